"""Compares a training step of vit_jax with one of a minimal Flax ViT and with timm's, alternating in one run.

python -m benchmarks.train_step --model=ViT-S/16 --batch=32 --rounds=10

All steps have the same sizes, softmax cross-entropy, AdamW with a constant rate, no dropout, one fixed batch, and
parameters in float32. The JAX steps are jitted with donated state. Ours is the step of `vit_jax.main`
(`program.train_step`, with its metrics, norms and the check for non-finite values). The minimal one is `nn.Conv`,
`nn.MultiHeadDotProductAttention` and `nn.Dense` with `optax.adamw`. timm's step runs in the environment of
`--torch=PYTHON`, and compiles while ours do. On a CPU it is eager, unless `--torch-compile` is given, with as many
threads as torch chooses. On a GPU it uses `torch.compile` in its default mode, with AdamW in one kernel.

`--also=FIELD=VALUE` adds our step with a field of the configuration changed, such as
`--also=model.attention=tokens_first`, `--also=batch=256` or `--also=compiler_options=xla_gpu_autotune_level=0`;
`--also=attention=triton` has the attention of `jax.experimental.pallas.ops.gpu`. `--dtype=bfloat16` sets the type of
computation, by the modules' `dtype` in JAX and by autocast in torch. All steps keep freed memory, as the command lines
do on CPUs; with `MALLOC_ARENA_MAX=8` in the environment none does. On a GPU set `XLA_PYTHON_CLIENT_PREALLOCATE=false`,
since both processes use it. The GPU memory of JAX is what the compiler allocates, that of torch the most that its
allocator has given out.

With `--seconds=N` the command ends in time: what is not compiled a quarter before that is left out, and rounds end.
"""

import argparse
import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from configs import base
from vit_jax import UserError, data, reason, sharding
from vit_jax.config import parse_value, resolve_config
from vit_jax.execution import attention_kinds
from vit_jax.machine import keep_freed_memory
from vit_jax.machine.host import MALLOPT_SETTINGS
from vit_jax.macs import macs_per_image
from vit_jax.measurements.matmul_rate import make_product_call
from vit_jax.models import ModelSpec, softmax_attention
from vit_jax.planning import peak_bytes
from vit_jax.program import make_program

RATE, DECAY = 1e-3, 1e-4
OURS, PLAIN, TRITON = "vit_jax", "plain Flax", "attention=triton"
THEIRS = Path(__file__).with_name("train_step_torch.py")
GIB = 2**30  # bytes


class Turn(NamedTuple):
    """Some steps that were measured together.

    Attributes:
        clock: wall-clock seconds of a step.
        work: processor seconds of a step, of all threads.
    """

    clock: float
    work: float


class Step(NamedTuple):
    """A step that is ready to be measured.

    Attributes:
        take_turn: makes a number of steps, one after the other, and measures them.
        images: the images of a step.
        compile_seconds: the seconds that its compilation took.
        memory: returns the GiB of device memory that the step needs; None: not measured.
    """

    take_turn: Callable[[int], Turn]
    images: int
    compile_seconds: float
    memory: Callable[[], float | None]


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

    def step(state, batch):
        def loss_of(params):
            logits = model.apply(params, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, changes), opt_state), loss

    params = jax.jit(model.init)(jax.random.key(0), batch["image"][:1])
    return jax_step(jax.jit(step, donate_argnums=0), (params, optimizer.init(params)), batch)


def our_step(program: Any, batch: dict[str, jax.Array]) -> Step:
    """Returns the step of this package, which trains on the same batch again and again."""
    return jax_step(program.train_step, program.init(jax.random.key(0), {}), batch)


def jax_step(step: Any, state: Any, batch: dict[str, jax.Array]) -> Step:
    """Compiles a jitted function (state, batch) -> (state, metrics), and returns the step that it makes."""
    began = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - began
    memory = peak_bytes(compiled.memory_analysis(), False) / GIB

    def take_turn(steps: int) -> Turn:
        nonlocal state
        start, start_work = time.perf_counter(), time.process_time()
        for _ in range(steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        return Turn((time.perf_counter() - start) / steps, (time.process_time() - start_work) / steps)

    return Step(take_turn, len(batch["image"]), compile_seconds, lambda: memory)


def build_program(arguments: argparse.Namespace, changed: str = "") -> Any:
    """Returns this package's program on one device, for the model, batch and other settings of the command line.

    Args:
        arguments: the arguments of the command line.
        changed: FIELD=VALUE, a field of the configuration that differs.

    Raises:
        UserError: there is no such field, or its value is wrong.
    """
    config = base.get_config()
    config.model.name, config.batch, config.resolution = arguments.model, arguments.batch, arguments.resolution
    config.model.dtype = arguments.dtype
    config.data.num_classes = config.data.num_examples = arguments.classes
    config.total_steps, config.decay_type = 1_000_000, "constant"
    config.base_lr, config.optim.weight_decay, config.optim.decays = RATE, DECAY, "all"
    if changed:
        name, _, value = changed.partition("=")
        config.update_from_flattened_dict({name: parse_value(config, name, value)})
    config = resolve_config(config)
    return make_program(config, sharding.make_mesh(config, jax.devices()[:1]), data.spec(config))


def draw_batch(arguments: argparse.Namespace, images: int) -> dict[str, jax.Array]:
    """Returns random images and labels."""
    keys, shape = jax.random.split(jax.random.key(0)), (images, arguments.resolution, arguments.resolution, 3)
    return {
        "image": jax.random.uniform(keys[0], shape, minval=-1, maxval=1),
        "label": jax.random.randint(keys[1], shape[:1], 0, arguments.classes),
    }


def triton(x, kernel, bias, packing, extras):
    """Attention by the Triton kernel of jax.experimental.pallas, with the signature of `attention_kinds.ATTENTIONS`.

    The tokens are padded to whole blocks, which belong to another segment.
    """
    from jax.experimental.pallas.ops.gpu import attention as pallas_attention  # imports GPU libraries

    qkv = attention_kinds.project(packing.unpack(x), kernel, bias, extras)
    batch, tokens, _, heads, head_dim = qkv.shape
    sizes = pallas_attention.BlockSizes.get_default()
    rows = -(-tokens // sizes.block_q) * sizes.block_q
    qkv = jnp.pad(qkv, ((0, 0), (0, rows - tokens), *[(0, 0)] * 3))
    segments = jnp.broadcast_to((jnp.arange(rows) >= tokens).astype(jnp.int32), (batch, rows))
    attended = pallas_attention.mha(
        *(qkv[:, :, part] for part in range(3)),
        segments,
        sm_scale=head_dim**-0.5,
        block_sizes=sizes,
        interpret=jax.default_backend() == "cpu",
    )
    weights = softmax_attention(qkv[:, :tokens])[1]  # which no step returns, so that none is computed
    return packing.pack(attended[:, :tokens].reshape(batch, tokens, heads * head_dim)), weights


def other_step(arguments: argparse.Namespace, changed: str) -> Step:
    """Returns our step with one thing changed."""
    if changed == TRITON:
        with mock.patch.dict(attention_kinds.ATTENTIONS, tokens_first=triton):
            program = build_program(arguments, "model.attention=tokens_first")
            return our_step(program, draw_batch(arguments, arguments.batch))
    program = build_program(arguments, changed)
    return our_step(program, draw_batch(arguments, program.batch["image"].shape[0]))


class Timm:
    """timm's model in the process of another environment, which compiles as soon as it is started."""

    def __init__(self, arguments: argparse.Namespace, kept: bool):
        size, patch = arguments.model.removeprefix("ViT-").split("/")
        name = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge"}.get(size, size.lower())
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        sizes = [str(value) for value in (arguments.batch, arguments.resolution, arguments.classes)]
        is_compiled = device == "cuda" or arguments.torch_compile
        settings = list(MALLOPT_SETTINGS.values()) if kept else []
        words = [*sizes, arguments.dtype, device, json.dumps(is_compiled), json.dumps(settings)]
        self.images = arguments.batch
        self.process = subprocess.Popen(
            [arguments.torch, THEIRS, f"vit_{name}_patch{patch}_224", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_step(self, seconds: float | None) -> tuple[str, Step]:
        """Returns the name of the row and the step, when it is compiled.

        Raises:
            UserError: it is not compiled in time, or its process has ended.
        """
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise UserError("not compiled in time")
        ready = self.answer()
        self.memory = ready["memory"]
        return ready["name"], Step(self.take_turn, self.images, ready["compile_seconds"], lambda: self.memory)

    def take_turn(self, steps: int) -> Turn:
        """Makes and measures some steps."""
        print(steps, file=self.process.stdin, flush=True)
        clock, work, self.memory = self.answer()
        return Turn(clock, work)

    def answer(self) -> Any:
        """Returns the value of the next line that the process writes."""
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"its process ended with exit code {self.process.wait()}; see above")
        return json.loads(line)


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
    parser.add_argument("--rounds", type=int, default=10, help="turns of each, at most")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn, between which nothing waits")
    parser.add_argument("--seconds", type=float, help="that the command may take")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the activations")
    parser.add_argument("--also", action="append", default=[], metavar="FIELD=VALUE", help="also ours with that field")
    parser.add_argument("--no-plain", action="store_true", help="leave out the minimal Flax ViT")
    parser.add_argument("--torch", metavar="PYTHON", help="also timm's, by the Python of an environment that has it")
    parser.add_argument("--torch-compile", action="store_true", help="compile timm's step on a CPU, too")
    parser.add_argument("--json", metavar="FILE", help="also write what was measured here, after each round")
    return parser.parse_args(argv[1:])


def main(argv: list[str], kept: bool = False) -> None:
    arguments = read_arguments(argv)
    end = time.monotonic() + (arguments.seconds or float("inf"))
    last_compile = end - (arguments.seconds or 0) / 4
    theirs = Timm(arguments, kept) if arguments.torch else None
    program, batch = build_program(arguments), draw_batch(arguments, arguments.batch)
    spec = program.model.spec
    device, memory = jax.devices()[0].device_kind, "kept" if kept else "given back"
    size = f"{arguments.batch} images of {arguments.resolution} px in {arguments.dtype}"
    print(f"{arguments.model}, {size}, {device}, freed memory {memory}", flush=True)

    steps: dict[str, Step] = {}
    notes: dict[str, str] = {}  # row -> why it is not measured

    def add(name: str, make: Callable[[], Step]) -> None:
        try:
            if time.monotonic() > last_compile:
                raise UserError("no time was left to compile it")
            step = make()
            step.take_turn(1)  # which may fail, and maps memory
            steps[name] = step
            print(f"  {name}: compiled in {step.compile_seconds:.1f} s", flush=True)
        except (UserError, jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            if name == OURS:
                raise
            notes[name] = reason(error)
            print(f"  {name}: left out: {notes[name]}", flush=True)

    add(OURS, lambda: our_step(program, batch))
    if not arguments.no_plain:
        add(PLAIN, lambda: plain_step(spec, batch))
    for changed in arguments.also:
        add(f"{OURS}, {changed}", lambda changed=changed: other_step(arguments, changed))
    if theirs:
        try:
            left = max(0.0, last_compile - time.monotonic()) if arguments.seconds else None
            name, step = theirs.await_step(left)
            steps[name] = step
            print(f"  {name}: compiled in {step.compile_seconds:.1f} s", flush=True)
        except UserError as error:
            theirs.process.kill()
            notes["timm"] = reason(error)
            print(f"  timm: left out: {notes['timm']}", flush=True)

    product_rate = measure_products(arguments.dtype) if device != "cpu" else None
    flops = 6 * macs_per_image(program.model)
    record = {"model": arguments.model, "device": device, **vars(arguments), "flops_per_image": flops}
    record |= {"product_flops": product_rate, "left_out": notes}
    record["compile_seconds"] = {name: step.compile_seconds for name, step in steps.items()}
    record["images"] = {name: step.images for name, step in steps.items()}
    rounds: list[dict[str, Turn]] = []
    for one in take_rounds(steps, arguments.rounds, arguments.steps, end):
        rounds.append(one)
        record["memory_gib"] = {name: step.memory() for name, step in steps.items()}
        record["rounds"] = rounds
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record) + "\n")
    print("\n".join(format_table(steps, rounds, flops, product_rate)), flush=True)


def take_rounds(steps: dict[str, Step], rounds: int, per_turn: int, end: float) -> Iterator[dict[str, Turn]]:
    """Yields rounds, in each of which every step has one turn; one at least, and none that would end too late."""
    for _ in range(rounds):
        began = time.monotonic()
        yield {name: step.take_turn(per_turn) for name, step in steps.items()}
        if 2 * time.monotonic() - began > end:
            break


def measure_products(dtype: str) -> float:
    """Returns the operations per second of a large matrix product: the median of seven turns of ten."""
    size, calls = 8192, 10
    sharding_of_one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    call, seconds = make_product_call(dtype, size, sharding_of_one, 1), []
    jax.block_until_ready(call())
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(calls):
            product = call()
        jax.block_until_ready(product)
        seconds.append((time.perf_counter() - began) / calls)
    return 2 * size**3 / statistics.median(seconds)


def format_table(
    steps: dict[str, Step], rounds: list[dict[str, Turn]], flops: float, product_rate: float | None
) -> Iterator[str]:
    """Yields the lines of the table.

    "ours is" compares the times of an image: above 1, ours is faster. "of products" is the part of the rate of large
    matrix products at which a step computes the products of its model.
    """
    if product_rate:
        yield f"  large matrix products: {product_rate / 1e12:.0f} TFLOP/s"
    columns = ("median s", "fastest s", "images/s", "CPU s", "ours is", "by CPU s", "in a round", "GiB", "of products")
    widest = max(map(len, steps))
    yield " " * widest + "".join(f"{column:>12}" for column in columns)
    ours, ours_work = (
        statistics.median(turn) / steps[OURS].images for turn in zip(*(one[OURS] for one in rounds), strict=True)
    )
    for name, step in steps.items():
        clock, work = (statistics.median(turn) for turn in zip(*(one[name] for one in rounds), strict=True))
        fastest = min(one[name].clock for one in rounds)
        relative_images = steps[OURS].images / step.images
        pairs = sorted(one[name].clock / one[OURS].clock * relative_images for one in rounds)
        cells = [f"{clock:.4f}", f"{fastest:.4f}", f"{step.images / clock:,.1f}", f"{work:.2f}"]
        cells += [f"{clock / step.images / ours:.2f}x", f"{work / step.images / ours_work:.2f}x"]
        cells += [f"{pairs[0]:.2f}-{pairs[-1]:.2f}x"]
        memory = step.memory()
        cells += ["" if memory is None else f"{memory:.2f}"]
        cells += [f"{flops * step.images / clock / product_rate:.0%}"] if product_rate else []
        yield name.ljust(widest) + "".join(f"{cell:>12}" for cell in cells)


if __name__ == "__main__":
    main(sys.argv, keep_freed_memory())  # as the command lines do on CPUs
