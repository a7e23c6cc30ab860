"""Recipes: files with a function `get_config`, found and executed by their path."""

import contextlib
import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from vit_jax import UserError, nearest_path
from vit_jax.config.field_names import rename_fields
from vit_jax.config.recipe_errors import recipe_errors
from vit_jax.storage import check_names

PACKAGE = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The file of a recipe, and the argument for its functions.

    Attributes:
        file: the path of an existing file.
        argument: the text after the colon in --config=FILE:ARGUMENT; None: there is no colon.
    """

    file: Path
    argument: str | None = None

    def __str__(self) -> str:
        return str(self.file) if self.argument is None else f"{self.file}:{self.argument}"

    def make_config(self) -> ConfigDict:
        """Returns the result of the recipe's `get_config`, locked, with earlier names of fields replaced.

        Raises:
            UserError: the file or the argument is wrong, or see `_separate_evaluations`.
        """
        config = self._call("get_config")
        if not isinstance(config, ConfigDict):
            raise UserError(f"get_config() of {self.file} returns {config!r}; it must end with `return config`.")
        with config.unlocked():
            rename_fields(config)
            if "evals" in config:
                _separate_evaluations(config.evals, self.file)
        return config.lock()

    def make_grid(self) -> dict[str, dict[str, Any]]:
        """Returns the result of the recipe's `get_grid`: name of a point -> {field: value}.

        The result is empty if the recipe has no `get_grid`.

        Raises:
            UserError: the file or the argument is wrong.
        """
        return self._call("get_grid", is_optional=True) or {}

    def _call(self, name: str, is_optional: bool = False) -> Any:
        """Executes the file and returns the result of its function `name`; None if an optional function is absent."""
        words = () if self.argument is None else (self.argument,)
        with _configs_importable(self.file), recipe_errors(self.file):
            spec = importlib.util.spec_from_file_location(self.file.stem, self.file)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            function = getattr(module, name, None)
            if function is None and is_optional:
                return None
            if function is None:
                raise UserError(f"{self.file} is not a recipe: it defines no {name}().")
            if words and not signature(function).parameters:
                raise UserError(f"the recipe {self.file} takes no argument, but was given {self.argument!r}.")
            try:
                return function(*words)
            except ValueError as error:
                raise UserError(f"{self}: {str(error).rstrip('.')}.") from error


def find_recipe(argv: list[str]) -> Recipe:
    """Returns the recipe that a command line names by --config=FILE or --config=FILE:ARGUMENT; the last one counts.

    A path `configs/...` that does not exist relative to the current folder is looked up among the recipes of the
    package.

    Raises:
        UserError: the command line names no recipe, the file does not exist, or its path has too long a name.
    """
    words = [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    if "--config" in argv:
        raise UserError("write --config=FILE, with an equals sign.")
    if not words:
        if given := [word for word in argv[1:] if re.match(r"[^-].*\.py(:|$)", word)]:
            raise UserError(f"{given[0]!r} is not a flag; did you mean --config={given[0]}?")
        raise UserError("add --config=FILE, the recipe to train, for example --config=configs/digits.py.")
    path, colon, argument = words[-1].partition(":")
    check_names(path)
    file = Path(path)
    shipped = shipped_recipes().parent / file
    if file.parts[:1] == ("configs",) and shipped.is_file() and not file.is_file():
        file = shipped
    if not file.is_file():
        raise UserError(f"there is no config file {file}{_hint_file(file)}")
    return Recipe(file, argument if colon else None)


def shipped_recipes() -> Path:
    """Returns the folder of the recipes that come with the package: inside it in a wheel, beside it in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def _separate_evaluations(evaluations: ConfigDict, file: Path) -> None:
    """Makes evaluations share no field, in place.

    A `ConfigDict` of a `ConfigDict` shares the fields that were unset in the original: what is set in one is set in the
    other.

    Raises:
        UserError: the recipe in `file` has set a field that two evaluations share, or they are the same object.
    """
    owners = dict[int, str]()  # identity of an evaluation or of its unset field -> the evaluation's name
    for name, own in evaluations.items():
        fields = dict(own.items(preserve_field_references=True)) if isinstance(own, ConfigDict) else {}
        references = {field: value for field, value in fields.items() if isinstance(value, FieldReference)}
        shared = {field: value for field, value in references.items() if id(value) in owners}
        taken = [field for field, value in shared.items() if value.get() is not None]
        if id(own) in owners or taken:
            other = owners[id(own) if id(own) in owners else id(shared[taken[0]])]
            what = ", ".join(taken) or "all fields"
            advice = "copy an evaluation by base.evaluation(**config.evals.NAME)"
            raise UserError(f"{file}: evals.{name} and evals.{other} share {what}; {advice}.")
        for field in shared:
            kind = own.get_type(field)
            del own[field]
            own[field] = placeholder(kind)
        owners |= dict.fromkeys([id(own), *map(id, references.values())], name)


@contextlib.contextmanager
def _configs_importable(file: Path) -> Iterator[None]:
    """Lets a recipe import modules such as `configs.base` inside the block.

    They come from the folder `configs` above the recipe or, if it has none, from the recipes of the package. `configs`
    is a namespace package (it has no `__init__.py`), so that all folders `configs` on `sys.path` form one package.
    """
    folders, before = file.resolve().parents, list(sys.path)
    own = next((folder for folder in folders if folder.name == "configs"), folders[0])
    if PACKAGE not in own.parents:
        sys.path[:0] = dict.fromkeys((str(own.parent), str(folders[0].parent)))
    sys.path.append(str(shipped_recipes().parent))  # in a wheel this is the package, whose other modules come last
    try:
        yield
    finally:
        sys.path[:] = before


def _hint_file(file: Path) -> str:
    """Returns a hint at the recipe with the most similar path to one that does not exist, as the end of a sentence."""
    among = Path("configs", file.name)
    places = [file, among] if len(file.parts) > 1 else [among, file]  # a bare name is first looked up among the recipes
    for place in places:
        if (near := nearest_path(place)) and near.suffix == ".py":
            return f"; did you mean {str(near)!r}?"
    near = nearest_path(shipped_recipes() / file.name)
    if near and near.suffix == ".py" and (len(file.parts) == 1 or file.parts[0] == "configs"):
        return f"; did you mean {str(Path('configs', near.name))!r}?"
    return "."
