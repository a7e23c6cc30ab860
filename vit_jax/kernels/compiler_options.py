"""Options of the compiler by kind of device, and a barrier against one of its optimizations.

The options are passed to `jax.jit(..., compiler_options=...)`, where libtpu accepts all flags that matter to a step.
"""

import logging
import os
from typing import TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import UserError

Options: TypeAlias = dict[str, str | bool]  # name of an option, as the compiler spells it -> value

# Figures are millions of cycles of a training step: the schedule of the compiler, then its own estimate, from libtpu
# 0.0.42 without a chip.

# The MiB from which the compiler cuts a product with weights that are split over chips into a loop over the chips, to
# hide the gathers. Whole products are faster, and other products hide their gathers. B/16 with 128 images a chip and
# weights over v5e:2x4, before there was an attention kernel: 256.6, 484 -> 176.8, 337, and 13.9 -> 9.9 GB.
WHOLE_PRODUCTS: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

# The memory on the chip that one operation may use, twice the default: products then work on larger tiles. S/16 with
# 256 images 73.7, 128.5 -> 70.4, 121.2; with 24 MiB 71.1, 123.2, with 48 MiB 71.6, 120.0.
LARGER_TILES: Options = {"xla_tpu_scoped_vmem_limit_kib": "32768"}

# Kind of device -> options. None may let the compiler assume that there is no NaN or infinity: the step tests for them.
TABLE: dict[str, Options] = {"TPU v5 lite": WHOLE_PRODUCTS | LARGER_TILES}

# Beginning of the names of the kinds of device whose compiler ends by a stack overflow where it fuses a norm's gradient
# with that of a strided convolution after it. A barrier keeps them apart.
CRASHING = "TPU v6"


def choose_options(given: str, mesh: Mesh) -> Options:
    """Returns the options under which the functions of a program are compiled.

    They are the options of `TABLE`, without those that LIBTPU_INIT_ARGS sets or that the installed compiler rejects.
    The given options replace them or are added to them.

    Args:
        given: `config.compiler_options`; NAME= without a value omits an option of the table.
        mesh: the mesh of the program.

    Raises:
        UserError: `given` cannot be parsed, or the compiler rejects one of its options.
    """
    own, kind = parse_options(given), mesh.devices.flat[0].device_kind
    set_elsewhere = {word.lstrip("-").partition("=")[0] for word in os.environ.get("LIBTPU_INIT_ARGS", "").split()}
    options: Options = {}
    for name, value in TABLE.get(kind, {}).items():
        if name in own or name in set_elsewhere:
            continue
        if fault := find_fault(name, value, mesh):
            logging.getLogger(__name__).warning("the compiler option %s=%s is omitted: %s", name, value, fault)
        else:
            options[name] = value
    for name, value in own.items():
        if value == "":
            continue
        if fault := find_fault(name, value, mesh):
            raise UserError(f"the compiler for {kind} rejects {name}={value} in compiler_options: {fault}.")
        options[name] = value
    return options


def parse_options(text: str) -> Options:
    """Returns the options that a text NAME=VALUE,NAME=VALUE states. The values true and false become bools.

    Raises:
        UserError: the text has another form.
    """
    options: Options = {}
    for part in filter(None, text.split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not name.isidentifier() or not equals:
            raise UserError(
                f"cannot parse {part!r} in compiler_options; write NAME=VALUE,NAME=VALUE, with the compiler's names."
            )
        # XLA's own options take truth values only as such, libtpu's as words too.
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def find_fault(name: str, value: str | bool, mesh: Mesh) -> str | None:
    """Returns why the compiler for the devices of a mesh rejects an option, or None if it accepts it."""
    trivial = jax.jit(lambda: 0, out_shardings=NamedSharding(mesh, P()), compiler_options={name: value})
    try:
        trivial.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ").strip().rstrip(".:")
    return None


def before_strided_convolution(x: jax.Array, device_kind: str) -> jax.Array:
    """Returns the input of a strided convolution, kept apart from what computes it where the compiler would crash."""
    return jax.lax.optimization_barrier(x) if device_kind.startswith(CRASHING) else x
