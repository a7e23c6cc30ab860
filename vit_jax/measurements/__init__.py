"""Measurements of the devices here, each beside the speed that the device should have."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
