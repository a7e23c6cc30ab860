"""The names of a ViT's arrays, in one form for all layouts of PyTorch's libraries."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

MlpNames: TypeAlias = tuple[tuple[str, ...], str]  # the layers that widen, which are one or two; the layer that narrows


class MapNames(NamedTuple):
    """The names of the arrays of attention pooling."""

    prefix: str  # the prefix of the names below and of the MLP's
    probe: str
    projections: tuple[str, str, str]  # of query, key and value; those with the same name are one array
    out: str
    norm: str


class Names(NamedTuple):
    """The names of a ViT's arrays in a layout.

    The names of layers and norms are the prefixes of `weight` and `bias`. The names inside a block are without the
    block's name.
    """

    patches: str
    cls: str
    registers: str
    position: str
    blocks: str  # prefix; the index of the block follows
    norms: tuple[str, str]
    attention: tuple[str, ...]  # query, key and value: three layers, or one for all
    out: str
    layer_scales: tuple[str, str]
    dense: MlpNames
    gated: MlpNames  # with SwiGLU
    norm: str
    map_head: MapNames
    pre_logits: str
    heads: Mapping[str, str]  # our name of a head -> its name
    qk_norms: tuple[str, str] = ("", "")
    pooled_norm: str = ""
    position_ones: int = 1  # leading dimensions of 1 that the array of the positions has

    def under(self, prefix: str) -> "Names":
        """Returns the names in a file where all names but those of the heads have a prefix."""
        return self._replace(
            patches=prefix + self.patches,
            cls=prefix + self.cls,
            registers=prefix + self.registers,
            position=prefix + self.position,
            blocks=prefix + self.blocks,
            norm=prefix + self.norm,
            pooled_norm=prefix + self.pooled_norm,
            map_head=self.map_head._replace(prefix=prefix + self.map_head.prefix),
            pre_logits=prefix + self.pre_logits,
        )
