"""Reports what this machine has, what is broken or missing, and the command that fixes it.

Example:
  python -m vit_jax.doctor

Exit codes: 0 everything required works, even if optional features are missing; 2 something is broken.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence

from vit_jax import ignore_closed_stdout
from vit_jax.json_text import to_json
from vit_jax.machine import (
    Finding,
    check_cluster,
    check_devices,
    check_extras,
    check_kernel,
    check_packages,
    check_space,
    check_tpu_lock,
)

CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    check_packages,
    check_tpu_lock,
    check_devices,
    check_kernel,
    check_extras,
    check_cluster,
    check_space,
)


def main(argv: list[str], checks: Sequence[Callable[[], Iterable[Finding]]] = CHECKS) -> None:
    """Runs the command line.

    Raises:
        SystemExit: with code 2, something is broken.
    """
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args(argv[1:])
    broken = False
    for finding in (finding for check in checks for finding in check()):
        broken |= finding.mark == "broken"
        print(format_json(finding) if args.json else format_text(finding), flush=True)
    if broken:
        sys.exit(2)


def format_json(finding: Finding) -> str:
    """Returns a finding as one line of JSON. The message also stands under `told`, its name in earlier versions."""
    return to_json(dataclasses.asdict(finding) | {"told": finding.message})


def format_text(finding: Finding) -> str:
    """Returns a finding as one line, and a second one if there is a remedy."""
    remedy = f"\n{'':8} -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.mark:8} {finding.subject}: {finding.message}{remedy}"


if __name__ == "__main__":
    with ignore_closed_stdout():
        main(sys.argv)
