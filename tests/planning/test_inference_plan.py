"""Figure 12 from two compilations of each point; the compiler is a line."""

import dataclasses
import json

import pytest

from tests.planning.builders import EXECUTABLE, make_compilation
from vit_jax import UserError, plan
from vit_jax.analysis import plot
from vit_jax.config import parse_command_line
from vit_jax.model import create
from vit_jax.planning import inference_plan
from vit_jax.planning.records import PlanRequest

WORDS = ["--config=configs/smoke.py", "--topology=v5e:1x1", "--inference"]


class Compiler:
    """Needs 100 bytes and 2 for each image, in a memory of 10,000; takes 1,000 cycles an image."""

    def __init__(self):
        self.asked = []

    def __call__(self, request):
        given = dict(word.partition("=")[::2] for word in request.words)
        name, resolution, batch = (given[f"--config.{key}"] for key in ("model.name", "resolution", "batch"))
        self.asked.append((name, int(resolution), int(batch)))
        executable = dataclasses.replace(EXECUTABLE, cycles=1000 * int(batch))
        return make_compilation(
            100 + 2 * int(batch),
            executable=executable,
            memory_bytes=10_000,
            batch=int(batch),
            devices=1,
            images_per_device=int(batch),
            inference=True,
            target="v5e:1x1",
        )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("ViT-H/14", [70, 126, 224, 378, 518]), ("ViT-B/32", [64, 128, 224, 384, 512]), ("R+ViT-Ti/16", [64, 128, 224])],
)
def test_sizes_are_those_that_patches_tile(name, sizes):
    assert [inference_plan.nearest_resolution(name, size) for size in inference_plan.SIZES[: len(sizes)]] == sizes
    assert inference_plan.nearest_resolution(name, 1) == inference_plan.nearest_resolution(name, 20)


def test_two_compilations_give_the_rate_and_the_largest_batch():
    compiler = Compiler()
    [point] = inference_plan.plan_inference(PlanRequest((), "v5e:1x1", True), compiler, ["ViT-B/16"], [225]).points
    assert compiler.asked == [("ViT-B/16", 224, 128), ("ViT-B/16", 224, 1024)]
    assert (point.images, point.largest_batch, point.by_schedule) == (128, 4950, False)
    assert point.images_per_second == pytest.approx(1.5e6, rel=0.01)  # 1.5 GHz


def test_the_figure_as_a_table_in_json_and_as_a_picture(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plan, "compile_in_subprocess", Compiler())
    given = ["--models=ViT-B/16,ViT-H/14", "--sizes=64,384", f"--picture={tmp_path / 'new' / 'figure.png'}"]
    plan.main(["plan", *WORDS, *given])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("| ViT-H/14 | ") and lines[-1].count("4,950") == 2
    assert lines[-1].count("(70)") == lines[-1].count("(378)") == 1 and "(" not in lines[-2]
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000
    plan.main(["plan", *WORDS, *given[:2], "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["model"], one["resolution"]) for one in found] == [
        (name, size) for name, size in (("ViT-B/16", 64), ("ViT-B/16", 384), ("ViT-H/14", 70), ("ViT-H/14", 378))
    ]


def test_models_of_both_families_by_one_recipe(monkeypatch, capsys):
    """The recipe's tanh layer is none of a ResNet's fields."""
    asked = []

    def compile(request):
        config, _ = parse_command_line(["plan", *request.words])
        asked.append((config.model.name, config.model.pre_logits))
        create(config.model.name, pre_logits=config.model.pre_logits)
        return Compiler()(request)

    monkeypatch.setattr(plan, "compile_in_subprocess", compile)
    words = ["--config=configs/vit_b16_jft.py", *WORDS[1:], "--models=ViT-B/16,BiT-R50x1,AxialResNet-26", "--sizes=224"]
    plan.main(["plan", *words])
    assert asked[::2] == [("ViT-B/16", True), ("BiT-R50x1", False), ("AxialResNet-26", False)]
    assert capsys.readouterr().out.count("| AxialResNet-26 | ") == 1


def test_what_is_unknown_leaves_a_gap_in_the_picture():
    point = inference_plan.InferencePoint("ViT-B/16", 64, 64, 8, None, 0, False)
    figure = plot.inference([point])
    assert [len(axes.lines) for axes in figure.axes] == [1, 1]
    assert "| ViT-B/16 | -, 0 |" in inference_plan.InferenceFigure("v5e:1x1", (point,)).render()


def test_wrong_usage(monkeypatch):
    monkeypatch.setattr(plan, "compile_in_subprocess", compiler := Compiler())
    for words in (["--sizes=big"], ["--sizes=0"], ["--sizes=64", "--fit"]):
        with pytest.raises(UserError, match="--sizes"):
            plan.main(["plan", *WORDS, *words])
    with pytest.raises(UserError, match="ViT-Q/16"):
        plan.main(["plan", *WORDS, "--models=ViT-B/16,ViT-Q/16"])
    with pytest.raises(UserError, match="one chip"):
        plan.main(["plan", WORDS[0], "--topology=v5e:2x2", "--inference", "--sizes=64"])
    with pytest.raises(UserError, match="cannot write"):
        plan.main(["plan", *WORDS, "--sizes=64", f"--picture={__file__}/figure.png"])
    assert not compiler.asked
