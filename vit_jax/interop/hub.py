"""Checkpoints on the Hugging Face hub: `hf-hub:OWNER/NAME`, or `hf-hub:OWNER/NAME@REVISION`.

The library `huggingface_hub` downloads them, with its own cache, token and settings (`HF_HOME`, `HF_TOKEN`,
`HF_ENDPOINT`, `HF_HUB_OFFLINE`).
"""

import importlib
from pathlib import Path

from vit_jax import UserError, printable, reason
from vit_jax.interop import catalog
from vit_jax.interop.licences import CARD

PREFIX = "hf-hub:"
HUB = "https://huggingface.co"
# What a checkpoint consists of; repositories also contain the same weights in formats that are not read here.
FILES = ("config.json", "preprocessor_config.json", "model.safetensors", "model.safetensors.index.json", CARD)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LOG_IN = "log in (hf auth login, or HF_TOKEN)"
SHARDS = "model-*-of-*.safetensors"


def download_checkpoint(path: str) -> Path:
    """Returns the local folder with the files of a checkpoint of the hub, downloaded if they are not there yet.

    Raises:
        UserError: `huggingface_hub` is not installed, or it cannot get the files.
    """
    name, _, revision = path.removeprefix(PREFIX).partition("@")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError("this needs huggingface_hub: pip install -e '.[hub]'") from None
    patterns = [*FILES, SHARDS, *ADAPTER_FILES]
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:
        raise UserError(_sentence(name, revision, error)) from None


def _sentence(name: str, revision: str, error: Exception) -> str:
    """Returns a sentence on what went wrong, which depends on the kind of the library's error."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    absent = f"{name} is not in the local cache, and the hub cannot be reached; download it where there is a network"
    sentences = {
        "RevisionNotFoundError": f"{name} has no revision {revision}",
        "GatedRepoError": f"no permission to read {name}; accept its terms on {HUB}/{name} and {LOG_IN}",
        "RepositoryNotFoundError": f"the hub has no model {name}, or it is private; check the name "
        f"({catalog.suggest_name(name)}), or {LOG_IN}",
        "HFValidationError": f"{name!r} is not the name of a model on the hub; write {PREFIX}OWNER/NAME or "
        f"{PREFIX}OWNER/NAME@REVISION",
        **dict.fromkeys(["LocalEntryNotFoundError", "OfflineModeIsEnabled", "IncompleteSnapshotError"], absent),
    }
    return next(
        (sentence for kind, sentence in sentences.items() if kind in kinds),
        printable(f"cannot be downloaded: {reason(error)}", 500),
    )
