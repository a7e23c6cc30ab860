"""How much disk each host needs for the temporary copies of the shards that it reads from a store."""

import math

from vit_jax import UserError, format_rounded_up
from vit_jax.data.eval_order import choose_eval_order
from vit_jax.data.shard_fetcher import PREFETCH_BATCHES
from vit_jax.data.shards import STREAMED_BYTES
from vit_jax.data.sources import Shards, Source
from vit_jax.storage import cache, filesystem

IMAGE_BYTES = 110_000  # of a photograph of ImageNet


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
    prefetched = 1 + math.ceil((PREFETCH_BATCHES + 1) * batch / readers / examples)
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


def eval_disk_need(source: Source, batch: int, hosts: int) -> int:
    """Estimates how many bytes of shards a host holds at a time in an evaluation; 0 if the source has no shards.

    The readers of an evaluation go through their shards one by one.
    """
    if source.shards is None:
        return 0
    return disk_need(source.shards, batch, choose_eval_order(source, batch).readers, 1, hosts)


def check_eval_disk(source: Source, batch: int, hosts: int) -> int:
    """Returns `eval_disk_need`; raises UserError if the cache has no room for it."""
    need, room = eval_disk_need(source, batch, hosts), cache.max_bytes()
    if need > room:
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
