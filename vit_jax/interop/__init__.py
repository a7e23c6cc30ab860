"""Weights in and out of files."""

from vit_jax.interop.adapt import adapt, check_classes, fields
from vit_jax.interop.ours import WEIGHTS, about
from vit_jax.interop.published import list_models
from vit_jax.interop.weights import LAYOUTS, load, save

__all__ = ["LAYOUTS", "WEIGHTS", "about", "adapt", "check_classes", "fields", "list_models", "load", "save"]
