"""Kernels beside their plain forms, on the devices that are to run them: whether they agree, and which is faster."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
