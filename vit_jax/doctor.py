"""Says what this machine has, what is broken or missing, and the command that mends it.

Example:
  python -m vit_jax.doctor

Exit codes: 0 what is needed works, whatever optional features are missing; 2 something is broken.
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vit_jax.machine import Finding, cluster, devices, has_gpu, has_tpu, lock, room

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")  # others only if something is wrong

# What it is good for -> the extras that bring it, any of them.
FEATURES = {
    "training on TPUs": ("tpu",),
    "training on NVIDIA GPUs": ("cuda", "cuda12"),
    "compiling for TPUs that are not here": ("plan",),
    "reading JPEGs faster, exactly": ("fast",),
    "gs:// paths": ("gcs",),
    "s3:// paths": ("s3",),
    "notebooks and pictures": ("notebook",),
}
# What some of them are good for only where it is.
DEVICES = {"training on TPUs": ("TPU", has_tpu), "training on NVIDIA GPUs": ("NVIDIA GPU", has_gpu)}


def versions() -> Iterator[Finding]:
    """Compares what is installed with what the package and jax declare."""
    if _version("vit_jax") is None:
        yield Finding("broken", "vit_jax", "not installed, only found: what it wants is not known", "pip install -e .")
        return
    yield Finding("ok", "vit_jax", f"{metadata.version('vit_jax')}, {Path(__file__).parent}")
    yield from hidden(Path(__file__).parents[1])
    wanted = SpecifierSet(metadata.metadata("vit_jax")["Requires-Python"])
    mark = "ok" if platform.python_version() in wanted else "broken"
    yield Finding(mark, "Python", f"{platform.python_version()} ({wanted} wanted), {sys.executable}")
    declared = [Requirement(text) for text in metadata.requires("vit_jax") or []]
    if _version("jax"):
        declared += [bound for bound in map(Requirement, metadata.requires("jax") or []) if bound.name == "jaxlib"]
    for bound in declared:
        if bound.marker and not bound.marker.evaluate({"extra": ""}):
            continue
        found, remedy = _version(bound.name), f"pip install '{bound.name}{bound.specifier}'"
        if found is None or not bound.specifier.contains(found, prereleases=True):
            yield Finding("broken", bound.name, f"{found or 'not installed'} ({bound.specifier} wanted)", remedy)
        elif bound.name in SHOWN:
            yield Finding("ok", bound.name, found)


def hidden(clone: Path) -> Iterator[Finding]:
    """Tells whether the folder of the code hides the package from a Python that is started in the folder above it.

    Python takes a folder without an `__init__.py` for a package unless it finds a real one of that name on its path; it
    does not ask the hook that an editable install of earlier versions of this project left.
    """
    found = PathFinder.find_spec("vit_jax", [str(clone.parent), *sys.path[1:]])
    if clone.name == "vit_jax" and found and found.loader is None:
        told = f"started in {clone.parent}, Python takes the folder {clone.name}/ for the package"
        yield Finding("warning", "import vit_jax", told, f"pip install -e {clone}")


def features() -> Iterator[Finding]:
    """Tells which extras are whole, and whether the device is here that they are for."""
    for purpose, extras in FEATURES.items() if _version("vit_jax") else ():
        missing = {extra: _missing(extra) for extra in extras}
        if all(missing.values()):
            told = f"wants {', '.join(missing[extras[0]])}"
            yield Finding("missing", purpose, told, f"pip install 'vit_jax[{extras[0]}]'")
            continue
        whole = f"[{next(extra for extra in extras if not missing[extra])}]"
        name, here = DEVICES.get(purpose, ("", bool))
        if name and not here():
            yield Finding("missing", purpose, f"no {name} seems to be here; what {whole} brings is installed")
        else:
            yield Finding("ok", purpose, whole)


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        SystemExit: with code 2, something is broken.
    """
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args(argv[1:])
    broken = False
    for check in (versions, lock, devices, features, cluster, room):
        for finding in check():
            broken |= finding.mark == "broken"
            if args.json:
                print(json.dumps(asdict(finding)), flush=True)
            else:
                remedy = f"\n{'':8} -> {finding.remedy}" if finding.remedy else ""
                print(f"{finding.mark:8} {finding.subject}: {finding.told}{remedy}", flush=True)
    if broken:
        sys.exit(2)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _missing(extra: str, package: str = "vit_jax") -> list[str]:
    """Returns the packages that an extra of a package brings, by the package's own word, and that are not installed."""
    missing = []
    for bound in map(Requirement, metadata.requires(package) or []):
        if bound.marker and bound.marker.evaluate({"extra": extra}) and not bound.marker.evaluate({"extra": ""}):
            found = _version(bound.name)
            if found is None:
                missing.append(bound.name)
            else:
                missing += [name for inner in bound.extras for name in _missing(inner, bound.name)]
    return missing


if __name__ == "__main__":
    main(sys.argv)
