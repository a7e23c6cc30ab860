"""Where a program contains the kernels, compiled for absent TPU slices: what interpreting them does not show."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from vit_jax.planning import targets

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")

BOTH = 2  # forward and backward
# batch, tokens, heads, head_dim, dtype
SHAPES = (
    "8,9,3,64,float32",
    "8,5,12,64,bfloat16",
    "8,1,12,64,bfloat16",
    "64,197,12,64,bfloat16",
    "8,50,3,88,float32",
    "8,50,5,24,bfloat16",
    "8,50,5,104,bfloat16",
)
LARGE = ("8,257,16,80,bfloat16", "8,577,12,64,bfloat16", "8,197,12,64,float32", "4,1370,16,80,bfloat16")
WIDE = "256,196,3,64,float32"  # eight packs of two images in a step of the grid
SEVERAL = "48,257,16,80,float32"  # three packs, for which the compiler needs more memory than for one
# All shapes for one kind of chip, some for the others. A v4 has too little memory for most of the larger ones.
CHIPS = {
    "v5e:2x2": (*SHAPES, *LARGE, "64,257,12,88,float32"),
    "v4:2x2x1": (SHAPES[3], LARGE[0]),
    "v5p:2x2x1": (SHAPES[3], LARGE[0]),
    "tpu7x:2x2x1": (SHAPES[4], LARGE[0]),
    "v6e:2x2": (SHAPES[3], *LARGE[::3], WIDE, SEVERAL),
}
ACTIVATIONS = 16 * 66 * 128 * 2  # bytes of the rows of all images, in bfloat16
QKV = 2 * 128 * 3 * 128  # and of the largest parameter


def compile_for(topology, *cases):
    """What the programs contain, see `compiled.facts`."""
    environment = os.environ | targets.NO_POD | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.compiled", topology, *cases]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return json.loads(answer.stdout)


@pytest.mark.slow
def test_kernels_where_each_device_runs_them_on_its_part():
    """Nothing but parameters is gathered, and what heads are summed over is half of the images."""
    alone, both, loose = "8,50,3,8,bfloat16", "fsdp, tensor", "sharded arrays"
    found = compile_for("v5e:2x2", alone, both, loose, "changed", "relative")
    assert found[alone] == {"kernels": BOTH}
    assert found[both]["kernels"] == BOTH and "all-to-all" not in found[both]
    for form in ("changed", "relative"):
        assert found[form]["kernels"] == BOTH and "all-to-all" not in found[form]
    assert found[both]["all-gather"] <= QKV / 2 and found[both]["all-reduce"] <= ACTIVATIONS / 2
    # Where nobody says what each device does, the compiler splits the plain form, and gathers nothing.
    assert found[loose]["kernels"] == 0 and not {"all-gather", "all-to-all"} & set(found[loose])


@pytest.mark.slow
def test_other_ways_to_call_them():
    found = compile_for("v5e:2x2", "data", "undivided", "vmap")
    assert [each["kernels"] for each in found.values()] == [BOTH, 0, 0]
    assert not {"all-gather", "all-to-all"} & set(found["data"])


@pytest.mark.slow
def test_several_slices():
    """Between them only gradients are exchanged."""
    found = compile_for("v5e:2x2", "slices")["slices"]
    assert found["kernels"] == BOTH and "all-to-all" not in found
    assert found["all-gather"] <= QKV and found["all-reduce between slices"] <= QKV


@pytest.mark.slow
@pytest.mark.parametrize("topology", CHIPS)
def test_every_kind_of_chip(topology):
    assert compile_for(topology, *CHIPS[topology]) == {case: {"kernels": BOTH} for case in CHIPS[topology]}


@pytest.mark.slow
def test_forms_that_a_v4_has_just_enough_memory_for():
    forms = ("ViT-B/16", {"qk_norm": True}), ("ViT-B/16", {"rotary": "axial"}), ("ViT-B/32", {"position": "relative"})
    cases = [f"{name} 8 {json.dumps(fields)}" for name, fields in forms]
    assert [each["kernels"] for each in compile_for("v4:2x2x1", *cases).values()] == [BOTH] * len(forms)


@pytest.mark.slow
def test_the_kernel_of_the_mlp():
    """Hidden channels that are split over devices are computed by the layers."""
    undivided = "ViT-S/16 64 {}"  # its last step has fewer rows
    found = compile_for("v6e:2x2", "mlp in a block", "mlp over tensor", undivided)
    assert [each["kernels"] for each in found.values()] == [2 * BOTH, BOTH, 2 * BOTH]
    assert not {"all-gather", "all-to-all"} & set(found["mlp over tensor"])
    assert found["mlp in a block"]["all-gather"] <= QKV and "all-to-all" not in found["mlp in a block"]
