"""Mistakes in one's own recipe: a sentence with file and line, as for the same mistake in a flag."""

import subprocess
import sys

import pytest

from vit_jax import UserError, cli
from vit_jax.config import read_command_line, read_grid
from vit_jax.program import model_without_data

BODY = """from configs import digits

def get_config():
    config = digits.get_config()
    {}
    return config
"""


def read(tmp_path, text, name="mine.py"):
    (tmp_path / name).write_text(text)
    return read_command_line(["main.py", f"--config={tmp_path / name}"])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("config.modle.depth = 3", "unknown config field 'modle'; did you mean 'model'?"),
        ("config.model.dpeth = 3", "unknown config field 'dpeth'; did you mean 'depth'?"),
        ("config.learning_rate = 3", "unknown config field 'learning_rate'; did you mean 'base_lr'?"),
        ("config.data.update({'sorce': 3})", "unknown config field 'sorce'; did you mean 'source'?"),
        (
            "config.gpus = 3",
            "unknown config field 'gpus'; all devices that JAX finds are used; the mesh fields say how.",
        ),
        ("config.model.depth = 'three'", "the value 'three' of depth must be a whole number."),
        ("config.batch = 1.5", "the value '1.5' of batch must be a whole number."),
        ("config.seed = 1 / 0", "ZeroDivisionError: division by zero."),
        ("config.seed = sedd", "NameError: name 'sedd' is not defined."),
    ],
)
def test_a_mistake_is_told_with_its_line(line, sentence, tmp_path):
    with pytest.raises(UserError) as raised:
        read(tmp_path, BODY.format(line))
    assert str(raised.value) == f"{tmp_path}/mine.py, line 5: {sentence}"


OPS = "inceptoin_crop({resolution})|flip_lr|value_range(-1,1)"


@pytest.mark.parametrize(
    ("line", "sentence", "place"),
    [
        (f"config.data.preprocess = '{OPS}'", "unknown preprocessing op 'inceptoin_crop'; did you mean", ", line 5: "),
        (
            "config.evals.test.preprocess = 'resize(16' + ')|flip_rl|value_range(-1,1)'",
            "in evals.test: unknown preprocessing op 'flip_rl'; did you mean 'flip_lr'?",
            ", line 5: ",
        ),
        (
            f"config.data.preprocess = '{OPS}'.replace('toi', 'tio').replace(')|f', ',0)|f')",
            "wrong arguments in 'inception_crop(16,0)': 0 < area_min <= area_max <= 100 must hold",
            "",  # which line makes it is not known
        ),
        ("config.data.preprocess = 'resize(0)|value_range(-1,1)'", "wrong arguments in 'resize(0)'", ", line 5: "),
    ],
)
def test_a_mistyped_op_is_told_with_its_line(line, sentence, place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "exit_with_message", lambda sentence, code: print(sentence))
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)
    (tmp_path / "mine.py").write_text(BODY.format(line))
    for words in ([], [f"--config.data.preprocess={OPS}"]):
        monkeypatch.setattr(sys, "argv", ["main.py", f"--config={tmp_path}/mine.py", *words])
        cli.run_command(lambda argv: model_without_data(read_command_line(argv).config))
        told = capsys.readouterr().out
        if words:
            assert told.startswith("unknown preprocessing op")  # the flag is at fault
        else:
            assert told.startswith(f"{tmp_path}/mine.py{place}{sentence}" if place else sentence)


def test_files_that_cannot_be_run(tmp_path):
    with pytest.raises(UserError, match=r"mine\.py, line 3: invalid syntax\.$"):
        read(tmp_path, "\n\ndef get_config(:\n    pass\n")
    with pytest.raises(UserError, match=r"mine\.py, line 1: ModuleNotFoundError: No module named 'nothing_here'\.$"):
        read(tmp_path, "import nothing_here\n\ndef get_config():\n    return 1\n")
    with pytest.raises(UserError, match=r"returns None; it must end with `return config`\.$"):
        read(tmp_path, "def get_config():\n    pass\n")


def test_a_mistake_in_a_file_that_a_recipe_imports_is_told_there(tmp_path):
    (folder := tmp_path / "configs").mkdir()
    (folder / "parts_of_mine.py").write_text("def change(config):\n    config.modle = 1\n")
    with pytest.raises(UserError, match=r"parts_of_mine\.py, line 2: unknown config field 'modle'"):
        read(folder, "from configs import parts_of_mine\n" + BODY.format("parts_of_mine.change(config)"))


@pytest.mark.slow
def test_a_package_of_ones_own_that_hides_the_recipes_is_named(tmp_path):
    (folder := tmp_path / "configs").mkdir()
    (folder / "__init__.py").touch()
    (folder / "mine.py").write_text(BODY.format("pass"))
    run = subprocess.run(
        [sys.executable, "-m", "vit_jax.main", "--config=configs/mine.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 2 and f"delete {folder}/__init__.py, which hides the recipes of the package." in run.stderr


def test_a_recipe_refuses_an_argument_in_its_own_words(tmp_path):
    with pytest.raises(UserError, match=r"no such size\.$"):
        read(tmp_path, "def get_config():\n    raise ValueError('no such size')\n")


def test_a_mistake_in_a_grid(tmp_path):
    (tmp_path / "mine.py").write_text("def get_config():\n    pass\n\ndef get_grid():\n    return 1 / 0\n")
    with pytest.raises(UserError, match=r"mine\.py, line 5: ZeroDivisionError"):
        read_grid(["", f"--config={tmp_path / 'mine.py'}"])


def test_a_bug_of_the_package_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.module_from_spec", lambda found: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read(tmp_path, BODY.format("pass"))


COPY = BODY.format("copy, own = ConfigDict(config.evals.test), config.evals\n    config.unlock()\n    {}")
COPY = "from ml_collections import ConfigDict\n" + COPY


def test_copies_of_an_evaluation_share_nothing(tmp_path):
    """Whatever is set by flags; what a recipe sets in both at once is refused."""
    for number, line in enumerate(("own.more = copy", "own.more, own.test.split = copy, 'train'", "own.test = copy")):
        config = read(tmp_path, COPY.format(line), f"copied{number}.py").config
        for name in config.evals:
            before = {other: one.to_dict() for other, one in config.evals.items()}
            config.evals[name].source, config.evals[name].every = "synthetic", 7
            after = {other: one.to_dict() for other, one in config.evals.items()}
            assert {other for other in after if after[other] != before[other]} == {name}
    for line, shared in (
        ("own.more = copy; copy.source, copy.every = 'synthetic', 3", "every, source"),
        ("own.more = own.test", "all fields"),
    ):
        advice = r"; copy an evaluation by base\.evaluation\(\*\*config\.evals\.NAME\)\."
        with pytest.raises(UserError, match=rf"shared\.py: evals\.test and evals\.more share {shared}{advice}"):
            read(tmp_path, COPY.format(line), "shared.py")
