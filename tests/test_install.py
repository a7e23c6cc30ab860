"""The package as it is found when it is installed, and what it shows."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest

import vit_jax
from tests.conftest import ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
# Without the packages of this environment, in which another copy of the package may lie.
FIND = "import site; site.addsitedir({!r}); import vit_jax; print(vit_jax.__file__)"
PROJECT = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def build_and_unpack(kind, source, site):
    """Builds a wheel of a copy of the project, as pip does, and unpacks it into the folder `site`."""
    pytest.importorskip("setuptools", minversion="77")
    subprocess.run([sys.executable, "-c", BUILD.format(kind), site], cwd=source, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", *site.glob("*.whl"), site], check=True)


def test_an_editable_install_wins_over_a_clone_of_the_same_name(tmp_path):
    """Started above a clone named `vit_jax`, Python finds the package in it, and not the clone itself."""
    clone, site = tmp_path / "vit_jax", tmp_path / "site"
    (clone / "vit_jax").mkdir(parents=True)
    for name in ("__init__", "errors", "streams", "unknown_words"):
        (clone / "vit_jax" / f"{name}.py").write_bytes((ROOT / "vit_jax" / f"{name}.py").read_bytes())
    shutil.copytree(ROOT / "configs", clone / "configs")
    for name in PROJECT:
        shutil.copy(ROOT / name, clone)
    build_and_unpack("editable", clone, site)
    found = subprocess.run([sys.executable, "-ES", "-c", FIND.format(str(site))], cwd=tmp_path, capture_output=True)
    assert found.stdout.decode().strip() == str(clone / "vit_jax" / "__init__.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder with the package as a wheel installs it, and an environment in which it is found first."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("vit_jax", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PROJECT:
        shutil.copy(ROOT / name, source)
    build_and_unpack("wheel", source, site)
    shutil.rmtree(source)
    return site


def run_wheel(wheel, folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    command = [sys.executable, "-m", "vit_jax.main", "--config=configs/digits.py", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_wheel_holds_all_modules_and_recipes_and_no_folder_configs(wheel):
    kinds = (".py", ".pyi", ".csv", ".json", ".txt", ".npz")
    shipped = {path.relative_to(ROOT) for path in (ROOT / "vit_jax").rglob("*") if path.suffix in kinds}
    recipes = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.py")}
    held = {path.relative_to(wheel) for path in (wheel / "vit_jax").rglob("*") if path.suffix in kinds}
    assert held == shipped | {"vit_jax" / path for path in recipes}
    assert {path.name for path in wheel.iterdir() if path.is_dir() and "-" not in path.name} == {"vit_jax"}


@pytest.mark.slow
def test_recipes_of_a_wheel_are_found_by_the_same_path_and_ones_own_import_them(wheel, tmp_path):
    printed = run_wheel(wheel, tmp_path, "--print")
    assert printed.stdout.startswith(f"{wheel}/vit_jax/configs/digits.py, resolved"), printed.stderr
    own = "from configs import digits\ndef get_config():\n  config = digits.get_config()\n"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text(f"{own}  config.batch = 32\n  return config\n")
    printed = run_wheel(wheel, tmp_path, "--config=configs/mine.py", "--print")
    assert printed.stdout.startswith("configs/mine.py, resolved"), printed.stderr
    assert "* batch                      recipe       32 " in printed.stdout


@pytest.mark.slow
def test_a_wheel_trains(wheel, tmp_path):
    done = run_wheel(wheel, tmp_path, "--config.total_steps=3", "--config.warmup_steps=1", "--config.log_every=1")
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stderr and (tmp_path / "workdirs" / "digits" / "model.npz").exists()


def test_the_package_shows_its_front_door_and_nothing_else():
    from vit_jax import interop, models  # what is imported is not shown

    assert (interop, models) == (vit_jax.interop, vit_jax.models)
    errors = {"LostHosts", "NonFiniteLoss", "Preempted", "UserError"}
    assert set(dir(vit_jax)) == {"create", "list_models", "load", "save", "train", "__version__"} | errors
    assert all(hasattr(vit_jax, name) for name in dir(vit_jax))


def test_the_version_is_stated_alike():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == vit_jax.__version__
