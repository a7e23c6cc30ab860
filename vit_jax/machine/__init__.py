"""The machine that runs this process: packages, accelerators, the cluster around it, memory and disks.

Only `devices.py` and `jax_settings.py` import jax.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
