"""Compares a kernel with its plain form on the device that is to run it. No kernel is trusted without that."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax

from vit_jax import models, reason
from vit_jax.distributed import Coordinator, current_group, run_on_all
from vit_jax.execution import PLAIN_FORMS, attention_sizes, measure_differences, measure_mlp_differences, mlp_sizes
from vit_jax.model import Model, create
from vit_jax.storage import memo, versions

TOLERANCE = 0.02  # relative; interpreted in bfloat16 the kernel is up to 0.011 from float32, the plain form up to 0.007

Differences: TypeAlias = Callable[[Any, Any, int], dict[str, float]]  # (spec, device, tensor) -> name -> difference

# Field of the spec -> the comparison of its kernel with the plain form.
COMPARISONS: dict[str, Differences] = {
    "attention": measure_differences,
    "mlp": lambda spec, device, tensor: measure_mlp_differences(spec, device),
}
PARTS = {"attention": "attention", "mlp": "MLP"}  # field of the spec -> the part of the model whose form it is


def check_kernels(
    model: Model,
    device: jax.Device,
    tensor: int = 1,
    coordinator: Coordinator | None = None,
    comparisons: Mapping[str, Differences] = COMPARISONS,
) -> Model:
    """Returns the model, with the plain form in place of each kernel that fails or is wrong on a device of some host.

    The result of a completed comparison is kept in the folder `checked` of the cache.

    Args:
        model: a model whose attention and MLP have been chosen.
        device: one of the devices of this host that will run the model.
        tensor: the number of devices over which the heads are split.
        coordinator: lets the hosts agree; all of them must call this function. None: the hosts that JAX knows.
        comparisons: measures the differences of each kernel, as `COMPARISONS` does.
    """
    coordinator = coordinator or current_group()
    faults = run_on_all(
        coordinator,
        "the comparison of kernels",
        lambda: {field: find_fault(model, field, device, tensor, comparisons[field]) for field in model.kernels},
    )
    for field, kind in model.kernels.items():
        host, fault = next(((host, each[field]) for host, each in enumerate(faults) if each[field]), (0, None))
        if fault:
            where = f" of host {host}" if coordinator.hosts > 1 else ""
            logging.getLogger(__name__).warning(
                "the %s kernel %s%s %s; the plain form, which is slower, replaces it.", PARTS[field], kind, where, fault
            )
            model = model.with_fields(**{field: PLAIN_FORMS[field]})
    return model


def find_fault(model: Model, field: str, device: jax.Device, tensor: int, compare: Differences) -> str | None:
    """Returns, in words, what is wrong with a kernel of a model on a device, or None if nothing is wrong.

    The result of a comparison is kept for the kind of device, the sizes and the code, and is returned the next time. A
    kernel that does not run is tried again each time. Returns None too if the field has no kernel, or on a CPU, which
    executes none.

    Args:
        model: the model.
        field: the field that chooses the kernel, `attention` or `mlp`.
        device: the device.
        tensor: the number of devices over which the heads are split.
        compare: measures the differences, as that of `COMPARISONS` does.
    """
    kind, spec = model.kernels.get(field), model.spec
    if kind is None or not isinstance(spec, models.ModelSpec) or device.platform == "cpu":
        return None
    code = versions.library_versions(versions.COMPILERS), versions.source_digest(Path(__file__).parents[1])
    sizes = attention_sizes(spec, 0, tensor) if field == "attention" else mlp_sizes(spec)
    text = json.dumps([device.device_kind, code, field, kind, sizes])
    if known := memo.recall("checked", text, json.loads):
        return known["fault"]
    try:
        differences = compare(spec, device, tensor)
    except Exception as error:  # whatever a compiler or a driver raises
        return f"does not run on {device.device_kind} ({reason(error)})"
    # A difference that is not a number is not below the tolerance.
    wrong = [f"{name} by {value:.2g}" for name, value in differences.items() if not value <= TOLERANCE]
    fault = f"is wrong on {device.device_kind}: it changes {', '.join(wrong)} times its size" if wrong else None
    memo.remember("checked", text, json.dumps({"fault": fault, "differences": differences, "of": text}))
    return fault


def check_example() -> list[tuple[str, str, str | None]]:
    """Returns (part, chosen form, fault) for the attention and the MLP of ViT-B/16 on this host's first device.

    The model computes in bfloat16. The fault says what is wrong with the kernel of the form there; None: nothing is.
    """
    device = jax.local_devices()[0]
    model = create("ViT-B/16", dtype="bfloat16").for_device(device.device_kind, 8)
    return [
        (PARTS[field], model.field(field), find_fault(model, field, device, 1, compare))
        for field, compare in COMPARISONS.items()
    ]
