"""Search for classes that lost all their images as near-duplicates, which is rarely what was wanted."""

from collections.abc import Mapping

from vit_jax.data.shards import files, readers
from vit_jax.data.shards.shard_manifest import ShardEntry
from vit_jax.data.sources import Source, label_list


def find_emptied(
    out: str, sources: Mapping[str, Source], labels: Mapping[int, int], splits: Mapping[str, tuple[ShardEntry, ...]]
) -> dict[str, list[int]]:
    """Returns the classes of each split of which near-duplicates were left out and no image remains.

    Args:
        out: the folder of the shards.
        sources: split -> its examples.
        labels: label in the source -> label as packed.
        splits: split -> the entries of its packed shards.

    Returns:
        Split -> the sorted labels, as packed, of these classes. A split without such classes is left out.

    Raises:
        UserError: a shard cannot be read.
    """
    emptied = {}
    for split, entries in splits.items():
        indices = [one.index for entry in entries for one in entry.duplicates]
        left_out = {label for index in indices for label in label_list(sources[split].label(index))}
        missing = {labels[label] for label in left_out if label in labels}
        for entry in entries:
            shard = readers.Shard(f"{out}/{entry.name}", entry.records, entry.size)
            for row in range(entry.records):
                if not missing:
                    break
                missing -= set(files.read_record(readers.cached_reader(shard), row)[1])
        if missing:
            emptied[split] = sorted(missing)
    return emptied
