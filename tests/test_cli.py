"""Exit codes of the command lines, and where they keep compiled programs."""

import importlib.util
import io
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from tests.conftest import ROOT
from vit_jax import NonFiniteLoss, Preempted, UserError, cli, machine
from vit_jax.__main__ import COMMANDS

COMMAND = "import vit_jax; from vit_jax import cli; cli.run_command(is_report=True, command=lambda argv"
ASKS = "import jax; from vit_jax import cli; cli.run_command(lambda argv: print(jax.default_backend()))"


def noted(error, *notes):
    """An error with notes."""
    for note in notes:
        error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("a sentence."), 2, "vit_jax: a sentence.\n"),
        (NonFiniteLoss("a sentence."), 1, "vit_jax: a sentence.\n"),
        (Preempted("a sentence."), 42, "vit_jax: a sentence.\n"),
        (KeyboardInterrupt(), 130, "vit_jax: interrupted; what the same command does.\n"),
        (cli.Terminated(), 143, "vit_jax: terminated; what the same command does.\n"),
        (
            noted(KeyboardInterrupt(), "continues after step 48."),
            130,
            "vit_jax: interrupted; continues after step 48.\n",
        ),
        (noted(cli.Terminated(), "continues after step 48."), 143, "vit_jax: terminated; continues after step 48.\n"),
    ],
)
def test_what_ends_a_command(error, code, text, capsys, monkeypatch):
    def command(argv):
        raise error

    monkeypatch.setattr(cli.os, "_exit", sys.exit)
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)  # this process keeps its own

    with pytest.raises(SystemExit) as end:
        cli.run_command(command, rerun_advice="what the same command does.")
    assert (end.value.code, capsys.readouterr().err) == (code, text)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AssertionError(), ""),
        (RuntimeError("no backend 'x'. (set JAX_PLATFORMS='' to choose an available one)"), " (no backend 'x')"),
    ],
)
def test_devices_that_do_not_start_are_a_sentence(error, why, capsys, monkeypatch):
    def start(*args):
        raise error

    monkeypatch.setattr(cli.os, "_exit", sys.exit)
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)  # this process keeps its own
    monkeypatch.setattr(jax, "devices", start)
    with pytest.raises(SystemExit) as end:
        cli.run_command(start)
    advice = "unset it, or see what is missing with: python -m vit_jax.doctor"
    sentence = f"vit_jax: JAX_PLATFORMS=cpu names devices that do not start here{why}; {advice}\n"
    assert (end.value.code, capsys.readouterr().err) == (2, sentence)


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", rb"\udce9 \xe9"), ("utf-8", rb"\udce9 " + "é".encode())])
def test_stdout_escapes_what_its_encoding_does_not_have(encoding, printed, monkeypatch):
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    cli.run_command(lambda argv: print("\udce9 é", flush=True))
    assert sys.stdout.buffer.getvalue().rstrip() == printed


def test_a_command_that_saves_nothing_promises_nothing(capsys, monkeypatch):
    monkeypatch.setattr(cli, "exit_with_message", lambda sentence, code: print(sentence))
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)

    def command(argv):
        raise KeyboardInterrupt

    cli.run_command(command)
    assert capsys.readouterr().out == "interrupted.\n"


def test_bugs_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.run_command(lambda argv: 1 / 0)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-c", f"{COMMAND}: [print('line', i) for i in range(9999)])"], 0, ""),
        pytest.param(["-c", f"{COMMAND}: print('a short answer'))"], 0, "", marks=pytest.mark.slow),
        (
            ["-c", f"{COMMAND}: print(1) or vit_jax.choose('letter', 'a', 'b'))"],
            2,
            "unknown letter 'a'; choose from b.",
        ),
        pytest.param(["-m", "vit_jax.predict", "--help"], 0, "", marks=pytest.mark.slow),
        (["-m", "vit_jax"], 0, ""),
        pytest.param(["-m", "vit_jax.main", "--config=configs/digits.py", "--print"], 0, "", marks=pytest.mark.slow),
        pytest.param(["-m", "vit_jax.doctor"], 0, "", marks=pytest.mark.slow),
    ],
)
def test_an_answer_that_nobody_reads_to_its_end_is_no_error(words, code, said):
    """The case of `python -m vit_jax.predict ... --csv | head -4`."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, f"vit_jax: {said}\n" if said else "")


@pytest.mark.parametrize("reports", [False, True])
def test_another_closed_pipe_is_an_error(capfd, reports):
    def command(argv):
        raise BrokenPipeError("a connection")

    with pytest.raises(BrokenPipeError, match="a connection"):
        cli.run_command(command, is_report=reports)


def test_a_run_that_cannot_print_any_more_is_not_done():
    """The case of `python -m vit_jax.main ... 2>&1 | head -3`: exit code 0 would mean that it is finished."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "from vit_jax import cli; cli.run_command(lambda argv: print('x' * 10**6, flush=True))"
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert done.returncode not in (0, 2, 42)


def test_compiled_programs_are_kept_for_their_user_alone(monkeypatch, tmp_path):
    kept = {}
    config = SimpleNamespace(jax_compilation_cache_dir=None, update=kept.__setitem__)
    monkeypatch.setattr(cli, "jax", SimpleNamespace(config=config))
    monkeypatch.delenv("VIT_JAX_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    cli.use_compilation_cache()
    assert kept == {"jax_compilation_cache_dir": str(tmp_path / ".cache" / "vit_jax" / "xla")}
    assert (tmp_path / ".cache" / "vit_jax" / "xla").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "mine"))
    cli.use_compilation_cache()
    assert (
        kept == {"jax_compilation_cache_dir": str(tmp_path / "mine" / "xla")} and (tmp_path / "mine" / "xla").is_dir()
    )


@pytest.mark.parametrize(
    ("here", "platforms", "asked"), [(False, None, False), (True, None, True), (False, "tpu,cpu", True)]
)
def test_libtpu_is_asked_only_where_a_tpu_may_be(here, platforms, asked, monkeypatch):
    replaced = {}
    monkeypatch.setattr(cli, "has_tpu", lambda: here)
    monkeypatch.setattr(cli, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=platforms)))
    monkeypatch.setattr(cli, "register_backend_factory", replaced.__setitem__)
    cli.skip_absent_tpu()
    assert replaced == ({} if asked else {"tpu": cli.no_tpu})


@pytest.mark.slow
def test_warnings_begin_alike_whatever_a_library_has_chosen():
    code = "from vit_jax import cli, main; cli.quiet_libraries(); import logging; logging.getLogger('a').warning('odd')"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stderr
    assert said == "WARNING: odd\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None or machine.has_tpu(), reason="no libtpu, or a TPU")
def test_libtpu_says_nothing_where_no_tpu_is():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    said = subprocess.run([sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")


def test_the_door_shows_all_commands():
    done = subprocess.run([sys.executable, "-m", "vit_jax"], capture_output=True, text=True, cwd=ROOT)
    shown = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert shown == list(COMMANDS) and "  train     Trains a model.\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    runnable = {path.stem for path in (ROOT / "vit_jax").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert set(COMMANDS.values()) == runnable - {"__main__"}


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (["plan", "--help"], 0, "usage: python -m vit_jax.plan", ""),
        (["trian"], 2, "", "vit_jax: unknown command 'trian'; did you mean 'train'?\n"),
        (["train", "--config=absent.py"], 2, "", "vit_jax: there is no config file absent.py"),
    ],
)
def test_the_door_leads_to_the_commands(words, code, out, err):
    done = subprocess.run([sys.executable, "-m", "vit_jax", *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code and done.stdout.startswith(out) and done.stderr.startswith(err), done.stderr
    assert bool(done.stdout) == bool(out) and bool(done.stderr) == bool(err)
