"""Chooses between a kernel and its plain form when a program is lowered.

The compiler splits plain operations over devices, but not kernels. A kernel is therefore used where a program is
lowered for TPUs and either runs on one device or states what each device does (`jax.shard_map`).
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

CallShape: TypeAlias = Any  # the sizes of a call and how the grid divides it, such as `AttentionShape`: hashable
Kernel: TypeAlias = Callable[..., list[jax.Array]]  # (interpret, shape, *operands) -> results
Plain: TypeAlias = Callable[..., list[jax.Array]]  # (shape, *operands) -> the same results

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def interpret_kernels() -> Iterator[None]:
    """Makes functions that are traced inside run their kernels interpreted, on any device but slowly: for tests."""
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def kernel_or_plain(kernel: Kernel, plain: Plain, shape: CallShape, *operands: jax.Array) -> list[jax.Array]:
    """Returns the results of `kernel`, or those of `plain` where the kernel cannot run.

    This function cannot be differentiated.
    """
    return _choice.bind(*operands, kernel=kernel, plain=plain, shape=shape, interpret=_interpreting.get())


def varying_like(operand: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape with the mesh axes over which `operand` varies, inside a `shard_map`."""
    return jax.eval_shape(lambda x: jnp.broadcast_to(x.ravel()[0].astype(shape.dtype), shape.shape), operand)


_choice = Primitive("kernel_or_plain")
_choice.multiple_results = True
_choice.def_impl(jax.jit(_choice.bind, static_argnames=("kernel", "plain", "shape", "interpret")))


@_choice.def_abstract_eval
def _results(*operands: Any, kernel: Kernel, plain: Plain, shape: CallShape, interpret: bool) -> list[Any]:
    return list(jax.make_jaxpr(functools.partial(plain, shape))(*operands).out_avals)


def _lower(
    context: mlir.LoweringRuleContext, *operands: Any, kernel: Kernel, plain: Plain, shape: CallShape, interpret: bool
) -> Any:
    if interpret:
        # The interpreter's loops know nothing of the mesh axes over which values vary inside a `shard_map`.
        avals = (
            [ShapedArray(each.shape, each.dtype) for each in side] for side in (context.avals_in, context.avals_out)
        )
        context = context.replace(**dict(zip(("avals_in", "avals_out"), avals, strict=True)))
        plain = functools.partial(kernel, True)
    return mlir.lower_fun(functools.partial(plain, shape), multiple_results=True)(context, *operands)


def _lower_for_tpu(
    context: mlir.LoweringRuleContext, *operands: Any, kernel: Kernel, plain: Plain, shape: CallShape, interpret: bool
) -> Any:
    if interpret:
        return _lower(context, *operands, kernel=kernel, plain=plain, shape=shape, interpret=True)
    axes = context.module_context.axis_context
    if (mesh := getattr(axes, "mesh", None)) is not None:
        alone = mesh.size == 1 or axes.manual_axes == frozenset(mesh.axis_names)
    else:
        alone = axes.num_devices == 1
    function = functools.partial(kernel, False, shape) if alone else functools.partial(plain, shape)
    return mlir.lower_fun(function, multiple_results=True)(context, *operands)


mlir.register_lowering(_choice, _lower)
mlir.register_lowering(_choice, _lower_for_tpu, platform="tpu")


def _batch(operands: Any, axes: Any, *, kernel: Kernel, plain: Plain, shape: CallShape, interpret: bool) -> Any:
    results = jax.vmap(functools.partial(plain, shape), in_axes=tuple(axes))(*operands)
    return results, (0,) * len(results)


batching.primitive_batchers[_choice] = _batch
