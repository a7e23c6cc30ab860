"""Data: from the config to global batches on the devices.

`complete_config` opens the data and checks it before anything is compiled. `spec` gives the shapes and counts that a
config states, without opening anything. `train_batches` and `EvalBatches` give the batches.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
