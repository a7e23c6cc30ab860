"""What a model is trained for: what a task reads from a batch, the head that it needs, its losses and its metrics."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
