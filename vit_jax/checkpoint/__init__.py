"""Checkpoints of a run: the training state, and JSON that describes the model and the data."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
