"""The server that the test beds stand on."""

from __future__ import annotations

from http.server import ThreadingHTTPServer


class QuietServer(ThreadingHTTPServer):
    """Clients that hang up are what these tests are about; on a busy machine many knock at once."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        return
