"""A host's network card: a TCP proxy that lets so many bytes a second through, in each direction.

Processes on one machine have no network between them and their object store. Here each of them reaches the store's
server through a card of its own, a process that any number of connections share, as those of a host do.

    python -m benchmarks.card <port of the server>

prints the port that it listens on. Each line on its standard input is a new rate in bytes a second (0: no limit), and
is answered with the bytes that went through since the line before. It ends with its standard input.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from typing import Self

BLOCK = 64 << 10  # bytes passed on at once, and the most that an idle card may send without delay


class Bucket:
    """A token bucket that may go into debt: who takes more than there is waits until it is paid back.

    Connections that take at the same time add to one debt, so they share the rate. `BLOCK` caps what gathers while
    nobody takes; a larger burst would pass uncounted in every save.
    """

    def __init__(self) -> None:
        self.bytes_per_sec = 0.0
        self.passed_bytes = 0
        self._tokens = 0.0
        self._filled = time.monotonic()

    def take(self, nbytes: int) -> float:
        """Counts bytes; returns the seconds to wait before they are passed on."""
        self.passed_bytes += nbytes
        if not self.bytes_per_sec:
            return 0.0
        now = time.monotonic()
        self._tokens = min(BLOCK, self._tokens + (now - self._filled) * self.bytes_per_sec) - nbytes
        self._filled = now
        return max(0.0, -self._tokens / self.bytes_per_sec)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bucket: Bucket) -> None:
    while data := await reader.read(BLOCK):
        if delay := bucket.take(len(data)):
            await asyncio.sleep(delay)
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def _connect(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server_port: int, sending: Bucket, receiving: Bucket
) -> None:
    """Serves one connection until both sides have said all, or one of them has gone."""
    with contextlib.closing(writer):
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server_port, limit=BLOCK)
        with contextlib.closing(server_writer):
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pass_on(reader, server_writer, sending))
                    both.create_task(_pass_on(server_reader, writer, receiving))
            except* OSError:
                pass  # a side has closed without waiting for the rest, as HTTP clients do with connections they keep


async def _serve(server_port: int) -> None:
    sending, receiving = Bucket(), Bucket()
    connections = set()  # the event loop itself holds tasks weakly, and a paused connection is held by nothing else

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(_connect(reader, writer, server_port, sending, receiving))
        connections.add(connection)
        connection.add_done_callback(connections.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=BLOCK)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps([sending.passed_bytes, receiving.passed_bytes]), flush=True)
        for bucket in (sending, receiving):
            bucket.passed_bytes = 0
            bucket.bytes_per_sec = float(line)


class Card:
    """Starts a card before the server at a port of this machine; a context manager."""

    def __init__(self, server_port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.card", str(server_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._process.stdout.readline())

    def limit(self, bytes_per_sec: float) -> tuple[int, int]:
        """Sets the rate of each direction, 0 for none; returns the bytes sent and received since the last call."""
        print(bytes_per_sec, file=self._process.stdin, flush=True)
        sent, received = json.loads(self._process.stdout.readline())
        return sent, received

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
