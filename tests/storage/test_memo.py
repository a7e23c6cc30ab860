"""Small results that are kept for later processes."""

from vit_jax.storage import memo


def test_a_result_is_found_by_its_key_until_its_file_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    assert memo.recall("numbers", "a", int) is None
    memo.remember("numbers", "a", "3")
    memo.remember("numbers", "\udce9", "4")  # a path that is not UTF-8
    assert [memo.recall("numbers", key, int) for key in ("a", "\udce9", "b")] == [3, 4, None]
    assert memo.recall("others", "a", int) is None
    for path in (tmp_path / "cache" / "numbers").iterdir():
        path.write_text("damaged")
    assert memo.recall("numbers", "a", int) is None
    memo.remember("numbers", "a", "5")
    assert memo.recall("numbers", "a", int) == 5


def test_a_cache_that_cannot_be_used_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "file"))
    memo.remember("numbers", "a", "3")
    assert memo.recall("numbers", "a", int) is None
