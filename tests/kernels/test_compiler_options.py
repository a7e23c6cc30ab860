"""Compiler options: parsed, chosen for the devices, given to every function of a program."""

import importlib.util

import jax
import pytest

from tests.test_program import build
from vit_jax import UserError
from vit_jax.kernels import compiler_options, tpu_kinds
from vit_jax.planning import PlanRequest, client
from vit_jax.training import run_summary

KNOWN = "xla_cpu_enable_fast_min_max"  # what this machine's compiler knows


@pytest.fixture
def table(monkeypatch):
    """A row of the table for CPUs: an option that the compiler knows, and one that it does not."""
    row = {KNOWN: False, "xla_nonsense": "1"}
    cpu = tpu_kinds.TpuKind("none", (jax.devices()[0].device_kind,), tpu_kinds.NARROW, options=row)
    monkeypatch.setattr(tpu_kinds, "TPU_KINDS", (*tpu_kinds.TPU_KINDS, cpu))


def test_options_are_pairs():
    found = compiler_options.parse_options("xla_a=5, xla_b=true,xla_c=False,xla_d=x=y,xla_e=,")
    assert found == {"xla_a": "5", "xla_b": True, "xla_c": False, "xla_d": "x=y", "xla_e": ""}
    assert compiler_options.parse_options("") == {}


@pytest.mark.parametrize("text", ["xla_a", "=1", "--xla_a=1", "xla_a=1,2", "xla a=1"])
def test_options_that_cannot_be_parsed(tiny, text):
    tiny.compiler_options = text
    with pytest.raises(UserError, match=r"cannot parse '.*' in compiler_options; write NAME=VALUE,NAME=VALUE"):
        build(tiny)


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ("", "", {KNOWN: False}),
        (f"{KNOWN}=true", "", {KNOWN: True}),
        (f"{KNOWN}=", "", {}),
        ("", f"--other=2 --{KNOWN}=true", {}),
        (f"{KNOWN}=true", f"--{KNOWN}=false", {KNOWN: True}),
        ("xla_llvm_disable_expensive_passes=false", "", {KNOWN: False, "xla_llvm_disable_expensive_passes": False}),
    ],
)
def test_a_given_option_precedes_the_environment_and_it_precedes_the_table(
    tiny, table, monkeypatch, caplog, given, environment, expected
):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", environment)
    tiny.compiler_options = given
    program = build(tiny, devices=8)
    assert program.compiler_options == expected
    assert "the compiler option xla_nonsense=1 is omitted: No such compile option" in caplog.text
    line = "Compiler options: " + ",".join(f"{name}={value}" for name, value in expected.items())
    assert (line in run_summary.banner_lines(tiny, program)) is bool(expected)


@pytest.mark.parametrize("text", ["xla_nope=1", f"{KNOWN}=7", "xla_backend_optimization_level=high"])
def test_an_option_that_the_compiler_rejects(tiny, text):
    tiny.compiler_options = text
    with pytest.raises(UserError, match=rf"the compiler for cpu rejects {text} in compiler_options: .*[\w']\.$"):
        build(tiny)


def test_every_function_of_a_program_has_them(tiny, table):
    program = build(tiny, devices=8)
    images, batch = program.batch["image"], program.eval_batch
    calls = {
        "init": (jax.random.key(0), {}),
        "train_step": (program.state, program.batch),
        "predict": (program.state.params, images),
        "eval_step": (program.state.params, batch),
        "features": (program.state.params, batch),
        "logits": (program.state.params, batch),
    }
    for name, arguments in calls.items():
        function = getattr(program, name)
        with pytest.raises(ValueError, match=f"can only be passed to top-level `jax.jit`.*'{KNOWN}': False"):
            jax.make_jaxpr(function)(*arguments)  # jax refuses such a function inside another
        function.trace(*arguments)  # and each holds none


def test_no_option_assumes_that_numbers_are_finite():
    for tpu in tpu_kinds.TPU_KINDS:
        assert not [name for name in tpu.options if "nan" in name or "fast_math" in name or "finite" in name]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_plan_says_which_option_the_compiler_rejects():
    data = ("--config.data.num_classes=10", "--config.data.num_examples=640")
    words = ("--config=configs/smoke.py", "--config.compiler_options=xla_nope=1", *data)
    with pytest.raises(UserError, match="the compiler for TPU v5 lite rejects xla_nope=1 in compiler_options: No such"):
        client.compile_in_subprocess(PlanRequest(words, "v5e:2x2"))
