"""Coordinates the processes of one run, which start, step, save and end together."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
