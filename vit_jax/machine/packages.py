"""The packages that are installed, compared with what this package and jax declare."""

import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vit_jax.machine.accelerators import has_gpu, has_tpu
from vit_jax.machine.finding import Finding

ALWAYS_SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")  # others only if they are wrong

# Feature -> the extras of this package that bring it, any one of them.
FEATURES = {
    "training on TPUs": ("tpu",),
    "training on NVIDIA GPUs": ("cuda", "cuda12"),
    "compiling for TPUs that are not here": ("plan",),
    "reading JPEGs faster, exactly": ("fast",),
    "gs:// paths": ("gcs",),
    "s3:// paths": ("s3",),
    "pictures": ("plot",),
    "notebooks": ("notebook",),
}


class FeatureDevice(NamedTuple):
    """A device that a feature needs: its name, and whether it is here."""

    name: str
    is_here: Callable[[], bool]


FEATURE_DEVICES = {
    "training on TPUs": FeatureDevice("TPU", has_tpu),
    "training on NVIDIA GPUs": FeatureDevice("NVIDIA GPU", has_gpu),
}


def installed_version(name: str) -> str | None:
    """Returns the version of a package that is installed, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def declared_requirements(name: str) -> list[str]:
    """Returns the requirements that an installed package declares."""
    return metadata.requires(name) or []


class Installation:
    """The packages that are installed, by two functions that a test may replace."""

    def __init__(
        self,
        version: Callable[[str], str | None] = installed_version,
        requires: Callable[[str], list[str]] = declared_requirements,
    ):
        """Takes `version` (package -> its version or None) and `requires` (package -> its declared requirements)."""
        self.version = version
        self._requires = requires

    def requirements(self, package: str) -> list[Requirement]:
        """Returns the requirements that a package declares, those of its extras included."""
        return [Requirement(text) for text in self._requires(package)]

    def missing(self, extra: str, package: str = "vit_jax") -> list[str]:
        """Returns the names of the packages that an extra of a package requires and that are not installed.

        If an installed package is required with extras of its own, what is missing of these is included.
        """
        missing = []
        for requirement in self.requirements(package):
            marker = requirement.marker
            if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                if self.version(requirement.name) is None:
                    missing.append(requirement.name)
                else:
                    missing += [name for inner in requirement.extras for name in self.missing(inner, requirement.name)]
        return missing


def check_packages(installation: Installation | None = None) -> Iterator[Finding]:
    """Yields whether Python and the packages have the versions that this package and jax declare."""
    installed = installation or Installation()
    own_version = installed.version("vit_jax")
    if own_version is None:
        message = "importable but not installed, so its requirements are unknown"
        yield Finding("broken", "vit_jax", message, "pip install -e .")
        return
    package = Path(__file__).parents[1]
    yield Finding("ok", "vit_jax", f"{own_version}, {package}")
    yield from check_shadowing(package.parent)
    wanted = SpecifierSet(metadata.metadata("vit_jax")["Requires-Python"])
    mark = "ok" if platform.python_version() in wanted else "broken"
    yield Finding(mark, "Python", f"{platform.python_version()} ({wanted} required), {sys.executable}")
    declared = installed.requirements("vit_jax")
    if installed.version("jax"):
        declared += [requirement for requirement in installed.requirements("jax") if requirement.name == "jaxlib"]
    for requirement in declared:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, specifier, version = requirement.name, requirement.specifier, installed.version(requirement.name)
        if version is None or not specifier.contains(version, prereleases=True):
            message = f"{version or 'not installed'} ({specifier} required)"
            yield Finding("broken", name, message, f"pip install '{name}{specifier}'")
        elif name in ALWAYS_SHOWN:
            yield Finding("ok", name, version)


def check_shadowing(clone: Path) -> Iterator[Finding]:
    """Yields a warning if the folder of the code shadows the package for a Python that is started in its parent folder.

    Python takes a folder without an `__init__.py` for a namespace package unless it finds a regular package of that
    name on its path. It finds none there if an earlier version of this project was installed as editable, which left an
    import hook instead of a path.
    """
    spec = PathFinder.find_spec("vit_jax", [str(clone.parent), *sys.path[1:]])
    if clone.name == "vit_jax" and spec and spec.loader is None:
        message = f"Python started in {clone.parent} imports the folder {clone.name}/ instead of the package"
        yield Finding("warning", "import vit_jax", message, f"pip install -e {clone}")


def check_extras(
    installation: Installation | None = None, devices: Mapping[str, FeatureDevice] = FEATURE_DEVICES
) -> Iterator[Finding]:
    """Yields which optional features are complete, and whether the device that they need is here."""
    installed = installation or Installation()
    for feature, extras in FEATURES.items() if installed.version("vit_jax") else ():
        missing = {extra: installed.missing(extra) for extra in extras}
        device = devices.get(feature)
        if all(missing.values()):
            message = f"needs {', '.join(missing[extras[0]])}"
            mark = "missing" if device and device.is_here() else "optional"
            yield Finding(mark, feature, message, f"pip install -e '.[{extras[0]}]'")
            continue
        complete = f"[{next(extra for extra in extras if not missing[extra])}]"
        if device and not device.is_here():
            message = f"no {device.name} seems to be present; the packages of {complete} are installed"
            yield Finding("optional", feature, message)
        else:
            yield Finding("ok", feature, complete)
