"""Steps that the runs of a sweep share: what makes another program, and that the numbers are those of constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import slow_but
from vit_jax import UserError, optim, shared_step
from vit_jax.config import OPTIMIZERS, resolve_config
from vit_jax.program import program_without_data


def changed(tiny, field, value):
    config = tiny.copy_and_resolve_references()
    config.update_from_flattened_dict({field: value})
    return resolve_config(config)


def test_what_only_scales_updates_makes_no_other_program(tiny, monkeypatch):
    tiny.task.label_smoothing = 0.1
    _, program = program_without_data(tiny)
    monkeypatch.setattr(shared_step, "_compile_once", lambda definition: lambda *given: (definition, given))

    def share(field, value):
        shared = shared_step.share_step(program, changed(tiny, field, value))
        return shared.train_step(None, None)

    base, (*_, arguments) = share("seed", 0)
    same = {"seed": 1, "base_lr": 0.0, "warmup_steps": 3, "decay_type": "linear", "total_steps": 12}
    same |= {"optim.weight_decay": 0.2, "optim.beta1": 0.8, "optim.ema_decay": 0.99, "log_every": 1}
    for field, value in same.items():
        found, (*_, given) = share(field, value)
        assert (found, hash(found)) == (base, hash(base)), field
        shapes = [jax.tree.map(jnp.shape, each) for each in (arguments, given)]
        assert shapes[0] == shapes[1], field
    early = shared_step.share_step(program, changed(tiny, "decay_type", "constant")).final_step(4, 8)
    found, (*_, given) = early(None, None)  # the cooldown of an early end
    assert found == base and given.relative_lr[:9].tolist() == [1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    others = {"optim.weight_decay": 0.0, "optim.ema_decay": 0.0, "optim.beta1": 0.0, "task.label_smoothing": 0.0}
    others |= {"grad_norm_clip": 2.0, "accum_steps": 2, "optim.name": "lion", "optim.sam_rho": 0.1}
    for field, value in others.items():
        assert share(field, value)[0] != base, field
    with pytest.raises(UserError, match=r"too many for step_numbers=arguments, .*; choose at most 67,108,864, or set"):
        share("total_steps", 2**31 - 1)


@pytest.mark.parametrize("name", slow_but(("adamw", "adafactor"), OPTIMIZERS))
def test_updates_are_those_of_constants(tiny, name):
    tiny.optim.name, tiny.warmup_steps, tiny.optim.decay_factor = name, 2, "schedule"
    tiny.optim.moment_dtype = "bfloat16" if "moment_dtype" in OPTIMIZERS[name].defaults else None
    config = resolve_config(tiny)
    random = np.random.default_rng(0)
    params = {"block": {"dense1": {"kernel": random.normal(size=(40, 48)).astype("f")}}}
    grads = jax.tree.map(lambda leaf: random.normal(size=(3, *leaf.shape)).astype("f"), params)

    def updates(config, rate):
        start, optimizer = (optim.make_optimizer(each, rate, optim.UNSCALED) for each in (resolve_config(tiny), config))

        def update(state, grads):
            changes, state = optimizer.update(grads, state, params)
            return state, changes

        return jax.lax.scan(update, start.init(params), grads)[1]

    def with_arguments(arguments):
        return updates(shared_step._replace_fields(config, arguments.values), arguments.rate)

    expected = jax.jit(lambda: updates(config, optim.make_schedule(config)))()
    found = jax.jit(with_arguments)(shared_step.make_arguments(config))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-5 * np.abs(other).max())
