"""What the folder of a run says about it."""

from configs.base import get_config
from vit_jax.monitoring import fields_as_text


def test_values_of_fields_are_text_and_what_has_no_value_is_unset():
    config = get_config()
    config.update(total_steps=10, total_epochs=None, report=True)
    names = ("total_epochs", "total_steps", "optim.name", "report")
    assert [fields_as_text(config)[name] for name in names] == ["unset", "10", config.optim.name, "true"]
