"""The Vision Transformer paper (arXiv 2010.11929) in JAX/Flax.

`create(name, **fields)` makes a model, `load(path)` reads one with its weights, `list_models()` lists the published
ones, `save(path, model, params)` writes one, and `vit_jax.train.train(config, workdir)` trains one. Nothing heavy is
imported before it is used.
"""

import importlib
import time
from typing import Any

from vit_jax.errors import BUGS as BUGS
from vit_jax.errors import NPZ_ERRORS as NPZ_ERRORS
from vit_jax.errors import LostHosts, NonFiniteLoss, Preempted, UserError
from vit_jax.errors import MissingData as MissingData
from vit_jax.errors import NoAnswer as NoAnswer
from vit_jax.errors import WrongText as WrongText
from vit_jax.errors import encode_text as encode_text
from vit_jax.errors import errors_of as errors_of
from vit_jax.errors import exit_code as exit_code
from vit_jax.errors import first_names as first_names
from vit_jax.errors import format_rounded_up as format_rounded_up
from vit_jax.errors import out_of_files as out_of_files
from vit_jax.errors import printable as printable
from vit_jax.errors import reason as reason
from vit_jax.errors import refuse as refuse
from vit_jax.errors import user_errors as user_errors
from vit_jax.errors import without_queries as without_queries
from vit_jax.streams import ignore_closed_stderr as ignore_closed_stderr
from vit_jax.streams import ignore_closed_stdout as ignore_closed_stdout
from vit_jax.streams import tell as tell
from vit_jax.unknown_words import choose as choose
from vit_jax.unknown_words import hint as hint
from vit_jax.unknown_words import nearest as nearest
from vit_jax.unknown_words import nearest_path as nearest_path

__version__ = "0.1.0"
# When Python started, by the monotonic clock. A process may be older: a shell becomes the last command that it runs.
# Before this line, a command of this package has only computed.
PYTHON_STARTED = time.monotonic() - time.process_time()
# What users need; the other names imported above are for the package itself.
__all__ = ["LostHosts", "NonFiniteLoss", "Preempted", "UserError", "create", "list_models", "load", "save", "train"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "create":
        from vit_jax.model import create

        return create
    if name in ("list_models", "load", "save"):
        from vit_jax import interop

        return getattr(interop, name)
    if name == "train":
        return importlib.import_module("vit_jax.train")
    raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
