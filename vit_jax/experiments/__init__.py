"""Reproduces the paper: sweeps over fields and seeds, records of finished runs, and the pages made from the records."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
