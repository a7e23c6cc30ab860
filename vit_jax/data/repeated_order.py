"""The order of repeated augmentation: a batch holds each of its images several times, each copy augmented anew."""

import grain

from vit_jax.data.shard_order import Endless


class RepeatedOrder(Endless):
    """Position in the run, n * batch + row -> index of the example (Hoffer et al., arXiv 1901.09335).

    A batch has k = ceil(batch / repeats) different images: row r holds image r mod k. So copies lie on different
    devices, as in DeiT's sampler, and MixUp, which mixes neighbours, never mixes two copies of an image. If `repeats`
    does not divide the batch, its last images have one copy less. As in DeiT, the rows that a run reads are counted as
    its examples: an epoch of N rows has N / repeats different images.
    """

    def __init__(self, order: grain.MapDataset, batch: int, repeats: int):
        """Takes the order of the images, without end, the rows of a global batch and the copies of each image."""
        self.order, self.batch = order, batch
        self.images = -(-batch // repeats)  # of a batch

    def __getitem__(self, position: int) -> int:
        """Returns the index of an example."""
        number, row = divmod(position, self.batch)
        return self.order[number * self.images + row % self.images]
