"""The results of checks of this machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        mark: ok, optional (not installed or not here, and not needed), missing (of a device that is here), warning or
            broken.
        subject: what was checked.
        message: what was found.
        remedy: what to do about it, if anything.
    """

    mark: str
    subject: str
    message: str
    remedy: str = ""
