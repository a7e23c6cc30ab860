"""Takes screenshots of pages in headless Chromium, light and dark, wide and narrow.

Example:
  python -m docs.screenshots workdirs/look/index.html --out=workdirs/screenshots

Chromium is controlled through a pipe (its DevTools protocol), since its own flag for screenshots cannot make narrow
windows.
"""

import argparse
import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vit_jax import UserError, cli, tell

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = {"wide": 1280, "narrow": 390}
MAX_HEIGHT = 12_000  # pixels; Chromium draws no larger pictures
# Waits until all visible images are loaded, including those that would be loaded only when they are scrolled to.
LOADED = """Promise.all([...document.images].filter(image => image.checkVisibility()).map(image => {
  image.loading = "eager"
  return image.decode().catch(() => 0)
})).then(() => 0)"""


class Browser:
    """A running Chromium.

    Attributes:
        session: the `sessionId` of the tab that commands are sent to; empty: commands are for the browser itself.
    """

    def __init__(self, commands: int, answers: int) -> None:
        """Takes the file descriptors of the pipes for commands to Chromium and for its answers."""
        self.session: dict[str, str] = {}
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        self._numbers = itertools.count(1)

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        """Sends a command of the protocol, and returns the result in Chromium's answer.

        Raises:
            UserError: Chromium has ended, or refuses the command.
        """
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values, **self.session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise UserError(f"Chromium refuses {method}: {answer['error']['message']}")
                return answer["result"]

    def await_event(self, method: str) -> None:
        """Waits until Chromium reports an event. Other messages that come before are dropped."""
        while self._read().get("method") != method:
            pass

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise UserError("Chromium ended; start it by hand to see why.")
            text += byte
        return json.loads(text)


def find_browser() -> str | None:
    """Returns the path of a Chromium on the PATH, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def start_browser() -> Iterator[Browser]:
    """Starts a Chromium without windows, profile or network, and kills it when the block ends.

    Raises:
        UserError: no Chromium is installed.
    """
    program = find_browser()
    if program is None:
        raise UserError("screenshots need Chromium or Chrome on the PATH, which is not here; install it.")
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    flags = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
    with tempfile.TemporaryDirectory(prefix="vit_jax_browser_", ignore_cleanup_errors=True) as profile:
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        line = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        words = [program, *flags, f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(["bash", "-c", line, "bash", *words], pass_fds=[to_read, to_write], **quiet)
        os.close(to_read)
        os.close(to_write)
        try:
            yield Browser(commands, answers)
        finally:
            process.kill()
            process.wait()


def take_screenshots(page: Path, folder: Path, browser: Browser) -> Iterator[Path]:
    """Writes a screenshot of a page for each theme at each width, and yields its path."""
    target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
    session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    browser.session = {"sessionId": session}
    browser.ask("Page.enable")
    for theme, (name, width) in itertools.product(("light", "dark"), WIDTHS.items()):
        feature = {"name": "prefers-color-scheme", "value": theme}
        browser.ask("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "deviceScaleFactor": 1, "mobile": False}
        browser.ask("Emulation.setDeviceMetricsOverride", height=800, **size)
        browser.ask("Page.navigate", url=page.resolve().as_uri())
        browser.await_event("Page.loadEventFired")
        height = 0
        while (needed := browser.ask("Page.getLayoutMetrics")["cssContentSize"]["height"]) > height < MAX_HEIGHT:
            height = min(needed, MAX_HEIGHT)  # a higher window loads more content, which may make the page higher
            browser.ask("Emulation.setDeviceMetricsOverride", height=height, **size)
            browser.ask("Runtime.evaluate", expression=LOADED, awaitPromise=True)
        if needed > MAX_HEIGHT:
            tell(f"{page} at {width} pixels, {theme}: the first {MAX_HEIGHT:,} of {needed:,} pixels are shown.")
        picture = browser.ask("Page.captureScreenshot", format="png")["data"]
        path = folder / f"{page.stem}-{theme}-{name}.png"
        path.write_bytes(base64.b64decode(picture))
        yield path
    browser.session = {}
    browser.ask("Target.closeTarget", targetId=target)


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: there is no such page, or no Chromium.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="page", help="an HTML or SVG file")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    args = parser.parse_args(argv[1:])
    for page in args.pages:
        if not page.is_file():
            raise UserError(f"there is no page {page}.")
    args.out.mkdir(parents=True, exist_ok=True)
    with start_browser() as browser:
        for page in args.pages:
            for path in take_screenshots(page, args.out, browser):
                print(path)


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
