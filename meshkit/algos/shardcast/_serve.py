"""HTTP server of a node of shardcast: versions, manifests and shards, also of versions that are still on their way."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meshkit.algos.shardcast._store import Store
from meshkit.errors import CheckpointError

WAIT_S = 5.0
"""how long a request waits for a shard that is on its way, before it is told to ask elsewhere"""


class QuietServer(ThreadingHTTPServer):
    """In threads that do not keep the process, and without a traceback for each connection that is lost."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Server:
    """Serves a store in threads of its own until it is closed.

    GET /versions: a list. GET /N/manifest. GET /N/shards/I: bytes; 503 where it has not come yet, 404 where there is none.
    """

    def __init__(self, store: Store, host: str, port: int) -> None:
        if not 0 <= port < 1 << 16:
            raise CheckpointError(f"shardcast: port={port}. Give one from 1 to 65535, or 0 for a free one.")
        try:
            self._server = QuietServer((host, port), type("Handler", (_Handler,), {"store": store}))
        except OSError as error:
            raise CheckpointError(f"shardcast: port={port}: {error}. Choose another port.") from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="shardcast server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    store: Store
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        try:
            if parts == ["versions"]:
                return self._send(200, json.dumps(self.store.versions).encode())
            version = int(parts[0])
            if parts[1:] == ["manifest"] and (there := self.store.get(version)) is not None:
                return self._send(200, there.manifest.to_json().encode())
            if len(parts) == 3 and parts[1] == "shards":
                data = self.store.read(version, int(parts[2]), wait_s=WAIT_S)
                return self._send(503, b"not yet") if data is None else self._send(200, data)
        except (ValueError, KeyError):
            pass
        self._send(404, b"no such version or shard")

    def _send(self, status: int, data: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:  # who asked is gone
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each shard would bury all else."""
