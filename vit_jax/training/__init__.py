"""A training run: its folder, how it begins, what is done beside the steps, how it ends."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
