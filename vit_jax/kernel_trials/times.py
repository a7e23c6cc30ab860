"""How fast the forms of attention were on this kind of device, and how a run that starts here uses these times.

`python -m vit_jax.measure` keeps the times in the folder `measured` of the cache. A run reads them only with
`use_measured_times`. At its first start, the plain form of attention is then chosen if it was faster, and the run's
configuration states it. At later starts the configuration stays, and a warning says what would be faster.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from vit_jax import models
from vit_jax.distributed import Coordinator, run_on_all
from vit_jax.execution import AttentionSizes, attention_sizes
from vit_jax.kernels import round_up
from vit_jax.program import auto_dtype, model_without_data
from vit_jax.storage import filesystem, memo, versions

PLAIN = "tokens_first"
SLOWER = 1.05  # times the plain form's seconds; two measurements of one form differ by less
ROWS = 8  # of a tile; sequences that fill equally many tiles take equally long


class AttentionTime(NamedTuple):
    """Seconds of one layer's attention, forward and backward, on one device.

    Attributes:
        heads: the number of heads on the device.
        head_dim: the channels of a head.
        tokens: the number of tokens of an image.
        dtype: the dtype of the activations.
        kind: the form that `attention=auto` stands for.
        seconds: the time of that form.
        plain_seconds: the time of the plain form.
    """

    heads: int
    head_dim: int
    tokens: int
    dtype: str
    kind: str
    seconds: float
    plain_seconds: float

    def is_of(self, sizes: AttentionSizes) -> bool:
        """Returns whether this measurement holds for attention of some sizes, whatever their number of images."""
        tokens = round_up(self.tokens, ROWS), round_up(sizes.tokens, ROWS)
        return (self.heads, self.head_dim, self.dtype) == (sizes.heads, sizes.head_dim, sizes.dtype) and (
            tokens[0] == tokens[1]
        )


def remember_times(device_kind: str, times: Sequence[AttentionTime]) -> None:
    """Keeps times for runs that start on a device of this kind with this code; on a full disk they are not kept."""
    memo.remember("measured", _memo_key(device_kind), json.dumps(times))


def read_times(device_kind: str) -> list[AttentionTime]:
    """Returns the times that were kept for a device of this kind and this code; none if nothing was measured."""

    def parse(text: str) -> list[AttentionTime]:
        return [AttentionTime(*time) for time in json.loads(text)]

    return memo.recall("measured", _memo_key(device_kind), parse) or []


def settle_attention(config: ConfigDict, location: str, coordinator: Coordinator) -> ConfigDict:
    """Returns the configuration of a run, with the plain form of attention if that was faster on the device here.

    Only a run with `use_measured_times` that starts for the first time is changed. A run that has started before keeps
    its form, and a warning names the flag that would replace it. Host 0 decides for all hosts.

    Args:
        config: the configuration of the run, with what it chose at its first start.
        location: the workdir of the run.
        coordinator: lets the hosts agree.

    Raises:
        UserError: the model is wrong, or the workdir cannot be read.
    """

    def decide() -> tuple[str, bool] | None:
        # All hosts call this, though the first decides: none has its devices before every host asks for its own.
        if (slower := find_slower(config)) is None:
            return None
        return slower, filesystem.exists(filesystem.join_path(location, "config.json"))

    decision = run_on_all(coordinator, "the form of attention", decide)[0]
    if decision is None:
        return config
    slower, started = decision
    if coordinator.host == 0:
        follows = f"this run keeps its attention; --config.model.attention={PLAIN} sets the plain form"
        words = follows if started else f"this run uses the plain form, model.attention={PLAIN}"
        logging.getLogger(__name__).warning("%s, as vit_jax.measure found here; %s.", slower, words)
    if started:
        return config
    settled = config.copy_and_resolve_references()
    settled.model.attention = PLAIN
    return settled


def find_slower(config: ConfigDict) -> str | None:
    """Returns a phrase on how much slower the form that `attention=auto` stands for here is than the plain form.

    Returns None if it is not slower (by more than `SLOWER`), if attention of these sizes was not measured, or if the
    configuration does not say `attention=auto` and `use_measured_times`.
    """
    device = jax.local_devices()[0]
    reads = config.use_measured_times and config.model.attention == "auto"
    times = read_times(device.device_kind) if reads else []
    if not times:
        return None
    spec = model_without_data(config, auto_dtype(device)).spec
    if not isinstance(spec, models.ModelSpec):
        return None
    sizes = attention_sizes(spec, 1, config.mesh.tensor)
    if sizes.change or sizes.relative or sizes.unsupported_scores:  # the times are of attention without these
        return None
    for time in times:
        if time.is_of(sizes) and time.seconds > SLOWER * time.plain_seconds:
            ratio = time.seconds / time.plain_seconds
            return f"the attention {time.kind} takes {ratio:.2f} times as long as the plain form"
    return None


def _memo_key(device_kind: str) -> str:
    code = versions.library_versions(versions.COMPILERS), versions.source_digest(Path(__file__).parents[1])
    return json.dumps([device_kind, code])
