"""Packages: versions out of bounds, extras that are not complete, a clone that shadows the package."""

import sys

import pytest

from tests.machine.helpers import marks, touch
from vit_jax.machine import Finding, packages
from vit_jax.machine.packages import Installation, declared_requirements, installed_version


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("flax", "0.1", "0.1 (<0.14,>=0.12 required)"),
        ("jaxlib", "0.1", "0.1 (<=0.10.2,>=0.10.1 required)"),
        ("tqdm", None, "not installed (<5,>=4.67 required)"),
    ],
)
def test_a_version_out_of_bounds(name, version, message):
    bounds = {"vit_jax": ["flax<0.14,>=0.12", "tqdm<5,>=4.67"], "jax": ["jaxlib<=0.10.2,>=0.10.1"]}
    installation = Installation(
        version=lambda package: version if package == name else installed_version(package),
        requires=lambda package: bounds.get(package) or declared_requirements(package),
    )
    [finding] = [finding for finding in packages.check_packages(installation) if finding.mark == "broken"]
    wanted = message.partition("(")[2].removesuffix(" required)")
    assert finding == Finding("broken", name, message, f"pip install '{name}{wanted}'")


def test_a_package_that_is_importable_but_not_installed():
    installation = Installation(version=lambda name: None)
    assert marks(packages.check_packages(installation)) == {"vit_jax": "broken"}
    assert not list(packages.check_extras(installation))


def test_what_extras_bring_is_read_from_the_packages():
    requires = {
        "vit_jax": ['jax[tpu]>=0.10; extra == "tpu"', 'jax[cuda13]; extra == "cuda"', 'gcsfs; extra == "gcs"', "numpy"],
        "jax": ['libtpu; extra == "tpu"', 'plugin[all]; extra == "cuda13"', "jaxlib"],
    }
    installation = Installation({"jax": "1", "libtpu": "1", "vit_jax": "1"}.get, requires.__getitem__)
    missing = [installation.missing(extra) for extra in ("tpu", "cuda", "gcs")]
    assert missing == [[], ["plugin"], ["gcsfs"]]
    found = {finding.subject: finding for finding in packages.check_extras(installation)}
    assert found["gs:// paths"] == Finding("optional", "gs:// paths", "needs gcsfs", "pip install -e '.[gcs]'")


@pytest.mark.parametrize(("is_here", "mark"), [(True, "missing"), (False, "optional")])
def test_what_a_device_needs_is_missing_only_where_it_is(is_here, mark):
    requires = {"vit_jax": ['libtpu; extra == "tpu"']}
    installation = Installation({"vit_jax": "1"}.get, requires.__getitem__)
    devices = {"training on TPUs": packages.FeatureDevice("TPU", lambda: is_here)}
    [finding] = [one for one in packages.check_extras(installation, devices) if one.subject == "training on TPUs"]
    assert finding.mark == mark and finding.message == "needs libtpu" and finding.remedy


def test_libtpu_alone_does_not_train_on_a_tpu():
    complete = Installation(version=lambda name: "1", requires=lambda name: [])
    here = {"TPU": True, "NVIDIA GPU": False}
    devices = {
        feature: packages.FeatureDevice(name, lambda name=name: here[name])
        for feature, (name, _) in packages.FEATURE_DEVICES.items()
    }
    found = {finding.subject: finding for finding in packages.check_extras(complete, devices)}
    assert found["training on TPUs"] == Finding("ok", "training on TPUs", "[tpu]")
    assert found["compiling for TPUs that are not here"].mark == "ok"
    message = "no NVIDIA GPU seems to be present; the packages of [cuda] are installed"
    assert found["training on NVIDIA GPUs"] == Finding("optional", "training on NVIDIA GPUs", message)


def test_a_clone_that_shadows_the_package_is_reported(tmp_path, monkeypatch):
    clone = tmp_path / "vit_jax"
    touch(clone / "vit_jax" / "__init__.py")
    monkeypatch.setattr(sys, "path", [""])
    [finding] = packages.check_shadowing(clone)
    assert finding.mark == "warning" and str(tmp_path) in finding.message
    assert finding.remedy == f"pip install -e {clone}"
    monkeypatch.setattr(sys, "path", ["", str(clone)])  # as an editable install has it
    assert not list(packages.check_shadowing(clone))
    monkeypatch.setattr(sys, "path", [""])
    assert not list(packages.check_shadowing(clone.rename(tmp_path / "vit-jax")))
