"""Files are replaced whole or not at all, and errors of libraries become sentences."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vit_jax import UserError, reason, user_errors
from vit_jax.storage import atomic_write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == tmp_path and temporary.suffix == ".partial"
    assert path.read_text() == "new" and names(tmp_path) == ["x.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(error), atomic_write(str(path)) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["x.json"]


def test_file_and_folder_are_synced_before_and_after_the_file_is_renamed(tmp_path, monkeypatch):
    path, synced = tmp_path / "x", []

    def fsync(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(path) as temporary:
        temporary.write_text("1")
    assert synced == [(str(temporary), False), (str(tmp_path), True)]


def test_a_folder_is_not_replaced(tmp_path):
    words = r"^cannot write x: it is a folder$"
    with pytest.raises(UserError, match=words), user_errors("cannot write x"), atomic_write(tmp_path):
        pass
    assert names(tmp_path) == []


def test_several_writers_do_not_disturb_one_another(tmp_path):
    def write(number):
        with atomic_write(tmp_path / "x") as temporary:
            temporary.write_text(str(number) * 10_000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(set((tmp_path / "x").read_text())) == 1 and names(tmp_path) == ["x"]


def test_what_killed_writers_left_is_removed_in_time(tmp_path):
    old, new, other = (tmp_path / name for name in ("x[1].0.partial", "x[1].1.partial", "y.2.partial"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, time.time() - 48 * 3600))
    with atomic_write(tmp_path / "x[1]") as temporary:
        temporary.touch()
    assert names(tmp_path) == ["x[1]", new.name, other.name]


def test_a_long_name_is_no_obstacle(tmp_path):
    with atomic_write(tmp_path / ("ä" * 127)) as temporary:
        temporary.touch()
    assert names(tmp_path) == ["ä" * 127]


def test_errors_of_libraries_become_sentences():
    words = r"^cannot read /nothing: No such file or directory; try another$"
    with pytest.raises(UserError, match=words) as raised, user_errors("cannot read /nothing", advice="try another"):
        Path("/nothing").read_text()
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    with pytest.raises(UserError, match=r"^it failed: first$"), user_errors("it failed", ValueError):
        raise ValueError("first.\nsecond")
    with pytest.raises(UserError, match=r"^plain$"), user_errors("it failed", Exception):
        raise UserError("plain")
    assert reason(TimeoutError()) == "TimeoutError"


def test_bugs_stay_bugs_unless_they_are_named():
    with pytest.raises(KeyError), user_errors("it failed", Exception):
        raise KeyError("x")
    with pytest.raises(ZeroDivisionError), user_errors("it failed"):
        raise ZeroDivisionError
    with pytest.raises(UserError, match=r"^it failed: 'x'$"), user_errors("it failed", Exception, KeyError):
        raise KeyError("x")
