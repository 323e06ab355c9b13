"""A server in front of another: it can want a password, be slow, or die in the middle."""

from __future__ import annotations

import base64
import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Proxy:
    """What the proxy does to requests; may be changed while it runs."""

    upstream: str
    delay_s: float = 0.0
    credentials: str | None = None
    die_at: str | None = None  # part of a path: from the first such request on, every connection is dropped
    dead: bool = False
    address: str = ""

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=30)
        headers = {name: value for name, value in headers.items() if name.lower() != "host"}
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        try:
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def handle_any(self) -> None:
        proxy = self.proxy
        proxy.dead = proxy.dead or bool(proxy.die_at and proxy.die_at in self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if proxy.dead:
            self.close_connection = True
            return
        time.sleep(proxy.delay_s)
        if proxy.credentials and not self._knows(proxy.credentials):
            self._answer(401, [], b"who are you?")
            return
        self._answer(*proxy.forward(self.command, self.path, dict(self.headers), body))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - the base class's names

    def _knows(self, credentials: str) -> bool:
        expected = base64.b64encode(credentials.encode()).decode()
        return bool(self.headers.get("Authorization") == f"Basic {expected}")

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads = True
    proxy.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
