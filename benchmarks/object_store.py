"""An object store on this machine, in a process of its own: of S3 what TensorStore asks for, kept in memory.

moto's server, which knows all of S3, takes 6 to 9 ms of one core a request and handles one after the other: with eight
hosts the last one waits for half a second, of a save that takes five. No real store does that, and here it would be
taken for a cost of the save. Signatures are not checked. Conditions are, since databases rely on them.

    python -m benchmarks.object_store        prints its port, and ends with its standard input
"""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"
ACCESS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
"""What a client's environment must have; any key will do."""

_STATUS = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    304: "Not Modified",
    404: "Not Found",
    405: "Method Not Allowed",
    412: "Precondition Failed",
}
_LIMIT = 1 << 20  # bytes of a body that wait in a stream's buffer

Reply = tuple[int, Mapping[str, str], bytes]


class Store:
    """Objects by their path, `/bucket/key`, each with a tag that changes whenever it is written."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[str, bytes]] = {}
        self._tags = itertools.count(1)

    def reply(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Does what a request asks for; header names are in lower case."""
        url = urlsplit(target)
        path = unquote(url.path)
        query = parse_qs(url.query)
        if "list-type" in query:
            return 200, {}, self._list(path.rstrip("/") + "/", query.get("prefix", [""])[0])
        tag, data = self._objects.get(path, (None, b""))
        if tag is None and method in ("GET", "HEAD"):
            return 404, {}, b""
        if (wanted := headers.get("if-match")) is not None and wanted != tag:
            return 412, {}, b""
        if tag is not None and headers.get("if-none-match") in (tag, "*"):
            return (412 if method == "PUT" else 304), {"ETag": tag}, b""
        if method == "PUT":
            tag = f'"{next(self._tags)}"'
            self._objects[path] = tag, body
            return 200, {"ETag": tag}, b""
        if method == "DELETE":
            self._objects.pop(path, None)
            return 204, {}, b""
        if method not in ("GET", "HEAD"):
            return 405, {}, b""
        if "range" not in headers:
            return 200, {"ETag": tag}, data
        first, _, last = headers["range"].removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        return 206, {"ETag": tag, "Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}, part

    def _list(self, bucket: str, prefix: str) -> bytes:
        """All at once, whatever their number; keys are sorted."""
        keys = sorted(path.removeprefix(bucket) for path in self._objects if path.startswith(bucket + prefix))
        contents = (
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self._objects[bucket + key][1])}</Size></Contents>"
            for key in keys
        )
        found = f"<KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>{''.join(contents)}"
        return f'<?xml version="1.0"?><ListBucketResult>{found}</ListBucketResult>'.encode()


async def connected(store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the requests of a connection until its client closes it."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
        while True:
            request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            method, target, _ = request.split(" ")
            pairs = (line.partition(":") for line in lines)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            if "expect" in headers:  # the client holds a large body back until it hears this
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            status, extra, data = store.reply(method, target, headers, body)
            names = {**extra, "Content-Length": str(len(data))}
            head = "".join(f"{name}: {value}\r\n" for name, value in names.items())
            writer.write(f"HTTP/1.1 {status} {_STATUS[status]}\r\n{head}\r\n".encode())
            if method != "HEAD":
                writer.write(data)
            await writer.drain()


async def _serve() -> None:
    store = Store()
    server = await asyncio.start_server(lambda *pair: connected(store, *pair), "127.0.0.1", 0, limit=_LIMIT)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextlib.contextmanager
def served() -> Iterator[int]:
    """Runs a store for the time of a block; gives its port."""
    command = [sys.executable, "-m", "benchmarks.object_store"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield int(server.stdout.readline())
        server.stdin.close()


if __name__ == "__main__":
    asyncio.run(_serve())
