"""The code that computed a result that is kept: a digest of the package's source, and the versions of libraries."""

import hashlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

SHIPPED = (".py", ".pyi", ".csv", ".json", ".npz", ".txt")  # what the package is made of
COMPILERS = (
    *("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)
IMAGE_LIBRARIES = ("numpy", "opencv-python", "opencv-python-headless", "pillow", "simplejpeg", "turbojpeg")


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns name -> version for those of the libraries that are installed."""
    distributions = {
        name: next(iter(metadata.distributions(name=name)), None) for name in names
    }  # the first one is imported
    return {name: each.version for name, each in distributions.items() if each}


def source_digest(package: Path) -> str:
    """Returns a short digest of the names and contents of a package's source and data files."""
    digest = hashlib.sha256()
    files = [path for path in package.rglob("*") if path.suffix in SHIPPED and path.is_file()]
    for path in sorted(path for path in files if "/." not in f"/{path.relative_to(package).as_posix()}"):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:12]
