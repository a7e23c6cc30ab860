"""What is predicted for TPUs that are not here: their devices are those that libtpu compiles for."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs import base
from tests.measurements.helpers import make_bench
from vit_jax import UserError
from vit_jax.kernels import TPU_KINDS, find_tpu_kind
from vit_jax.machine import count_chips
from vit_jax.measurements import bus_bandwidth, published, steps
from vit_jax.measurements.bench import Timing
from vit_jax.measurements.workloads import MeasuredStep
from vit_jax.planning import CHIPS, targets
from vit_jax.sharding import make_mesh


def test_kinds_of_devices_are_known_by_jax_name():
    known = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
    known |= {"TPU7x": "tpu7x", "cpu": None}
    assert {kind: published.find_tpu(kind) for kind in known} == known
    assert {tpu.name for tpu in TPU_KINDS} == CHIPS.keys()
    assert find_tpu_kind("TPU v5e") is find_tpu_kind("TPU v5 lite")  # its options included
    assert published.find_published("TPU v5 lite") == (197e12, 819e9)
    assert published.find_published("NVIDIA H100 80GB HBM3").hbm_bandwidth == 3.35e12
    assert published.find_published("cpu") is published.find_published("NVIDIA GeForce") is None


@pytest.mark.parametrize("topology", ["v5e:2x4", "v4:2x2x1", "tpu7x:2x2x2"])
def test_a_slice_is_known_by_its_devices(topology):
    devices = targets.find_devices(topology, 1)
    assert str(published.find_slice(devices)) == topology


def test_the_two_devices_of_a_chip_are_neighbours_along_the_last_axis_of_a_mesh():
    devices = targets.find_devices("tpu7x:2x2x2", 1)
    config = base.get_config()
    config.mesh.tensor = 2
    places = [[device.coords for device in pair] for pair in make_mesh(config, devices).devices.reshape(-1, 2)]
    assert len(places) == count_chips(devices) == 8 and all(one == other for one, other in places)
    assert published.find_published("TPU7x").flops == 2307e12 / 2


def test_collectives_take_what_the_busiest_link_takes():
    """Four chips in a ring without a closing link on v5e: 50 GB/s a link and direction."""
    mesh = make_bench(devices=targets.find_devices("v5e:2x2", 1)).mesh
    size, link = 2**26, CHIPS["v5e"].ici_bandwidth / 4
    seconds = bus_bandwidth.predict_seconds(mesh, "data", "all-gather", size)
    assert seconds == pytest.approx(size * 3 / 4 / (2 * link))  # over both links of a chip
    assert bus_bandwidth.predict_seconds(mesh, "data", "all-reduce", size) == pytest.approx(2 * seconds)
    assert bus_bandwidth.predict_seconds(mesh, "data", "collective-permute", size) == pytest.approx(size / link)
    assert bus_bandwidth.predict_seconds(make_bench().mesh, "data", "all-gather", size) is None


def test_bus_bytes_are_those_of_nccls_tests():
    assert [bus_bandwidth.bus_bytes(kind, 800, 4) for kind in bus_bandwidth.KINDS] == [1200, 600, 600, 800]


@pytest.mark.parametrize(
    ("topology", "model", "milliseconds"), [("v5e:2x2", "ViT-B/16", 81.7), ("v6e:2x4", "ViT-L/16", 44.9)]
)
def test_a_step_stands_beside_its_schedule(topology, model, milliseconds):
    bench = make_bench(devices=targets.find_devices(topology, 1))
    bench.given = frozenset({"data.source"})
    row = steps.step_row(bench, MeasuredStep.of(bench, model), Timing(0.1, 0.001))
    assert row.predicted == pytest.approx(milliseconds, abs=0.1) and row.kind == "near"
    assert row.source.startswith("schedule of v") and "the compiler's estimate: " in row.note
    bench.given = frozenset({"model.remat"})
    assert steps.step_row(bench, MeasuredStep.of(bench, model), Timing(0.1, 0.001)).source == ""


def test_slow_devices_get_fewer_images():
    bench = make_bench()
    bench.product_flops = 1e9
    whole = MeasuredStep.of(bench, "ViT-mu/16")
    bench.step_seconds = whole.flops / 1e9 / 3
    assert MeasuredStep.choose(bench, "ViT-mu/16").images == whole.images // 4
    bench.step_seconds = 0.0
    assert MeasuredStep.choose(bench, "ViT-mu/16").images == 1
    assert whole.config.batch == 8 * whole.images


def test_a_batch_that_is_given_is_measured():
    bench = make_bench("--config.batch=24", "--config.mesh.data=4", "--config.mesh.tensor=2")
    bench.product_flops, bench.step_seconds = 1e9, 0.0
    workload = MeasuredStep.choose(bench, "ViT-mu/16")
    assert (workload.images, workload.config.batch) == (6, 24)
    with pytest.raises(UserError, match="batch=12 is not divisible by"):
        make_bench("--config.batch=12")


@pytest.mark.slow
def test_collectives_compute_what_they_are_named_for():
    mesh = make_bench("--config.mesh.data=2", "--config.mesh.fsdp=4").mesh
    x = np.arange(64, dtype=np.float32)  # 8 a device; groups of 4 along fsdp
    groups = x.reshape(2, 4, 8)

    def run(kind):
        function, _ = bus_bandwidth.KINDS[kind]
        mapped = jax.shard_map(
            lambda x: function("fsdp", 4, x),
            mesh=mesh,
            in_specs=P(mesh.axis_names),
            out_specs=P(mesh.axis_names),
            check_vma=False,
        )
        return np.asarray(jax.jit(mapped)(x)).reshape(2, 4, 8)

    assert (run("all-reduce") == groups.sum(1, keepdims=True)).all()
    assert (run("all-gather") == groups[:, :, :2].reshape(2, 1, 8)).all()
    assert (run("reduce-scatter")[:, :, :2] == groups.sum(1).reshape(2, 4, 2)).all()
    assert (run("collective-permute") == np.roll(groups, 1, 1)).all()
