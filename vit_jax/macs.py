"""Counts the multiply-accumulates (MACs) of a function, in its matrix products and convolutions, from its trace."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.interpreters import partial_eval

from vit_jax.model import Model, parameter_shapes


def macs_per_image(model: Model) -> int:
    """Returns the multiply-accumulates of a model's forward pass on one image, without dropout and padded tokens."""
    if not model.field("attention_pattern") or model.field("attention_pattern") == "full":
        model = model.with_attention("heads_first")  # which pads no tokens
    model = dataclasses.replace(model, spec=model.spec.quick_to_trace)
    images = jax.ShapeDtypeStruct((1, *model.image_size, 3), jnp.float32)
    return count_macs(lambda params, images: model.apply(params, images)[0], parameter_shapes(model), images)


def training_flops(macs: int, passes: int = 1, teacher_macs: int = 0) -> int:
    """Returns the floating point operations of training on an image.

    As in Table 6, a multiply-accumulate counts as 2 operations and the backward pass as twice the forward pass.
    Activations that are computed again in the backward pass (`remat`) count once.

    Args:
        macs: the multiply-accumulates of the model's forward pass on the image.
        passes: the number of gradients that a step computes: two with SAM.
        teacher_macs: the multiply-accumulates of the forward pass of a teacher; 0: there is none.
    """
    return 6 * passes * macs + 2 * teacher_macs


def count_macs(function: Callable[..., Any], *args: Any) -> int:
    """Returns the multiply-accumulates of a function for arguments that are arrays or their shapes.

    The body of a `while` loop is counted once. A kernel is counted as the plain JAX function that it replaces.
    Operations on which no result depends are not counted, nor are multiplications by the zeros of a convolution's
    padding.
    """
    return jaxpr_macs(jax.make_jaxpr(function)(*args).jaxpr)


def jaxpr_macs(jaxpr: Jaxpr) -> int:
    """Returns the multiply-accumulates of a traced function, counted as by `count_macs`."""
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _used_macs(used)


def _used_macs(jaxpr: Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        match equation.primitive.name:
            case "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                total += math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
            case "conv_general_dilated":
                total += _convolution_macs(equation)
            case "cond":  # one of its branches is executed
                total += max(map(_used_macs, jaxprs_in_params(equation.params)))
            case "kernel_or_plain":
                plain = functools.partial(equation.params["plain"], equation.params["shape"])
                operands = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in equation.invars]
                total += count_macs(plain, *operands)
            case _:
                inner = sum(map(_used_macs, jaxprs_in_params(equation.params)))
                devices = equation.params["mesh"].size if equation.primitive.name == "shard_map" else 1
                total += inner * equation.params.get("length", 1) * devices
    return total


def _convolution_macs(equation: Any) -> int:
    """Returns the multiply-accumulates of a convolution.

    A position of a window counts only if it lies on an element of the image, not on padding.
    """
    params, dimensions = equation.params, equation.params["dimension_numbers"]
    (image, kernel), result = (variable.aval.shape for variable in equation.invars), equation.outvars[0].aval.shape
    total = math.prod(result[i] for i in dimensions.out_spec[:2]) * kernel[dimensions.rhs_spec[1]]
    spaces = zip(dimensions.lhs_spec[2:], dimensions.rhs_spec[2:], dimensions.out_spec[2:], strict=True)
    for i, (size, width, steps) in enumerate(spaces):
        stride, (low, _) = params["window_strides"][i], params["padding"][i]
        spread, holes = params["rhs_dilation"][i], params["lhs_dilation"][i]
        starts = [step * stride - low for step in range(result[steps])]
        places = [start + tap * spread for start in starts for tap in range(kernel[width])]
        total *= sum(0 <= place <= (image[size] - 1) * holes and place % holes == 0 for place in places)
    return total
