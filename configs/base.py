"""The start of every recipe: all fields with their defaults, which a recipe changes.

vit_jax/config/fields.py has a row for each field: default, meaning and what it accepts; docs/fields.md shows them.
"""

from vit_jax.config import evaluation, get_config, parse_argument

__all__ = ["evaluation", "get_config", "parse_argument"]
