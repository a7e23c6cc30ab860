"""Loads models from files and saves them, in our own layout and in those of other projects."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
