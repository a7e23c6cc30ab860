"""Checkpoints on the Hugging Face hub: `hf-hub:OWNER/NAME`, or `hf-hub:OWNER/NAME@REVISION`.

The library `huggingface_hub` downloads and uploads them, with its own cache, token and settings (`HF_HOME`, `HF_TOKEN`,
`HF_ENDPOINT`, `HF_HUB_OFFLINE`).
"""

import fnmatch
import hashlib
import importlib
from pathlib import Path
from typing import Any

from vit_jax import BUGS, UserError, first_names, printable, reason, refuse, tell
from vit_jax.interop import catalog
from vit_jax.interop.licences import CARD, is_own_card

PREFIX = "hf-hub:"
HUB = "https://huggingface.co"
# What a checkpoint consists of; repositories also contain the same weights in formats that are not read here.
FILES = ("config.json", "preprocessor_config.json", "model.safetensors", "model.safetensors.index.json", CARD)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LOG_IN = "log in (hf auth login, or HF_TOKEN)"
SHARDS = "model-*-of-*.safetensors"
DECLARED = (*FILES, SHARDS, *ADAPTER_FILES)  # what makes a repository a model; another layout has others of them
ATTRIBUTES = ".gitattributes"  # the hub puts this file into every new repository


def download_checkpoint(path: str) -> Path:
    """Returns the local folder with the files of a checkpoint of the hub, downloaded if they are not there yet.

    Raises:
        UserError: `huggingface_hub` is not installed, or it cannot get the files.
    """
    name, _, revision = path.removeprefix(PREFIX).partition("@")
    hub = _import_library()
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=list(DECLARED)))
    except Exception as error:
        raise UserError(_sentence(name, revision, error)) from None


def _import_library(part: str = "") -> Any:
    try:
        return importlib.import_module(f"huggingface_hub{part}")
    except ImportError:
        raise UserError("this needs huggingface_hub: pip install -e '.[hub]'") from None


def repository_of(path: str) -> str:
    """Returns OWNER/NAME of the repository on the hub with the weights at a path; empty if they are elsewhere.

    The path is as `weights.load` takes it. A revision is left out.
    """
    entry = catalog.find_entry(path)
    address = entry.address if entry else path
    return address.removeprefix(PREFIX).partition("@")[0] if address.startswith(PREFIX) else ""


def check_repository(target: str) -> str:
    """Returns OWNER/NAME of `hf-hub:OWNER/NAME`, without asking the hub.

    Raises:
        UserError: `huggingface_hub` is not installed, or no repository may have this name.
    """
    name = target.removeprefix(PREFIX)
    try:
        _import_library(".utils").validate_repo_id(name)
    except ValueError:
        name = ""
    refuse((name.count("/") != 1, f"{printable(target, 200)!r} names no repository; write {PREFIX}OWNER/NAME."))
    return name


def publish(folder: Path, name: str, *, private: bool = False, tag: str | None = None, update: bool = False) -> str:
    """Uploads the files of a folder to a repository on the hub, in one commit, and returns its address.

    The repository is created if there is none. Files that are there already are not uploaded again, and a file whose
    upload was completed before a connection was lost neither. A model card that was not written here stays as it is.

    Args:
        folder: the folder, without subfolders.
        name: OWNER/NAME.
        private: whether only its owners see a new repository.
        tag: the tag that the commit gets.
        update: whether files may be replaced, and those of `DECLARED` that the folder lacks be removed.

    Raises:
        UserError: `huggingface_hub` is not installed; the hub refuses or cannot be reached; without `update`, the
            repository has other files; the tag exists; or the repository is public although `private` is asked for.
    """
    library, errors = _import_library(), _import_library(".errors")
    api, files = library.HfApi(), {path.name: path for path in sorted(folder.iterdir())}
    there: dict[str, Any] = {}
    tags: dict[str, str] = {}
    commit = None
    try:
        try:
            found = api.model_info(name, files_metadata=True)
        except errors.RepositoryNotFoundError:  # or this token does not see it
            api.create_repo(name, private=private or None, exist_ok=True)
        else:
            there, commit = {file.rfilename: file for file in found.siblings if file.rfilename != ATTRIBUTES}, found.sha
            public = f"{name} is there and public; make it private in its settings on the hub, or leave out --private."
            refuse((private and not found.private, public))
            tags = {one.name: one.target_commit for one in api.list_repo_refs(name).tags} if tag else {}
        changed = [file for file, path in files.items() if file not in there or not _is_same(path, there[file])]
        gone = [file for file in there if file not in files and any(fnmatch.fnmatch(file, one) for one in DECLARED)]
        listed = f"{name} has files already ({first_names(list(there))})"
        tagged = f"{name} has a tag {tag} already, of other files; choose another one."
        refuse(
            (there and (changed or gone) and not update, f"{listed}; choose another name, or add --update."),
            (tag in tags and (changed or gone or tags[tag or ""] != commit), tagged),
        )
        if {CARD} <= there.keys() & set(changed) and not is_own_card(Path(api.hf_hub_download(name, CARD))):
            changed.remove(CARD)
            tell(f"{name}: its card is not changed, as vit_jax did not write it; it must state the licence.")
        if changed or gone:
            added = [library.CommitOperationAdd(file, files[file]) for file in changed]
            removed = [library.CommitOperationDelete(file) for file in gone]
            message = f"Upload {', '.join(changed) or 'nothing'} with vit_jax"
            commit = api.create_commit(name, [*added, *removed], commit_message=message, parent_commit=commit).oid
        if tag and tag not in tags:
            api.create_tag(name, tag=tag, revision=commit)
    except (UserError, *BUGS):
        raise
    except Exception as error:
        raise UserError(_upload_sentence(name, error)) from None
    return f"{api.endpoint}/{name}"


def _is_same(path: Path, there: Any) -> bool:
    """Returns whether a local file is the one in a repository, by the digest that the hub states of it."""
    if there.lfs:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == there.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == there.blob_id  # as git does


def _upload_sentence(name: str, error: Exception) -> str:
    """Returns a sentence on why a repository was not written."""
    causes = [error, error.__cause__ or error]  # the library puts words of its own around some errors
    responses = [response for one in causes if (response := getattr(one, "response", None)) is not None]
    status = responses[0].status_code if responses else 0
    words = " ".join(str(error).split()) if isinstance(error, ValueError) else reason(causes[-1])
    changed = f"{name} was changed by somebody else at the same time; repeat the command"
    sentences = {
        401: f"the hub does not know who you are; {LOG_IN} with a token that may write to {name}",
        403: f"this token may not write to {name}; use one with the permission to write, or another OWNER",
        404: f"the hub has no {name}, or this token does not see it; {LOG_IN} with a token that may write to it",
        409: changed,
        412: changed,
        400: f"the hub refuses to write {name}: {printable(words, 500)}",
        429: "the hub has had too many requests; repeat the command in some minutes: what has arrived stays there",
    }
    other = f"cannot publish {name}: {printable(words, 500)}; repeat the command: what has arrived stays there"
    return f"{sentences.get(status, other)}."


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
