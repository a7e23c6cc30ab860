"""The package as it is found when it is installed, and what it shows."""

import subprocess
import sys
import tomllib

import pytest

import vit_jax
from tests.conftest import ROOT

BUILD = "from setuptools import build_meta; build_meta.build_editable(__import__('sys').argv[1])"
# Without the packages of this environment, in which another copy of the package may lie.
FIND = "import site; site.addsitedir({!r}); import vit_jax; print(vit_jax.__file__)"


def test_an_editable_install_wins_over_a_clone_of_the_same_name(tmp_path):
    """Started above a clone named `vit_jax`, Python finds the package in it, and not the clone itself."""
    pytest.importorskip("setuptools", minversion="77")
    clone, site = tmp_path / "vit_jax", tmp_path / "site"
    (clone / "vit_jax").mkdir(parents=True)
    for name in ("__init__", "errors"):
        (clone / "vit_jax" / f"{name}.py").write_bytes((ROOT / "vit_jax" / f"{name}.py").read_bytes())
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", BUILD, site], cwd=clone, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", *site.glob("*.whl"), site], check=True)
    found = subprocess.run([sys.executable, "-ES", "-c", FIND.format(str(site))], cwd=tmp_path, capture_output=True)
    assert found.stdout.decode().strip() == str(clone / "vit_jax" / "__init__.py")


def test_the_package_shows_its_front_door_and_nothing_else():
    from vit_jax import interop, models  # what is imported is not shown

    assert (interop, models) == (vit_jax.interop, vit_jax.models)
    errors = {"LostHosts", "NonFiniteLoss", "Preempted", "UserError"}
    assert set(dir(vit_jax)) == {"create", "list_models", "load", "save", "train", "__version__"} | errors
    assert all(hasattr(vit_jax, name) for name in dir(vit_jax))


def test_the_version_is_stated_alike():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == vit_jax.__version__
