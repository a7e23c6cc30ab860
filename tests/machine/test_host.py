import os

import pytest

from vit_jax.machine import count_cores, host_memory


@pytest.mark.parametrize(("granted", "cores"), [("max 100000", 16), ("250000 100000", 3), ("6400000 100000", 16)])
def test_cores_are_those_that_the_process_and_its_container_may_use(granted, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    (tmp_path / "cpu.max").write_text(granted + "\n")
    assert count_cores(tmp_path / "cpu.max") == cores and count_cores(tmp_path / "none") == 16


@pytest.mark.parametrize(("limit", "bytes_"), [("max", None), (str(2**30), 2**30), (str(2**80), None)])
def test_memory_is_that_which_the_container_may_use(limit, bytes_, tmp_path):
    (tmp_path / "memory.max").write_text(limit + "\n")
    whole = host_memory(tmp_path / "none")
    assert host_memory(tmp_path / "memory.max") == (bytes_ or whole) and whole > 2**30
