"""The plot of a sweep: compute as in Table 6, seeds averaged, lines of studies, early stopping; what is left out."""

import dataclasses
import json

import pytest

from tests.conftest import ROOT
from tests.experiments.test_results import write_run
from tests.planning.builders import WORKLOAD
from vit_jax import UserError, sweep
from vit_jax.analysis import plot
from vit_jax.experiments import make_record, scaling, write_record
from vit_jax.macs import macs_per_image
from vit_jax.planning.time_estimate import model_flops_per_image
from vit_jax.program import model_without_data

JFT = {"data.num_examples": 303_000_000, "data.num_classes": 18_291, "model.pre_logits": True, "batch": 4096}


def run(folder, name="ViT-B/16", accuracy=0.5, more=None, **fields):
    """Writes the folder of a finished run; names of fields in `more` have dots."""
    groups = {"model": {"name": name}, "data": {}} | fields
    for key, value in (more or {}).items():
        group, _, field = key.rpartition(".")
        (groups[group] if group else groups)[field] = value
    return write_run(folder, last=fields.get("total_steps", 10), accuracy=accuracy, **groups)


def points(*folders, **request):
    return scaling.read_points([str(folder) for folder in folders], scaling.ScalingPlot(**request))


def test_compute_is_that_of_table_6(tmp_path):
    pretrained = run(tmp_path / "b16", total_steps=7 * 303_000_000 // 4096, more=JFT)
    (point,), notes = points(run(tmp_path / "tuned", accuracy=0.9, init_from=str(pretrained)))
    assert point.x_value == pytest.approx(224, rel=2e-3) and (point.mean, notes) == (0.9, [])
    assert (point.line, point.model) == ("Transformer (ViT)", "ViT-B/16")
    tuned = [run(tmp_path / f"of,seed={seed}", init_from=f"{pretrained}/seed={seed}/..") for seed in (0, 1)]
    for seed in (0, 1):
        (pretrained / f"seed={seed}").mkdir()
    (point,), notes = points(*tuned)
    assert (point.runs, notes) == (2, [])  # seeds of the run that the weights came from
    assert scaling.family("R50+ViT-B/32") == "Hybrid" and scaling.family("BiT-R50x1") == "ResNet (BiT)"


def test_the_compute_of_a_run_includes_its_teacher(tmp_path):
    plain = points(run(tmp_path / "plain"))[0][0].x_value
    taught = run(tmp_path / "taught", more={"task.kind": "distill", "task.teacher": "t"}, task={})
    with pytest.raises(UserError, match="did not store the size of its teacher; choose a field"):
        points(taught)
    history = json.loads((taught / "history.json").read_text())
    (taught / "history.json").write_text(json.dumps([one | {"teacher_macs": 10**9} for one in history]))
    config = scaling.read_run(str(taught), "").config
    images = config.total_steps * config.batch
    assert points(taught)[0][0].x_value == pytest.approx(plain + 2 * 10**9 * images / 1e18)
    workload = dataclasses.replace(
        WORKLOAD, macs_per_image=macs_per_image(model_without_data(config)), teacher_macs=10**9
    )
    assert points(taught)[0][0].x_value == pytest.approx(model_flops_per_image(workload) * images / 1e18)


def test_lines_seeds_and_early_stopping(tmp_path, capsys):
    for line, depth in (("base", 8), ("depth", 4), ("depth", 16), ("width", 2)):
        for seed, accuracy in ((0, 0.5), (1, 0.7)):
            fields = {"seed": seed, "model.depth": depth, "model.width": 48, "model.num_heads": 4}
            run(tmp_path / "shape" / line / f"{depth},seed={seed}", accuracy=accuracy, more=fields)
    found, _ = points(tmp_path / "shape", against="model.depth")
    assert [(point.line, point.x_value, point.mean, point.runs) for point in found] == [
        (line, place, pytest.approx(0.6), 2) for line, place in (("base", 8), ("depth", 4), ("depth", 16), ("width", 2))
    ]
    assert found[0].std == pytest.approx(0.1 * 2**0.5)
    lines = scaling.lines_of(found)
    assert {name: sorted(one.x_value for one in line) for name, line in lines.items()} == {
        "depth": [4, 8, 16],
        "width": [2, 8],
    }
    early, _ = points(tmp_path / "shape", against="model.depth", stop="test/accuracy")
    assert early[0].mean == pytest.approx(0.6)
    sweep.main(["sweep", f"--plot={tmp_path}/shape.svg", "--against=model.depth", str(tmp_path / "shape")])
    assert "0.1414" in capsys.readouterr().out
    assert "model.depth" in (tmp_path / "shape.svg").read_text()


def test_the_other_fields_are_kept_apart_and_the_best_is_marked(tmp_path, capsys):
    for rate, decay, seed, accuracy in (
        *((0.1, 0.0, seed, 0.5 + 0.02 * seed) for seed in (0, 1)),
        *((0.1, 0.3, 0, 0.7), (0.2, 0.0, 0, 0.6), (0.2, 0.3, 0, 0.55)),
    ):
        fields = {"seed": seed, "base_lr": rate, "optim.weight_decay": decay, "checkpoint_every": int(100 * rate)}
        run(tmp_path / "runs" / f"{rate},{decay},{seed}", accuracy=accuracy, optim={}, more=fields)
    found, _ = points(tmp_path / "runs", against="base_lr")
    assert [(one.line, one.x_value, one.mean, one.runs, one.best) for one in found] == [
        ("optim.weight_decay=0.0", 0.1, pytest.approx(0.51), 2, False),
        ("optim.weight_decay=0.0", 0.2, 0.6, 1, False),
        ("optim.weight_decay=0.3", 0.1, 0.7, 1, True),
        ("optim.weight_decay=0.3", 0.2, 0.55, 1, False),
    ]
    figure = plot.scaling(scaling.lines_of(found), "base_lr", joined=True)
    assert "best: 70 at 0.1, optim.weight_decay=0.3" in [
        text.get_text() for text in figure.axes[0].get_legend().get_texts()
    ]
    sweep.main(["sweep", f"--plot={tmp_path}/a.svg", "--against=optim.weight_decay", str(tmp_path / "runs")])
    [best] = [line for line in capsys.readouterr().out.splitlines() if line.endswith("best")]
    assert best.startswith("base_lr=0.1") and "0.7000" in best
    assert figure.axes[0].get_xscale() == "log"
    found, _ = points(tmp_path / "runs", against="optim.weight_decay")
    assert plot.scaling(scaling.lines_of(found), "decay", joined=True).axes[0].get_xscale() == "linear"  # it is 0


def test_records_are_drawn_as_their_runs(tmp_path):
    for seed, accuracy in ((0, 0.5), (1, 0.7)):
        place = run(tmp_path / "runs" / "depth" / f"4,seed={seed}", accuracy=accuracy, more={"seed": seed})
        write_record(make_record(str(place), f"runs/depth/4,seed={seed}"), tmp_path / "results")
    assert points(tmp_path / "results" / "runs") == points(tmp_path / "runs")
    found, _ = points(ROOT / "results" / "cifar10_data_size", against="data.num_examples", metric="test/accuracy")
    shown = {f"| {one.line}/{one.x_value:.0f} | {100 * one.mean:.2f} " for one in found}
    assert len(shown) == 12 and all(line in (ROOT / "docs" / "results.md").read_text() for line in shown)
    place = run(tmp_path / "worse", accuracy=0.05)  # than at its step 5
    write_record(make_record(str(place), "worse/run"), tmp_path / "results")
    [stopped], _ = points(tmp_path / "results" / "worse", stop="test/accuracy")
    assert stopped.mean == 0.1
    with pytest.raises(UserError, match="contain only the last step; leave out --stop"):
        points(ROOT / "results" / "cifar10_data_size", stop="val/accuracy")  # of an earlier version
    (tmp_path / "results" / "list.json").write_text("[]")
    with pytest.raises(UserError, match="there is no run in"):
        points(tmp_path / "results")


def test_accuracies_also_stand_against_the_speed_of_inference(tmp_path, capsys, monkeypatch):
    for name, accuracy in (("ViT-mu/16", 0.5), ("ViT-mu/8", 0.6), ("BiT-R14x1", 0.4)):
        run(tmp_path / "axial" / name.replace("/", ""), name, accuracy)
    figures = []
    real = plot.scaling
    monkeypatch.setattr(sweep.analysis.plot, "scaling", lambda *args: figures.append(real(*args)) or figures[-1])
    speeds = {"ViT-mu/16": 300.0, "ViT-mu/8": 100.0, "BiT-R14x1": 200.0}
    rows = [json.dumps({"model": name, "images_per_second": speed}) for name, speed in speeds.items()]
    (tmp_path / "speeds.jsonl").write_text("\n".join(rows) + "\n")
    words = ["sweep", f"--plot={tmp_path}/a.svg", str(tmp_path / "axial"), f"--speeds={tmp_path}/speeds.jsonl"]
    words.append("--against=total_steps")
    sweep.main(words)
    left, right = figures[0].axes
    drawn = {tuple(point) for line in right.lines for point in line.get_xydata()}
    assert {(300, 50), (100, 60), (200, 40)} <= drawn and right.get_xlabel() == "images/s a chip, inference"
    assert left.get_xlabel() == "total_steps"
    for text, models in (
        ("\n".join(rows[1:]), "ViT-mu/16"),
        ("\n".join([rows[0], *rows]), "BiT-R14x1,ViT-mu/16,ViT-mu/8"),
    ):
        (tmp_path / "speeds.jsonl").write_text(text)
        with pytest.raises(UserError, match=f"must have one speed for each model; .* --models={models} "):
            sweep.main(words)
    with pytest.raises(UserError, match="cannot read absent"):
        sweep.main([*words[:3], "--against=total_steps", "--speeds=absent"])


@pytest.mark.parametrize("places", [(1.1, 1.3), (3e-4, 2.4e-3), (2, 16), (1e-7, 224)])
def test_the_axis_has_readable_ticks(places):
    line = [scaling.Point("a", "", "ViT-B/16", place, "test/accuracy", 0.5, None, 1) for place in places]
    axes = plot.scaling({"a": line}, "exaFLOPs", joined=True).axes[0]
    left, right = axes.get_xlim()
    assert 2 <= sum(left <= tick <= right for tick in axes.get_xticks()) <= 10


def test_few_values_are_labelled_on_the_axis():
    values = (0.0005, 0.002, 0.0021)  # the last would touch the one before
    line = [scaling.Point("a", "", "ViT-B/16", value, "test/accuracy", 0.5, None, 1) for value in values]
    axes = plot.scaling({"a": line}, "base_lr", joined=True).axes[0]
    axes.figure.canvas.draw()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.0005", "0.002"]
    assert not len(axes.get_xticks(minor=True))


def test_what_has_no_point_is_left_out(tmp_path, capsys):
    run(tmp_path / "runs" / "whole", "ViT-mu/16")
    run(tmp_path / "runs" / "half", total_steps=20)
    (tmp_path / "runs" / "half" / "metrics.jsonl").write_text(json.dumps({"step": 3, "train/loss": 1.0}) + "\n")
    run(tmp_path / "runs" / "published", init_from="ViT-B/16-imagenet21k")
    (tmp_path / "runs" / "bert").mkdir()
    (tmp_path / "runs" / "bert" / "config.json").write_text('{"hidden_size": 768}')
    sweep.main(["sweep", f"--plot={tmp_path}/a.png", str(tmp_path / "runs"), "--json"])
    told = capsys.readouterr()
    assert json.loads(told.out)["name"] == "whole"
    assert "bert is not the folder of a run: its config.json is of another program." in told.err
    assert "half is at step 3 of 20." in told.err and "published is unknown, since ViT-B/16-imag" in told.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--plot=a.svg"], "write --plot=FILE and folders of runs"),
        (["--plot", "RUNS"], "write --plot=FILE and folders of runs"),
        (["--plot=a.svg", "--metrc=x", "RUNS"], "unknown flag of --plot 'metrc'; did you mean 'metric'"),
        (["--plot=a.svg", "RUNS", "--metric=real/accuracy"], "can be plotted: .*one has no metric real/accuracy"),
        (["--plot=a.svg", "RUNS", "--stop=val/accuracy"], "one has no metric val/accuracy"),
        (["--plot=a.svg", "RUNS", "--against=model.dept"], "did you mean 'model.depth'"),
        (["--plot=a.svg", "RUNS", "--against=model.name"], "model.name=ViT-B/16, which is not a number"),
        (["--plot=a.svg", str(ROOT / "docs")], "there is no run in"),
        (["--plot=/proc/x/a.svg", "RUNS"], "cannot write /proc/x/a.svg"),
    ],
)
def test_mistakes(tmp_path, words, sentence):
    run(tmp_path / "runs" / "one")
    with pytest.raises(UserError, match=sentence):
        sweep.main(["sweep", *(str(tmp_path / "runs") if word == "RUNS" else word for word in words)])
