"""Configurations: a table with one row per field, and all that is derived from its rows.

`get_config` returns the defaults, from which recipes start. `parse_command_line` returns a recipe with the flags
applied. `check_config` checks a configuration, and `resolve_config` fills in what follows from other fields.
`save_config` and `load_config` store it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
