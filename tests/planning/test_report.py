"""Estimates from what a compiler reports, plans as text and as JSON, and the command to run next."""

import dataclasses
import json
import re
import shlex

import pytest

from launch import tpu_vm
from tests.conftest import ROOT
from tests.planning.builders import EXECUTABLE, WORKLOAD, make_compilation
from vit_jax import UserError
from vit_jax.config import parse_command_line
from vit_jax.planning import chips, plan_table, records, time_estimate
from vit_jax.planning.planner import training_command
from vit_jax.planning.records import (
    Advice,
    Estimate,
    EvaluationReport,
    Exchange,
    LargestBatch,
    Plan,
    PlanRequest,
    RunEstimate,
    StepSchedule,
)
from vit_jax.planning.time_estimate import RatioBand, find_band


def compiled_for(tpu, cycles, collectives, **fields):
    """The compilation of a program that fits, with so many cycles and such exchanges."""
    executable = dataclasses.replace(EXECUTABLE, cycles=cycles, collectives=collectives)
    fields |= {"devices": tpu.devices, "chips": tpu.chips}
    return make_compilation(1000, executable=executable, target=str(tpu), **fields)


@pytest.mark.parametrize("kind", chips.CHIPS)
def test_a_chip_that_computes_only_has_all_of_its_mfu(kind):
    chip, macs = chips.CHIPS[kind], 10**12
    tpu = chips.Slice(kind, (16, 16) if chip.dimensions == 2 else (4, 8, 8))
    cycles = round(6 * macs * 16 / chip.flops * chip.clock)
    fields = {"model": "ViT-L/16", "num_examples": 303_000_000, "epochs": 14.0, "batch": 4096, "steps": 1000}
    fields |= {"macs_per_image": macs, "images_per_host": 64, "fast": True}
    between = {"all-reduce between slices": Exchange(1, 10**12, 0.0)}
    found = time_estimate.estimate_step(compiled_for(tpu, cycles, between, **fields))
    assert found.mfu == pytest.approx(1) and found.exchange_seconds == 0
    assert found.images_per_second_per_chip == pytest.approx(chip.flops / (6 * macs))
    run = found.run
    assert run.chip_hours == pytest.approx(256 * 1000 * found.compute_seconds / 3600)
    assert run.paper_tpuv3_core_days == 680
    assert run.images_per_second_per_host == pytest.approx(64 / found.compute_seconds)
    assert run.host_cores == chip.cores[4] and run.input_cores == run.images_per_second_per_host / 1230
    reduced = {"all-reduce": Exchange(2, 1, 2 * tpu.link_bandwidth)}
    found = time_estimate.estimate_step(compiled_for(tpu, cycles, reduced, **fields))
    assert found.exchange_seconds == pytest.approx(2)
    halves = compiled_for(tpu, cycles // 2, between, **fields)
    executable = dataclasses.replace(halves.step.executable, kernels=12, kernel_cycles=cycles - cycles // 2)
    halves = dataclasses.replace(halves, step=dataclasses.replace(halves.step, executable=executable))
    assert time_estimate.estimate_step(halves).mfu == pytest.approx(1)  # a kernel counts by its schedule
    prediction = time_estimate.estimate_step(compiled_for(tpu, cycles, between, inference=True, **fields))
    assert prediction.mfu == pytest.approx(1 / 3) and prediction.run is None


def test_what_does_not_fit_or_has_no_cycles_is_not_estimated():
    assert time_estimate.estimate_step(make_compilation(2000)) is None
    assert time_estimate.estimate_step(make_compilation(500)) is None
    executable = dataclasses.replace(EXECUTABLE, cycles=1000)
    assert time_estimate.estimate_step(make_compilation(500, executable=executable)) is not None
    assert time_estimate.estimate_step(make_compilation(500, executable=executable, target="gpu")) is None


@pytest.mark.parametrize(
    ("recipe", "days"),
    [("vit_l16_jft", 680), ("vit_h14_jft", 2500), ("vit_l16_imagenet21k", 230), ("vit_b16_jft", None)],
)
def test_recipes_of_table_2_are_compared_with_its_core_days(recipe, days):
    config, _ = parse_command_line(["plan", f"--config={ROOT}/configs/{recipe}.py"])
    images = config.data.num_examples
    steps = int(config.total_epochs * images / config.batch)  # as the configuration is resolved
    epochs = steps * config.batch / images
    workload = dataclasses.replace(
        WORKLOAD, model=config.model.name, num_examples=images, epochs=epochs, batch=config.batch, steps=steps
    )
    found = time_estimate.estimate_run(workload, chips.parse_topology("v5e:2x4"), 1.0)
    assert found.paper_tpuv3_core_days == days


def test_the_rate_of_reading_is_the_one_that_was_measured():
    page = (ROOT / "docs" / "data.md").read_text()
    rates = time_estimate.CORE_IMAGES_PER_SECOND
    assert f"| ours, `data.fast`, with `.[fast]` | {rates[True]:,} (" in page
    assert f"| ours, exact pixels, with `.[fast]` | {rates[False]:,} (" in page


@pytest.fixture
def plan():
    """A plan that fits."""
    run = RunEstimate(
        images_per_second_per_host=1280.0,
        input_cores=1280 / 1025,
        images_per_second_per_core=1025,
        host_cores=224,
        hours=5.0,
        chip_hours=40.0,
        paper_tpuv3_core_days=None,
        streamed_disk={2: 10**9, 1: 2 * 10**9},
    )
    step = Estimate(
        cycles_per_image=1e6,
        compute_seconds=0.08,
        exchange_seconds=0.02,
        images_per_second_per_chip=160.0,
        mfu=0.3,
        model_flops=1.0,
        run=run,
    )
    compilation = make_compilation(4 << 30, memory_bytes=10 << 30, waiting_bytes=1 << 30)
    return Plan(compilation, step, command="python -m all")


def with_workload(plan, **fields):
    """The plan of a workload with other fields."""
    workload = dataclasses.replace(plan.compilation.workload, **fields)
    return dataclasses.replace(plan, compilation=dataclasses.replace(plan.compilation, workload=workload))


def with_evaluation(plan, peak_bytes):
    """The plan with an evaluation step that needs so many bytes."""
    evaluation = EvaluationReport(64, 8, peak_bytes, None, 1.0, False)
    return dataclasses.replace(plan, compilation=dataclasses.replace(plan.compilation, evaluation=evaluation))


def cells(plan):
    """Label and value of the lines of a plan."""
    lines = (re.split("  +", line.strip(), maxsplit=1) for line in plan_table.render_plans([plan]).splitlines())
    return dict(line for line in lines if len(line) == 2)


def test_what_a_step_and_a_run_take_is_shown(plan):
    shown = cells(plan)
    assert shown["step"] == "100.0 ms = 80.0 of compute + 20.0 of exchange"
    assert (shown["run"], shown["order of magnitude"]) == ("7,000 steps", "5.0 hours, 40 chip-hours")
    text = plan_table.render_plans([plan])
    assert text.endswith("v5e:2x4, data=8, to run it; replace the words in capitals:\npython -m all")


def test_a_schedule_is_shown_and_survives_its_json(plan):
    kinds = {"matmul": 75_000_000, "kernel": 25_000_000}
    schedule = StepSchedule(kinds, 50_000_000, 1_000_000, 0, 2_000_000, 3 << 30, 4, 5)
    executable = dataclasses.replace(EXECUTABLE, cycles=10**8, kernels=24, kernel_cycles=25_000_000, schedule=schedule)
    compilation = make_compilation(
        500, executable=executable, target="v5e:2x2", batch=400, devices=4, macs_per_image=65536 * 10**6 // 6
    )
    assert records.compilation_from_json(records.compilation_to_json(compilation)) == compilation
    found = time_estimate.estimate_schedule(compilation)
    assert found.cycles_per_image == 10**6 and found.seconds == pytest.approx(0.1)
    assert found.mfu == pytest.approx(1 / 3, rel=0.01)  # at peak, a chip does 131,072 FLOPs in a cycle
    whole = dataclasses.replace(plan, compilation=compilation, by_schedule=found)
    shown = cells(whole)
    assert shown["kernels"] == "24, 25.00 million cycles by schedule"
    assert shown["kernel"] == "25.00 Mcycles, 25%" and shown["loops"].startswith("4 operations")
    assert shown["exchange"] == "50.00 Mcycles exposed, 1.00 hidden"
    assert records.plan_to_json(whole)["schedule"]["mfu"] == found.mfu


def test_a_prediction_stands_with_its_band(plan):
    executable = dataclasses.replace(EXECUTABLE, cycles=1000, schedule=StepSchedule({}, 1, 0, 0, 0, 0, 0, 0))
    compilation = make_compilation(500, executable=executable)
    step, schedule = time_estimate.estimate_step(compilation), time_estimate.estimate_schedule(compilation)
    assert step.band == find_band("v5e", "estimate") and schedule.band == find_band("v5e", "schedule")
    bands = RatioBand(0.8, 0.9, 3, ("v5e",)), RatioBand(1.1, 1.25, 4, ("v4", "v5p"))
    step, schedule = (dataclasses.replace(each, band=band) for each, band in zip((step, schedule), bands, strict=True))
    whole = Plan(compilation, step, by_schedule=schedule)
    shown, found = cells(whole), records.plan_to_json(whole)
    assert shown["published / estimate"] == "0.80 to 0.90 in 3 runs on v5e"
    assert shown["published / schedule"] == "1.10 to 1.25 in 4 runs on v4, v5p"
    assert (found["band"], found["schedule"]["band"]) == tuple(map(dataclasses.asdict, bands))
    assert cells(plan)["published / estimate"] == "not calibrated"
    prediction = make_compilation(500, executable=executable, inference=True)  # none was published
    assert time_estimate.estimate_step(prediction).band is time_estimate.estimate_schedule(prediction).band is None


def test_the_limit_is_shown(plan):
    shown = cells(plan)
    assert shown["disk, streamed"] == "1 GB a host, 2 GB on one alone"
    assert (shown["read by each host"], shown["cores for it"], shown["limit"]) == (
        "1,280 images/s",
        "1.2 of 224",
        "chips",
    )
    measured = "cores: 1,025 images/s a core, as measured on ImageNet's JPEGs at 224 pixels (docs/data.md)."
    assert plan_table.render_plans([plan, plan]).count(measured) == 1
    run = dataclasses.replace(plan.estimate.run, host_cores=1)
    slow = dataclasses.replace(plan, estimate=dataclasses.replace(plan.estimate, run=run))
    assert cells(slow)["limit"] == "input"
    assert "384 pixels were not measured." in plan_table.render_plans([with_workload(plan, resolution=384)])


def test_what_is_left_of_the_memory_is_shown(plan):
    assert cells(plan)["left"] == "6.00 GiB, enough for 1.00 GiB of batches read ahead"
    left = cells(with_evaluation(plan, (9 << 30) + 2**20))["left"]
    assert left == "1,023.00 MiB, too little for 1.00 GiB of batches read ahead"


def test_advice_and_the_largest_batch_are_shown(plan):
    first = Plan(make_compilation(2000))
    better = dataclasses.replace(plan, command=None)
    shown = plan_table.render_plans([dataclasses.replace(first, advice=Advice({"accum_steps": "2"}, better))])
    assert "v5e:2x4, data=8: it fits with --config.accum_steps=2 (compiled):\n" in shown
    assert "no change tried makes it fit" in plan_table.render_plans(
        [dataclasses.replace(first, advice=Advice({}, None))]
    )
    shown = plan_table.render_plans([dataclasses.replace(first, largest=LargestBatch(better, 17))])
    assert "the largest batch has 16 images a device; 17 do not fit:\n" in shown
    shown = plan_table.render_plans([dataclasses.replace(first, largest=LargestBatch(None, 1))])
    assert shown.endswith("no batch fits; 1 do not fit.")


def test_keys_of_the_json_are_absent_or_null_as_ever(plan):
    """Programs read them: see docs/plans.md."""
    found = records.plan_to_json(plan)
    assert {"target", "mesh", "peak_bytes", "fits", "mfu", "hours", "command"} <= found.keys()
    assert found["cycles"] is None and found["paper_tpuv3_core_days"] is None and found["data_dir"] is None
    assert not {"needed_bytes", "evaluation", "advice", "fit", "price"} & found.keys()
    refused = Plan(make_compilation(2000), advice=Advice({}, None))
    found = records.plan_to_json(refused)
    assert (found["fits"], found["needed_bytes"], found["advice"]) == (False, 2000, None)
    assert not {"peak_bytes", "cycles", "mfu", "command"} & found.keys()
    better = dataclasses.replace(plan, price=9.0, command=None)
    found = records.plan_to_json(dataclasses.replace(refused, advice=Advice({"batch": "8"}, better)))
    assert found["advice"] == {"change": {"batch": "8"}, **records.plan_to_json(better)}
    found = records.plan_to_json(Plan(plan.compilation, largest=LargestBatch(None, 1)))
    assert found["fit"] == {"largest": None, "refused_images_per_device": 1}


def test_a_compilation_survives_json(plan):
    exchanged = {"all-reduce": Exchange(1, 2, 3.0)}
    executable = dataclasses.replace(EXECUTABLE, collectives=exchanged, cycles=7)
    for compilation in (
        with_evaluation(plan, 5).compilation,
        make_compilation(2000),
        make_compilation(900, executable=executable),
    ):
        text = json.dumps(records.compilation_to_json(compilation))
        assert records.compilation_from_json(json.loads(text)) == compilation
    kept = records.remember_step(plan.compilation.step)
    assert not {"flops", "remembered"} & json.loads(kept).keys()
    again = dataclasses.replace(plan.compilation.step, flops=3.0, remembered=True)
    assert records.remembered_step(kept, flops=3.0) == again
    for damaged in ("", "[]", "{}", '{"peak_bytes": 1}', '{"needed_bytes": 1}'):
        with pytest.raises(ValueError):
            records.remembered_step(damaged, flops=3.0)


def test_the_command_to_run_next():
    words = ("--config=configs/vit_l16_jft.py", "--config.batch=512")
    request = PlanRequest(words, "v5e:2x4")
    start = "python -m launch.tpu_vm run vit-l16-jft --topology=v5e:2x4 --zone=ZONE -- python -m vit_jax.main "
    there = " --config.data.source=array_record:gs://BUCKET/DATA --workdir=gs://BUCKET/vit_l16_jft"
    assert training_command(request, WORKLOAD) == start + " ".join(words) + there
    newer = training_command(dataclasses.replace(request, target="tpu7x:2x2x1"), WORKLOAD)
    assert newer.startswith("python -m launch.compute_engine run vit-l16-jft --topology=tpu7x:2x2x1 --zone=ZONE -- ")
    python, option, module, verb, *rest = shlex.split(training_command(request, WORKLOAD))
    assert (python, option, module, verb) == ("python", "-m", "launch.tpu_vm", "run")
    with pytest.raises(UserError, match="ZONE is not the name of a zone"):
        tpu_vm.main(["tpu_vm", verb, "--dry-run", *rest])
    rest[rest.index("--zone=ZONE")] = "--zone=us-west4-a"
    tpu_vm.main(["tpu_vm", verb, "--dry-run", *rest])  # it takes such a command
    kept = (*words, "--config.data.source=folder:gs://b/photos", "--workdir=gs://b/run")
    workload = dataclasses.replace(WORKLOAD, source="folder:gs://b/photos", mesh={**WORKLOAD.mesh, "slice": 2})
    command = training_command(dataclasses.replace(request, words=kept), workload)
    assert command == start.replace("2x4", "2x4 --slices=2") + " ".join(kept)
    for source in ("digits", "synthetic", "hf://datasets/o/n", "mix:1*digits+1*folder:gs://b/photos"):
        assert "BUCKET/DATA" not in training_command(request, dataclasses.replace(WORKLOAD, source=source))
    mixed = dataclasses.replace(WORKLOAD, source="mix:1*tfds:cifar10+2*parquet:photos,label=fine")
    given = shlex.split(training_command(request, mixed))
    assert "--config.data.source=mix:1*tfds:cifar10+2*parquet:gs://BUCKET/DATA,label=fine" in given
    assert "--config.data.data_dir=gs://BUCKET/tensorflow_datasets" in given
    task = dataclasses.replace(WORKLOAD, source="vtab:pets")
    assert "--config.data.data_dir=gs://BUCKET/" in training_command(request, task)
    local = dataclasses.replace(WORKLOAD, source="tfds:cifar10", data_dir="tfds")
    assert "--config.data.data_dir=gs://BUCKET/" in training_command(request, local)
    downloaded = dataclasses.replace(WORKLOAD, source="tfds:cifar10", data_dir="gs://b/tfds")
    assert "data_dir=" not in training_command(request, downloaded)
    downloaded = dataclasses.replace(WORKLOAD, source="tfds:cifar10")
    assert "--config.data.data_dir=gs://BUCKET/" in training_command(request, downloaded)
    here = " ".join(["python -m vit_jax.main", *words])
    assert training_command(dataclasses.replace(request, target="gpu"), WORKLOAD) == here
    emulated = dataclasses.replace(request, target="cpu", emulated_devices=8)
    count = "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    assert training_command(emulated, WORKLOAD) == f"JAX_PLATFORMS=cpu {count} {here}"


def test_amounts_have_units():
    assert [plan_table.format_bytes(size) for size in (3 << 19, 15.75 * 2**30)] == ["1.50 MiB", "15.75 GiB"]
