"""Google Cloud Storage in memory: the part of its JSON API that TensorStore uses, for tests on the loopback interface.

    python -m tests.servers.gcs PORT BUCKET...

Preconditions are checked under the lock that the change is made under, so several writers may race. A page of a list
has few entries, so that clients must ask for the next. The API is that of
https://cloud.google.com/storage/docs/json_api/v1/objects.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.servers.handler import QuietKeepAlive

_PAGE = 20


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, message: str = ""):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Stored:
    """An object's bytes, and the generation that they are."""

    generation: int
    data: bytes


@dataclass
class Buckets:
    """What is stored: objects by name, by bucket. Generations rise over all buckets and are never used again."""

    names: list[str]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self):
        self._objects: dict[str, dict[str, Stored]] = {name: {} for name in self.names}
        self._generations = itertools.count(1)

    def get(self, bucket: str, name: str, conditions: dict[str, str]) -> Stored:
        with self.lock:
            found = self._of(bucket).get(name)
        _check(conditions, found, changed=HTTPStatus.NOT_MODIFIED)
        if found is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"No such object: {bucket}/{name}")
        return found

    def insert(self, bucket: str, name: str, data: bytes, conditions: dict[str, str]) -> Stored:
        with self.lock:
            objects = self._of(bucket)
            _check(conditions, objects.get(name), changed=HTTPStatus.PRECONDITION_FAILED)
            objects[name] = Stored(next(self._generations), data)
            return objects[name]

    def delete(self, bucket: str, name: str, conditions: dict[str, str]) -> None:
        with self.lock:
            objects = self._of(bucket)
            _check(conditions, objects.get(name), changed=HTTPStatus.PRECONDITION_FAILED)
            if objects.pop(name, None) is None:
                raise RefusedError(HTTPStatus.NOT_FOUND, f"No such object: {bucket}/{name}")

    def page(self, bucket: str, query: dict[str, str]) -> tuple[list[tuple[str, Stored]], str | None]:
        """Objects in the order of their names, and the token of the next page."""
        with self.lock:
            objects = sorted(self._of(bucket).items())
        first = query.get("startOffset", "")
        end = query.get("endOffset")
        after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
        matching = [
            (name, stored)
            for name, stored in objects
            if name.startswith(query.get("prefix", ""))
            and name >= first
            and (end is None or name < end)
            and name > after
        ]
        page = matching[: min(_PAGE, int(query.get("maxResults", _PAGE)))]
        more = len(page) < len(matching)
        return page, base64.urlsafe_b64encode(page[-1][0].encode()).decode() if more else None

    def _of(self, bucket: str) -> dict[str, Stored]:
        if bucket not in self._objects:
            raise RefusedError(HTTPStatus.NOT_FOUND, "The specified bucket does not exist.")
        return self._objects[bucket]


def _check(conditions: dict[str, str], found: Stored | None, changed: HTTPStatus) -> None:
    """Compares preconditions with what is there; generation 0 stands for nothing."""
    generation = 0 if found is None else found.generation
    if "ifGenerationMatch" in conditions and int(conditions["ifGenerationMatch"]) != generation:
        raise RefusedError(HTTPStatus.PRECONDITION_FAILED, "At least one of the pre-conditions did not hold.")
    if "ifGenerationNotMatch" in conditions and int(conditions["ifGenerationNotMatch"]) == generation:
        raise RefusedError(changed, "At least one of the pre-conditions did not hold.")


class _Handler(QuietKeepAlive, BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._insert)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, method) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        try:
            if not self.headers.get("Authorization", "").startswith("Bearer "):
                raise RefusedError(HTTPStatus.UNAUTHORIZED, "Anonymous caller does not have access to the bucket.")
            bucket, name = self._place(url.path)
            method(bucket, name, query, body)
        except RefusedError as refused:
            error = {"error": {"code": refused.status.value, "message": str(refused)}}
            no_body = refused.status is HTTPStatus.NOT_MODIFIED
            self._send(refused.status, b"" if no_body else json.dumps(error).encode())

    def _place(self, path: str) -> tuple[str, str]:
        """Bucket and object of [/upload]/storage/v1/b/BUCKET/o[/OBJECT]."""
        parts = path.removeprefix("/upload").split("/", 6)
        if parts[:4] != ["", "storage", "v1", "b"] or parts[5:6] != ["o"]:
            raise RefusedError(HTTPStatus.NOT_IMPLEMENTED, f"{path} is not served")
        return unquote(parts[4]), unquote(parts[6]) if len(parts) > 6 else ""

    def _get(self, bucket: str, name: str, query: dict[str, str], _: bytes) -> None:
        if not name:
            page, token = self.server.buckets.page(bucket, query)
            listed = {"kind": "storage#objects", "items": [_describe(bucket, n, stored) for n, stored in page]}
            self._send(HTTPStatus.OK, json.dumps(listed | ({} if token is None else {"nextPageToken": token})).encode())
            return
        stored = self.server.buckets.get(bucket, name, query)
        if query.get("alt") != "media":
            self._send(HTTPStatus.OK, json.dumps(_describe(bucket, name, stored)).encode())
            return
        headers = {"X-Goog-Generation": str(stored.generation), "X-Goog-Metageneration": "1"}
        if (asked := self.headers.get("Range")) is None:
            self._send(HTTPStatus.OK, stored.data, headers)
            return
        size = len(stored.data)
        begin, end = _range(asked, size)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._send(HTTPStatus.PARTIAL_CONTENT, stored.data[begin:end], headers)

    def _insert(self, bucket: str, name: str, query: dict[str, str], body: bytes) -> None:
        if name or query.get("uploadType") != "media" or not query.get("name"):
            raise RefusedError(HTTPStatus.NOT_IMPLEMENTED, "only uploads with uploadType=media are served")
        stored = self.server.buckets.insert(bucket, query["name"], body, query)
        self._send(HTTPStatus.OK, json.dumps(_describe(bucket, query["name"], stored)).encode())

    def _delete(self, bucket: str, name: str, query: dict[str, str], _: bytes) -> None:
        self.server.buckets.delete(bucket, name, query)
        self._send(HTTPStatus.NO_CONTENT, b"")

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def _describe(bucket: str, name: str, stored: Stored) -> dict[str, str]:
    """An object's resource."""
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": bucket,
        "size": str(len(stored.data)),
        "generation": str(stored.generation),
        "metageneration": "1",
    }


def _range(asked: str, size: int) -> tuple[int, int]:
    """The bytes of a `Range: bytes=…`: from the first, to before the second."""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    begin, end = (max(0, size - int(last)), size) if not first else (int(first), int(last) + 1 if last else size)
    if begin >= size:
        raise RefusedError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
    return begin, min(end, size)


class Server(ThreadingHTTPServer):
    """Serves some buckets on a port of the loopback interface."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, buckets: list[str]):
        super().__init__(("127.0.0.1", port), _Handler)
        self.buckets = Buckets(buckets)


if __name__ == "__main__":
    Server(int(sys.argv[1]), sys.argv[2:]).serve_forever()
