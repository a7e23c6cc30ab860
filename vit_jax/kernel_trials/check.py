"""Compares a kernel with its plain form on the device that is to run it. No kernel is trusted without that."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax

from vit_jax import models, reason
from vit_jax.distributed import Coordinator, Supervisor, run_on_all
from vit_jax.storage import atomic_write, cache, versions

TOLERANCE = 0.02  # relative; interpreted in bfloat16 the kernel is up to 0.011 from float32, the plain form up to 0.007

Differences: TypeAlias = Callable[[Any, Any, int], dict[str, float]]  # (spec, device, tensor) -> name -> difference


@runtime_checkable
class DeviceLike(Protocol):
    """The attributes of a `jax.Device` that are used here."""

    @property
    def platform(self) -> str:
        """Name of the kind of backend."""

    @property
    def device_kind(self) -> str:
        """Name of the kind of chip."""


def check_kernels(
    model: models.Model,
    device: DeviceLike,
    tensor: int = 1,
    coordinator: Coordinator | None = None,
    compare: Differences = models.measure_differences,
) -> models.Model:
    """Returns the model, with the plain form of attention if its kernel fails or is wrong on a device of some host.

    The result of a completed comparison is kept in the folder `checked` of the cache.

    Args:
        model: a model whose attention has been chosen.
        device: one of the devices of this host that will run the model.
        tensor: the number of devices over which the heads are split.
        coordinator: lets the hosts agree; all of them must call this function. None: the hosts that JAX knows.
        compare: measures the differences, as `models.measure_differences` does.
    """
    kind, coordinator = model.kernel, coordinator or Supervisor()
    faults = run_on_all(coordinator, "the comparison of kernels", lambda: find_fault(model, device, tensor, compare))
    for host, fault in enumerate(faults):
        if fault:
            where = f" of host {host}" if coordinator.hosts > 1 else ""
            logging.getLogger(__name__).warning(
                "the attention kernel %s%s %s; the plain form, which is slower, replaces it.", kind, where, fault
            )
            return model.with_attention("tokens_first")
    return model


def find_fault(
    model: models.Model, device: DeviceLike, tensor: int = 1, compare: Differences = models.measure_differences
) -> str | None:
    """Returns, in words, what is wrong with a model's kernel on a device, or None if nothing is wrong.

    The result of a comparison is kept for the kind of device, the sizes and the code, and is returned the next time. A
    kernel that does not run is tried again each time. Returns None too if the model has no kernel, or on a CPU, which
    executes none.
    """
    kind, spec = model.kernel, model.spec
    if kind is None or not isinstance(spec, models.ModelSpec) or device.platform == "cpu":
        return None
    code = versions.library_versions(versions.COMPILERS), versions.source_digest(Path(__file__).parents[1])
    text = json.dumps([device.device_kind, code, kind, models.attention_sizes(spec, 0, tensor)])
    path = cache.root() / "checked" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):  # it was never compared, or the file is damaged
        return json.loads(path.read_text())["fault"]
    try:
        differences = compare(spec, device, tensor)
    except Exception as error:  # whatever a compiler or a driver raises
        return f"does not run on {device.device_kind} ({reason(error)})"
    # A difference that is not a number is not below the tolerance.
    wrong = [f"{name} by {value:.2g}" for name, value in differences.items() if not value <= TOLERANCE]
    fault = f"is wrong on {device.device_kind}: it changes {', '.join(wrong)} times its size" if wrong else None
    with contextlib.suppress(OSError):  # on a full disk it is not remembered
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps({"fault": fault, "differences": differences, "of": text}))
    return fault


def check_example() -> tuple[str, str | None]:
    """Returns the attention chosen for ViT-B/16 in bfloat16 on this host's first device, and what is wrong with its
    kernel there (None: nothing).
    """
    device = jax.local_devices()[0]
    model = models.create("ViT-B/16", dtype="bfloat16").for_device(device.device_kind, 1)
    return model.field("attention"), find_fault(model, device)
