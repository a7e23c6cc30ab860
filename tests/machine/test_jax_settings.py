"""The machine's settings of jax: commands compute without them, and the library names them."""

import jax
import pytest

from vit_jax import UserError, program
from vit_jax.machine import check_settings, jax_settings, reset_settings

OTHERS = {
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_threefry_partitionable": False,
    "jax_transfer_guard": "disallow",
}


@pytest.fixture(params=OTHERS)
def changed(request, monkeypatch):
    """The name of a setting that has another value."""
    before = getattr(jax.config, request.param)
    monkeypatch.setenv(request.param.upper(), str(OTHERS[request.param]))
    jax.config.update(request.param, OTHERS[request.param])
    yield request.param
    jax.config.update(request.param, getattr(before, "value", before))


def test_a_command_ignores_a_setting_and_says_so(changed, capsys):
    reset_settings()
    told = capsys.readouterr().err
    assert f"{changed.upper()}={OTHERS[changed]} is ignored; it is {jax_settings.SETTINGS[changed]} here." in told
    check_settings()
    reset_settings()
    assert not capsys.readouterr().err


def test_a_program_that_trains_is_told_how_to_undo_a_setting(changed, quick):
    with pytest.raises(UserError, match=f"vit_jax does not train with {changed}; set jax.config.update"):
        program.prepare(quick)


def test_every_setting_is_tried():
    assert OTHERS.keys() == jax_settings.SETTINGS.keys()
