"""What is read from compiled programs, counted, estimated and advised, without compiling anything large."""

import itertools
import math
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.plans import JFT_CLASSES, JFT_IMAGES, TABLE_6
from launch import tpu_vm
from tests.conftest import ROOT
from vit_jax import UserError, main, models
from vit_jax.planning import chips, collectives, compiled, estimate, flops, hlo, link_traffic, report, search
from vit_jax.planning.command import next_command

HLO = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %g = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %s = bf16[2,4]{1,0} reduce-scatter(%g), channel_id=2, replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add
  %m = f32[8,4]{1,0} fusion(%g), calls=%fused, backend_config={"estimated_cycles":"100"}
  ROOT %t = (s32[], f32[8,4]) tuple(%i, %g)
}

%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {
  %r = f32[8]{0} all-reduce(%p), channel_id=5, replica_groups=mesh['a'=1,'b'=4], device_ids=([2,2]T(1,0)) {'a','b'}
  ROOT %d = f32[2]{0} dynamic-slice(%r, %i)
}

%fused (p: f32[8,4]) -> f32[8,4] {
  ROOT %k = f32[8,4]{1,0} copy(%p), backend_config={"estimated_cycles":"7777"}
}

%below (p: (s32[], f32[4])) -> pred[] {
  %five = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %five), direction=LT
}

%again (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %r = f32[4]{0} all-to-all(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

%step_of_a_fusion (p: f32[2]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=6, frontend_attributes={chain_id="0"}, dimensions={0}
}

ENTRY %main (x: f32[4,4]) -> f32[] {
  %r = (f32[4,4]{1,0}, f32[], /*index=2*/pred[3]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3}}, to_apply=%add
  %o = f32[4]{0} fusion(%x), calls=%fused, backend_config={"estimated_cycles":"5"}
  %kernel = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %n = f32[4]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%add
  %ps = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %pd = f32[4]{0} collective-permute-done(%ps)
  %gs = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%y), replica_groups=[1,4]<=[4], dimensions={0}
  %gd = bf16[16]{0} all-gather-done(%gs)
  %w = (s32[], f32[8,4]) while(%t), body=%body, condition=%c, backend_config={"known_trip_count":{"n":"3"}}
  %v = (s32[], f32[4]) while(%t), condition=%below, body=%again
  %f = f32[2]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %a = f32[8]{0} fusion(%x), kind=kCustom, calls=%step_of_a_fusion
  %b = f32[8]{0} fusion(%x), kind=kCustom, calls=%step_of_a_fusion
  %sent = (bf16[96,8]{1,0}, u32[], token[]) send(%x), frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %e = f32[] constant(0)
}
"""


def test_collectives_are_read_from_the_text_of_a_program():
    assert [(each.kind, each.bytes, each.groups, each.times) for each in collectives.read(HLO)] == [
        ("all-reduce", 64 + 4 + 3, ((0, 1), (2, 3)), 1),
        ("collective-permute", 16, ((0, 1), (1, 0)), 1),
        ("all-gather", 32, ((0, 1, 2, 3),), 1),
        ("all-gather", 128, ((0, 2), (1, 3)), 3),
        ("reduce-scatter", 32, ((0, 1), (2, 3)), 3),
        ("all-to-all", 16, ((0, 1, 2, 3),), 5),
        ("reduce-scatter", 32, ((0, 2, 1, 3),), 1),
        ("all-gather", 32, (), 1),
        ("all-reduce between slices", 96 * 8 * 2, (), 1),
    ]


def test_cycles_count_as_often_as_loops_run_and_fusions_once():
    executed = [each for each in hlo.read(HLO) if not each.fused]
    assert sum(each.cycles * each.times for each in executed if each.cycles) == 5 + 3 * 100
    assert [each.operation for each in executed if compiled.KERNEL in each.line] == ["custom-call"]


@pytest.mark.parametrize("stride, padding, spread, holes", [(1, (1, 1), 1, 1), (2, (3, 2), 1, 1), (1, (2, 0), 2, 3)])
def test_a_convolution_counts_products_that_lie_on_the_image(stride, padding, spread, holes):
    """By numbers: of ones with ones, each result is the count of its products."""
    image, kernel = np.ones((2, 9, 7, 6), np.float32), np.ones((3, 3, 2, 12), np.float32)

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            (stride, 1),
            (padding, (1, 1)),
            lhs_dilation=(holes, 1),
            rhs_dilation=(spread, 1),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        )

    assert flops.count(convolve, image, kernel) == convolve(image, kernel).sum()


def test_matmuls_count_in_loops_and_whatever_they_are_wrapped_in():
    def step(x, w):
        return jax.checkpoint(jnp.dot)(x, w), None

    def loop(x, w):
        return jax.jit(lambda x: jax.lax.scan(step, x, w)[0])(x) + jnp.einsum("bij,bjk->ik", w, w).sum()

    x, w = jnp.zeros((5, 4)), jnp.zeros((3, 4, 4))
    assert flops.count(loop, x, w) == 3 * 5 * 4 * 4 + 3 * 4 * 4 * 4
    gradient = jax.grad(lambda x, w: step(x, w)[0].sum(), argnums=(0, 1))
    assert flops.count(gradient, x, w[0]) == 3 * 5 * 4 * 4

    def either(flag, x, w):
        return jax.lax.cond(flag, lambda: x @ w[0], lambda: x @ w[0] @ w[1])

    assert flops.count(either, True, x, w) == 2 * 5 * 4 * 4
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    per_device = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert flops.count(per_device, jnp.zeros((16, 4)), w[0]) == 16 * 4 * 4


# Table 6, except where the paper contradicts itself: paper.md, E.5.
OUTLIERS = {("ViT-B/32", 7): 0.025, ("R50+ViT-L/16", 7): 0.035}


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in TABLE_6))
def test_exaflops_are_those_of_table_6(name):
    model = models.create(name, num_classes=JFT_CLASSES, pre_logits=True, scan=True)  # sooner traced
    one = flops.exaflops(model, JFT_IMAGES)
    for _, epochs, paper in (row for row in TABLE_6 if row[0] == name):
        assert one * epochs == pytest.approx(paper, rel=OUTLIERS.get((name, epochs), 0.015))


def test_slices_by_name():
    assert [chips.parse_topology(text).chips for text in ("v5e:16x16", "v4:2x2x4", "v6e:1x1")] == [256, 16, 1]
    for text, ring in {"v5e:16x16": (1, 1), "v5e:8x16": (0, 1), "v5e:8x8": (0, 0), "v4:2x2x4": (0, 0, 0)}.items():
        assert chips.parse_topology(text).ring == ring
    assert chips.parse_topology("v4:4x4x8").ring == (True, True, True)
    assert [chips.parse_topology(text).link_bandwidth for text in ("v4:2x2x1", "v5e:2x4")] == [50e9, 50e9]
    assert str(chips.parse_topology("v5p:2x2x2")) == "v5p:2x2x2"
    for text in ("v5e", "v5e:4x4x4", "v4:4x4", "v5e:0x4", "v5e:4x", "v5e:4x4 "):
        with pytest.raises(UserError, match="dimensions: --topology=v"):
            chips.parse_topology(text)
    with pytest.raises(UserError, match="did you mean 'v5e'"):
        chips.parse_topology("v5ee:4x4")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("v5e-8", r"'v5e-8' \(8 chips\) is written with its shape here: --topology=v5e:2x4\.$"),
        ("v5litepod-256", "--topology=v5e:16x16"),
        ("v6e-1", "--topology=v6e:1x1"),
        ("v5e:8", "--topology=v5e:2x4"),
        ("TPU-v5-lite-4", "--topology=v5e:2x2"),
        ("v4-32", r"\(32 cores, 16 chips\) is written with its shape here: --topology=v4:2x2x4"),
        ("v5p-8", "--topology=v5p:2x2x1"),
        ("v5e-2x4", "'v5e-2x4' is written with its shape here: --topology=v5e:2x4"),
        ("v5e-5", "no cloud has a v5e of 5 chips; choose from 1x1, 2x2"),
        ("v4-4", "no cloud has a v4 of 4 cores, 2 chips; choose from 2x2x1"),
        ("v3-8", "unknown TPU 'v3-8'"),
    ],
)
def test_names_that_clouds_give_lead_to_ours(text, told):
    with pytest.raises(UserError, match=told):
        chips.parse_topology(text)


def line(*steps):
    """Places along the second axis of a flat slice."""
    return [(0, 0, step) for step in steps]


SQUARE = [(0, x, y) for x in range(4) for y in range(4)]


@pytest.mark.parametrize(
    ("kind", "groups", "places", "ring", "shape", "expected"),
    [
        # Of 80 bytes in a group of n a chip sends (n - 1) / n, of an all-reduce twice that; over so many links.
        ("all-reduce", [], SQUARE, (False, False), (4, 4), 2 * 80 * 15 / 16 / 2),
        ("all-reduce", [], SQUARE, (True, True), (4, 4), 2 * 80 * 15 / 16 / 4),
        ("all-gather", [], SQUARE, (False, True), (4, 4), 80 * 15 / 16 / 3),
        (
            "all-reduce",
            [(0, 1), (2, 3)],
            line(0, 1, 2, 3),
            (False, False),
            (1, 4),
            2 * 80 / 2 / 1,
        ),  # one link of a chip
        ("reduce-scatter", [(0, 2), (1, 3)], line(0, 1, 2, 3), (False, False), (1, 4), 80 / 2 * 2),  # two share it
        ("all-gather", [(0, 2), (1, 3)], line(0, 1, 2, 3), (False, True), (1, 4), 80 / 2),  # there is a way round, too
        ("all-gather", [(0, 3)], line(0, 1, 2, 3), (False, True), (1, 4), 80 / 2),  # neighbours where it closes
        ("all-gather", [(0, 1, 2, 3)], line(0, 1, 2, 3), (False, True), (1, 4), 80 * 3 / 4 / 2),
        ("all-gather", [range(i, i + 4) for i in range(0, 16, 4)], SQUARE, (False, False), (4, 4), 80 * 3 / 4),
        ("all-gather", [(0, 1, 4, 5), (2, 3, 6, 7)], SQUARE, (False, False), (4, 4), 80 * 3 / 4 / 2),
        ("all-gather", [(0, 1, 2)], [(0, 0, 0), (0, 0, 1), (0, 1, 1)], (False, False), (2, 2), 80 * 2 / 3),  # no box
        ("all-reduce", [(0,), (1,)], line(0, 1), (False, False), (1, 2), 0),
        ("all-reduce", [(0, 1)], [(0, 0, 0), (1, 0, 0)], (False, False), (1, 1), 0),  # of two slices
        ("collective-permute", [(0, 1), (1, 2), (2, 3)], line(0, 1, 2, 3), (False, False), (1, 4), 80),
        ("collective-permute", [(0, 1), (1, 2), (2, 3), (3, 0)], line(0, 1, 2, 3), (False, True), (1, 4), 80),
        ("collective-permute", [(0, 2), (1, 3)], line(0, 1, 2, 3), (False, False), (1, 4), 2 * 80),
        (
            "collective-permute",
            [(0, 1), (2, 3)],
            [(0, 0, 0), (0, 1, 1), (0, 0, 1), (0, 1, 0)],
            (False,) * 2,
            (2, 2),
            80,
        ),
        ("collective-permute", [(1, 1)], line(0, 1), (False, False), (1, 2), 0),
        ("all-to-all", [(0, 1, 2, 3)], line(0, 1, 2, 3), (False, False), (1, 4), 80 / 4 * 4),  # four cross the middle
    ],
)
def test_an_exchange_takes_the_links_that_its_group_has(kind, groups, places, ring, shape, expected):
    assert link_traffic.link_bytes(kind, 80, groups, places, ring, shape) == pytest.approx(expected)


@pytest.mark.parametrize("kind", chips.CHIPS)
def test_a_chip_that_computes_only_has_all_of_its_mfu(kind):
    chip = chips.CHIPS[kind]
    macs = 1e9
    facts = {
        "inference": False,
        "model": "ViT-L/16",
        "num_examples": 303_000_000,
        "epochs": 14.0,
        "devices": 256,
        "batch": 4096,
        "steps": 1000,
        "macs_per_image": macs,
        "cycles": 6 * macs * 16 / chip.flops * chip.clock,
        "collectives": {"all-reduce between slices": {"count": 1, "bytes": 10**12, "link_bytes": 0.0}},
        "images_per_host": 64,
        "fast": True,
    }
    tpu = chips.Slice(kind, (16, 16) if chip.dimensions == 2 else (4, 8, 8))
    found = estimate.estimate_cost(facts, tpu)
    assert found["mfu"] == pytest.approx(1) and found["exchange_seconds"] == 0
    assert found["images_per_second_per_chip"] == pytest.approx(chip.flops / (6 * macs))
    assert found["chip_hours"] == pytest.approx(256 * 1000 * found["compute_seconds"] / 3600)
    assert found["paper_tpuv3_core_days"] == 680
    assert found["images_per_second_per_host"] == pytest.approx(64 / found["compute_seconds"])
    assert found["host_cores"] == chip.cores[4] and found["input_cores"] == found["images_per_second_per_host"] / 1106
    facts["collectives"] = {"all-reduce": {"count": 2, "bytes": 1, "link_bytes": 2 * tpu.link_bandwidth}}
    assert estimate.estimate_cost(facts, tpu)["exchange_seconds"] == pytest.approx(2)
    assert estimate.estimate_cost(facts | {"inference": True}, tpu)["mfu"] < found["mfu"] / 3


@pytest.mark.parametrize(
    ("recipe", "days"),
    [("vit_l16_jft", 680), ("vit_h14_jft", 2500), ("vit_l16_imagenet21k", 230), ("vit_b16_jft", None)],
)
def test_recipes_of_table_2_are_told_its_core_days(recipe, days):
    config, _ = main.parse(["plan", f"--config={ROOT}/configs/{recipe}.py"])
    images = config.data.num_examples
    steps = int(config.total_epochs * images / config.batch)  # settings.resolve
    facts = {
        "inference": False,
        "model": config.model.name,
        "num_examples": images,
        "epochs": steps * config.batch / images,
        "devices": 8,
        "batch": config.batch,
        "steps": steps,
        "macs_per_image": 1,
        "cycles": 1,
        "collectives": {},
        "images_per_host": 8,
        "fast": False,
    }
    assert estimate.estimate_cost(facts, chips.parse_topology("v5e:2x4"))["paper_tpuv3_core_days"] == days


def test_the_rate_of_reading_is_the_one_that_was_measured():
    page = (ROOT / "docs" / "data.md").read_text()
    assert f"| ours, `data.fast`, with `.[fast]` | {estimate.READ[True]:,} (" in page
    assert f"| ours, exact pixels, with `.[fast]` | {estimate.READ[False]:,} (" in page


@pytest.fixture
def shown():
    """A plan that fits, as `mapping.render` takes it."""
    return {
        **facts_of(1000, mesh={"data": 8}, target="v5e:2x4", model="ViT-B/16", dtype="bfloat16"),
        **{"peak_bytes": 4 << 30, "memory_bytes": 10 << 30, "waiting_bytes": 1 << 30, "flops": 1.0},
        **{"device_kind": "TPU v5 lite", "collectives": {}, "compiler_flops": None, "kernels": 0, "resolution": 224},
        **{"cycles_per_image": 1e6, "compute_seconds": 0.08, "exchange_seconds": 0.02, "mfu": 0.3},
        **{"images_per_second_per_chip": 160.0, "steps": 7000, "hours": 5.0, "chip_hours": 40.0},
        **{"images_per_second_per_host": 1280.0, "images_per_second_per_core": 834, "host_cores": 224},
        **{"input_cores": 1280 / 834, "command": "python -m all"},
    }


def cells(plan):
    """Label and value of the lines that `mapping.render` gives of a plan."""
    lines = (re.split("  +", line.strip(), maxsplit=1) for line in report.render([plan]).splitlines())
    return dict(line for line in lines if len(line) == 2)


def test_what_a_step_and_a_run_take_is_told(shown):
    told = cells(shown)
    assert told["step"] == "100.0 ms = 80.0 of compute + 20.0 of exchange"
    assert (told["run"], told["order of magnitude"]) == ("7,000 steps", "5.0 hours, 40 chip-hours")
    assert report.render([shown]).endswith("v5e:2x4, data=8, to run it; yours for what is in capitals:\npython -m all")


def test_the_limit_is_told(shown):
    told = cells(shown)
    assert (told["read by each host"], told["cores for it"], told["limit"]) == ("1,280 images/s", "1.5 of 224", "chips")
    assert "cores: 834 images/s a core, as measured on ImageNet's JPEGs at 224 pixels (docs/data.md)." in report.render(
        [shown, shown]
    )
    assert cells(shown | {"host_cores": 1})["limit"] == "input"
    assert "384 pixels were not measured." in report.render([shown | {"resolution": 384}])


def test_what_is_left_of_the_memory_is_told(shown):
    assert cells(shown)["left"] == "6.00 GiB, enough for 1.00 GiB of batches read ahead"
    evaluation = {"evaluation": {"peak_bytes": (9 << 30) + 2**20, "images_per_device": 8}}
    assert cells(shown | evaluation)["left"] == "1,023.00 MiB, too little for 1.00 GiB of batches read ahead"


def test_the_command_to_run_next():
    facts = {"target": "v5e:2x4", "mesh": {"slice": 1}, "source": "array_record:jft300m", "data_dir": None}
    words = ["--config=configs/vit_l16_jft.py", "--config.batch=512"]
    start = "python -m launch.tpu_vm run vit-l16-jft --topology=v5e:2x4 --zone=ZONE -- python -m vit_jax.main "
    there = " --config.data.source=array_record:gs://BUCKET/DATA --workdir=gs://BUCKET/vit_l16_jft"
    assert next_command(words, facts) == start + " ".join(words) + there
    python, option, module, verb, *rest = shlex.split(next_command(words, facts))
    assert (python, option, module, verb) == ("python", "-m", "launch.tpu_vm", "run")
    tpu_vm.main(["tpu_vm", verb, "--dry-run", *rest])  # it takes such a command
    kept = [*words, "--config.data.source=folder:gs://b/photos", "--workdir=gs://b/run"]
    asked = facts | {"source": "folder:gs://b/photos", "mesh": {"slice": 2}}
    assert next_command(kept, asked) == start.replace("2x4", "2x4 --slices=2") + " ".join(kept)
    assert "--config.data.data_dir=gs://BUCKET/" in next_command(words, facts | {"source": "tfds:cifar10"})
    assert next_command(words, facts | {"target": "gpu"}) == "python -m vit_jax.main " + " ".join(words)
    count = "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    here = next_command(words, facts | {"target": "cpu"}, 8)
    assert here == f"JAX_PLATFORMS=cpu {count} python -m vit_jax.main {' '.join(words)}"


def facts_of(need, **fields):
    """What a compiler would tell of a program that needs so many bytes, 1,000 being there."""
    told = {"fits": need <= 1000, "peak_bytes" if need <= 1000 else "needed_bytes": need}
    return {
        "inference": False,
        "state_bytes": 600,
        "parameter_bytes": 200,
        "devices": 8,
        "mesh": {"slice": 1, "data": 8, "fsdp": 1, "tensor": 1},
        "batch": 128,
        "images_per_device": 16,
        "accum_steps": 1,
        "remat": "none",
        **fields,
        **told,
    }


def memory(state, image, waste=1.0):
    """A compiler: what a program needs follows from its change; it wastes some of what it is given."""

    def compile(change):
        share = 8 if "mesh.fsdp" in change else 1
        accum, batch = int(change.get("accum_steps", 1)), int(change.get("batch", 128))
        kept = 0.3 if change.get("model.remat") == "full" else 1
        gradients = state / 3 if accum > 1 else 0
        need = (state + gradients) / share + batch / 8 / accum * image * kept * waste
        asked.append(change)
        return facts_of(
            math.ceil(need), batch=batch, images_per_device=batch // 8, state_bytes=state, parameter_bytes=state // 3
        )

    asked = []
    return compile, asked


@pytest.mark.parametrize(
    "state, image, expected",
    [
        (300, 50, {"accum_steps": "2"}),
        (300, 70, {"accum_steps": "2"}),
        (600, 60, {"accum_steps": "8"}),
        (960, 30, search.STRATEGIES["fsdp"]),
        (960, 60, search.STRATEGIES["fsdp"] | {"accum_steps": "2"}),
        (600, 2500, search.STRATEGIES["fsdp"] | {"model.remat": "full", "accum_steps": "16"}),
    ],
)
def test_advice_is_the_cheapest_change_that_fits(state, image, expected):
    compile, asked = memory(state, image)
    first = compile({})
    assert not first["fits"]
    change, found = search.advise(first, 1000, compile)
    assert change == expected and found["fits"] and len(asked) == 2  # guessed right at once


def test_a_prediction_is_advised_no_parts_and_no_backward_pass():
    def compile(change):
        asked.append(change)
        need = 400 / (8 if "mesh.fsdp" in change else 1) + int(change.get("batch", 128)) / 8 * 60
        return facts_of(int(need), inference=True, parameter_bytes=400, state_bytes=1200)

    asked = []
    change, found = search.advise(compile({}), 1000, compile)
    assert change == {"batch": "64"} and found["fits"] and len(asked) == 2


def test_advice_is_only_what_was_compiled_and_fits():
    compile, asked = memory(300, 70, waste=1.6)
    first = facts_of(300 + 70 * 16, state_bytes=300, parameter_bytes=100)
    change, found = search.advise(first, 1000, compile)
    assert found["fits"] and asked[-1] == change and len(asked) > 1
    compile, asked = memory(20_000, 1)
    assert search.advise(facts_of(20_016, state_bytes=20_000, parameter_bytes=6_666), 1000, compile) is None
    assert len(asked) == 1 and {"mesh.fsdp", "model.remat", "batch"} <= set(asked[0])  # the most frugal of all


@pytest.mark.parametrize(("state", "image", "expected"), [(300, 30, {}), (300, 70, {"accum_steps": "2"})])
def test_an_evaluation_that_does_not_fit_gets_a_smaller_batch(state, image, expected):
    step, asked = memory(state, image)

    def compile(change):
        facts, images = step(change), int(change.get("batch_eval", 512)) // 8
        need = state + 20 * images
        told = {"batch": 8 * images, "images_per_device": images, "fits": need <= 1000}
        told["peak_bytes" if told["fits"] else "needed_bytes"] = need
        return facts | {"evaluation": told, "fits": facts["fits"] and told["fits"]}

    change, found = search.advise(compile({}), 1000, compile)
    assert change == expected | {"batch_eval": "256"} and found["fits"] and len(asked) == 2 + len(expected)


def test_weights_are_never_split_over_slices():
    split = {"slice": 2, "data": 1, "fsdp": 4, "tensor": 1}
    assert all("mesh.fsdp" not in change for change, _ in search.candidates(facts_of(2000, mesh=split)))
    half = {"slice": 2, "data": 2, "fsdp": 2, "tensor": 1}
    guesses = [
        guess for change, guess in search.candidates(facts_of(2000, mesh=half)) if change == search.STRATEGIES["fsdp"]
    ]
    assert guesses == [600 / 2 + 1400]


@pytest.mark.parametrize("state, image, start", [*itertools.product((100, 600), (0.3, 7, 60), (1, 16, 4000))])
def test_the_largest_batch_is_found_in_few_compilations(state, image, start):
    def compile(change):
        asked.append(int(change["batch"]) // 8)
        near = max(0, image * asked[-1] + state - 900)  # some of it is computed again when memory runs out
        need = state + image * asked[-1] - near / 2
        return facts_of(math.ceil(need), images_per_device=asked[-1], batch=asked[-1] * 8, state_bytes=state)

    asked = []
    best, refused = search.largest_batch(compile({"batch": start * 8}), 1000, compile)
    largest = (1100 - state) / image
    assert best["fits"] and best["images_per_device"] <= largest < refused
    assert refused - best["images_per_device"] <= max(1, best["images_per_device"] / search.CLOSE)
    assert len(asked) <= 1 + search.MOST_FIT


@pytest.mark.parametrize("accum", [2, 3, 8])
def test_a_batch_is_cut_in_equal_parts_whatever_is_tried(accum):
    def compile(change):
        images = int(change["batch"]) // 8
        assert images % accum == 0
        if images > 3000:
            raise UserError("the warm-up is longer than the run")
        return facts_of(
            100 + images // 4, images_per_device=images, batch=images * 8, state_bytes=100, accum_steps=accum
        )

    best, refused = search.largest_batch(compile({"batch": 8 * accum}), 1000, compile)
    assert 2000 < best["images_per_device"] <= 3000 < refused


def test_no_batch_fits():
    compile, _ = memory(1200, 1)
    assert search.largest_batch(compile({}), 1000, compile) == (None, 1)


def test_what_a_compiler_refuses_is_read():
    beside = "RESOURCE_EXHAUSTED: Ran out of memory, the total memory required for HLO temporaries (30.02G) exceeds"
    assert compiled.refusal(beside, 100)["needed_bytes"] == int(30.02 * 2**30) + 100
    total = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Used 215.17G of 31.25G hbm. Exceeded by 183.92G."
    assert compiled.refusal(total, 100) == {"fits": False, "needed_bytes": int(215.17 * 2**30)}
    with pytest.raises(UserError, match=r"the compiler refuses the program: INTERNAL: no$"):
        compiled.refusal("INTERNAL: no\nmore", 0)


def test_amounts_have_units():
    assert [report.amount(n) for n in (3 << 19, 15.75 * 2**30)] == ["1.50 MiB", "15.75 GiB"]
