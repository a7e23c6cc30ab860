"""From what a user names to the local file or checkpoint folder that holds the weights."""

from pathlib import Path
from typing import NamedTuple

from vit_jax import UserError, checkpoint, user_errors
from vit_jax.interop import catalog, hub

MODEL_FILE = "model.npz"  # of a workdir
HUB_FILES = ("model.safetensors", "model.safetensors.index.json")  # of folders that timm or transformers wrote


class Located(NamedTuple):
    """Weights on this machine: a file of arrays or its index, or a checkpoint folder of a run."""

    path: Path
    entry: catalog.CatalogEntry | None  # in the catalog


def locate_weights(path: str | Path) -> Located:
    """Returns where the weights are that a user names, downloaded if necessary.

    Args:
        path: as `weights.load` takes it.

    Raises:
        UserError: nothing that can be loaded is there.
    """
    with user_errors("is not a path", OSError, RuntimeError, ValueError):
        entry = downloaded = None
        if hub.is_hub_name(str(path)) or not Path(path).expanduser().exists():
            entry = catalog.find_entry(str(path))
            address = entry.address if entry else str(path)
            is_hub = hub.is_hub_name(address)
            downloaded = hub.download_checkpoint(address) if is_hub else catalog.download_entry(str(path))
        local = downloaded or checkpoint.local_weights(path)
        exists = local.exists()
    if not exists:
        raise UserError(f"does not exist, and no published checkpoint has this name; {catalog.suggest_name(str(path))}")
    return Located(local if local.is_file() or checkpoint.is_checkpoint(local) else _find_in_folder(local), entry)


def is_download_name(name: str) -> bool:
    """Returns whether a name stands for a published checkpoint or one of the hub."""
    return hub.is_hub_name(name) or catalog.is_published(name)


def _find_in_folder(folder: Path) -> Path:
    """Returns the file or checkpoint with the weights in a folder.

    Raises:
        UserError: there is none.
    """
    if (folder / MODEL_FILE).is_file():
        return folder / MODEL_FILE
    found = checkpoint.find_checkpoint(folder)  # before files that were exported into a workdir
    if found is not None:
        return found
    files = [folder / name for name in HUB_FILES if (folder / name).is_file()]
    if files:
        return files[0]
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return single[0]
    if (folder / "pytorch_model.bin").is_file():
        raise UserError(
            "contains pytorch_model.bin, which only PyTorch can read; save the model there as model.safetensors"
        )
    raise UserError(f"contains neither {MODEL_FILE} nor {HUB_FILES[0]} nor checkpoints")
