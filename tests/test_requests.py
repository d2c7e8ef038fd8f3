"""How often a save asks an object store for something: each request is answered with a delay, and delays add up."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np

import flax_rpsave as rps
from benchmarks import planning
from benchmarks.object_store import ACCESS, BUCKET, Store, connected


class Counting(Store):
    """Counts requests by their method."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def reply(self, method, target, headers, body):
        self.requests[method] += 1
        return super().reply(method, target, headers, body)


@contextlib.contextmanager
def served(store: Store) -> Iterator[int]:
    """Serves a store from a thread; gives its port."""
    loop = asyncio.new_event_loop()
    start = asyncio.start_server(lambda *pair: connected(store, *pair), "127.0.0.1", 0, limit=1 << 20)
    server = loop.run_until_complete(start)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(server: asyncio.Server) -> None:
    server.close()
    connections = asyncio.all_tasks() - {asyncio.current_task()}
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


def test_save_does_not_ask_once_a_leaf(monkeypatch):
    state = {str(i): np.full(8, i, np.float32) for i in range(200)}
    store = Counting()
    with served(store) as port:
        for name, value in {**ACCESS, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}.items():
            monkeypatch.setenv(name, value)
        rps.save(f"s3://{BUCKET}/saved", state)
        saving = store.requests.total()
        loaded = rps.load(f"s3://{BUCKET}/saved")
    expected = planning.requests(1, 200 * 32)
    assert expected / 2 < saving < 2 * expected < len(state), store.requests
    assert all((loaded[name] == value).all() for name, value in state.items())
