"""Recipes: files with a function `get_config`, found and executed by their path."""

import ast
import contextlib
import dataclasses
import importlib.util
import re
import sys
import traceback
from collections.abc import Collection, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from vit_jax import UserError, hint, nearest_path, reason
from vit_jax.config.fields import SYNONYMS
from vit_jax.config.make_config import flatten_config, get_config, rename_fields
from vit_jax.storage import check_names

PACKAGE = Path(__file__).parent.parent
SHORT = 3  # values that a message names where it shows the form of an argument
TYPES = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "a text", "tuple": "a tuple"}
# The messages of ConfigDict for an unknown field, and for a value of another type than the field's.
UNKNOWN = re.compile(r'(?:Key|instead of) "(\w+)"')
NEAR = re.compile(r'Did you mean "(\w+)" instead of')
WRONG_TYPE = re.compile(
    r"""override field ['"](?P<field>[\w.]+).*?\. (?P<value>.*) is of original type <class '\w+'> .*"""
    r"""to type <class '(?P<type>\w+)'>""",
    re.S,
)


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
        with _configs_importable(self.file), _recipe_errors(self.file):
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


def find_text(argv: list[str], *texts: str) -> str | None:
    """Returns `FILE, line N` of the text of a recipe that a command line names.

    It is a text constant of the recipe, or of a module in its folder that it has imported.

    Args:
        argv: the command line.
        texts: a text and parts of it. The first for which a single line has a constant that is equal to it, or else
            contains it, is found.

    Returns:
        The place; or None if there is no such line, or the command line itself contains one of the texts.
    """
    if any(text in word for text in texts for word in argv[1:]) or not any(w.startswith("--config=") for w in argv):
        return None
    file = find_recipe(argv).file
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    beside = [Path(path) for path in modules if path and Path(path).parent == file.resolve().parent]
    constants = [
        (path, node.lineno, node.value)
        for path in dict.fromkeys([file, *beside])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for text in texts:
        whole = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
        for places in (
            {(path, line) for path, line, value in constants if value == text},
            {(path, line) for path, line, value in constants if whole.search(value)},
        ):
            if len(places) == 1:
                [(path, line)] = places
                return f"{path}, line {line}"
    return None


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


def parse_argument(arg: str, **keys: str | Collection[str]) -> dict[str, str]:
    """Returns the value of each key of a recipe's argument.

    Args:
        arg: `KEY=VALUE,KEY=VALUE`; a key that is left out has its default.
        keys: key -> the values that it may have, the default first; or, where any value will do, the default as text.

    Raises:
        ValueError: a key is unknown, or its value is missing or not one of those that it may have.
    """
    given = dict(part.partition("=")[::2] for part in arg.split(",") if part)
    if not given.keys() <= keys.keys() or not all(given.values()):
        form = ",".join(f"{key}={_show_values(key, values)}" for key, values in keys.items())
        raise ValueError(f"the argument {arg!r} is not {form}, of which any part may be left out")
    for key, value in given.items():
        if not isinstance(keys[key], str) and value not in keys[key]:
            raise ValueError(f"{key}={value} must be {key}=VALUE with one of the values {', '.join(keys[key])}")
    return {key: values if isinstance(values, str) else next(iter(values)) for key, values in keys.items()} | given


def _show_values(key: str, values: str | Collection[str]) -> str:
    """Returns the values of a key if they are few, and otherwise the key in capitals, which stands for a value."""
    return key.upper() if isinstance(values, str) or len(values) > SHORT else "|".join(values)


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


@contextlib.contextmanager
def _recipe_errors(file: Path) -> Iterator[None]:
    """Turns an exception in the code of a recipe into a UserError with the file and the line.

    A ValueError passes unchanged, because a recipe raises it to refuse its argument. So do exceptions whose traceback
    does not lead through the recipe's folder.

    Args:
        file: the file of the recipe.

    Raises:
        UserError: in place of any other exception.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        line = _find_line(error, file)
        if not line or type(error) is ValueError:
            raise
        raise UserError(f"{line}: {_describe_error(error)}") from error


def _find_line(error: BaseException, file: Path) -> str | None:
    """Returns `FILE, line N` for the last line that was executed in the recipe's folder, or that has a syntax error.

    Returns None if the error did not pass through that folder or its subfolders.
    """
    folder = file.resolve().parent
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
    own = [(Path(name), line) for name, line in frames if Path(name).resolve().is_relative_to(folder)]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else None


def _describe_error(error: BaseException) -> str:
    """Returns what is wrong, as the end of a sentence; shorter than the message for known errors of ConfigDict."""
    text = str(error.args[0]) if error.args else ""
    if isinstance(error, SyntaxError):
        return f"{error.msg}."
    if isinstance(error, ImportError) and error.name == "configs" and error.path:
        return f"{text.partition(' (')[0]}; delete {error.path}, which hides the recipes of the package."
    if isinstance(error, AttributeError | KeyError) and (match := UNKNOWN.search(text)):
        word, same_group = match[1], NEAR.search(text)
        if same_group and word not in SYNONYMS:
            return f"unknown config field {word!r}; did you mean {same_group[1]!r}?"
        fields, otherwise = flatten_config(get_config()), "vit_jax/config/fields.py lists them."
        return f"unknown config field {word!r}; {hint(word, fields, otherwise, SYNONYMS)}"
    if isinstance(error, TypeError) and (match := WRONG_TYPE.search(text)):
        wanted = TYPES.get(match["type"], match["type"])
        return f"the value {match['value']!r} of {match['field']} must be {wanted}."
    return f"{type(error).__name__}: {reason(error)}."


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
