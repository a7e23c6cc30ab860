"""How the equations of a model are executed on devices: forms of attention and MLP, their choice, and their check."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
