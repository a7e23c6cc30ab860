"""Sweeps over fields and seeds, records of finished runs, and tables and plots of them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
