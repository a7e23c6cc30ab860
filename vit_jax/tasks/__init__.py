"""Tasks, for which models are trained: the arrays of a batch that each reads, its head, its losses and its metrics."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
