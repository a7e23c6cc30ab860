"""Every benchmark that the documents show: run once, as small as it goes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import vit_jax
from benchmarks import dependencies, feed, goodput, loader, mutants, overhead, stream_accuracy, tpu, tpu_process
from configs import smoke
from docs import plans, screenshots
from tests.conftest import ROOT, write_tfds
from tests.faults import hosts
from tests.planning.builders import EXECUTABLE, make_compilation
from tests.test_docs import BENCHMARKS, LINES, commands, write_photos
from vit_jax import UserError, pack
from vit_jax.analysis import html
from vit_jax.planning.goodput import MEASURED_ON_CPU
from vit_jax.planning.records import StepSchedule, step_to_json

# What replaces the words of a command, so that it takes seconds.
SMALL = {
    "benchmarks.bucket": ["--photos=data/photos", "--copies=1", "--shards=2", "--batch=8", "--batches=2", "--rounds=1"],
    "benchmarks.calibration": ["--only=none"],
    "tests.faults.table": ["--only=none"],
    "benchmarks.feed": [
        "--photos=data/photos",
        "--workers=1",
        "--batch=64",
        "--batches=1",
        "--images=64",
        "--rounds=1",
    ],
    "docs.fields": ["--write=fields.md", "--kinds=kinds.md"],
    "benchmarks.goodput": [f"--config={ROOT}/configs/smoke.py", "--batch=8"],
    "benchmarks.load": ["--model=ViT-mu/16", "--layouts=ours", "--rounds=1"],
    "benchmarks.neighbourhoods": ["--only=none"],
    "benchmarks.optimizers": ["--only=none"],
    "benchmarks.overhead": ["--source=digits", "--rounds=1", "--steps=1"],
    "benchmarks.patterns": ["--only=none"],
    "docs.plans": ["--only=exaflops"],
    "docs.imagenet": [],
    "docs.results_page": [f"--results={ROOT}/results", "--write=results.md", "--pictures=pictures"],
    "docs.studies": [f"--results={ROOT}/results"],
    "benchmarks.stream": ["--part=0.01"],
    "benchmarks.stream_accuracy": ["--data-dir=tfds", "--seeds=1", "--epochs=1"],
    "benchmarks.tpu": ["--only=none"],
    "benchmarks.tpu_check": ["--only=none"],
    "benchmarks.train_step": ["--model=ViT-mu/16", "--batch=2", "--resolution=32", "--rounds=1"],
}
SHOWN = [command for line in LINES for command in commands(line) if command[0] in BENCHMARKS]


@pytest.mark.slow
@pytest.mark.parametrize("command", SHOWN, ids=" ".join)
def test_a_benchmark_that_a_page_shows_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(overhead.cifar10, "plain", smoke.get_config)  # it compiles sooner
    monkeypatch.setattr(plans, "TABLE_6", plans.TABLE_6[:1])
    monkeypatch.setattr(feed, "PACKED", {"packed": feed.PACKED["packed"]})  # each starts two worker processes
    monkeypatch.setattr(
        stream_accuracy,
        "SMALL",
        ["model.depth=1", "optim.name=adamw", "batch=16", "batch_eval=16", "data.num_examples=128"],
    )
    write_photos(tmp_path)
    (tmp_path / "kinds.md").write_text("<!-- kinds -->\n<!-- /kinds -->\n")
    name, *words = command
    words = SMALL.get(name, words)
    if name == "benchmarks.input":
        words = [word for word in words if not word.startswith(("--others", "--write"))] + ["--rounds=1"]
    if name == "benchmarks.stream_accuracy":
        monkeypatch.setenv("XLA_FLAGS", hosts.QUICK)  # of its runs
        write_tfds(tmp_path / "tfds", "cifar10", "3.0.2", list("abcdefghij"), {"train": 128, "test": 16})
    if name == "docs.pictures":
        write_tfds(tmp_path / "tfds", "cifar10", "3.0.2", list("abcdefghij"), {"train": 2, "test": 8})
        model = vit_jax.create("ViT-mu/8", resolution=32, num_classes=2, preprocess="resize(32)|value_range(-1,1)")
        vit_jax.save("model.npz", model, model.init(jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32)))
        words = ["model.npz", "--data-dir=tfds", "--write=drawn"]
    if name == "docs.screenshots":
        if not screenshots.find_browser():
            pytest.skip("no Chromium")
        (tmp_path / "page.html").write_text(html.document("Title", "<h1>Title</h1>"))
        words = ["page.html", "--out=shots"]
    if name == "benchmarks.loader":
        pack.main(["vit_jax.pack", "folder:data/photos", "data/packed/photos"])
        words += ["--rounds=1", "--batches=1", "--batch=8", "--resolution=32"]
        loader.main([name, *words, "--workers=0"])
        words += ["--sources=synthetic"]  # one source is enough for worker processes, which start slowly
    assert not BENCHMARKS[name].main([name, *words])


def test_what_a_restart_costs_is_as_the_page_says():
    text = (ROOT / "docs" / "reliability.md").read_text()
    for lines in (goodput.restart_table(MEASURED_ON_CPU), goodput.goodput_table(MEASURED_ON_CPU)):
        assert "\n".join(lines) in text


def test_a_host_feeds_what_its_workers_read_and_its_main_process_hands_on():
    """A worker takes 1 ms, the main process 0.1 ms; a chip of v5e takes S/16 in 70.5 million cycles at 1.5 GHz."""
    lines = list(feed.hosts_table(1e-4, {("originals", True): 1e-3}))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[3:]]
    assert [row[:4] for row in rows] == [
        ["2", "threads", "1,818", "10,000"],
        ["16", "14", "10,000", "10,000"],
        ["112, with 4 chips of v5e", "110", "10,000", "10,000"],
        ["224, with 8 chips of v5e", "222", "10,000", "10,000"],
    ]
    assert feed.fed(12, 1e-3, 1e-5) == pytest.approx(10_000) and feed.fed(4, 1e-3, 0.0) == pytest.approx(4000)
    assert feed.images_per_second("S/16") == pytest.approx(256 / (70.5e6 / 1.5e9), rel=0.01)
    assert [row[4:] for row in rows[:2]] == [["", "", ""]] * 2 and all(rows[2][4:])


def test_without_a_browser_there_are_no_screenshots(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "page.html").touch()
    with pytest.raises(UserError, match="screenshots need Chromium or Chrome on the PATH"):
        screenshots.main(["screenshots", str(tmp_path / "page.html"), f"--out={tmp_path / 'shots'}"])
    with pytest.raises(UserError, match="there is no page"):
        screenshots.main(["screenshots", "absent.html", f"--out={tmp_path / 'shots'}"])


def test_dependencies_that_cannot_be_installed_are_a_line_of_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        dependencies.main(["dependencies"])
    assert "uv makes the environments: pip install uv" in capsys.readouterr().err
    (tmp_path / "uv").write_text("#!/bin/sh\necho there is no Python 3.9 >&2\nexit 2\n")
    (tmp_path / "uv").chmod(0o755)
    page = tmp_path / "page.md"
    page.write_text("<!-- dependencies -->\n<!-- /dependencies -->\n")
    assert dependencies.main(["dependencies", "--python", "3.9", "--only=est", f"--write={page}"]) == 1
    lines = [f"| 3.9 | {kind} | BROKEN: there is no Python 3.9 |\n" for kind in ("oldest", "newest")]
    assert page.read_text().endswith("".join([*lines, "<!-- /dependencies -->\n"]))
    needs = {**dependencies.NEEDS, **dependencies.NEEDS_AND_NETWORK}
    assert set(needs.values()) < set(dependencies.EXTRAS.split(","))


def test_rows_are_shown_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(tpu, "KEPT", tmp_path)
    for code, million in (("vit_jax", 100), ("big_vision", 150)):
        schedule = StepSchedule({"matmul": million * 10**6}, 5_000_000, 0, 0, 0, 10**9, 0, 0)
        executable = dataclasses.replace(EXECUTABLE, cycles=2 * million * 10**6, schedule=schedule)
        step = make_compilation(900, executable=executable).step
        kept = step_to_json(step) | {"macs_per_image": 65536 * 10**8 // 6 // 128}  # the half of what fills a v5e
        (tmp_path / f"{tpu.Row(code, 'B/16', 'v5e:2x2', 128).name}.json").write_text(json.dumps(kept))
    refused = make_compilation(3000).step
    row = tpu.Row("vit_jax", "L/16", "v5e:2x4", 64, fields=tpu.SPLIT["tensor"])
    (tmp_path / f"{row.name}.json").write_text(json.dumps(step_to_json(refused) | {"macs_per_image": 1}))
    (tmp_path / f"{tpu.Row('vit_jax', 'H/14', 'v5e:2x2', 32).name}.json").write_text('{"error": "exit code 1"}')
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in tpu.SECTIONS))
    tpu.main(["tpu", "--only=none", f"--write={page}"])
    text = page.read_text()
    [line] = [line for line in text.splitlines() if line.startswith("| B/16, 128 | v5e:2x2 | 196 ")]
    ours, theirs = "200 | 100.0 | 5.0 + 0.0 | 0.00 MiB | 50%", "300 | 150.0 | 5.0 + 0.0 | 0.00 MiB | 33%"
    assert line.endswith(f"| {ours} | {theirs} | 1.50 |")
    assert "| L/16, 64 | tensor |  |  |  | does not fit: 0.00 MiB |" in text and "| exit code 1 |" in text
    names = [path.name for path in tmp_path.iterdir()]
    assert len(set(names)) == 5 and row.name == "vit_jax-l_16-v5e_2x4-64-gap-data_1-tensor4"


def test_a_compilation_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(tpu_process, "LIMIT", 0.01)
    report = tpu_process.compile_in_process("B/16", "v5e:2x2", "benchmarks.tpu_rows")
    assert report == {"error": "not compiled within 0 minutes"}


def test_a_compiler_that_crashes_is_said_to_have_crashed(tmp_path, monkeypatch):
    (tmp_path / "crashing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = tpu_process.compile_in_process("B/16", "v5e:2x2", "crashing")
    assert report == {"error": "the compiler ended by signal 11"}


def test_the_tests_of_each_room_are_where_the_mutants_look_for_them():
    assert all(map(mutants.tests_of, mutants.TESTS))
