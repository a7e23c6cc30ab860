"""Accelerators: signs of them, whether jax uses them, and the lock of a TPU."""

import subprocess
import sys

import pytest

from tests.machine.helpers import touch
from vit_jax.machine import Finding, accelerators

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.{kind}(file, fcntl.LOCK_EX)
print("held", flush=True)
input()
"""
ONE_CPU = """print('["cpu", 1, "cpu", null]')"""


@pytest.mark.parametrize(
    ("files", "environment", "here"),
    [
        ({}, {}, False),
        ({"dev/accel0": ""}, {}, True),
        ({"dev/vfio/0": ""}, {}, True),
        ({"dev/vfio/vfio": ""}, {}, False),  # exists on any machine that can pass devices on
        ({}, {"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({}, {"TPU_SKIP_MDS_QUERY": "1"}, False),  # jax sets it where it finds no TPU
        ({"vendor": "0x1ae0\n", "class": "0x020000\n"}, {}, False),  # the network card of Google's machines
        ({"vendor": "0x1ae0\n", "class": "0x010802\n"}, {}, False),  # their disks
        ({"vendor": "0x1ae0\n", "class": "0x088000\n"}, {}, True),
        ({"vendor": "0x10de\n", "class": "0x030200\n"}, {}, False),
    ],
)
def test_signs_of_a_tpu(files, environment, here, tmp_path):
    for name, text in files.items():
        place = name if "/" in name else f"sys/bus/pci/devices/0000:00:04.0/{name}"
        touch(tmp_path / place).write_text(text)
    assert accelerators.has_tpu(tmp_path, environment) is here


def test_devices_that_do_not_start():
    [finding] = accelerators.check_devices(0.3, "import time; time.sleep(60)")
    assert finding.mark == "broken" and finding.message == "did not start within 0.3 s"
    [finding] = accelerators.check_devices(query="raise RuntimeError('jaxlib is too old')")
    assert finding.mark == "broken" and finding.message == "RuntimeError: jaxlib is too old"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("AssertionError", ""),
        ("RuntimeError('Unable to initialize backend x')", " (Unable to initialize backend x)"),
    ],
)
def test_devices_that_a_variable_names_and_that_are_not_there(error, why):
    [finding] = accelerators.check_devices(query=f"raise {error}", environment={"JAX_PLATFORMS": "cuda"})
    assert finding.message == f"JAX_PLATFORMS=cuda names devices that do not start here{why}"
    assert finding.remedy.startswith("unset JAX_PLATFORMS")


@pytest.mark.parametrize(("device", "name"), [("nvidia0", "GPU"), ("accel0", "TPU"), ("vfio/0", "TPU")])
def test_an_accelerator_that_jax_does_not_use(device, name, tmp_path):
    touch(tmp_path / "dev" / device)

    def check(*installed, **environment):
        _, finding = accelerators.check_devices(
            query=ONE_CPU, root=tmp_path, environment=environment, installed=lambda: installed
        )
        assert finding.subject == name
        return finding

    assert check().mark == "missing" and f"pip install -e '.[{'cuda' if name == 'GPU' else 'tpu'}]" in check().remedy
    assert check(JAX_PLATFORMS="cpu").remedy == "unset JAX_PLATFORMS"
    found = check("jax-cuda12-plugin", "libtpu")
    assert found == Finding("broken", name, "does not start: jax does not say why", check().remedy)


def test_an_accelerator_in_use():
    [finding] = accelerators.check_devices(query="""print('["gpu", 8, "H100", 85899345920]')""")
    assert finding == Finding("ok", "devices", "8 x H100 (gpu), 80 GiB each")


@pytest.mark.parametrize("kind", ["lockf", "flock"])
def test_a_lock_is_held_or_stale(kind, tmp_path):
    assert not list(accelerators.check_tpu_lock(tmp_path))
    path = touch(tmp_path / "tmp" / "libtpu_lockfile")
    assert not list(accelerators.check_tpu_lock(tmp_path, environment={}))  # it is not that of a TPU
    touch(tmp_path / "dev" / "accel0")
    words = [sys.executable, "-S", "-c", HOLD.format(kind=kind), str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        [finding] = accelerators.check_tpu_lock(tmp_path)
        assert finding.message.startswith(f"used by process {holder.pid} ({sys.executable} -S -c")
        assert finding.remedy == f"wait for it, or: kill {holder.pid}"
        [finding] = accelerators.check_tpu_lock(tmp_path, find_holders=lambda files: [])  # as if it were another user's
        assert finding.message == "used by another user's process"
        holder.communicate(b"\n")
    [finding] = accelerators.check_tpu_lock(tmp_path)
    assert finding == Finding("warning", "TPU lock", f"{path} is stale: no process holds it", f"rm {path}")
