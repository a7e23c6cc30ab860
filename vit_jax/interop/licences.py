"""The licences of published weights, and the model cards that state them.

A licence has the name by which the Hugging Face hub knows it (`apache-2.0`), or else the `license_name` of a model card
(`dinov3-license`). The catalog states it, or the card (`README.md`) beside a file, or timm's configuration. Where
nothing states it, it is empty. Models that are made from weights inherit it.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vit_jax import printable
from vit_jax.model import Model

CARD = "README.md"
MAX_CARD_BYTES = 2**20
MAX_LETTERS = 200  # of a name or an address
OUR_TAG = "vit_jax"  # a tag of the cards that are written here

# Name -> address.
ADDRESSES = {
    "apache-2.0": "https://www.apache.org/licenses/LICENSE-2.0",
    "mit": "https://opensource.org/license/mit",
    "cc-by-nc-4.0": "https://creativecommons.org/licenses/by-nc/4.0/legalcode.en",
    "dinov3-license": "https://ai.meta.com/resources/models-and-libraries/dinov3-license/",
    "apple-ascl": "https://huggingface.co/apple/DFN2B-CLIP-ViT-B-16/blob/main/LICENSE",
}
UNLISTED = ("dinov3-license",)  # those that a card states as `other`, since the hub does not list them
# Name -> what to know before weights that are tuned from the licensed ones are passed on. DINOv3 License, 1.b.i;
# CC BY-NC 4.0, sections 1.a and 2.a.1.
BINDING = {
    "dinov3-license": "it also binds weights that are tuned from these; who passes them on must add a copy of it",
    "cc-by-nc-4.0": "it also binds weights that are tuned from these, and allows no commercial use",
}
LIBRARIES = {"timm": "timm", "huggingface": "transformers"}  # layout -> name of its library on the hub


class Licence(NamedTuple):
    """A licence by name and address; both are empty if it is not known."""

    name: str = ""
    address: str = ""

    @property
    def fields(self) -> dict[str, str]:
        """The keywords of `vit_jax.create` that state it."""
        return {"licence": self.name, "licence_address": self.address}


def find_licence(name: str, address: str = "") -> Licence:
    """Returns the licence with a name, and with its known address if none is given."""
    return Licence(name, address or ADDRESSES.get(name, ""))


def read_card(folder: Path) -> Licence:
    """Returns the licence that the front matter of the model card in a folder states; an empty one if it states none.

    A card that cannot be read states nothing.
    """
    if not (folder / CARD).is_file():
        return Licence()
    with (folder / CARD).open("rb") as file:
        text = file.read(MAX_CARD_BYTES).decode(errors="replace")
    matter = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    try:
        stated = yaml.load(matter[1], yaml.BaseLoader) if matter else None  # whose values are texts
    except (yaml.YAMLError, ValueError, RecursionError):
        return Licence()
    return _read_matter(stated) if isinstance(stated, dict) else Licence()


def _read_matter(stated: dict[str, Any]) -> Licence:
    values = (stated.get(key) for key in ("license", "license_name", "license_link"))
    kind, name, link = (value.strip()[:MAX_LETTERS] if isinstance(value, str) else "" for value in values)
    if kind == "unknown":
        return Licence()
    name = name or kind if kind == "other" else kind
    licence = find_licence(name, link if link.startswith("https://") else "")
    return licence if licence.address or not name else Licence(name, link)


def describe_licence(model: Model) -> str:
    """Returns a phrase with the licence of a model's weights and its address; empty if it is not known."""
    words = [printable(text, MAX_LETTERS) for text in (model.licence, model.licence_address) if text]
    binding = BINDING.get(model.licence)
    return "; ".join([", ".join(words), *([binding] if binding else [])])


def write_card(model: Model, layout: str) -> str:
    """Returns the text of the model card for a folder in a layout. Its front matter states the licence, if known."""
    matter: dict[str, Any] = {}
    if model.licence:
        is_listed = model.licence in ADDRESSES and model.licence not in UNLISTED
        matter = {"license": model.licence} if is_listed else {"license": "other", "license_name": model.licence}
        if model.licence_address and not is_listed:
            matter["license_link"] = model.licence_address
    if layout in LIBRARIES:
        matter["library_name"] = LIBRARIES[layout]
    height, width = model.image_size
    lines = [
        "---",
        yaml.safe_dump(matter | {"tags": [OUR_TAG]}, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {model.name}",
        "",
        f"{height}x{width} pixels, {model.field('num_classes'):,} classes; written by vit_jax in the layout {layout}.",
    ]
    if model.preprocess:
        lines += ["", f"Preprocessing: `{model.preprocess}`"]
    if model.licence:
        lines += ["", f"Licence of the weights: {describe_licence(model)}"]
    return "\n".join(lines) + "\n"


def is_own_card(path: Path) -> bool:
    """Returns whether a model card was written here."""
    with path.open("rb") as file:
        return f"\ntags:\n- {OUR_TAG}\n---\n".encode() in file.read(MAX_CARD_BYTES)
