"""Options of the compiler for the devices of a program, and a barrier against one of its optimizations.

The options are passed to `jax.jit(..., compiler_options=...)`, where libtpu accepts all flags that matter to a step.
"""

import logging
import os

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import UserError
from vit_jax.kernels.tpu_kinds import Options, find_tpu_kind


def choose_options(given: str, mesh: Mesh) -> Options:
    """Returns the options under which the functions of a program are compiled.

    They are those of the kind of TPU, without those that LIBTPU_INIT_ARGS sets or that the installed compiler rejects.
    The given options replace them or are added to them.

    Args:
        given: `config.compiler_options`; NAME= without a value omits an option of the kind of TPU.
        mesh: the mesh of the program.

    Raises:
        UserError: `given` cannot be parsed, or the compiler rejects one of its options.
    """
    own, kind = parse_options(given), mesh.devices.flat[0].device_kind
    set_elsewhere = {word.lstrip("-").partition("=")[0] for word in os.environ.get("LIBTPU_INIT_ARGS", "").split()}
    tpu, options = find_tpu_kind(kind), Options()
    for name, value in (tpu.options if tpu else {}).items():
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
    tpu = find_tpu_kind(device_kind)
    return jax.lax.optimization_barrier(x) if tpu and tpu.compiler_crashes else x
