"""The tests. `typechecked` checks types and shapes in the packages that state shapes, which pyproject.toml names.

An int may be given for a float.
"""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
