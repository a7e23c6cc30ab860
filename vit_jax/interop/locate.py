"""Finds the local file or checkpoint folder with the weights that a user names."""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vit_jax import UserError, checkpoint, user_errors
from vit_jax.interop import augreg, catalog, hub, peft
from vit_jax.interop.archives import INDEX, SAFETENSORS
from vit_jax.interop.licences import CARD, Licence, find_licence
from vit_jax.interop.model_json import MODEL_FILE, description_file
from vit_jax.storage import expand_home, filesystem, memo

HUB_FILES = (f"model{SAFETENSORS}", f"model{INDEX}")  # in folders that timm or transformers wrote
REMEMBERED_BYTES = 2**26  # of a file whose digest is kept: it takes long to compute


class Located(NamedTuple):
    """Weights on this machine: a file of arrays or its index, or a checkpoint folder of a run."""

    path: Path
    entry: catalog.CatalogEntry | None  # the entry in the catalog; None: the weights are not in the catalog
    loss: str  # softmax or sigmoid, as the catalog or AugReg's index tells; empty: neither tells it
    licence: Licence  # as the catalog states it, or of AugReg's files; empty: not known from there
    adapter: peft.Adapter | None = None  # if there is one, `path` is the file of the adapter


def locate_weights(path: str | Path) -> Located:
    """Returns where on this machine the weights are that a user names. Downloads them if necessary.

    Args:
        path: a path or a name, as `weights.load` takes it.

    Raises:
        UserError: nothing that can be loaded is there.
    """
    with user_errors("is not a path", OSError, RuntimeError, ValueError):
        name, local, entry, loss, licence = str(path), expand_home(path), None, "", ""
        if name.startswith(hub.PREFIX) or not local.exists():
            entry = catalog.find_entry(name)
            if entry:
                loss, licence = entry.loss, entry.licence
            elif augreg.is_name(name):
                loss, licence = augreg.training_loss(name), augreg.LICENCE
            address = entry.address if entry else name
            if address.startswith(hub.PREFIX):
                local = hub.download_checkpoint(address)
            elif downloaded := catalog.download_entry(name):
                local = downloaded
            elif filesystem.is_remote(name):
                local = _copy_remote(name)
        exists = local.exists()
    if not exists:
        raise UserError(f"does not exist, and no published checkpoint has this name; {catalog.suggest_name(name)}")
    weights = local if local.is_file() else _find_in_folder(local)
    adapter = peft.find_adapter(weights.parent) if weights.name == peft.WEIGHTS else None
    return Located(weights, entry, loss, find_licence(licence), adapter)


def _copy_remote(location: str) -> Path:
    """Returns a local copy of the weights at a remote path, with the files that describe them.

    The path is a file of arrays, a folder of timm, transformers or PEFT, a checkpoint folder, or a workdir. Of a
    workdir its `model.npz` is copied, or its newest checkpoint if there is no `model.npz`.

    Raises:
        UserError: the path cannot be read.
    """
    if location.endswith(".npz"):
        described = f"{location.removesuffix('.npz')}.json"
        beside = [described.rpartition("/")[2]] if filesystem.exists(described) else []
        return Path(filesystem.local_copy(location, *beside))
    if location.endswith((SAFETENSORS, INDEX)):
        folder, _, name = location.rpartition("/")
        return _copy_arrays(folder, SAFETENSORS if name.endswith(INDEX) else name) / name
    names = filesystem.list_files(location)
    if set(HUB_FILES) & set(names) or (peft.WEIGHTS in names and MODEL_FILE not in names):
        return _copy_arrays(location, SAFETENSORS)
    if MODEL_FILE in names:
        described = description_file(Path(MODEL_FILE)).name
        return Path(filesystem.local_copy(filesystem.join_path(location, MODEL_FILE), described))
    return checkpoint.local_checkpoint(location)


def _copy_arrays(folder: str, ending: str) -> Path:
    """Returns a local copy of the files in a remote folder that end with `ending`, its JSON files and its card."""

    def is_wanted(name: str) -> bool:
        return "/" not in name and (name.endswith((ending, ".json")) or name == CARD)

    return Path(filesystem.local_copy_of_folder(folder, is_wanted))


def locate_base(adapter: peft.Adapter) -> str:
    """Returns the path or the name of the weights that an adapter changes, as `weights.load` takes it.

    A path in the adapter's configuration may be relative to the current folder or to the adapter's folder. OWNER/NAME,
    as PEFT writes the name of weights on the hub, is returned as `hf-hub:OWNER/NAME`.

    Raises:
        UserError: the configuration names the folder of the adapter itself, or weights that are adapted from these.
    """
    advice = "write the path or name of the original weights into base_model_name_or_path"
    existing = _existing_base(adapter)
    if existing and existing.resolve() == adapter.folder.resolve():
        raise UserError(f"{peft.CONFIG} names its own folder as the weights to adapt; {advice}")
    if existing:
        passed = {adapter.folder.resolve()}
        place: Path | None = existing
        while place and (inner := _local_adapter(place)):
            if inner.folder.resolve() in passed:
                again = "the weights to adapt, which are adapted from these again"
                raise UserError(f"{peft.CONFIG} names {adapter.base} as {again}; {advice}")
            passed.add(inner.folder.resolve())
            place = _existing_base(inner)
        return str(existing)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", adapter.base) and not catalog.is_published(adapter.base):
        revision = f"@{adapter.revision}" if adapter.revision else ""
        return adapter.base if augreg.is_name(adapter.base) else f"{hub.PREFIX}{adapter.base}{revision}"
    return adapter.base


def _existing_base(adapter: peft.Adapter) -> Path | None:
    """Returns the path of the weights that an adapter changes, if it is on this machine."""
    with user_errors("base_model_name_or_path is not a path", OSError, RuntimeError, ValueError):
        paths = expand_home(adapter.base), adapter.folder / adapter.base
        return next((path for path in paths if path.exists()), None)


def _local_adapter(place: Path) -> peft.Adapter | None:
    """Returns the adapters that are loaded from a place on this machine; None: they are other weights, or none."""
    with contextlib.suppress(UserError):
        return locate_weights(place).adapter
    return None


def digest_weights(path: str | Path) -> str:
    """Returns a short digest of the contents of weights. Copies of the same files have the same digest.

    Args:
        path: a path or a name, as `weights.load` takes it.

    Raises:
        UserError: nothing that can be loaded is there.
    """
    located = locate_weights(path)
    if located.adapter is None:
        return _digest_located(located.path)
    base = digest_weights(locate_base(located.adapter)).encode()
    files = _digest_files(located.adapter.folder / name for name in hub.ADAPTER_FILES)
    return hashlib.sha256(b"".join([base, *files])).hexdigest()[:16]


def _digest_located(path: Path) -> str:
    if path.is_dir():
        arrays = json.dumps(checkpoint.manifest_of(path)["arrays"], sort_keys=True)
        return hashlib.sha256(arrays.encode()).hexdigest()[:16]
    files = sorted(path.parent.glob("*.safetensors")) if path.suffix == ".json" else [path]
    return hashlib.sha256(b"".join(_digest_files(files))).hexdigest()[:16]


def _digest_files(files: Iterable[Path]) -> list[bytes]:
    with user_errors("cannot read the weights"):
        return [_digest_file(path, filesystem.file_version(str(path))) for path in files]


@functools.cache
def _digest_file(path: Path, _version: str) -> bytes:
    """Returns the digest of a file's contents. They are read once for each `_version` (`filesystem.file_version`).

    The digest of a large file is kept in the cache, if there is one, for later processes. It is that of a file with the
    same place, number, size and times, of which no program can set the last (`st_ctime`).
    """
    status, key = path.stat(), ""
    if status.st_size >= REMEMBERED_BYTES:
        key = f"{path.resolve()} {[status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]}"
        if digest := memo.recall("digests", key, _parse_digest):
            return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    if key:
        memo.remember("digests", key, digest.hex())
    return digest


def _parse_digest(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("no whole digest")
    return digest


def is_download_name(name: str) -> bool:
    """Returns whether a name stands for a published checkpoint or for a checkpoint on the hub."""
    return name.startswith(hub.PREFIX) or catalog.is_published(name)


def _find_in_folder(folder: Path) -> Path:
    """Returns the file or checkpoint with the weights in a folder, which may be a checkpoint itself.

    Raises:
        UserError: the folder has no weights that can be loaded.
    """
    if (folder / MODEL_FILE).is_file():
        return folder / MODEL_FILE
    newest_checkpoint = checkpoint.find_checkpoint(folder)  # before files that were exported into a workdir
    if newest_checkpoint is not None:
        return newest_checkpoint
    files = [folder / name for name in (*HUB_FILES, peft.WEIGHTS) if (folder / name).is_file()]
    if files:
        return files[0]
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return single[0]
    if checkpoint.is_checkpoint(folder):
        return folder
    for name, readable in (("pytorch_model.bin", "model.safetensors"), ("adapter_model.bin", peft.WEIGHTS)):
        if (folder / name).is_file():
            raise UserError(f"contains {name}, which only PyTorch can read; save the model from PyTorch as {readable}")
    raise UserError(f"contains neither {MODEL_FILE} nor {HUB_FILES[0]} nor checkpoints")
