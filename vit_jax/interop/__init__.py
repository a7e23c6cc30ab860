"""Weights in and out of files."""

from vit_jax.interop.adapt import adapt
from vit_jax.interop.load import load
from vit_jax.interop.ours import WEIGHTS, about
from vit_jax.interop.save import LAYOUTS, save

__all__ = ["LAYOUTS", "WEIGHTS", "about", "adapt", "load", "save"]
