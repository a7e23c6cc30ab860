"""Plans: the memory, the time and the communication of a run, found by compiling it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
