"""The checkpoints that the authors published: what there is, how good it is, and where it lies.

`catalog.csv` lists those of google-research/vision_transformer and of google-research/big_vision, with the source of
each row. A name is MODEL[-RECIPE]-DATA[-RESOLUTION], DATA being what the head was trained on last:

  ViT-B/16-imagenet21k              of the paper, pre-trained: with `pre_logits` and 21,843 classes, at 224 px
  ViT-B/16-imagenet2012-384         of the paper, then fine-tuned on ImageNet
  ViT-B/16-augreg-imagenet21k       of "How to train your ViT?" (arXiv 2106.10270), the one recommended of many
  ViT-B/16-augreg-imagenet2012-384  that one fine-tuned; those at 224 px are the ones that timm takes
  ViT-B/16-augreg-1k-...            never saw ImageNet-21k; likewise `deit3-1k`
  ViT-B/16-sam-..., -gsam-...       with sharpness-aware optimizers (arXiv 2106.01548, 2203.08065), ImageNet alone
  ViT-S/16-plain-90ep-...           big_vision's baseline (arXiv 2205.01580), ImageNet alone
  ViT-B/16-deit3-...                DeiT III (arXiv 2204.07118), converted by big_vision
  ViT-B/16-flexibase-...            what FlexiViT (arXiv 2212.08013) is compared with; its file holds larger patches

An accuracy is what the authors report, not what we measured; an empty field was not found.
"""

import csv
import dataclasses
import difflib
import fnmatch
import functools
import html
import re
from pathlib import Path
from urllib.parse import unquote

from vit_jax.interop import download

LIST = Path(__file__).with_name("published.csv")
SHOWN = ("name", "layout", "data", "resolution", "head", "accuracy", "size", "address")  # in a table
NUMBERS = ("resolution", "head", "accuracy", "size")  # right-aligned


@dataclasses.dataclass(frozen=True)
class CatalogEntry:
    """A published checkpoint.

    Attributes:
        name: of this checkpoint.
        model: as `vit_jax.create` names it; `R+ViT-Ti/16` is the stem of a ResNet only.
        layout: of the npz: `google` or `big_vision`.
        data: what it was trained on.
        resolution: of the images it was last trained on.
        head: classes; 0 means none.
        accuracy: in percent, as its authors report it.
        of: what the accuracy is of; "in the paper" means of the paper's run, which need not be this file.
        size: as listed, `393.69 MiB`: rounded to its last digit.
        address: of the file.
        source: of the address and the figures.
        flexi: the file holds patches and positions of other sizes, which are resized when it is loaded.
        preprocess: the pipe of operations that the accuracy was measured with or, without one, that its authors use.
        preprocess_source: of that.
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


class Table(tuple[CatalogEntry, ...]):
    """Checkpoints that print as a table, in notebooks too."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no published checkpoint has such a name"
        rows = [SHOWN, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            pairs = zip(SHOWN, row, widths, strict=True)
            padded = [cell.rjust(width) if key in NUMBERS else cell.ljust(width) for key, cell, width in pairs]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row(tag: str, cells: tuple[str, ...]) -> str:
            aligned = ("right" if key in NUMBERS else "left" for key in SHOWN)
            pairs = zip(cells, aligned, strict=True)
            return "".join(f'<{tag} style="text-align: {to}">{html.escape(cell)}</{tag}>' for cell, to in pairs)

        body = "".join(f"<tr>{row('td', _cells(one))}</tr>" for one in self)
        return f"<table><thead><tr>{row('th', SHOWN)}</tr></thead><tbody>{body}</tbody></table>"


def list_models(pattern: str = "*") -> Table:
    """Returns the published checkpoints whose names match a pattern of the shell; upper and lower case differ.

    Example: `list_models("ViT-B/16*384")`.
    """
    return Table(one for one in _all().values() if fnmatch.fnmatchcase(one.name, pattern))


def find_listed(name: str) -> CatalogEntry | None:
    """Returns the published checkpoint of that name, if there is one."""
    return _all().get(name)


def listed(path: str) -> CatalogEntry | None:
    """Returns the published checkpoint of that name or address, https:// or gs://, if there is one."""
    address = unquote(re.sub("^gs://", f"https://{download.GOOGLE}/", path))
    return find_listed(path) or next((one for one in _all().values() if unquote(one.address) == address), None)


def nearest_listed(name: str) -> str:
    """Returns what to try instead of a name that is none."""
    folded = {known.lower(): known for known in _all()}
    near = [known for known in folded if known.startswith(f"{name.lower()}-")]
    near = near or difflib.get_close_matches(name.lower(), folded, n=1)
    return f"did you mean {folded[near[0]]!r}?" if near else "vit_jax.list_models() shows those"


def download_listed(name: str) -> Path | None:
    """Returns where the file of a published checkpoint, or of an https address, lies here, downloaded if need be; None
    if the name is neither.

    Raises:
        UserError: it cannot be downloaded.
    """
    known = find_listed(name)
    if known:
        return download.download(known.address, known.size or None)
    return download.download(name) if name.lower().startswith(("https://", "http://")) else None


@functools.cache
def _all() -> dict[str, CatalogEntry]:
    with LIST.open(newline="", encoding="utf-8") as file:
        return {row["name"]: _published(row) for row in csv.DictReader(file)}


def _published(row: dict[str, str]) -> CatalogEntry:
    accuracy = float(row["accuracy"]) if row["accuracy"] else None
    numbers = {"resolution": int(row["resolution"]), "head": int(row["head"]), "accuracy": accuracy}
    return CatalogEntry(**(row | numbers | {"flexi": row["flexi"] == "yes"}))  # type: ignore[arg-type]


def _cells(one: CatalogEntry) -> tuple[str, ...]:
    values = (getattr(one, key) for key in SHOWN)
    return tuple("" if value is None else str(value) for value in values)
