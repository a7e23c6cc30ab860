"""Compares a training step of vit_jax with one of a minimal Flax ViT and with timm's, alternating in one run.

python -m benchmarks.train_step --model=ViT-S/16 --batch=32 --rounds=10

All steps have the same sizes, softmax cross-entropy, AdamW with a constant rate, no dropout, and parameters in float32.
The JAX steps are jitted with donated state. Ours is the step of `vit_jax.main` (`program.train_step`, with its metrics,
norms and the check for non-finite values). The minimal one is `nn.Conv`, `nn.MultiHeadDotProductAttention` and
`nn.Dense` with `optax.adamw`. timm's step runs in the environment of `--torch=PYTHON`. On a CPU it is eager, with as
many threads as torch chooses. On a GPU it uses `torch.compile` in its default mode, with AdamW in one kernel.
`--dtype=bfloat16` sets the type of computation, by the modules' `dtype` in JAX and by autocast in torch. All steps keep
freed memory, as the command lines do on CPUs; with `MALLOC_ARENA_MAX=8` in the environment none does. On a GPU set
`XLA_PYTHON_CLIENT_PREALLOCATE=false`, since both processes use it. The GPU memory of JAX is what the compiler
allocates, that of torch the most that its allocator has given out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from configs import base
from vit_jax import data, sharding
from vit_jax.config import resolve_config
from vit_jax.machine import keep_freed_memory
from vit_jax.machine.allocator import MALLOPT_SETTINGS
from vit_jax.models import ModelSpec
from vit_jax.planning import peak_bytes
from vit_jax.program import make_program

RATE, DECAY = 1e-3, 1e-4
OURS = "vit_jax"
THEIRS = Path(__file__).with_name("train_step_torch.py")


class Measured(NamedTuple):
    """The measurements of a step.

    Attributes:
        clock: wall-clock seconds.
        work: processor seconds of all threads.
        memory: GiB of device memory; None: not measured.
    """

    clock: float
    work: float
    memory: float | None


class Step(NamedTuple):
    """A compiled step.

    Attributes:
        run: makes one step and returns its loss.
        memory: GiB of device memory that the step needs.
    """

    run: Callable[[], float]
    memory: float


class PlainBlock(nn.Module):
    mlp_dim: int
    num_heads: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.num_heads, dtype=self.dtype, deterministic=True)(y, y)
        y = nn.Dense(self.mlp_dim, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(nn.gelu(y))


class PlainViT(nn.Module):
    spec: ModelSpec

    @nn.compact
    def __call__(self, images):
        spec = self.spec
        patch = (spec.stem.patch_size,) * 2
        x = nn.Conv(spec.width, patch, strides=patch, padding="VALID", dtype=spec.dtype)(images)
        x = x.reshape(len(images), -1, spec.width)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, spec.width))
        x = jnp.concatenate([jnp.tile(cls, (len(images), 1, 1)).astype(x.dtype), x], axis=1)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, *x.shape[1:])).astype(x.dtype)
        for _ in range(spec.depth):
            x = PlainBlock(spec.mlp_dim, spec.attention.num_heads, spec.dtype)(x)
        return nn.Dense(spec.head.num_classes, kernel_init=nn.initializers.zeros)(nn.LayerNorm()(x)[:, 0])


def plain_step(spec: ModelSpec, batch: dict[str, jax.Array]) -> Step:
    """Returns the step of the plain model, which trains on the same batch again and again."""
    model, optimizer = PlainViT(spec), optax.adamw(RATE, weight_decay=DECAY)

    def step(params, opt_state, batch):
        def loss_of(params):
            logits = model.apply(params, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, loss

    params = jax.jit(model.init)(jax.random.key(0), batch["image"][:1])
    state = [params, optimizer.init(params)]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state, batch).compile()

    def run() -> float:
        *state[:], loss = compiled(*state, batch)
        jax.block_until_ready(state)
        return float(loss)

    return Step(run, allocated(compiled))


def our_step(program: Any, batch: dict[str, jax.Array]) -> Step:
    """Returns the step of this package, which trains on the same batch again and again."""
    state = program.init(jax.random.key(0), {})
    compiled = program.train_step.lower(state, batch).compile()

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready(state)
        return float(metrics["train/loss"])

    return Step(run, allocated(compiled))


def allocated(step: Any) -> float:
    """Returns the GiB of device memory that the compiler allocates for a step."""
    return peak_bytes(step.memory_analysis(), False) / 2**30


def build_program(arguments: argparse.Namespace, attention: str) -> Any:
    """Returns this package's program on one device, for the model, batch and other settings of the command line."""
    config = base.get_config()
    config.model.name, config.batch, config.resolution = arguments.model, arguments.batch, arguments.resolution
    config.model.dtype = arguments.dtype
    config.model.attention = attention
    config.data.num_classes = config.data.num_examples = arguments.classes
    config.total_steps, config.decay_type = 1_000_000, "constant"
    config.base_lr, config.optim.weight_decay, config.optim.decays = RATE, DECAY, "all"
    config = resolve_config(config)
    return make_program(config, sharding.make_mesh(config, jax.devices()[:1]), data.spec(config))


def timm_step(arguments: argparse.Namespace, kept: bool) -> tuple[str, Callable[[], Measured]]:
    """Starts timm's model in the process of another environment.

    Args:
        arguments: the arguments of the command line.
        kept: whether freed memory is kept.

    Returns:
        The name of the row, and a function that makes and measures one step.
    """
    size, patch = arguments.model.removeprefix("ViT-").split("/")
    name = {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}.get(size, size.lower())
    sizes = [str(value) for value in (arguments.batch, arguments.resolution, arguments.classes)]
    sizes += [arguments.dtype, "cuda" if jax.default_backend() == "gpu" else "cpu"]
    command = [arguments.torch, THEIRS, f"vit_{name}_patch{patch}_224", *sizes]
    settings = list(MALLOPT_SETTINGS.values()) if kept else []
    process = subprocess.Popen(
        [*command, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    stdin, stdout = process.stdin, process.stdout

    def run() -> Measured:
        print("step", file=stdin, flush=True)
        return Measured(*json.loads(stdout.readline()))

    return json.loads(stdout.readline())["name"], run


def timed(step: Step) -> Callable[[], Measured]:
    """Returns a function that makes and measures one step."""

    def measured() -> Measured:
        start, start_work = time.perf_counter(), time.process_time()
        step.run()
        return Measured(time.perf_counter() - start, time.process_time() - start_work, step.memory)

    return measured


def read_arguments(argv: list[str]) -> argparse.Namespace:
    description, example, *notes = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(
        description="\n\n".join([description, *notes]),
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("--resolution", type=int, default=224, help="pixels on a side")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10, help="steps of each, in turn")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the activations")
    parser.add_argument("--attention", default="auto", help="our forms of attention, the first of which is compared")
    parser.add_argument("--torch", metavar="PYTHON", help="also timm's, by the Python of an environment that has it")
    return parser.parse_args(argv[1:])


def main(argv: list[str], kept: bool = False) -> None:
    arguments = read_arguments(argv)
    keys = jax.random.split(jax.random.key(0))
    shape = (arguments.batch, arguments.resolution, arguments.resolution, 3)
    batch = {
        "image": jax.random.uniform(keys[0], shape, minval=-1, maxval=1),
        "label": jax.random.randint(keys[1], shape[:1], 0, arguments.classes),
    }
    first, *others = (build_program(arguments, form) for form in arguments.attention.split(","))
    runs = {"plain Flax": timed(plain_step(first.model.spec, batch)), OURS: timed(our_step(first, batch))}
    runs |= {f"{OURS}, {program.model.field('attention')}": timed(our_step(program, batch)) for program in others}
    runs |= dict([timm_step(arguments, kept)] if arguments.torch else [])
    rounds = [{name: run() for name, run in runs.items()} for _ in range(arguments.rounds + 1)][1:]  # one compiles

    device, memory = jax.devices()[0].device_kind, "kept" if kept else "given back"
    size = f"{arguments.batch} images of {arguments.resolution} px in {arguments.dtype}"
    print(f"{arguments.model}, {size}, {device}, freed memory {memory}")
    columns = ("median s", "fastest s", "images/s", "CPU s", "ours is", "by CPU s", "in a round", "GiB")
    print(f"{'':26}" + "".join(f"{column:>11}" for column in columns))
    medians = {name: median_of([one[name] for one in rounds]) for name in runs}
    ours = medians[OURS]
    for name, (clock, work, needed) in medians.items():
        fastest = min(one[name].clock for one in rounds)
        pairs = sorted(one[name].clock / one[OURS].clock for one in rounds)
        ratios = f"{clock / ours.clock:10.2f}x{work / ours.work:10.2f}x{pairs[0]:7.2f}-{pairs[-1]:.2f}x"
        gib = "" if needed is None else f"{needed:.2f}"
        print(f"{name:26}{clock:11.4f}{fastest:11.4f}{arguments.batch / clock:11.2f}{work:11.2f}{ratios}{gib:>11}")


def median_of(steps: list[Measured]) -> Measured:
    """Returns the medians of both kinds of seconds over some steps, and the memory of the last step."""
    clock, work, _ = zip(*steps, strict=True)
    return Measured(statistics.median(clock), statistics.median(work), steps[-1].memory)


if __name__ == "__main__":
    main(sys.argv, keep_freed_memory())  # as the command lines do on CPUs
