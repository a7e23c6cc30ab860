"""The training order of a single source: each epoch is a shuffle of all its examples."""

import grain


def shuffle_epochs(length: int, seed: int) -> grain.MapDataset:
    """Returns the order of a source's examples: position in the run -> index. Each epoch is shuffled by itself."""
    return grain.MapDataset.range(length).seed(seed).shuffle().repeat(None)
