"""Which order a run reads its training images in: all of them shuffled, or streamed from a few shards at a time."""

import hashlib
import math
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax import UserError, format_rounded_up
from vit_jax.data.disk_need import describe_need, fewer_hosts, stream_need
from vit_jax.data.mixed_order import MixedStreamOrder, TrainStream
from vit_jax.data.sources import Shards, Source, is_in_shards
from vit_jax.data.stream_order import StreamOrder
from vit_jax.storage import cache, filesystem

MAX_READERS = 64  # the most that are chosen if the config sets none, unless there are more hosts
ONE_BY_ONE = (
    "Order: global; the files in the bucket are read one by one. Shards are read faster, and need not fit this disk: "
    "python -m vit_jax.pack --shuffle=0 makes them."
)


class Order(NamedTuple):
    """The order that was chosen for training.

    Attributes:
        fields: the fields of `config.data` that state it, with their values.
        identity: a text that differs between streamed orders; empty: the order is global.
        note: a line for the user; empty: there is nothing to say.
    """

    fields: dict[str, str | int]
    identity: str = ""
    note: str = ""


def stream_order(config: ConfigDict, source: Source) -> TrainStream:
    """Returns the order of a config whose `data.order` is stream, given its source in shards."""
    assert source.shards
    settings = source.shards.examples, config.batch, config.data.readers, config.data.window, config.seed
    return MixedStreamOrder(source.mixture, *settings) if source.mixture else StreamOrder(*settings)


def choose_order(config: ConfigDict, source: Source, eval_disk_bytes: int, hosts: int) -> Order:
    """Returns the order of training: that of the config or, if `data.order` is auto, one for which the cache has room.

    With auto, the images are streamed only if the cache cannot hold all remote shards. If `data.readers` is unset, a
    streamed order has as many readers as the cache has room for.

    Args:
        config: the config of the run.
        source: the training images.
        eval_disk_bytes: bytes of the cache that an evaluation needs at a time.
        hosts: number of hosts that read.

    Raises:
        UserError: the images are not in shards, or are repeated, the readers do not divide the batch, or the cache has
            no room.
    """
    shards, order = source.shards, config.data.order
    large = shards is not None and 0 < shards.remote_bytes > cache.max_bytes() - eval_disk_bytes
    if order == "auto":
        order = "stream" if large else "global"
    if order == "global":
        source.check_cache_room(eval_disk_bytes)
        in_bucket = config.data.source.startswith("folder:") and filesystem.is_remote(config.data.source)
        return Order({"order": order}, note=ONE_BY_ONE if shards is None and in_bucket else "")
    if config.data.repeats > 1:
        raise UserError(
            f"data.repeats={config.data.repeats} needs data.order=global, but the images of this run are streamed; set "
            "--config.data.repeats=1, or --config.data.order=global, which needs a cache that holds all shards."
        )
    if shards is None:
        raise UserError(
            "data.order=stream reads shards, but the training images are not all in shards; pack them with python -m "
            "vit_jax.pack, or set --config.data.order=global."
        )
    need = (shards.remote_bytes + eval_disk_bytes) / 1e9
    reason = f"; all shards need {need:.3g} GB, the cache may hold {cache.max_bytes() / 1e9:.3g}" if large else ""
    return _choose_readers(config, source, shards, eval_disk_bytes, hosts, reason)


def _choose_readers(
    config: ConfigDict, source: Source, shards: Shards, eval_disk_bytes: int, hosts: int, reason: str
) -> Order:
    room, readers, window = cache.max_bytes(), config.data.readers, config.data.window
    fewest = min(source.mixture.lengths) if source.mixture else len(source)
    possible = possible_readers(config.batch, fewest, hosts)
    if readers and config.batch % readers == 0 and readers <= fewest:
        possible.append(readers)
    needs = {number: stream_need(source, config.batch, number, window, hosts) + eval_disk_bytes for number in possible}
    if readers is None:
        readers = max((number for number, need in needs.items() if need <= room), default=min(needs))
    if readers not in needs:
        raise UserError(
            f"data.readers={readers} must divide the batch of {config.batch} and not exceed the {fewest} images; "
            f"unset it, or set --config.data.readers={max(needs)}."
        )
    if needs[readers] > room:
        needed, least = (format_rounded_up(need / 1e9, 3) for need in (needs[readers], min(needs.values())))
        raise UserError(
            f"data.readers={readers} with data.window={window} needs about {needed} GB of cache on each host, but the "
            f"cache may hold {room / 1e9:.3g} GB; set VIT_JAX_CACHE_GB={needed} or more, or lower data.readers "
            f"(data.readers=1 needs {least} GB) or data.window."
        )
    fewer = {
        one: stream_need(source, config.batch, readers, window, one) + eval_disk_bytes for one in fewer_hosts(hosts)
    }
    disk = f", {describe_need(fewer)}" if needs[readers] else ""
    note = f"Order: streamed, readers={readers} with window={window} shards each{disk}{reason}."
    if not shards.shuffled:
        note += " They may be sorted by class, which mixes badly; python -m vit_jax.pack --shuffle=0 mixes them."
    digest = hashlib.sha256(repr(list(shards.examples)).encode()).hexdigest()[:16]
    identity = f"{readers} readers, window {window}, {len(shards.runs)} shards {digest}"
    return Order({"order": "stream", "readers": readers}, identity, note)


def planned_readers(config: ConfigDict, hosts: int) -> int:
    """Returns with how many readers a run would stream its images, without opening them; 0 if it cannot stream them."""
    if config.data.order == "global" or not is_in_shards(config.data.source):
        return 0
    return config.data.readers or max(possible_readers(config.batch, config.data.num_examples, hosts))


def possible_readers(batch: int, examples: int, hosts: int) -> list[int]:
    """Returns the numbers of readers to choose from: powers of two that divide the batch and do not exceed `examples`.

    They are at most 64 or, if that is more, the number of hosts.
    """
    powers = [2**power for power in range(int(math.log2(max(MAX_READERS, hosts))) + 1)]
    return [number for number in powers if batch % number == 0 and number <= examples]
