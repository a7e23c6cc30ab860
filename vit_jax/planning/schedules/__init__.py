"""The cycles of a compiled program, read off the schedule that the TPUs' compiler writes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
