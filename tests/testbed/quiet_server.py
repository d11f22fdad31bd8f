"""The server that the test beds stand on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietServer(ThreadingHTTPServer):
    """Clients that hang up are what these tests are about; on a busy machine many knock at once."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        return


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **known: object) -> Iterator[str]:
    """Answer on a free loopback port until the block ends; the handler knows what is given here."""
    # else a body waits for the client's answer to the headers: 40 ms, in every reply
    known["disable_nagle_algorithm"] = True
    server = QuietServer(("127.0.0.1", 0), type("Handler", (handler,), known))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
