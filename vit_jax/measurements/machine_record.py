"""The record of one machine: what was measured, on what, by which code; written after every section."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from vit_jax import UserError, __version__
from vit_jax.json_text import to_json
from vit_jax.machine import describe_hardware
from vit_jax.measurements.measurement import Measurement
from vit_jax.monitoring import write_page
from vit_jax.storage import filesystem, versions

LIBRARIES = (*versions.COMPILERS, "flax", "optax", "orbax-checkpoint", "grain")


@dataclasses.dataclass(frozen=True)
class Section:
    """The rows of one measurement.

    Attributes:
        seconds: the seconds that it took.
        rows: the rows, in the order in which they were measured.
    """

    seconds: float
    rows: tuple[Measurement, ...]


@dataclasses.dataclass(frozen=True)
class MachineRecord:
    """All that was measured.

    Attributes:
        name: the name of the record.
        key: what must be the same for a measurement to go on: devices, hosts, code, versions, arguments.
        sections: name of a section -> the section, in the order in which they were measured.
    """

    name: str
    key: Mapping[str, Any]
    sections: Mapping[str, Section] = dataclasses.field(default_factory=dict)

    def with_section(self, name: str, section: Section) -> "MachineRecord":
        """Returns the record with one more section."""
        return dataclasses.replace(self, sections={**self.sections, name: section})

    def find(self, section: str, name: str) -> Measurement | None:
        """Returns a row by its name; None: it is not there."""
        rows = self.sections[section].rows if section in self.sections else ()
        return next((row for row in rows if row.name == name), None)

    def off(self) -> list[tuple[str, Measurement]]:
        """Returns the rows that are off, each after the name of its section."""
        return [(name, row) for name, section in self.sections.items() for row in section.rows if row.verdict]

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON values."""
        sections = {
            name: {"seconds": section.seconds, "rows": [row.to_json() for row in section.rows]}
            for name, section in self.sections.items()
        }
        return {"name": self.name, "key": self.key, "sections": sections}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "MachineRecord":
        """Rebuilds a record from what `to_json` returned."""
        sections = {
            name: Section(section["seconds"], tuple(Measurement(**row) for row in section["rows"]))
            for name, section in given["sections"].items()
        }
        return cls(given["name"], given["key"], sections)


def make_key(devices: list[jax.Device], hosts: int, mesh: Mapping[str, int], arguments: list[str]) -> dict[str, Any]:
    """Returns what identifies a measurement, as JSON.

    Args:
        devices: the devices of all hosts.
        hosts: the number of hosts to which they belong.
        mesh: axis of the mesh -> number of devices along it.
        arguments: the other arguments of the command line.
    """
    return {
        "hardware": describe_hardware(devices),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "hosts": hosts,
        "mesh": dict(mesh),
        "arguments": arguments,
        "vit_jax": __version__,
        "source": versions.source_digest(Path(__file__).parent.parent),
        "versions": versions.library_versions(LIBRARIES),
    }


def write_record(record: MachineRecord, path: str) -> None:
    """Writes a record, whole or not at all.

    Raises:
        UserError: the record cannot be written.
    """
    write_page(path, to_json(record.to_json(), indent=1) + "\n")


def read_record(path: str) -> MachineRecord:
    """Returns a record that was written.

    Raises:
        UserError: there is none, or it is damaged.
    """
    content = filesystem.read_bytes(path)
    try:
        return MachineRecord.from_json(json.loads(content))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"cannot read {path}: it is not a record of vit_jax.measure; delete it.") from error


def open_record(name: str, path: str, key: Mapping[str, Any]) -> MachineRecord:
    """Returns the record at a path, to which sections can be added; a new one without sections if there is none.

    Raises:
        UserError: the record there is of other devices, code or arguments, or cannot be read.
    """
    if not filesystem.exists(path):
        return MachineRecord(name, key)
    record = read_record(path)
    if changed := [word for word in key if record.key.get(word) != key[word]]:
        raise UserError(
            f"{path} was measured with other values of {', '.join(changed)}; choose another --name, or delete it to "
            "measure again."
        )
    return record
