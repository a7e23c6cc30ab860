"""Each measurement on emulated devices, with a fault put into what it measures."""

import time

import jax
import pytest

from tests.measurements.helpers import MODEL, make_bench
from vit_jax import UserError, measure, measurements
from vit_jax.data import loader
from vit_jax.execution import AttentionSizes, attention_kinds
from vit_jax.measurements import cpu_losses, steps
from vit_jax.measurements.attention_forms import compare_times
from vit_jax.measurements.bench import Timing
from vit_jax.measurements.workloads import MeasuredStep

SLOW = 0.3  # seconds that a step takes longer


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))


def rows_of(section, bench):
    return {row.name: row for row in section(bench)}


def test_every_part_is_measured_once_and_has_its_share():
    names = {name for name in measurements.__all__ if name.startswith("measure_")}
    assert {function.__name__ for function, _ in measure.SECTIONS.values()} == names
    assert sum(share for _, share in measure.SECTIONS.values()) == pytest.approx(1)
    assert next(iter(measure.SECTIONS)) == "products"  # whose rate decides how many images the others get


@pytest.mark.slow
def test_products_and_memory_are_timed():
    bench = make_bench(devices=jax.devices()[:2], seconds=2)
    products = list(measurements.measure_products(bench))
    assert len(products) == 2 and all(1 < row.measured < 1e5 for row in products)
    assert products[1].predicted >= products[1].measured
    copied, transferred = measurements.measure_memory(bench)
    assert 0.1 < copied.measured < 1e4 and "a CPU's memory" in transferred.note


@pytest.mark.slow
def test_collectives_are_timed_over_each_axis_until_the_time_is_over():
    bench = make_bench("--config.mesh.data=2", "--config.mesh.fsdp=4", seconds=0)
    rows = list(measurements.measure_collectives(bench))
    assert len(rows) == 4 * 2 * 4 and {row.note for row in rows} == {"no time was left"}
    bench.deadline = time.monotonic() + 0.5
    rows = list(measurements.measure_collectives(bench))
    assert rows[0].measured > 0 and rows[0].name == "all-reduce of 64 KiB over 2 devices of mesh.data"
    one = make_bench(devices=jax.devices()[:1])
    assert [row.note for row in measurements.measure_collectives(one)] == ["there is one device"]


def test_a_step_that_needs_a_teacher_is_not_measured():
    bench = make_bench("--config.task.kind=distill", "--config.task.teacher=teacher.npz", devices=jax.devices()[:1])
    with pytest.raises(UserError, match="not measured; choose a recipe without it"):
        steps.start(bench, MeasuredStep.of(bench, MODEL, 1))


@pytest.mark.slow
def test_a_slow_step_is_found_beside_an_earlier_record(monkeypatch):
    bench = make_bench(devices=jax.devices()[:1], seconds=100)
    bench.step_seconds, bench.product_flops = 0.0, 1e12  # one image a step
    healthy = rows_of(measurements.measure_steps, bench)
    name = next(name for name in healthy if name.endswith(": step"))
    assert healthy[name].kind == "bound" and healthy[name].verdict == ""
    assert measure.beside_earlier(healthy[name], healthy[name]).verdict == ""
    assert {row.unit for row in healthy.values()} == {"s", "ms", "GiB"} and len(healthy) == 4
    advance = steps.advance
    monkeypatch.setattr(steps, "advance", lambda *args: (time.sleep(SLOW), advance(*args))[1])
    slow = measure.beside_earlier(rows_of(measurements.measure_steps, bench)[name], healthy[name])
    assert slow.verdict == "worse" and slow.measured > 1e3 * SLOW and slow.source == "an earlier record"
    record = measurements.MachineRecord("x", {}).with_section("steps", measurements.Section(1.0, (slow,)))
    [line] = measurements.format_off(record)
    assert line.startswith(f"steps: {MODEL}, 1 images of 32 pixels a device: step: ") and "profile_steps" in line


@pytest.mark.slow
def test_a_wrong_kernel_is_found(monkeypatch):
    bench = make_bench(devices=jax.devices()[:1])
    assert not any(row.advice == "kernel values" and row.verdict for row in measurements.measure_attention(bench))
    right = attention_kinds.ATTENTIONS["fused"]

    def wrong(x, kernel, bias, packing, change):
        return right(x, kernel, bias * 1.1, packing, change)

    monkeypatch.setitem(attention_kinds.ATTENTIONS, "fused", wrong)
    found = {row.name for row in measurements.measure_attention(bench) if row.advice == "kernel values" and row.verdict}
    assert found and all("fused, interpreted" in name for name in found)

    def broken(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(attention_kinds.ATTENTIONS, "fused", broken)
    [failed] = [row for row in measurements.measure_attention(bench) if row.verdict == "failed"]
    assert failed.note == "does not run: no such instruction"


@pytest.mark.parametrize(("spread", "remembered"), [(0.1, 1), (0.6, 0)])
def test_times_that_are_noise_are_not_remembered(monkeypatch, spread, remembered):
    bench, times = make_bench(devices=jax.devices()[:1]), []
    seconds = [Timing(2.0, spread), Timing(1.0, spread)]
    monkeypatch.setattr(type(bench), "time_in_turns", lambda self, calls: seconds)
    sizes = AttentionSizes(1, 4, 1, 8, "float32")
    rows = list(compare_times(bench, "a", "heads_first", sizes, times))
    assert [row.ratio for row in rows] == [2.0, 2.0] and len(times) == remembered


@pytest.mark.slow
def test_a_starving_loader_is_found(monkeypatch):
    bench = make_bench(devices=jax.devices()[:1], seconds=10)
    bench.step_seconds, bench.product_flops = 0.0, 1e12  # one image a step
    get = loader.LocalBatches.__next__
    monkeypatch.setattr(loader.LocalBatches, "__next__", lambda self: (time.sleep(SLOW), get(self))[1])
    rows = rows_of(measurements.measure_loading, bench)
    alone, both = rows["the loader alone, from synthetic"], rows["both together"]
    assert alone.verdict == "worse" and alone.measured < 1.1 / SLOW and alone.advice == "loader"
    assert both.note == "the devices wait for the loader" and both.verdict == ""


@pytest.mark.slow
def test_a_checkpoint_is_saved_and_restored(tmp_path):
    saved, restored = measurements.measure_saving(make_bench(folder=str(tmp_path)))
    assert saved.measured > 0 and restored.measured > 0 and (tmp_path / "checkpoints" / "1").is_dir()
    [alone] = measurements.measure_saving(make_bench())
    assert alone.measured is None and alone.verdict == "" and "--out=gs://" in alone.note


@pytest.mark.slow
def test_the_curve_is_that_of_a_cpu_and_not_one_of_fewer_digits(monkeypatch):
    bench = make_bench(seconds=0)  # for the first steps only
    [right] = measurements.measure_curve(bench)
    assert right.verdict == "" and right.measured < 1e-6 and right.name.startswith("losses of 20 steps")
    exact = cpu_losses.make_config

    def rounded(mesh):
        config = exact(mesh)
        config.model.dtype = "bfloat16"
        return config

    monkeypatch.setattr(cpu_losses, "make_config", rounded)
    [wrong] = measurements.measure_curve(bench)
    assert wrong.verdict == "worse" and wrong.advice == "curve"
    [large] = measurements.measure_curve(make_bench(devices=jax.devices()[:3]))
    assert large.measured is None and "cannot be split over 3 devices" in large.note
