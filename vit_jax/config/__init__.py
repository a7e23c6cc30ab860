"""Configurations: the fields, one row each, and all that is derived from the rows.

`get_config` gives the defaults, from which recipes start; `parse_command_line` a recipe with the flags; `check_config`
and `resolve_config` make it ready; `save_config` and `load_config` keep it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
