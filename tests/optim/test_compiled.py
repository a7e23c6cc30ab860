"""The update as it is compiled for TPUs, where it takes as long as its bytes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from vit_jax.planning import targets

CHIPS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")
def test_the_update_is_one_pass_with_all_its_norms():
    """The norm of the gradient is one more, which has to be known before, and the moving average a third."""
    environment = os.environ | targets.NO_POD | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.optim.compiled", *CHIPS]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    parameter, first, second, grad = 4, 2, 4, 2
    bytes_moved = 2 * (parameter + first + second) + 2 * grad
    for topology, (plain, averaged) in json.loads(answer.stdout).items():
        assert plain == pytest.approx(bytes_moved, abs=0.1), topology
        assert averaged == pytest.approx(bytes_moved + 3 * parameter, abs=0.1), topology
