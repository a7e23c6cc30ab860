"""The digests of programs: equal where only names, places and order differ, and not where an operation does."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import programs

PLAIN = """
def helper(x, y):
    return jnp.where(x > y, x * 2.0, y)


def body(carry, x):
    return helper(carry, x) + jnp.sin(carry), carry


def function(x, y):
    left = jnp.tanh(x)
    right = jnp.exp(y)
    return jax.lax.scan(body, left + y, jnp.stack([right, x]))
"""
KERNEL = """
def kernel(x_ref, y_ref, out_ref):
    out_ref[...] = x_ref[...] * 2.0 + y_ref[...]


def function(x, y):
    return pl.pallas_call(kernel, out_shape=x)(x, y)
"""
SWAPPED = "    right = jnp.exp(y)\n    left = jnp.tanh(x)\n", "    left = jnp.tanh(x)\n    right = jnp.exp(y)\n"


def digests(source, platform="cpu"):
    from jax.experimental import pallas as pl

    names = {"jax": jax, "jnp": jnp, "pl": pl}
    exec(compile(source, f"{hash(source)}.py", "exec"), names)
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    module = jax.jit(names["function"]).trace(x, x).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    return programs.digest_module(module, programs.Kernels())[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda source: "\n# A comment\n\n" + source.replace("\n\n\n", "\n\n\n\n"),
        lambda source: source.replace("helper", "other").replace("body", "step").replace("kernel", "renamed"),
    ],
    ids=["lines", "names"],
)
@pytest.mark.parametrize(("source", "platform"), [(PLAIN, "cpu"), (KERNEL, "tpu")], ids=["plain", "kernel"])
def test_lines_and_names_do_not_count(source, platform, change):
    assert digests(change(source), platform) == digests(source, platform)


@pytest.mark.parametrize(
    "change",
    [
        lambda source: source.replace(*SWAPPED[::-1]),
        lambda source: source.replace("def helper", "@jax.jit\ndef helper"),
        lambda source: source.replace("    right", "    unused = jnp.exp(y)\n    right"),
    ],
    ids=["order", "functions", "repeated"],
)
def test_order_and_functions_are_told_apart_from_operations(change):
    before, after = digests(PLAIN), digests(change(PLAIN))
    assert change(PLAIN) != PLAIN and after["graph"] == before["graph"]


@pytest.mark.parametrize(
    ("source", "platform", "old", "new"),
    [
        (PLAIN, "cpu", "2.0", "3.0"),
        (PLAIN, "cpu", "x * 2.0, y)", "y, x * 2.0)"),
        (PLAIN, "cpu", "jnp.sin(carry), carry", "jnp.sin(x), carry"),
        (PLAIN, "cpu", "[right, x]", "[right, y]"),
        (KERNEL, "tpu", "2.0", "3.0"),
        (KERNEL, "tpu", "kernel, out_shape=x)(x, y)", "kernel, out_shape=x)(y, x)"),
    ],
)
def test_operations_and_what_they_take_count(source, platform, old, new):
    assert digests(source.replace(old, new), platform)["graph"] != digests(source, platform)["graph"]


def test_a_barrier_keeps_what_is_computed_again_apart():
    before = "    return jax.lax.optimization_barrier(x) + jax.lax.optimization_barrier(x)"
    after = "    x = jax.lax.optimization_barrier(x)\n    return x + x"
    twice, once = (digests(f"def function(x, y):\n{lines}")["graph"] for lines in (before, after))
    assert twice != once


def test_a_comparison_names_what_differs(tmp_path, capsys):
    before = {name: {"graph": "1", "text": "2"} for name in ("a", "b", "c")}
    after = {"a": {"graph": "1", "text": "3"}, "b": {"graph": "4", "text": "5"}, "d": {"graph": "1", "text": "2"}}
    for name, found in (("before", before), ("after", after)):
        (tmp_path / name).write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="1"):
        programs.main(["programs", "--compare", str(tmp_path / "before"), str(tmp_path / "after")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["differs: b", "only in one: c", "only in one: d", "other order or functions: a"]
    (tmp_path / "after").write_text(json.dumps(before))
    with pytest.raises(SystemExit, match="0"):
        programs.main(["programs", "--compare", str(tmp_path / "before"), str(tmp_path / "after")])


@pytest.mark.slow
def test_a_program_is_the_same_in_another_process(tmp_path):
    found = []
    for name in ("first", "second"):
        programs.main(["programs", f"--out={tmp_path / name}", "--platforms=cpu", "--only=^B/16, adapters; cpu, 8"])
        found.append(json.loads((tmp_path / name).read_text()))
    assert found[0] == found[1]
    assert [*found[0]] == [f"B/16, adapters; cpu, 8; {function}" for function in ("train", "eval", "capture")]
