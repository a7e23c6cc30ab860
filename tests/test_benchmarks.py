"""Every benchmark that the documents show: run once, as small as it goes."""

import pytest

from benchmarks import loader, overhead, plans
from configs import smoke
from tests.test_docs import BENCHMARKS, LINES, commands, write_photos
from vit_jax import pack

# What replaces the words of a command, so that it takes seconds.
SMALL = {
    "benchmarks.faults": ["--only=none"],
    "benchmarks.load": ["--model=ViT-mu/16", "--layouts=ours", "--rounds=1"],
    "benchmarks.overhead": ["--source=digits", "--rounds=1", "--steps=1"],
    "benchmarks.plans": ["--only=exaflops"],
    "benchmarks.tpu": ["--only=none"],
    "benchmarks.train_step": ["--model=ViT-mu/16", "--batch=2", "--resolution=32", "--rounds=1"],
}
SHOWN = [command for line in LINES for command in commands(line) if command[0] in BENCHMARKS]


@pytest.mark.slow
@pytest.mark.parametrize("command", SHOWN, ids=" ".join)
def test_it_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(overhead, "cifar10", smoke)  # it compiles sooner
    monkeypatch.setattr(plans, "TABLE_6", plans.TABLE_6[:1])
    write_photos(tmp_path)
    name, *words = command
    words = SMALL.get(name, words)
    if name == "benchmarks.input":
        words = [word for word in words if not word.startswith("--others")] + ["--rounds=1"]
    if name == "benchmarks.loader":
        pack.main(["vit_jax.pack", "folder:data/photos", "data/packed/photos"])
        words += ["--rounds=1", "--batches=1", "--batch=8", "--resolution=32"]
        loader.main([name, *words, "--workers=0"])
        words += ["--sources=synthetic"]  # one source is enough for worker processes, which start slowly
    assert not BENCHMARKS[name].main([name, *words])
