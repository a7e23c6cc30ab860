"""TPU kernels (Pallas): programs for one kind of chip, each beside the plain form that it must equal."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
