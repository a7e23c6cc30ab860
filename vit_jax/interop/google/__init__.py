"""The files of the authors of the paper, of BiT and of AugReg."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
