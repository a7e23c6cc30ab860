"""Checkpoints of the Hugging Face hub: `hf-hub:OWNER/NAME`, or `hf-hub:OWNER/NAME@REVISION`.

The library `huggingface_hub` downloads them, with its own cache, token and settings (`HF_HOME`, `HF_TOKEN`,
`HF_ENDPOINT`, `HF_HUB_OFFLINE`).
"""

import importlib
from pathlib import Path

from vit_jax import BUGS, UserError, shown, user_errors

PREFIX = "hf-hub:"
# What a checkpoint consists of; repositories also contain the same weights in formats that are not read here.
FILES = ("config.json", "preprocessor_config.json", "model.safetensors", "model.safetensors.index.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
SHARDS = "model-*-of-*.safetensors"


def is_hub_name(path: str) -> bool:
    """Returns whether a path names a checkpoint of the hub."""
    return path.startswith(PREFIX)


def download_checkpoint(path: str) -> Path:
    """Returns the local folder with the files of a checkpoint of the hub, downloaded if they are not there yet.

    Raises:
        UserError: the library is not installed, or it cannot get the files.
    """
    name, _, revision = path.removeprefix(PREFIX).partition("@")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError("this needs huggingface_hub: pip install -e '.[hub]'") from None
    try:
        with user_errors("cannot be downloaded", Exception, *BUGS):
            folder = hub.snapshot_download(
                name, revision=revision or None, allow_patterns=[*FILES, SHARDS, *ADAPTER_FILES]
            )
    except UserError as error:
        raise UserError(_sentence(name, revision, error)) from None
    return Path(folder)


def _sentence(name: str, revision: str, error: UserError) -> str:
    """Returns what went wrong, by the kind of the library's error."""
    cause = error.__cause__
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    if "RevisionNotFoundError" in kinds:
        return f"{name} has no revision {revision}"
    if "GatedRepoError" in kinds:
        return f"no permission to read {name}; accept its terms on the hub and log in (hf auth login, or HF_TOKEN)"
    if "RepositoryNotFoundError" in kinds:
        return f"the hub has no model {name}, or it is private; check the name, or log in (hf auth login, or HF_TOKEN)"
    if "HFValidationError" in kinds:
        return (
            f"{name!r} is not the name of a model on the hub; write {PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME@REVISION"
        )
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "IncompleteSnapshotError"}:
        return f"{name} is not in the local cache, and the hub cannot be reached; download it where there is a network"
    return shown(error, 500)
