"""The licences of published weights, and the model cards that state them.

A licence has the name by which the Hugging Face hub knows it (`apache-2.0`), or else the `license_name` of a model card
(`dinov3-license`). The catalog states it, or the card (`README.md`) beside a file, or timm's configuration. Where
nothing states it, it is empty. Models that are made from weights inherit it.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vit_jax import choose, printable, refuse
from vit_jax.interop.published_config import split_keys
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
# The names that the hub knows; a card states any other as `other`. huggingface/hub-docs,
# docs/hub/repositories-licenses.md at 008d54d, and apple-ascl, which is newer (huggingface.js).
LIST = "https://huggingface.co/docs/hub/repositories-licenses"
LISTED = split_keys(
    """afl-3.0 agpl-3.0 apache-2.0 apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
    eupl-1.1 gemma gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 lppl-1.3c mit mpl-2.0 ms-pl ncsa
    odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 pddl postgresql unlicense wtfpl zlib"""
)
# Name -> what to know before weights that are tuned from the licensed ones are passed on. DINOv3 License, 1.b.i;
# CC BY-NC 4.0, sections 1.a and 2.a.1.
BINDING = {
    "dinov3-license": "it also binds weights that are tuned from these; who passes them on must add a copy of it",
    "cc-by-nc-4.0": "it also binds weights that are tuned from these, and allows no commercial use",
}
TO_COPY = ("dinov3-license",)  # those whose text must lie beside the weights
LIBRARIES = {"timm": "timm", "huggingface": "transformers"}  # layout -> name of its library on the hub
DESCRIBING = {"timm": "config.json", "transformers": "preprocessor_config.json"}  # library -> file of the preprocessing


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


def parse_licence(text: str) -> Licence:
    """Returns the licence that a user names: by its name on the hub, or by NAME,https://ADDRESS.

    Raises:
        UserError: neither the hub nor this module knows the name, and no address is given.
    """
    name, comma, address = text.partition(",")
    if not comma:
        return find_licence(choose("licence", name, [*sorted(LISTED), *ADDRESSES], LIST))
    whole = re.fullmatch(r"[\w.+-]+", name) and re.fullmatch(r"https://\S+", address)
    refuse((not whole, f"cannot read the licence {printable(text, MAX_LETTERS)}; write NAME or NAME,https://ADDRESS."))
    return Licence(name, address)


def licensed(model: Model, given: str | None, source: str) -> Model:
    """Returns a model with the licence that a user gives; None: with that of its weights.

    Raises:
        UserError: see `parse_licence`; or the weights, which come from `source`, have a licence that binds those made
            from them, and another one is given.
    """
    if given is None:
        return model
    licence = parse_licence(given)
    bound = model.licence in BINDING and licence.name != model.licence
    refuse((bound, f"{source} has the licence {describe_licence(model)}; leave out the other licence."))
    return dataclasses.replace(model, licence=licence.name, licence_address=licence.address)


def check_licence(model: Model, source: str, has_text: bool) -> None:
    """Raises UserError if the weights from `source` may not be published: no licence, or no copy of its text."""
    name = model.licence
    unknown = f"the licence of {source} is not known; name it as in --licence=apache-2.0 ({LIST} lists the names)"
    copied = f"{source} has the licence {name}, whose text must lie beside the weights; add --licence-text=FILE"
    other = f"add --licence=NAME,https://ADDRESS or --licence-text=FILE: the hub does not know {name}"
    refuse(
        (not name, f"{unknown} or --licence=NAME,https://ADDRESS."),
        (name in TO_COPY and not has_text, f"{copied} ({model.licence_address})."),
        (name not in LISTED and not model.licence_address and not has_text, f"{other}."),
    )


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


def write_card(model: Model, layout: str, base: str = "", sections: str = "") -> str:
    """Returns the text of the model card for a folder in a layout. Its front matter states the licence, if known.

    Args:
        model: the model.
        layout: the layout of the folder.
        base: the repository on the hub, OWNER/NAME, whose weights the training started from; empty: not known.
        sections: what follows in the text, as Markdown.
    """
    matter: dict[str, Any] = {}
    if model.licence in LISTED:
        matter = {"license": model.licence}
    elif model.licence:
        matter = {"license": "other", "license_name": model.licence}
        matter |= {"license_link": model.licence_address} if model.licence_address else {}
    classes = model.field("num_classes")
    library = LIBRARIES.get(layout, "")
    if library:
        matter["library_name"] = library
        matter["pipeline_tag"] = "image-classification" if classes else "image-feature-extraction"
    if base:
        matter["base_model"] = base
    height, width = model.image_size
    named = ", named in config.json" if library and model.class_names else ""
    lines = [
        "---",
        yaml.safe_dump(matter | {"tags": [OUR_TAG]}, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {model.name}",
        "",
        f"{height}x{width} pixels, {classes:,} classes{named}; written by vit_jax in the layout {library or layout}.",
    ]
    if model.preprocess:
        told = f", which {DESCRIBING[library]} tells {library}" if library else ""
        lines += ["", f"Preprocessing, in the words of vit_jax{told}: `{model.preprocess}`"]
    if model.licence:
        lines += ["", f"Licence of the weights: {describe_licence(model)}"]
    return "\n".join([*lines, *(["", sections.rstrip()] if sections else [])]) + "\n"


def is_own_card(path: Path) -> bool:
    """Returns whether a model card was written here."""
    with path.open("rb") as file:
        return f"\ntags:\n- {OUR_TAG}\n---\n".encode() in file.read(MAX_CARD_BYTES)
