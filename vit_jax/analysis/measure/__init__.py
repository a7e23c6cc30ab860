"""Measures of the inside of a model, as functions of arrays: attention, representations, gradients and parameters."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
