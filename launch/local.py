"""Starts several processes of a program on this machine, as if they were the hosts of a pod, to try it on a laptop.

Example:
  python launch/local.py -n 4 -- python -m vit_jax.main --config=configs/smoke.py --workdir=workdirs/hosts

Each process has emulated CPU devices of its own, and its lines are printed after its number. When one fails, the others
have some time to end by themselves. SIGTERM and Ctrl-C are forwarded to all of them. The exit code is that of the first
process that failed, or 128 plus the number of the signal that ended it.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def process_environments(processes: int, devices: int) -> list[dict[str, str]]:
    """Returns the environment variables of each process, each with `devices` emulated CPU devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = re.sub(rf"{DEVICE_COUNT_FLAG}=\d+ ?", "", os.environ.get("XLA_FLAGS", ""))
    common = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} {DEVICE_COUNT_FLAG}={devices}".strip(),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(processes),
    }
    return [{**common, "JAX_PROCESS_ID": str(number)} for number in range(processes)]


def print_lines(number: int, stream: IO[str]) -> None:
    """Prints the lines of a process to stderr, each after the number of the process in brackets."""
    for line in stream:
        if not line.startswith("[Gloo]"):  # messages of the transport
            print(f"[{number}] {line}", end="", file=sys.stderr, flush=True)


def describe_exit(code: int) -> str:
    """Returns a return code of `subprocess` in words: "exit code 1" or, if it is negative, "signal SIGKILL"."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def run_processes(command: list[str], processes: int, devices: int, grace: float) -> int:
    """Runs a command in several processes and waits for all of them.

    Args:
        command: the words of the command.
        processes: the number of processes.
        devices: the number of emulated CPU devices of each process.
        grace: seconds after the first failure after which the remaining processes are killed.

    Returns:
        0 if all succeeded, else the exit code of the process that failed first (128 + the number of its signal).
    """
    ends: dict[int, int] = {}
    started = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for environment in process_environments(processes, devices)
    ]

    def forward_signal(kind: int, frame: object) -> None:
        for number, process in enumerate(started):
            if number not in ends:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the process has just ended
                    os.killpg(process.pid, kind)

    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, forward_signal)
    readers = [
        threading.Thread(target=print_lines, args=[number, process.stdout]) for number, process in enumerate(started)
    ]
    for reader in readers:
        reader.start()
    first, deadline = 0, float("inf")
    while len(ends) < processes:
        for number, process in enumerate(started):
            if number not in ends and process.poll() is not None:
                ends[number] = process.returncode
                if process.returncode and not first:
                    first, deadline = process.returncode, time.monotonic() + grace
                    print(f"process {number} ended first, with {describe_exit(first)}", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            left = [number for number in range(processes) if number not in ends]
            print(f"killed after {grace:g} s: process {', '.join(map(str, left))}", file=sys.stderr, flush=True)
            forward_signal(signal.SIGKILL, None)
            deadline = float("inf")
        time.sleep(0.02)
    for reader in readers:
        reader.join()
    return 128 - first if first < 0 else first


def main(argv: list[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python launch/local.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, required=True, metavar="PROCESSES", help="number of processes")
    parser.add_argument("--devices", type=int, default=1, help="emulated devices of each process [1]")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds for the others to end after a failure [60]")
    parser.add_argument("command", nargs="+", help="after --, the command that each process runs")
    args = parser.parse_args(argv)
    if args.n < 1 or args.devices < 1:
        parser.error("-n and --devices must be at least 1")
    return run_processes(args.command, args.n, args.devices, args.grace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
