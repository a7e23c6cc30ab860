"""The page of a run, the files that it reads, and the server that shows it."""

import base64
import contextlib
import dataclasses
import http.client
import io
import itertools
import json
import re
import threading

import jax
import numpy as np
import pytest

from tests.analysis.test_look import Page, check_picture
from tests.conftest import ROOT
from tests.evals.helpers import make_source
from vit_jax import UserError, report, train
from vit_jax.analysis import curves, page_server, run_checkpoints, run_cost, run_mistakes, run_page, run_report
from vit_jax.config import get_config, parse_command_line, save_config
from vit_jax.data.preprocess import parse_pipe
from vit_jax.evals.logit_metrics import Predictions
from vit_jax.evals.prediction_files import SIDE, find_mistakes
from vit_jax.model import create
from vit_jax.monitoring import RunFolder, format_value, read_metrics, read_run
from vit_jax.training import run_end

RANDOM = np.random.default_rng(0)
NAME = "a <b> & 'c'"
PROCESS = {"seconds": 90.0, "hardware": "8 x TPU <x>", "vit_jax": "0.1.0", "jax": "0.10", "peak_bytes": 2**30}
LEDGER = [  # 100 seconds, 50 without anything, 250 seconds
    {"first": 0, "last": 14, "began": 1.7e9, "seconds": {"starting": 20.0, "step": 80.0}},
    {"first": 10, "last": 30, "began": 1.7e9 + 150, "seconds": {"steps done again": 50.0, "step": 200.0}},
]
PLAN = {"batch": 16, "devices": 2, "device_kind": "TPU v5 lite", "macs_per_image": 10**6, "peak_bytes": 2**29}
PLAN |= {"images_per_second_per_chip": 500.0, "mfu": 0.4, "hours": 0.01}


class RunPage(Page):
    def handle_data(self, data):
        if "script" not in self.open:
            super().handle_data(data)


def check_run_page(text):
    """Checks that a page with scripts stands alone, and that every picture has a text."""
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    page = RunPage(text)
    assert not {"link", "iframe", "object", "base", "form", "a"} & {tag for tag, _ in page.tags}
    [policy] = [tag["content"] for tag in page.all("meta") if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and not re.search(r"https?:|\*|connect-src|'self'", policy)
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert not (tag == "script" and "src" in attributes)
        for name in {"src", "srcset", "href"} & attributes.keys():
            kind, content = re.fullmatch(r"data:image/(png|webp|svg\+xml);base64,(.+)", attributes[name]).groups()
            check_picture(kind, base64.b64decode(content, validate=True))
    assert all(image["alt"].strip() for image in page.all("img"))
    assert all(tag["aria-label"].strip() for _, tag in page.tags if tag.get("role") == "img")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))
    return page


def write_lines(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics(step):
    return {
        "step": step,
        "train/loss": 1 / step,
        "train/lr": 0.1,
        "norm/grads": 1.0,
        "train/images_per_sec": 8.0 * step,
    }


def write_run(folder, steps=30, **fields):
    """Writes the folder of a run that was resumed after steps 10 and 20, with `model` and all that it may have."""
    folder.mkdir()
    config = get_config()
    config.total_steps, config.total_epochs, config.batch, config.data.num_examples = 30, None, 16, 100
    config.update(fields)
    save_config(config, folder / "config.json")
    lines = [metrics(step) | {"perf/data_wait": 0.1} for step in range(1, steps + 1)]
    lines[3]["norm/grads"] = None
    write_lines(
        folder, [*lines, {"step": steps, "test/accuracy": 0.5, "test/loss": 1.5, "test/n": 9, "few/5shot": 0.3}]
    )
    history = [PROCESS | {"first": first, "last": first + 10} for first in range(0, steps, 10)]
    (folder / "history.json").write_text(json.dumps(history))
    (folder / "ledger.json").write_text(json.dumps(LEDGER))
    (folder / "plan.json").write_text(json.dumps(PLAN) + "\n")
    np.savez(folder / "test.test.mistakes.npz", step=np.array(20), **mistakes(classes=3))
    (folder / "checkpoints" / "10").mkdir(parents=True)
    return folder


def mistakes(classes, images=40, shape=(8, 12, 3)):
    logits, labels = RANDOM.random((images, classes), np.float32), RANDOM.integers(-1, classes, images)
    source = make_source([f"{NAME}/{index}" for index in range(images)])
    preprocess = parse_pipe(f"central_crop(({shape[0]},{shape[1]}))|value_range(-1,1)", 0)
    names = [f"<i>class</i> {index}" for index in range(classes)]
    found = find_mistakes(Predictions(logits, labels, names), "softmax", source, preprocess)
    wrong = (labels >= 0) & (logits.argmax(axis=1) != labels)
    assert found["pairs"][:, 2].sum() == (labels >= 0).sum()
    assert len(found["labels"]) == min(24, wrong.sum()) and (found["labels"] != found["predictions"]).all()
    assert (np.diff(found["confidences"]) <= 0).all()
    return found


@pytest.fixture(scope="module")
def weights():
    vit = create("ViT-mu/8", resolution=16, num_classes=3)
    image = jax.ShapeDtypeStruct((1, 16, 16, 3), np.float32)
    params = jax.tree.map(
        lambda leaf: RANDOM.normal(size=leaf.shape), jax.eval_shape(vit.init, jax.random.key(0), image)
    )
    return vit, params


@pytest.fixture
def model(weights, monkeypatch):
    """What every checkpoint holds."""
    monkeypatch.setattr(run_checkpoints.interop, "load", lambda path, dtype: weights)
    run_checkpoints.draw_checkpoint.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"), [("test/accuracy", "50.00%"), ("few/5shot", "30.00%"), ("test/loss", "1.5")]
)
def test_the_page_prints_metrics_as_the_log_does(tmp_path, name, value):
    run = read_run(str(write_run(tmp_path / "run")), "run")
    assert run_page.format_best(run, name).startswith(f"{value} at step 30, ")
    assert format_value(name, dict(run.metrics)[30][name]) == value


def test_the_page_stands_alone_and_says_all(tmp_path, model):
    run = write_run(tmp_path / NAME)
    page = check_run_page(run_report.make_page([read_run(str(run), NAME)]))
    assert f"Run {NAME}" in page.text and "<i>class</i> 2" in page.text and "TPU <x>" in page.text
    for words in (
        "complete: 30 of 30 steps",
        "after step 10, 20",
        "norm/grads in 1 lines",
        "of the split test are wrong",
    ):
        assert words in page.text
    plots = [tag["aria-label"] for _, tag in page.tags if tag.get("role") == "img"]
    assert [text.partition(":")[0] for text in plots] == [
        *("Loss", "Accuracy", "Learning rate", "Norms", "Speed", "Waiting for data")
    ]
    assert len([tag for tag in page.all("img") if "after step 10" in tag["alt"]]) == 2
    assert "another run" not in page.text
    assert "Goodput 70.0% of 6.7 minutes, 2 starts." in page.text
    for words in ("steps done again", "idle between starts", "12.5%"):
        assert words in page.text
    # Measured: a median of 124 images/s; planned: 1,000 on two devices; 40 % utilization there.
    for number in ("124.0", "1,000.0", "4.96%", "40.00%", "1.00 GiB", "0.50 GiB", "36.0 s", "4.5 minutes"):
        assert number in page.text, number


def test_a_plan_of_another_run_is_named(tmp_path, model):
    run = write_run(tmp_path / NAME)
    other = {"model": "ViT-H/14", "steps": 30, "batch": 4096, "resolution": [32, 48]}
    (run / "plan.json").write_text(json.dumps(PLAN | other) + "\n")
    text = check_run_page(run_report.make_page([read_run(str(run), NAME)])).text
    name = get_config().model.name
    assert (
        f"another run: model.name is ViT-H/14 there, {name} here; batch is 4096 there, 16 here; resolution is" in text
    )
    assert "total_steps is" not in text


def test_runs_are_compared(tmp_path, model):
    _, two = (write_run(tmp_path / name, **fields) for name, fields in (("one", {}), ("two", {"seed": 7})))
    (two / "history.json").unlink()
    (two / "plan.json").unlink()
    (two / "test.test.mistakes.npz").write_bytes(b"damaged")
    text = run_report.make_page(report.read_runs([str(tmp_path)]))
    page = check_run_page(text)
    assert "2 runs" in page.text and "two: train/loss" in page.text
    # The heading of a figure, its key of dashes, which one metric does not need, and the heading of its table.
    assert (
        "Losstrain/loss solid, test/loss dashedEqual, in turns: all 2 runs (train/loss, test/loss)Loss in n"
        in page.text
    )
    assert "Learning ratetrain/lrEqual, in turns: all 2 runs (train/lr)Learning rate in numbers" in page.text
    differs = re.search("What differs</h3>(.*?)</table>", text)[1]
    assert re.findall(r'<th scope="col">(\S+?)</th>', differs) == ["seed"]
    assert "cannot read test.test.mistakes.npz" in page.text and f"{two}/plan.json" in page.text


def test_many_runs_are_lines_beside_their_colours_and_what_they_share_is_said_once(tmp_path):
    (tmp_path / "rates").mkdir()
    for number in range(9):
        write_run(tmp_path / "rates" / f"{number}", base_lr=0.1 * number, seed=number // 5, log_every=1 + number)
    runs, colours = report.read_runs([str(tmp_path)]), curves.colours_of(9)
    told = re.sub("<.*?>", "", run_page.summary(runs))
    assert told.startswith(f"all 9 runsfolder{tmp_path}/ratesstatecomplete: 30 of 30 steps") and told.count("ViT") == 1
    assert run_page.environment(runs).count("8 x TPU &lt;x&gt;") == 1
    differs = re.search("What differs</h3>(.*?)</table>", run_page.configuration(runs, {}))[1]
    labels = re.findall(
        r'<th scope="row"><span class="plot" style="color: (.*?)">&#9632;</span>&nbsp;(\d)</th>', differs
    )
    assert labels == [(colour, str(number)) for number, colour in enumerate(colours)] and len(set(colours)) == 9
    assert re.findall('<th scope="col">(.*?)</th>', differs) == ["base_lr", "log_every", "seed"]
    rows = [(f"fact {fact}", [f"{fact} of {run}" for run in range(9)]) for fact in range(12)]
    widths = [head.count('scope="col"') for head in run_page.table_of(runs, rows).split("</thead>")[:-1]]
    assert widths == [run_page.COLUMNS, 9 - run_page.COLUMNS]


def test_equal_curves_take_turns_on_one_line(tmp_path):
    def curve(run, values, metric="train/loss"):
        return curves.Curve(run, metric, np.arange(3), np.array(values, float))

    drawn = [
        curve(0, [1, 2, np.nan]),
        curve(1, [1, 2.5, 3]),
        curve(2, [1, 2.0001, np.nan]),
        curve(0, [1, 2, 4], "a/loss"),
    ]
    assert curves.find_equal(drawn) == [[drawn[0], drawn[2]]]
    runs = [read_run(str(write_run(tmp_path / name)), name) for name in "abc"]
    plot = curves.draw_panel(curves.PANELS[0], runs, drawn, curves.Range1d(0, 3))
    glyphs = [renderer.glyph for renderer in plot.renderers if type(renderer.glyph).__name__ == "Line"]
    dashes = [(glyph.line_color, glyph.line_dash, glyph.line_dash_offset) for glyph in glyphs]
    assert dashes[0] == (curves.CURVE_COLOURS[0], [10, 10], 0) and dashes[2] == (curves.CURVE_COLOURS[2], [10, 10], -10)
    lines = run_page.describe_equal([[drawn[0], drawn[2]]], runs)
    assert (
        len(lines) == 1
        and re.sub("<.*?>", "", lines[0]) == "Equal, in turns: &#9632;&nbsp;a, &#9632;&nbsp;c (train/loss)"
    )


def test_a_run_that_has_only_begun(tmp_path):
    folder = tmp_path / "begun"
    folder.mkdir()
    config = get_config()
    config.total_steps, config.total_epochs = 30, None
    save_config(config, folder / "config.json")
    page = check_run_page(run_report.make_page(report.read_runs([str(folder)])))
    for words in (
        "0 of 30 steps",
        "No metrics",
        "--save=mistakes",
        "No checkpoint",
        "No plan",
        "No process",
        "an earlier version trained",
    ):
        assert words in page.text


def test_a_run_that_was_killed_twice_has_one_curve(tmp_path):
    """Lines after the last checkpoint, evaluations of the same step, and half a line."""
    parts = [range(1, 13), range(11, 26), range(21, 31)]
    run = write_run(tmp_path / "run")
    lines = [metrics(step) for part in parts for step in part]
    lines.insert(10, {"step": 10, "test/loss": 2.0})
    write_lines(run, lines)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "train/lo')
    found = curves.list_curves([read_run(str(run), "run")])
    for panel in found.values():
        for curve in panel:
            assert curve.steps.tolist() == ([10] if curve.metric == "test/loss" else list(range(1, 31)))
    with pytest.raises(UserError, match="is not the JSON of a step's metrics"):
        read_metrics(b'{"epoch": 1}\n', "metrics.jsonl")


def test_long_curves_keep_their_spikes_and_gaps():
    values = np.sin(np.arange(100_000) / 1e3)
    values[[0, 54_321, 77_777, 99_999]] = -9, 50, np.nan, 7
    kept = curves.thin_out(values)
    assert {0, 54_321, 77_777, 99_999} <= set(kept.tolist()) and len(kept) <= 3 * curves.BUCKETS + 1
    assert (np.diff(kept) > 0).all() and curves.thin_out(values[:100]).tolist() == list(range(100))


def test_kept_images_are_small():
    assert mistakes(classes=2)["pixels"].shape[1:] == (8, 12, 3)
    found = mistakes(classes=2, shape=(20, 30, 3))
    assert (found["pixels"][0] == int(str(found["images"][0]).rpartition("/")[2])).all()
    assert SIDE == 128


@contextlib.contextmanager
def served(pages):
    def make_page():
        if not pages:
            raise UserError("there is no run <yet")
        return pages[0]

    server = page_server.make_server(0, make_page, lambda: 15)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_server_shows_one_page_to_this_machine_only():
    def ask(method, path, **headers):
        connection = http.client.HTTPConnection(*address)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    pages = ["<p>é"]
    with served(pages) as address:
        assert address[0] == "127.0.0.1"
        status, content, headers = ask("GET", "/")
        assert (status, content.decode(), headers["Refresh"]) == (200, "<p>é", "15")
        assert ask("HEAD", "/")[:2] == (200, b"")
        for path in ("/config.json", "/../config.json", "//etc/passwd", "/%2e%2e/x", "/?x", "*", "/metrics.jsonl"):
            assert ask("GET", path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert ask(method, "/")[0] == 501
        assert ask("GET", "/", Host="evil.example")[0] == 403
        pages.clear()
        status, content, _ = ask("GET", "/")
        assert status == 503 and b"there is no run &lt;yet" in content
        with pytest.raises(UserError, match=f"cannot listen on port {address[1]}: .*; choose another --port"):
            page_server.make_server(address[1], str, lambda: None)


def test_the_command_writes_one_file(tmp_path, model, capsys):
    run = write_run(tmp_path / "run")
    before = set(run.iterdir())
    report.main(["report", str(run)])
    assert capsys.readouterr().out == f"{run}/report.html\n" and set(run.iterdir()) - before == {run / "report.html"}
    with pytest.raises(UserError, match="--serve writes nothing"):
        report.main(["report", str(run), "--serve", "--out=x.html"])
    write_run(tmp_path / "other")
    with pytest.raises(UserError, match="say where to write the page of 2 runs"):
        report.main(["report", str(tmp_path)])


@pytest.mark.slow
def test_a_run_that_is_interrupted_twice_and_writes_its_page(tmp_path):
    fields = {"report": True, "total_steps": 12, "eval_every": 4, "log_every": 1, "warmup_steps": 1, "batch": 64}
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    config, _ = parse_command_line(["main", f"--config={ROOT}/configs/digits.py", *words])
    for last in (6, 10):

        def interrupt(step, metrics, last=last):
            if step == last:
                raise RuntimeError

        with pytest.raises(RuntimeError):
            train.train(config, tmp_path / "run", watch=interrupt)
    train.train(config, tmp_path / "run")
    run = read_run(str(tmp_path / "run"), "run")
    assert [process["first"] for process in run.processes] == [0, 4, 8]
    for panel in curves.list_curves([run]).values():
        for curve in panel:
            step = 4 if curve.metric.startswith("test/") else 1
            assert curve.steps.tolist() == list(range(step, 13, step))
    page = check_run_page((tmp_path / "run" / "report.html").read_text())
    assert "after step 4, 8" in page.text and "Wrong with most confidence" in page.text


@pytest.mark.parametrize("value", ["text", [1], {}, -1, True, float("nan"), 10**400], ids=lambda value: str(value)[:9])
def test_a_damaged_plan_is_a_sentence(value, model):
    config = get_config()
    config.total_steps = 30
    run = RunFolder("r", "place", config, [(1, metrics(1))], [PROCESS], None, {})
    plan = PLAN | {"needed_bytes": None, "passes": 1, "teacher_macs": 0, "steps": 3, "resolution": [3, 4]}
    for field in plan:
        damaged = dataclasses.replace(run, plan=json.dumps(plan | {field: value}).encode())
        with contextlib.suppress(UserError):  # "place/plan.json is not a plan"
            assert run_cost.cost_part(damaged).startswith("<table")
    for text in (b"", b"[" * 100_000, b"\xff", b"null", b'{"batch": 1'):
        with pytest.raises(UserError, match=r"place/plan\.json is not a plan; delete it"):
            run_cost.cost_part(dataclasses.replace(run, plan=text))


def test_damaged_mistakes_are_a_sentence():
    arrays = mistakes(classes=3) | {"step": np.array(20), "split": np.array("test")}
    others = [np.array(3), np.array([2.5]), np.zeros((3, 3)), np.array(["x"] * 24), np.zeros((24, 2, 2, 3))]
    others += [np.int64(-9), np.zeros(24, np.int64), np.full((24, 0, 0, 3), 1, np.uint8), np.full(24, np.nan)]
    others += [np.array([], str)]
    refused = 0
    for name in arrays:
        for other in (*others, -abs(arrays["labels"]) - 1):
            content = io.BytesIO()
            np.savez(content, **arrays | {name: other})
            try:
                read = run_mistakes.read_mistakes("m.npz", content.getvalue())
            except UserError as error:
                assert str(error) == "m.npz was not written by vit_jax.evaluate --save=mistakes; remove it."
                refused += 1
            else:
                assert run_mistakes.evaluation_part("test.test.mistakes.npz", read)
    assert refused > 60


@pytest.mark.slow
def test_a_page_of_many_lines_is_small(tmp_path):
    run = write_run(tmp_path / "run")
    write_lines(run, [metrics(step) for step in range(1, 100_001)])
    np.savez(run / "test.test.mistakes.npz", step=np.array(-1), **mistakes(classes=30, shape=(200, 100, 3)))
    text = run_report.make_page([read_run(str(run), "run")])
    assert len(text) < 3e6 and "Confused most" in check_run_page(text).text


def test_only_headings_are_moved_below_the_names_of_runs():
    part = '<h3>Test</h3><img src="data:image/png;base64,AA/h3AA"><code>/home/h4/run</code>'
    runs = [RunFolder(name, f"/runs/{name}", get_config(), [], [], None, {}) for name in "ab"]
    found = run_page.render_each_run(runs, lambda run: part + run.name)
    assert found.count("<h4>Test</h4>") == 2 and found.count("AA/h3AA") == found.count("/home/h4/run") == 2
    found = run_page.render_each_run(runs, lambda run: f"{part} in {run.location}")  # the same for both
    assert found.startswith("<section><p>All 2 runs, with the folder of each in place of RUN:</p><h3>Test</h3>")
    assert found.endswith("</code> in RUN</section>")


def test_a_report_that_fails_is_a_line():
    def fail(error):
        raise error

    assert run_end.run_or_describe_failure("there is no report", lambda: None) == []
    assert run_end.run_or_describe_failure("there is no report", lambda: fail(UserError("the disk is full."))) == [
        "there is no report: the disk is full."
    ]
    assert run_end.run_or_describe_failure("there is no report", lambda: fail(IndexError(3))) == [
        "there is no report: IndexError: 3"
    ]


def test_runs_of_one_name_are_told_apart(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder / "run").mkdir(parents=True)
        save_config(get_config(), tmp_path / folder / "run" / "config.json")
    places = [str(tmp_path / folder / "run") for folder in ("one", "other")]
    runs = report.read_runs(places)
    assert [run.name for run in runs] == [run.location for run in runs] == places
    assert [run.name for run in report.read_runs([places[0], places[0]])] == ["run"]
