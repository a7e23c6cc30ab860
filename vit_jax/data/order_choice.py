"""The order of a run: all images shuffled, or streamed from a few shards at a time; and the disk that this needs.

A host keeps copies of the shards that it reads from a store. An order is chosen whose copies fit into its cache.
"""

import hashlib
import math
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax import UserError, format_rounded_up
from vit_jax.data.order import (
    BalancedOrder,
    BalancedStreamOrder,
    ClassDraws,
    EvalOrder,
    MixedOrder,
    MixedStreamOrder,
    Order,
    RepeatedOrder,
    ShuffledOrder,
    StreamOrder,
)
from vit_jax.data.shard_fetcher import COPIED_AHEAD
from vit_jax.data.shards import STREAMED_BYTES
from vit_jax.data.sources import Shards, Source, is_in_shards
from vit_jax.storage import cache, filesystem

# Of an evaluation. Of training, the most that are chosen if the config sets none, unless there are more hosts.
MAX_READERS = 64
MAX_EVAL_BYTES = 20e9  # of the shards that one host would hold, which are up to three of each reader
IMAGE_BYTES = 110_000  # of a photograph of ImageNet
ONE_BY_ONE = (
    "Order: global; the files in the bucket are read one by one. Shards are read faster, and need not fit this disk: "
    "python -m vit_jax.pack --shuffle=0 makes them."
)


def training_order(config: ConfigDict, source: Source) -> Order:
    """Returns the order in which a run reads its training images, as `choose_order` has stated it in the config."""
    balance, seed = config.data.balance, config.seed
    labels = source.labels() if balance else None
    draws = None if labels is None or source.mixture else ClassDraws(labels, balance, seed)
    if config.data.order == "stream":
        assert source.shards
        settings = source.shards.examples, config.batch, config.data.readers, config.data.window
        if source.mixture:
            return MixedStreamOrder(source.mixture, *settings, seed, labels, balance)
        return BalancedStreamOrder(draws, *settings) if draws else StreamOrder(*settings, seed)
    if source.mixture:
        order: Order = MixedOrder(source.mixture, seed, labels, balance)
    else:
        order = BalancedOrder(draws) if draws else ShuffledOrder(len(source), seed)
    return RepeatedOrder(order, config.batch, config.data.repeats) if config.data.repeats > 1 else order


def eval_order(source: Source, batch: int) -> EvalOrder:
    """Returns the order in which an evaluation reads a source in batches of `batch` rows.

    Examples that are not in shards have a single reader.
    """
    if source.shards is None:
        return EvalOrder([len(source)], batch, 1)
    largest = max(run.size or 1 for run in source.shards.runs)
    most = min(MAX_READERS, len(source.shards.runs), MAX_EVAL_BYTES / (3 * largest))
    readers = max(2**power for power in range(7) if power == 0 or (2**power <= most and batch % 2**power == 0))
    return EvalOrder(source.shards.examples, batch, readers)


class OrderChoice(NamedTuple):
    """The order that was chosen for training.

    Attributes:
        fields: the fields of `config.data` that state it, with their values.
        identity: a text that differs between streamed orders; empty: the order is global.
        note: a line for the user; empty: there is nothing to say.
    """

    fields: dict[str, str | int]
    identity: str = ""
    note: str = ""


def choose_order(config: ConfigDict, source: Source, eval_disk_bytes: int, hosts: int) -> OrderChoice:
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
            no room; or the classes cannot be balanced.
    """
    if config.data.balance:
        check_balance(config, source)
    shards, order = source.shards, config.data.order
    large = shards is not None and 0 < shards.remote_bytes > cache.max_bytes() - eval_disk_bytes
    if order == "auto":
        order = "stream" if large else "global"
    if order == "global":
        source.check_cache_room(eval_disk_bytes)
        in_bucket = config.data.source.startswith("folder:") and filesystem.is_remote(config.data.source)
        return OrderChoice({"order": order}, note=ONE_BY_ONE if shards is None and in_bucket else "")
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
    return OrderChoice({"order": "stream", "readers": readers}, identity, note)


def check_balance(config: ConfigDict, source: Source) -> None:
    """Raises UserError if the labels of all images are not known, or an image may have several."""
    if source.max_labels or source.has_numbers:
        raise UserError("data.balance needs images with one label each; set --config.data.balance=0")
    if source.split_labels is None:
        raise UserError(
            f"data.balance={config.data.balance:g} needs the label of each image before images are read, which "
            f"{config.data.source} does not state; pack it once with python -m vit_jax.pack SOURCE FOLDER "
            "--index-labels, and train on array_record:FOLDER, or set --config.data.balance=0"
        )


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


def stream_need(source: Source, batch: int, readers: int, window: int, hosts: int) -> int:
    """Estimates how many bytes of the shards of a streamed source a host holds at a time.

    The result for a mixture is the sum over its parts.

    Args:
        source: the source; its examples lie in shards.
        batch: rows of a global batch.
        readers: number of readers, over all hosts.
        window: shards that a reader shuffles at a time.
        hosts: number of hosts.
    """
    assert source.shards
    if source.mixture is None:
        return disk_need(source.shards, batch, readers, window, hosts)
    runs, examples, _ = source.shards
    weights, parts = source.mixture.weights, source.mixture.runs(examples)
    return sum(
        disk_need(
            Shards(runs[part.start : part.stop], examples[part.start : part.stop]),
            batch * weight / sum(weights),
            readers,
            window,
            hosts,
        )
        for part, weight in zip(parts, weights, strict=True)
    )


def disk_need(shards: Shards, batch: float, readers: int, window: int, hosts: int) -> int:
    """Estimates how many bytes of remote shards a host holds at a time.

    These are the shards in the windows of its readers, and those that are copied ahead. Local shards are not copied.
    The arguments are those of `stream_need`; `batch` is the part of a batch that is read from these shards.
    """
    sizes = {run.path: run.size or 0 for run in shards.runs if filesystem.is_remote(run.path)}.values()
    if not sizes:
        return 0
    examples = sum(shards.examples) / len(shards.runs)  # of a shard
    return min(sum(sizes), shards_held(examples, batch, readers, window, hosts) * max(sizes))


def shards_held(examples: float, batch: float, readers: int, window: int, hosts: int) -> int:
    """Estimates how many shards, of `examples` each, a host holds at a time; see `disk_need`."""
    prefetched = 1 + math.ceil((COPIED_AHEAD + 1) * batch / readers / examples)
    return math.ceil(readers / hosts) * (window + prefetched)


def planned_disk(examples: int, batch: int, readers: int, window: int, hosts: int) -> dict[int, int]:
    """Returns number of hosts -> bytes of shards that each host would hold at a time, for `hosts` and for fewer.

    The shards are taken to be of the size that `pack --shuffle` writes, with photographs of 110 KB, as in ImageNet. The
    result is empty if `readers` is 0, which means that the data cannot be streamed.
    """
    if not readers:
        return {}
    held = {one: shards_held(STREAMED_BYTES / IMAGE_BYTES, batch, readers, window, one) for one in fewer_hosts(hosts)}
    return {one: min(examples * IMAGE_BYTES, shards * STREAMED_BYTES) for one, shards in held.items()}


def check_eval_disk(source: Source, order: EvalOrder, hosts: int) -> int:
    """Estimates how many bytes of shards a host holds at a time in an evaluation; 0 if the source has no shards.

    The readers of an evaluation go through their shards one by one.

    Raises:
        UserError: the cache has no room for them.
    """
    if source.shards is None:
        return 0
    need = disk_need(source.shards, order.batch, order.readers, 1, hosts)
    if need > (room := cache.max_bytes()):
        raise UserError(
            f"evaluating {source.name} needs {need / 1e9:.3g} GB of shards on a host at a time, more than the "
            f"{room / 1e9:.3g} GB that the cache may hold; set VIT_JAX_CACHE_GB={format_rounded_up(need / 1e9, 3)} or "
            "more, and VIT_JAX_CACHE to a folder with room."
        )
    return need


def describe_need(needs: dict[int, int]) -> str:
    """Returns what a host needs as a part of a sentence: `about 0.4 GB of disk on each of 64 hosts (fewer hosts, ...)`.

    Args:
        needs: number of hosts -> bytes on each host, the largest number of hosts first.
    """
    (hosts, own), *others = needs.items()
    each = f"each of {hosts} hosts" if hosts > 1 else "the host"
    fewer = ", ".join(f"{number}: {need / 1e9:.2g}" for number, need in others)
    return f"about {own / 1e9:.2g} GB of disk on {each}" + (f" (fewer hosts, {fewer})" if fewer else "")


def fewer_hosts(hosts: int) -> list[int]:
    """Returns `hosts`, half as many (rounded down), a quarter, and so on, down to 1."""
    return [hosts, *fewer_hosts(hosts // 2)] if hosts > 1 else [1]
