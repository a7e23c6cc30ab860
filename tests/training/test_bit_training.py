"""A BiT from a published file: fine-tuned by HyperRule, killed, resumed, evaluated; and what it can start from."""

import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.conftest import ROOT
from tests.models.test_models import params_of
from vit_jax import UserError, interop, predict
from vit_jax.interop import transfer
from vit_jax.model import parameter_shapes

RULE = "--config=configs/bit_hyperrule.py:model=BiT-R14x1,dataset=folder:PATH,split=full,images=25000,small=yes"
SMALL = (
    "data.source=digits",
    "model.width=32",
    "resolution=16",
    "data.preprocess=resize(18)|random_crop({resolution})|value_range(-1,1)",
    "total_steps=10",
    "warmup_steps=1",
    "batch=64",
    "batch_eval=120",
    "base_lr=0.03",
    "log_every=1",
    "checkpoint_every=4",
    "eval_every=10",
)


def run(weights, workdir, *words):
    flags = [f"--config.{field}" for field in (*SMALL, f"init_from={weights}", *words)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "vit_jax.main", RULE, *flags, f"--workdir={workdir}"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_fine_tuning_killed_and_resumed_is_fine_tuning_bit_for_bit(tmp_path):
    weights, (whole, killed) = tmp_path / "pretrained.npz", (tmp_path / name for name in ("whole", "killed"))
    model = vit_jax.create("BiT-R14x1", width=32, num_classes=20)
    vit_jax.save(weights, model, params_of(model), layout="google")
    assert run(weights, whole).wait() == 0
    process = run(weights, killed)
    while process.poll() is None and not (killed / "checkpoints" / "4").is_dir():
        time.sleep(0.01)
    process.kill()
    assert process.wait() != 0
    assert run(weights, killed).wait() == 0
    assert "Resuming" in (killed / "train.log").read_text()
    one, other = (np.load(workdir / "model.npz") for workdir in (whole, killed))
    assert one.files == other.files and all(np.array_equal(one[name], other[name]) for name in one)

    tuned, params = vit_jax.load(killed)
    assert tuned.spec == vit_jax.create("BiT-R14x1", width=32, num_classes=10, resolution=16).spec
    assert np.any(params["head"]["kernel"])
    Image.new("RGB", (16, 16)).save(tmp_path / "x.png")
    [found] = predict.predict(killed, [tmp_path / "x.png"], top=2)
    assert len(found["classes"]) == 2


def test_a_run_takes_over_all_but_the_head():
    source, target = (vit_jax.create("BiT-R14x1", width=32, num_classes=n, resolution=16 * n) for n in (3, 2))
    params, wanted = params_of(source), parameter_shapes(target)
    taken = interop.adapt_parameters(source, params, target, wanted)
    assert len(taken) == len(jax.tree.leaves(params)) - 2 and not any(name.startswith("head") for name in taken)
    assert set(transfer.config_fields(source)) == {"width", "stages", "unit", "border", "root", "se_reduction"}
    with pytest.raises(
        UserError, match=r"^the checkpoint contains a ViT-S/16, not a BiT-R14x1; to match it, set --con"
    ):
        interop.adapt_parameters(vit_jax.create("ViT-S/16"), {}, target, wanted)
    other = vit_jax.create("BiT-R14x1", width=32, unit="post_activation")
    with pytest.raises(UserError, match=r"unit post_activation, not pre_activation; to match it, set .*unit="):
        interop.adapt_parameters(other, {}, target, wanted)
    unnamed = vit_jax.create("BiT", stages=(1, 2), width=32)
    with pytest.raises(UserError, match=r"to match it, set --config\.model\.name=BiT --config\.model\.stages=1,2$"):
        interop.adapt_parameters(unnamed, {}, target, wanted)
