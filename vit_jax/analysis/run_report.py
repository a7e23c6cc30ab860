"""Makes the HTML page of runs, if the libraries that draw it are installed."""

from collections.abc import Sequence
from types import ModuleType

from vit_jax import user_errors
from vit_jax.config import get_config
from vit_jax.monitoring import RunFolder, fields_as_text

PAGE = "report.html"


def load_drawing() -> ModuleType:
    """Returns the module that draws the page.

    Raises:
        UserError: bokeh or matplotlib, which it needs, is missing.
    """
    with user_errors("cannot draw a report", ModuleNotFoundError):
        from vit_jax.analysis import run_page
    return run_page


def make_page(runs: Sequence[RunFolder]) -> str:
    """Returns the page of runs; raises UserError as `load_drawing` does."""
    return load_drawing().run_page(runs, fields_as_text(get_config()))
