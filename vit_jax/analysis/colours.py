"""The colours of curves and plots. Those of data are Okabe and Ito's and greys, which colour-blind readers can tell
apart."""

from typing import Literal

Theme = Literal["light", "dark"]

GREY = "#767676"
# Of the runs on a page, or of the metrics of a single run; without the yellow, which is faint on white.
CURVE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#333333")
_OTHERS = ("#cc79a7", "#8c959f", "#f0e442")
# Theme -> background, text and lines, grid, colours of data.
THEMES: dict[Theme, tuple[str, str, str, tuple[str, ...]]] = {
    "light": ("#ffffff", "#1f2328", "#8c959f", ("#0072b2", "#d55e00", "#009e73", *_OTHERS, "#56b4e9", "#e69f00")),
    "dark": ("#0d1117", "#e6edf3", "#656c76", ("#56b4e9", "#e69f00", "#009e73", *_OTHERS, "#0072b2", "#d55e00")),
}
