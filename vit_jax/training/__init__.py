"""A training run: its folder, its start, the logs, saves and evaluations between the steps, and its end."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
