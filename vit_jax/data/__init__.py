"""Data: from the config to global batches on the devices.

`complete` opens the data and checks it, before anything is compiled; `spec` gives shapes and counts of a completed
config without opening anything; `make` and `make_eval` give the batches.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
