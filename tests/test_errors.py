"""Advice: what it says to set is enough."""

import logging
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from vit_jax import UserError, cli, errors_of, format_rounded_up, tell, without_queries
from vit_jax.config import check_resumes, load_config, save_config
from vit_jax.data.loader import report_replaced
from vit_jax.sharding import axis_sizes


@settings(derandomize=True, deadline=None)
@given(some.floats(1e-9, 1e12), some.integers(1, 6))
def test_a_number_is_rounded_up_and_not_far(value, digits):
    rounded = float(format_rounded_up(value, digits))
    assert value * (1 - 1e-11) <= rounded <= value * (1 + 1.01 * 10 ** (1 - digits))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(some.integers(1, 10**7), some.data())
def test_as_many_unreadable_images_are_allowed_as_the_message_says(count, data):
    met = data.draw(some.integers(1, min(count, 1000)))

    with pytest.raises(UserError) as raised:
        report_replaced(met, count, 0.0, "cannot read 0")
    advised = re.search(r"set --config\.data\.max_bad=(\S+)$", str(raised.value))
    logging.disable(logging.WARNING)
    try:
        report_replaced(met, count, float(advised[1]), "cannot read 0")
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("devices", "fsdp", "words"), [(1, 3, "3, which does not divide 1,"), (8, 3, "3, which does not divide 8,")]
)
def test_a_mesh_says_what_does_not_divide_the_devices(tiny, devices, fsdp, words):
    tiny.mesh.fsdp = fsdp
    with pytest.raises(UserError, match=words):
        axis_sizes(tiny, devices)


@settings(derandomize=True, deadline=None)
@given(some.integers(1, 10**13))
def test_gigabytes_are_enough(size):
    assert int(float(format_rounded_up(size / 1e9, 3)) * 1e9) >= math.floor(size * (1 - 1e-11))


SIGNED = "https://host/w.npz?X-Amz-Signature=SECRET&a='b,c"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (SIGNED, "https://host/w.npz?..."),
        (f"cannot read {SIGNED}; try again.", "cannot read https://host/w.npz?...; try again."),
        (f'"{SIGNED}", and (HTTP://h?SECRET).', '"https://host/w.npz?...", and (HTTP://h?...).'),
        ("what? photos?/a.jpg and https://host/w.npz", "what? photos?/a.jpg and https://host/w.npz"),
    ],
)
def test_what_follows_the_question_mark_of_an_address_is_hidden(text, shown, capsys):
    assert without_queries(text) == without_queries(shown) == shown
    tell(text)
    assert capsys.readouterr().err == f"{shown}\n"
    with pytest.raises(UserError) as raised, errors_of(f"init_from={SIGNED}"):
        raise UserError(f"{SIGNED}: {text}")
    assert str(raised.value) == f"init_from=https://host/w.npz?...: {shown}"
    record = logging.makeLogRecord({"msg": "%s", "args": (text,)})
    assert cli.PlainFormatter("%(message)s").format(record) == shown


def test_a_stored_configuration_has_no_query_and_is_that_of_the_same_run(tiny, tmp_path):
    tiny.init_from = SIGNED
    save_config(tiny, tmp_path / "config.json")
    assert "SECRET" not in (tmp_path / "config.json").read_text()
    stored = load_config(tmp_path / "config.json")
    for query in ("?X-Amz-Signature=SECRET2", "?..."):
        tiny.init_from = f"https://host/w.npz{query}"
        assert check_resumes(stored, tiny, "here") == []
    tiny.init_from = "https://host/other.npz?X-Amz-Signature=SECRET"
    assert check_resumes(stored, tiny, "here") == ["init_from: https://host/w.npz?... -> https://host/other.npz?..."]
