"""Shards: files of encoded images in several formats, and the manifest beside them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
