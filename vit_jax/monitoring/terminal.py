"""The output of a run on stderr: lines, and in a terminal a progress bar below them."""

import sys

from tqdm import tqdm

from vit_jax import ignore_closed_stderr


class Terminal:
    """Lines of text and a bar on stderr, as long as anything reads it."""

    def __init__(self, bar: bool, start: int, total: int):
        """Draws a bar from step `start` to `total`, if asked to or if stderr is a terminal."""
        self.has_bar = bar or (sys.stderr is not None and sys.stderr.isatty())  # a notebook is none, but shows a bar
        with ignore_closed_stderr():
            self._bar = tqdm(
                initial=start, total=total, unit="step", dynamic_ncols=True, smoothing=0.05, disable=not self.has_bar
            )

    @ignore_closed_stderr()
    def write(self, text: str) -> None:
        """Writes lines."""
        tqdm.write(text, file=sys.stderr)

    @ignore_closed_stderr()
    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(step - self._bar.n)

    @ignore_closed_stderr()
    def close(self) -> None:
        """Ends the bar, which stays visible as it is."""
        self._bar.close()
