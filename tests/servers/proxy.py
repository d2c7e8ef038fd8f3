"""What stands between a client and an object store, and misbehaves: refuses, throttles, loses answers, dies.

It forwards HTTP requests to a real server and notes them. A *fault* is asked about each request before it is
forwarded, and says what happens in its place.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.servers.handler import QuietKeepAlive


class Loss(enum.Enum):
    """A connection that breaks."""

    OF_REQUEST = enum.auto()
    """Before the server got the request."""
    OF_ANSWER = enum.auto()
    """After the server did what was asked, and before the client knows."""


@dataclass(frozen=True)
class Request:
    """What a client asked for.

    Attributes:
      kind: "read", "write", "delete" or "list"; "other" for what is none of them.
      key: The object's, within its bucket; of a list the prefix.
    """

    kind: str
    key: str


Fault = Callable[[Request], "int | Loss | None"]
"""What happens in place of a request: the status of an error, a loss, or None for nothing."""


def parse_s3(method: str, target: str) -> Request:
    """A request to S3, the bucket in its path."""
    url = urlsplit(target)
    key = unquote(url.path).removeprefix("/").partition("/")[2]
    query = parse_qs(url.query)
    if method == "GET" and "list-type" in query:
        return Request("list", query.get("prefix", [""])[0])
    return Request({"GET": "read", "HEAD": "read", "PUT": "write", "DELETE": "delete"}.get(method, "other"), key)


def parse_gcs(method: str, target: str) -> Request:
    """A request to Google Cloud Storage's JSON API."""
    url = urlsplit(target)
    query = parse_qs(url.query)
    key = unquote(url.path.partition("/o/")[2])
    if method == "POST":
        return Request("write", query["name"][0])
    if method == "GET" and not key:
        return Request("list", query.get("prefix", query.get("startOffset", [""]))[0])
    return Request({"GET": "read", "DELETE": "delete"}.get(method, "other"), key)


def s3_error(status: int) -> bytes:
    """The body of an error of S3."""
    code = {403: "AccessDenied", 503: "SlowDown"}.get(status, "InternalError")
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} by test</Message></Error>".encode()


def gcs_error(status: int) -> bytes:
    """The body of an error of Google Cloud Storage."""
    return json.dumps({"error": {"code": status, "message": f"error {status} by test"}}).encode()


class Proxy:
    """Forwards requests on a port of its own to a server on another.

    Args:
      upstream: The server's port.
      parse: Reads method and target of a request.
      error: Makes the body of an error.
    """

    def __init__(self, upstream: int, parse: Callable[[str, str], Request], error: Callable[[int], bytes]):
        self.upstream = upstream
        self.parse = parse
        self.error = error
        self.done: list[Request] = []
        self._fault: Fault | None = None
        self._server: _Server | None = None
        self.start()
        self.port = self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def faulty(self, fault: Fault) -> Iterator[None]:
        """Requests in the block meet a fault."""
        self._fault = fault
        try:
            yield
        finally:
            self._fault = None

    def outcome(self, request: Request) -> int | Loss | None:
        return None if self._fault is None else self._fault(request)

    def start(self) -> None:
        """Serves; after `stop`, on the same port again."""
        self._server = _Server(getattr(self, "port", 0), self)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), name="proxy").start()

    def stop(self) -> None:
        """Ends as a process that is killed does: no connection is answered any more, none is accepted."""
        server, self._server = self._server, None
        if server is not None:
            server.die()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, proxy: Proxy):
        super().__init__(("127.0.0.1", port), _Handler)
        self.proxy = proxy
        self.dead = False
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()

    def die(self) -> None:
        self.dead = True
        self.shutdown()
        self.server_close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # it may have gone by itself
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request, client_address) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """Says nothing of connections that break: that is what they are here for."""


class _Handler(QuietKeepAlive, BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def _forward(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = proxy.parse(self.command, self.path)
        outcome = proxy.outcome(request)
        if self.server.dead or outcome is Loss.OF_REQUEST:
            self.close_connection = True
            return
        if isinstance(outcome, int):
            self._send(outcome, {}, proxy.error(outcome))
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        self._upstream.request(self.command, self.path, body, headers)
        answer = self._upstream.getresponse()
        data = answer.read()
        if answer.status < 400:
            proxy.done.append(request)
        if outcome is Loss.OF_ANSWER:
            self.close_connection = True
            return
        self._send(answer.status, dict(answer.getheaders()), data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815 - named by the base class

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
