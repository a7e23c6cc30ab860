"""The checkpoints that the authors published: their names, accuracies and addresses.

`published.csv` lists those of google-research/vision_transformer and of google-research/big_vision, with the source of
each row. A name is MODEL[-RECIPE]-DATA[-RESOLUTION], where DATA is the data set that the head was last trained on:

  ViT-B/16-imagenet21k              of the paper, pre-trained: with `pre_logits` and 21,843 classes, at 224 px
  ViT-B/16-imagenet2012-384         of the paper, then fine-tuned on ImageNet
  ViT-B/16-augreg-imagenet21k       of "How to train your ViT?" (arXiv 2106.10270), the recommended one of many
  ViT-B/16-augreg-imagenet2012-384  the same, fine-tuned; those at 224 px are the ones that timm offers
  ViT-B/16-augreg-1k-...            trained without ImageNet-21k; likewise `deit3-1k`
  ViT-B/16-sam-..., -gsam-...       with sharpness-aware optimizers (arXiv 2106.01548, 2203.08065), ImageNet alone
  ViT-S/16-plain-90ep-...           big_vision's baseline (arXiv 2205.01580), ImageNet alone
  ViT-B/16-deit3-...                DeiT III (arXiv 2204.07118), converted by big_vision
  ViT-B/16-flexibase-...            the baselines of FlexiViT (arXiv 2212.08013); the files have larger patches

An accuracy is the one that the authors report, not one that we measured. A field is empty if no value was found.
"""

import csv
import dataclasses
import difflib
import fnmatch
import functools
import html
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from vit_jax import UserError, models
from vit_jax.interop import download

CATALOG_FILE = Path(__file__).with_name("published.csv")
COLUMNS = ("name", "layout", "data", "resolution", "head", "accuracy", "size", "address")  # of a printed table
RIGHT_ALIGNED = ("resolution", "head", "accuracy", "size")


@dataclasses.dataclass(frozen=True)
class CatalogEntry:
    """A published checkpoint.

    Attributes:
        name: of the checkpoint.
        model: as `vit_jax.create` takes it; `R+ViT-Ti/16` has only the root of a ResNet as its stem.
        layout: of the .npz file: `google` or `big_vision`.
        data: the data sets that it was trained on.
        resolution: of the images that it was last trained on.
        head: number of classes; 0 means no head.
        accuracy: in percent, as its authors report it.
        of: what the accuracy refers to; "in the paper" is the paper's run, which need not be this file.
        size: as published, `393.69 MiB`, rounded to its last digit.
        address: of the file.
        source: of the address and the figures.
        flexi: the patches and positions in the file have other sizes and are resized when it is loaded.
        preprocess: the pipe of operations with which the accuracy was measured; without one, the authors' usual pipe.
        preprocess_source: the source of that pipe.
    """

    name: str
    model: str
    layout: str
    data: str
    resolution: int
    head: int
    accuracy: float | None
    of: str
    size: str
    address: str
    source: str
    flexi: bool
    preprocess: str
    preprocess_source: str

    def check(self, layout: str, inferred: dict[str, Any]) -> None:
        """Compares a file with this entry; patches and positions of FlexiViT's files may differ.

        Raises:
            UserError: it is another model.
        """
        wanted = models.create(self.model)
        resized = inferred | ({"patch_size": wanted.field("patch_size")} if self.flexi else {})
        fixed = inferred.get("position") != "learned" or self.flexi  # then no array determines the resolution
        resolution = models.image_size(self.resolution) if fixed else inferred["resolution"]
        found = (layout, models.model_name(resized), resolution, inferred["num_classes"])
        listed = (self.layout, wanted.name, models.image_size(self.resolution), self.head)
        if found != listed:
            words = "a {1} in the {0} layout, {2[0]}x{2[1]} pixels, {3:,} classes".format
            stored = words(layout, models.model_name(inferred), inferred["resolution"], inferred["num_classes"])
            raise UserError(
                f"the file contains {stored}, but the catalog lists {words(*listed)}, so the file was not loaded"
            )


class CatalogTable(tuple[CatalogEntry, ...]):
    """Entries that print as a table, in notebooks too."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no published checkpoint has such a name"
        rows = [COLUMNS, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            columns = zip(COLUMNS, row, widths, strict=True)
            padded = [cell.rjust(width) if key in RIGHT_ALIGNED else cell.ljust(width) for key, cell, width in columns]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row(tag: str, cells: tuple[str, ...]) -> str:
            sides = ("right" if key in RIGHT_ALIGNED else "left" for key in COLUMNS)
            pairs = zip(cells, sides, strict=True)
            return "".join(f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>' for cell, side in pairs)

        body = "".join(f"<tr>{row('td', _cells(entry))}</tr>" for entry in self)
        return f"<table><thead><tr>{row('th', COLUMNS)}</tr></thead><tbody>{body}</tbody></table>"


def list_models(pattern: str = "*") -> CatalogTable:
    """Returns the published checkpoints whose names match a shell pattern, which is case-sensitive.

    Example: `list_models("ViT-B/16*384")`.
    """
    return CatalogTable(entry for entry in _entries().values() if fnmatch.fnmatchcase(entry.name, pattern))


def find_entry(path: str) -> CatalogEntry | None:
    """Returns the published checkpoint with this name or this address, https:// or gs://, if there is one."""
    address = unquote(re.sub("^gs://", f"https://{download.GOOGLE_STORAGE}/", path))
    by_address = (entry for entry in _entries().values() if unquote(entry.address) == address)
    return _entries().get(path) or next(by_address, None)


def suggest_name(name: str) -> str:
    """Returns a hint for a name that no published checkpoint has."""
    folded = {known.lower(): known for known in _entries()}
    near = [known for known in folded if known.startswith(f"{name.lower()}-")]
    near = near or difflib.get_close_matches(name.lower(), folded, n=1)
    return f"did you mean {folded[near[0]]!r}?" if near else "vit_jax.list_models() lists the published ones"


def download_entry(name: str) -> Path | None:
    """Returns the local file of a published checkpoint or of an https address, downloaded if necessary; None if the
    name is neither.

    Raises:
        UserError: it cannot be downloaded.
    """
    known = _entries().get(name)
    if known:
        return download.download_file(known.address, known.size or None)
    return download.download_file(name) if name.lower().startswith(("https://", "http://")) else None


def _entries() -> dict[str, CatalogEntry]:
    return read_entries(CATALOG_FILE)


@functools.cache
def read_entries(path: Path) -> dict[str, CatalogEntry]:
    """Returns the entries of a catalog file by name."""
    with path.open(newline="", encoding="utf-8") as file:
        return {row["name"]: _parse_entry(row) for row in csv.DictReader(file)}


def _parse_entry(row: dict[str, str]) -> CatalogEntry:
    accuracy = float(row["accuracy"]) if row["accuracy"] else None
    numbers = {"resolution": int(row["resolution"]), "head": int(row["head"]), "accuracy": accuracy}
    return CatalogEntry(**(row | numbers | {"flexi": row["flexi"] == "yes"}))  # type: ignore[arg-type]


def _cells(entry: CatalogEntry) -> tuple[str, ...]:
    values = (getattr(entry, key) for key in COLUMNS)
    return tuple("" if value is None else str(value) for value in values)
