"""The checkpoints that the authors published: their names, accuracies and addresses.

`published.csv` lists checkpoints of google-research/vision_transformer, big_vision and big_transfer (BiT), and of timm
and the models' authors on the Hugging Face hub, with the source of each row; `benchmarks.timm_catalog` writes the rows
of timm's later models. A checkpoint of the hub keeps its name. Any other is named MODEL[-RECIPE]-DATA[-RESOLUTION],
where DATA is the data set that the head was last trained on:

  ViT-B/16-imagenet21k              of the paper, pre-trained: with `pre_logits` and 21,843 classes, at 224 px
  ViT-B/16-imagenet2012-384         of the paper, then fine-tuned on ImageNet
  ViT-B/16-augreg-imagenet21k       of "How to train your ViT?" (arXiv 2106.10270), the recommended one of many
  ViT-B/16-augreg-imagenet2012-384  the same, fine-tuned; those at 224 px are the ones that timm offers
  ViT-B/16-augreg-1k-...            trained without ImageNet-21k, as `deit3-1k` is
  ViT-B/16-sam-..., -gsam-...       with sharpness-aware optimizers (arXiv 2106.01548, 2203.08065), ImageNet alone
  ViT-S/16-plain-90ep-...           big_vision's baseline (arXiv 2205.01580), ImageNet alone
  ViT-B/16-deit3-...                DeiT III (arXiv 2204.07118), converted by big_vision
  ViT-B/16-flexibase-...            the baselines of FlexiViT (arXiv 2212.08013); the files have larger patches
  BiT-R50x1-s-..., -m-...           pre-trained on ImageNet and ImageNet-21k (BiT-S and BiT-M of arXiv 1912.11370)
  timm/NAME.TAG, facebook/NAME      on the hub; timm/ may be left out

An accuracy is the one that the authors report, not one that we measured. A field is empty if no value was found.
"""

import csv
import dataclasses
import difflib
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

from vit_jax import choose
from vit_jax.interop import augreg, download
from vit_jax.interop.printed_table import Table

CATALOG_FILE = Path(__file__).with_name("published.csv")
TIMM = "timm/"  # may be left out of the names that begin with it


@dataclasses.dataclass(frozen=True)
class CatalogEntry:
    """A published checkpoint.

    Attributes:
        name: the name of the checkpoint.
        model: the model's name, as `vit_jax.create` takes it; `R+ViT-Ti/16` has only the root of a ResNet as its stem.
        layout: the layout of the file: `google`, `big_vision`, `timm` or `huggingface`.
        data: the data sets that the checkpoint was trained on.
        resolution: the resolution of the images that the checkpoint was last trained on, in pixels.
        head: the number of classes; 0: no head.
        accuracy: the accuracy in percent, as the authors report it; None: none was found.
        of: what the accuracy refers to; "in the paper" is the paper's run, which need not be this file.
        size: the size of the file as published, `393.69 MiB`, rounded to its last digit.
        address: the address of the file, or `hf-hub:OWNER/NAME`.
        source: where the address and the figures are published.
        flexi: whether the patches and positions in the file have other sizes and are resized when it is loaded.
        preprocess: the pipe of operations with which the accuracy was measured; empty: the authors' usual pipe, or the
            one that the folder on the hub states.
        preprocess_source: where the pipe is published.
        loss: the loss that the head was last trained with, softmax or sigmoid; empty: not known.
        loss_source: where the loss is published.
        image_mean: the mean of red, green and blue, of values in [0, 1], which the model subtracts; empty: as the
            folder on the hub states. It is for information: what the folder states is computed.
        image_std: the standard deviation by which the model divides, likewise.
        licence: the licence of the weights, as the Hugging Face hub names it; empty: none was found.
        licence_source: where the licence is stated.
    """

    COLUMNS: ClassVar = ("name", "layout", "data", "resolution", "head", "accuracy", "size", "licence", "address")

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
    loss: str
    loss_source: str
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    licence: str
    licence_source: str


def list_models(pattern: str = "*", source: str = "published", **query: Any) -> Table:
    """Returns the checkpoints whose names match a shell pattern, which is case-sensitive.

    Examples: `list_models("ViT-B/16*384")`, `list_models(source="augreg", model="ViT-B/16", best=True)`.

    Args:
        pattern: the shell pattern of the name.
        source: published, the catalog of this module; or augreg, some 51,000 checkpoints whose index is downloaded.
        **query: further arguments of `augreg.list_checkpoints`, for the source augreg.

    Raises:
        UserError: the source or a keyword is unknown, or the index cannot be downloaded.
    """
    search = SOURCES[choose("source", source, SOURCES)]
    known = set(inspect.signature(search).parameters) - {"pattern"}
    for keyword in query:
        choose("keyword", keyword, known, f"the help of list_models(source={source!r})")
    return search(pattern, **query)


def _list_published(pattern: str) -> Table:
    return Table(entry for entry in _entries().values() if fnmatch.fnmatchcase(entry.name, pattern))


SOURCES: dict[str, Callable[..., Table]] = {"published": _list_published, "augreg": augreg.list_checkpoints}


def find_entry(path: str) -> CatalogEntry | None:
    """Returns the entry of the catalog for a checkpoint; None: the catalog does not list it.

    `path` is the name of the checkpoint in the catalog, with or without `timm/`; its name in AugReg's index; or its
    address, which begins with https://, gs:// or hf-hub:.
    """
    place = augreg.address(path) if augreg.is_name(path) else path
    address = unquote(re.sub("^gs://", f"https://{download.GOOGLE_STORAGE}/", place))
    return _find_named(path) or next((one for one in _entries().values() if unquote(one.address) == address), None)


def is_published(name: str) -> bool:
    """Returns whether this is the name of a checkpoint of the catalog or of AugReg's index."""
    return _find_named(name) is not None or augreg.is_name(name)


def _find_named(name: str) -> CatalogEntry | None:
    """Returns the entry with a name, or else of the repository on the hub with this name."""
    names = (name, f"{TIMM}{name}")
    addresses = {f"hf-hub:{one}" for one in names}
    by_address = (entry for entry in _entries().values() if entry.address in addresses)
    return next((_entries()[one] for one in names if one in _entries()), None) or next(by_address, None)


def suggest_name(name: str) -> str:
    """Returns a hint for a name that no published checkpoint has: the names nearest to it."""
    folded = {known.lower().removeprefix(TIMM): known.removeprefix(TIMM) for known in _entries()}
    asked = name.lower().removeprefix(TIMM)
    same = [known for known in folded if known == asked or known.startswith((f"{asked}-", f"{asked}."))]
    near = same[:1] or difflib.get_close_matches(asked, folded, n=3)
    shown = " or ".join(repr(folded[one]) for one in near)
    return f"did you mean {shown}?" if near else "vit_jax.list_models() lists the published ones"


def download_entry(name: str) -> Path | None:
    """Returns the local file of a published checkpoint or of an https address, downloaded if necessary; None if the
    name is neither.

    Raises:
        UserError: it cannot be downloaded.
    """
    known = _entries().get(name)
    if known:
        return download.download_file(known.address, known.size or None)
    if augreg.is_name(name):
        return download.download_file(augreg.address(name))
    is_address = name.lower().startswith(("https://", "http://"))
    return download.download_file(name, may_change=True) if is_address else None


def _entries() -> dict[str, CatalogEntry]:
    return read_entries(CATALOG_FILE)


@functools.cache
def read_entries(path: Path) -> dict[str, CatalogEntry]:
    """Returns the entries of a catalog file by name."""
    with path.open(newline="", encoding="utf-8") as file:
        return {row["name"]: _parse_entry(row) for row in csv.DictReader(file)}


def _parse_entry(row: dict[str, str]) -> CatalogEntry:
    accuracy = float(row["accuracy"]) if row["accuracy"] else None
    numbers: dict[str, Any] = {"resolution": int(row["resolution"]), "head": int(row["head"]), "accuracy": accuracy}
    numbers |= {name: tuple(map(float, row[name].split())) for name in ("image_mean", "image_std")}
    return CatalogEntry(**(row | numbers | {"flexi": row["flexi"] == "yes"}))  # type: ignore[arg-type]
