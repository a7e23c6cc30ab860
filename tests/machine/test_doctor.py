"""What the doctor says of machines in good and bad health."""

import json
import subprocess
import sys

import pytest

from vit_jax import doctor
from vit_jax.machine import Finding
from vit_jax.machine import accelerators as machine

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.{kind}(file, fcntl.LOCK_EX)
print("held", flush=True)
input()
"""
ONE_CPU = """print('["cpu", 1, "cpu", null]')"""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def marks(findings):
    return {finding.subject: finding.mark for finding in findings}


def test_a_real_run_in_good_health(capsys):
    doctor.main(["doctor", "--json"])
    found = [Finding(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    said = {finding.subject: finding.told for finding in found}
    assert said["devices"] == "8 x cpu (cpu)"
    assert {*doctor.SHOWN, *doctor.FEATURES, "Python", "vit_jax", "memory", "cache"} <= said.keys()
    assert said["notebooks and pictures"] == "[notebook]"


def test_what_is_broken_ends_with_code_2_and_tells_the_remedy(capsys, monkeypatch):
    for name in ("versions", "lock", "devices", "features", "cluster", "room"):
        monkeypatch.setattr(doctor, name, lambda: [])
    monkeypatch.setattr(doctor, "features", lambda: [Finding("missing", "gs:// paths", "wants gcsfs", "a command")])
    doctor.main(["doctor"])
    assert capsys.readouterr().out == "missing  gs:// paths: wants gcsfs\n         -> a command\n"
    monkeypatch.setattr(doctor, "devices", lambda: [Finding("broken", "devices", "none")])
    with pytest.raises(SystemExit) as end:
        doctor.main(["doctor"])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("flax", "0.1", "0.1 (<0.14,>=0.12 wanted)"),
        ("jaxlib", "0.1", "0.1 (<=0.10.2,>=0.10.1 wanted)"),
        ("tqdm", None, "not installed (<5,>=4.67 wanted)"),
    ],
)
def test_a_version_out_of_bounds(name, version, told, monkeypatch):
    found, requires = doctor._version, doctor.metadata.requires
    monkeypatch.setattr(doctor, "_version", lambda package: version if package == name else found(package))
    bounds = {"vit_jax": ["flax<0.14,>=0.12", "tqdm<5,>=4.67"], "jax": ["jaxlib<=0.10.2,>=0.10.1"]}
    monkeypatch.setattr(doctor.metadata, "requires", lambda package: bounds.get(package) or requires(package))
    [finding] = [finding for finding in doctor.versions() if finding.mark == "broken"]
    wanted = told.partition("(")[2].removesuffix(" wanted)")
    assert finding == Finding("broken", name, told, f"pip install '{name}{wanted}'")


def test_what_is_only_lying_there(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert marks(doctor.versions()) == {"vit_jax": "broken"} and not list(doctor.features())


def test_what_extras_bring_is_read_from_the_packages(monkeypatch):
    requires = {
        "vit_jax": ['jax[tpu]>=0.10; extra == "tpu"', 'jax[cuda13]; extra == "cuda"', 'gcsfs; extra == "gcs"', "numpy"],
        "jax": ['libtpu; extra == "tpu"', 'plugin[all]; extra == "cuda13"', "jaxlib"],
    }
    monkeypatch.setattr(doctor.metadata, "requires", requires.__getitem__)
    monkeypatch.setattr(doctor, "_version", {"jax": "1", "libtpu": "1", "vit_jax": "1"}.get)
    assert (doctor._missing("tpu"), doctor._missing("cuda"), doctor._missing("gcs")) == ([], ["plugin"], ["gcsfs"])
    found = {finding.subject: finding for finding in doctor.features()}
    assert found["gs:// paths"] == Finding("missing", "gs:// paths", "wants gcsfs", "pip install 'vit_jax[gcs]'")


def test_libtpu_alone_trains_on_no_tpu(monkeypatch):
    monkeypatch.setattr(doctor, "_missing", lambda extra: [])
    here = {"TPU": True, "NVIDIA GPU": False}
    for subject, (name, _) in doctor.DEVICES.items():
        monkeypatch.setitem(doctor.DEVICES, subject, (name, lambda name=name: here[name]))
    found = {finding.subject: finding for finding in doctor.features()}
    assert found["training on TPUs"] == Finding("ok", "training on TPUs", "[tpu]")
    assert found["compiling for TPUs that are not here"].mark == "ok"
    told = "no NVIDIA GPU seems to be here; what [cuda] brings is installed"
    assert found["training on NVIDIA GPUs"] == Finding("missing", "training on NVIDIA GPUs", told)


@pytest.mark.parametrize(
    ("files", "environment", "here"),
    [
        ({}, {}, False),
        ({"dev/accel0": ""}, {}, True),
        ({"dev/vfio/0": ""}, {}, True),
        ({"dev/vfio/vfio": ""}, {}, False),  # lies there on any machine that can pass devices on
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
    assert machine.has_tpu(tmp_path, environment) is here


def test_devices_that_do_not_start():
    [finding] = machine.devices(0.3, "import time; time.sleep(60)")
    assert finding.mark == "broken" and finding.told == "did not start within 0.3 s"
    [finding] = machine.devices(query="raise RuntimeError('jaxlib is too old')")
    assert finding.mark == "broken" and finding.told == "RuntimeError: jaxlib is too old"


@pytest.mark.parametrize(("device", "name"), [("nvidia0", "GPU"), ("accel0", "TPU"), ("vfio/0", "TPU")])
def test_an_accelerator_that_jax_does_not_use(device, name, tmp_path, monkeypatch):
    touch(tmp_path / "dev" / device)
    monkeypatch.setattr(machine.metadata, "distributions", lambda: installed)
    installed = []

    def look(**environment):
        _, finding = machine.devices(query=ONE_CPU, root=tmp_path, environment=environment)
        assert finding.subject == name
        return finding

    assert look().mark == "missing" and f"vit_jax[{'cuda' if name == 'GPU' else 'tpu'}]" in look().remedy
    assert look(JAX_PLATFORMS="cpu").remedy == "unset JAX_PLATFORMS"
    installed = [type("Installed", (), {"name": package}) for package in ("jax-cuda12-plugin", "libtpu")]
    assert look() == Finding("broken", name, "does not start: jax does not say why", look().remedy)


def test_an_accelerator_in_use():
    [finding] = machine.devices(query="""print('["gpu", 8, "H100", 85899345920]')""")
    assert finding == Finding("ok", "devices", "8 x H100 (gpu), 80 GiB each")


@pytest.mark.parametrize("kind", ["lockf", "flock"])
def test_a_lock_is_held_or_stale(kind, tmp_path, monkeypatch):
    assert not list(machine.lock(tmp_path))
    path = touch(tmp_path / "tmp" / "libtpu_lockfile")
    words = [sys.executable, "-S", "-c", HOLD.format(kind=kind), str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        [finding] = machine.lock(tmp_path)
        assert finding.told.startswith(f"held by process {holder.pid} ({sys.executable} -S -c")
        assert finding.remedy == f"wait for it, or: kill {holder.pid}"
        monkeypatch.setattr(machine, "_holders", lambda files: [])  # as if it were another user's
        [finding] = machine.lock(tmp_path)
        assert finding.told == "held by another user's process"
        holder.communicate(b"\n")
    [finding] = machine.lock(tmp_path)
    assert finding == Finding("warning", "TPU lock", f"{path} is stale: no process holds it", f"rm {path}")


@pytest.mark.parametrize(
    ("environment", "mark", "told"),
    [
        ({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, "ok", "Cloud TPU: process 1 of 2, counted from 0"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "warning", "not set: TPU_WORKER_ID"),
        ({"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}, "warning", "not set: MEGASCALE_COORDINATOR_ADDRESS"),
        ({"SLURM_JOB_ID": "7"}, "warning", "Slurm: process ? of ?"),
        (dict.fromkeys(("SLURM_JOB_ID", *machine.CLUSTERS[2][2]), "3"), "ok", "Slurm: process 3 of 3"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "warning", "OMPI_MCA_orte_hnp_uri"),
        ({"https_proxy": "x", "GRPC_PROXY": "y"}, "warning", "https_proxy, GRPC_PROXY set"),
    ],
)
def test_what_the_environment_tells_of_a_cluster(environment, mark, told):
    [finding] = machine.cluster(environment)
    assert finding.mark == mark and told in finding.told and bool(finding.remedy) == (mark == "warning")
    assert not list(machine.cluster({}))


def test_no_room(monkeypatch, tmp_path):
    assert marks(machine.room())["cache"] == "ok"
    monkeypatch.setattr(machine, "disk_usage", lambda folder: type("Usage", (), {"free": 5e8}))
    assert marks(machine.room()) == {"memory": "ok", "this folder": "warning", "cache": "warning"}
    monkeypatch.setenv("VIT_JAX_CACHE", str(touch(tmp_path / "file")))
    [finding] = [finding for finding in machine.room() if finding.subject == "cache"]
    assert finding.mark == "warning" and "VIT_JAX_CACHE" in finding.remedy


def test_a_clone_that_hides_the_package_is_named(tmp_path, monkeypatch):
    clone = tmp_path / "vit_jax"
    touch(clone / "vit_jax" / "__init__.py")
    monkeypatch.setattr(sys, "path", [""])
    [finding] = doctor.hidden(clone)
    assert finding.mark == "warning" and str(tmp_path) in finding.told
    assert finding.remedy == f"pip install -e {clone}"
    monkeypatch.setattr(sys, "path", ["", str(clone)])  # as an editable install has it
    assert not list(doctor.hidden(clone))
    monkeypatch.setattr(sys, "path", [""])
    assert not list(doctor.hidden(clone.rename(tmp_path / "vit-jax")))
