"""Serves a page to browsers on this machine.

There is one address, and its page is made anew for each request. No file is written or served.
"""

import contextlib
import threading
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vit_jax import UserError, encode_text, user_errors

HOST = "127.0.0.1"
RETRY: int | None = 15  # seconds after which a browser asks again if the page could not be made
ALLOWED_HOSTS = (
    HOST,
    "localhost",
)  # hosts that a request may name; with another name, a foreign page misleads the browser


def make_server(port: int, make_page: Callable[[], str], seconds: Callable[[], int | None]) -> ThreadingHTTPServer:
    """Returns a server that listens on this machine only; its `serve_forever` answers until it is interrupted.

    Args:
        port: the port to listen on; 0: any that is free.
        make_page: returns the page. Calls do not overlap.
        seconds: returns the number of seconds after which a browser asks again, or None for never.

    Raises:
        UserError: the port is taken.
    """

    making = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD of /; everything else is refused."""

        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            """Sends the page."""
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name not in ALLOWED_HOSTS:
                return self.send_error(403, "this server is for this machine only")
            if self.path != "/":
                return self.send_error(404, "there is one page here: /")
            status, wait = 200, RETRY
            try:
                with making:  # one after the other: what draws has settings of the whole process
                    page, wait = make_page(), seconds()
            except UserError as error:
                status, page = 503, f"<!doctype html><title>report</title><p>{escape(str(error))}</p>"
            content = encode_text(page)
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if wait is not None:
                self.send_header("Refresh", str(wait))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(ConnectionError):  # the reader has left
                    self.wfile.write(content)
            return None

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    with user_errors(f"cannot listen on port {port}", OSError, OverflowError, advice="choose another --port"):
        return ThreadingHTTPServer((HOST, port), Handler)
