"""Metrics as the records of TensorBoard's event files.

The writer of tensorboardX is not used: its thread ends on a full disk, and it then waits for that thread for ever.
"""

import socket
import struct
import time

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from vit_jax.monitoring.metrics_file import Metrics

VERSION = "brain.Event:2"


def event_file_name() -> str:
    """Returns a name that TensorBoard finds, which no earlier process has used."""
    return f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"


def first_record(start: int) -> bytes:
    """Returns the beginning of an event file.

    If the run goes on after a step `start` above 0, it makes TensorBoard hide later steps of other event files.
    """
    first = _frame(event_pb2.Event(file_version=VERSION, wall_time=time.time()))
    if not start:
        return first
    session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    return first + _frame(event_pb2.Event(step=start + 1, session_log=session, wall_time=time.time()))


def metrics_record(step: int, metrics: Metrics) -> bytes:
    """Returns the metrics of a step as a record of an event file."""
    values = [value for name, number in metrics.items() for value in scalar(name, number).value]
    summary = summary_pb2.Summary(value=values)
    return _frame(event_pb2.Event(step=step, summary=summary, wall_time=time.time()))


def _frame(event: event_pb2.Event) -> bytes:
    """Returns an event as a record of a TFRecord file: length and content, each with its checksum."""
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join([length, _checksum(length), content, _checksum(content)])


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(content))
