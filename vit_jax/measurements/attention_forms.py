"""Compares the form of attention that a run chooses on these devices with the plain form: its values and its time."""

import math
from collections.abc import Iterator

import jax

from vit_jax import UserError, reason
from vit_jax.execution import AttentionSizes, attention_sizes, make_attention_calls
from vit_jax.kernel_trials import COMPARISONS, PLAIN, TOLERANCE, AttentionTime, remember_times
from vit_jax.kernels import interpret_kernels
from vit_jax.measurements.bench import Bench
from vit_jax.measurements.measurement import Measurement
from vit_jax.measurements.workloads import MeasuredStep
from vit_jax.model import Model, create

INTERPRETED = "ViT-mu/16"  # the model for devices that execute no kernel: small, since interpreting one is slow


def measure_attention(bench: Bench) -> Iterator[Measurement]:
    """Yields, for each model, how far its attention differs from the plain form, and the times of both.

    Host 0 remembers the times for the runs with `use_measured_times` that start on such devices later.
    """
    times = list[AttentionTime]()
    for name in bench.models:
        try:
            workload = MeasuredStep.choose(bench, name)
            model = workload.device_model(bench)
            sizes = attention_sizes(model.vit, workload.images, bench.mesh.shape["tensor"])
        except UserError as error:
            yield Measurement(f"{name}: attention", "ms", None, note=str(error))
            continue
        kind = model.field("attention")
        values = list(compare_values(bench, f"{name}: {kind}", model, "attention"))
        yield from values
        if "mlp" in model.kernels:
            yield from compare_values(bench, f"{name}: MLP {model.field('mlp')}", model, "mlp")
        obstacles = {
            "it does not run on every host": not all(
                bench.coordinator.all_gather("whether the kernel runs", len(values) > 1)
            ),
            "no kernel suits these devices": kind == PLAIN or model.vit.attention.is_sparse,
            "no time was left": bench.agree_seconds_left() <= 0,
        }
        if any(obstacles.values()):
            yield Measurement(f"{name}: {kind}", "ms", None, note=next(filter(obstacles.get, obstacles)))
            continue
        try:
            yield from compare_times(bench, f"{name}: {kind}, {workload.images} images", kind, sizes, times)
        except jax.errors.JaxRuntimeError as error:
            yield Measurement(f"{name}: {kind}", "ms", None, advice="kernel time", note=reason(error))
    if bench.device.platform == "cpu":
        small = create(INTERPRETED, resolution=64, attention="fused")
        with interpret_kernels():
            yield from compare_values(bench, f"{INTERPRETED}: fused, interpreted", small, "attention")
        yield Measurement("fused: time", "ms", None, note="a CPU executes no kernel")
    if bench.coordinator.host == 0 and times:
        remember_times(bench.device.device_kind, times)


def compare_values(bench: Bench, name: str, model: Model, field: str) -> Iterator[Measurement]:
    """Yields how far a model's attention or MLP is from the plain form in float32: the result and each gradient."""
    tensor = bench.mesh.shape["tensor"]
    try:
        differences = COMPARISONS[field](model.spec, bench.device, tensor)
    except Exception as error:  # whatever a compiler or a driver raises
        yield Measurement(
            f"{name}, values", "relative", None, advice="kernel values", note=f"does not run: {reason(error)}"
        )
        return
    for what, value in differences.items():
        finite = value if math.isfinite(value) else None
        yield Measurement(
            f"{name}, {what}",
            "relative",
            finite,
            0.0,
            TOLERANCE,
            "tolerated difference from the plain form",
            "limit",
            margin=0.0,
            advice="kernel values",
            note="" if finite is not None else "not a number",
        )


def compare_times(
    bench: Bench, name: str, kind: str, sizes: AttentionSizes, times: list[AttentionTime]
) -> Iterator[Measurement]:
    """Yields the times of the forward pass and of the forward and backward pass, beside those of the plain form.

    If the latter two differ by more than their spreads, they are appended to `times`.
    """
    forms = [make_attention_calls(form, sizes, bench.device) for form in (kind, PLAIN)]  # type: ignore[arg-type]
    for what in forms[0]:
        own, plain = bench.time_in_turns([calls[what] for calls in forms])
        measured, predicted = (1e3 * own.median, 1e3 * own.spread), 1e3 * plain.median
        yield Measurement(
            f"{name}, {what}", "ms", *measured, predicted, f"{PLAIN}, here", "limit", advice="kernel time"
        )
    if own.spread + plain.spread < abs(own.median - plain.median):
        sized = sizes.heads, sizes.head_dim, sizes.tokens, sizes.dtype
        times.append(AttentionTime(*sized, kind, own.median, plain.median))
