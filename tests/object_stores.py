"""Object stores for tests: real servers on the loopback interface, and a proxy before each."""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import tensorstore as ts

from flax_rpsave.directory import open_directory
from flax_rpsave.store import new_context
from tests.helpers import free_port
from tests.servers import proxy as proxies

BUCKET = "bucket"
MARKER = "commit_success.txt"
_START_SECS = 60
_AUTHORIZED = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
}


@dataclass
class Store:
    """An object store.

    Attributes:
      scheme: Of its URLs, "s3" or "gs".
      proxy: What clients talk to in the server's place.
    """

    scheme: str
    proxy: proxies.Proxy

    def url(self, path: str, bucket: str = BUCKET) -> str:
        return f"{self.scheme}://{bucket}/{path}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client's environment must have."""
        name = {"s3": "AWS_ENDPOINT_URL", "gs": "TENSORSTORE_GCS_HTTP_URL"}[self.scheme]
        return {**_AUTHORIZED, name: self.proxy.url}


def own_url(store: Store, request: pytest.FixtureRequest) -> str:
    """A URL of a test's own."""
    return store.url("".join(c if c.isalnum() else "-" for c in request.node.name))


@contextlib.contextmanager
def serving(scheme: str, port: int) -> Iterator[subprocess.Popen]:
    """A server with one bucket in a process of its own, killed at the end of the block."""
    arguments = {
        "s3": ["moto.server", "-H", "127.0.0.1", "-p", str(port)],
        "gs": ["tests.servers.gcs", str(port), BUCKET],
    }[scheme]
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=pathlib.Path(__file__).parents[1],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_listening(process, port)
        if scheme == "s3":
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("PUT", f"/{BUCKET}")
            assert connection.getresponse().status == 200
            connection.close()
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(scheme: str) -> Iterator[Store]:
    """A server with a proxy before it, and this process's environment set for it."""
    port = free_port()
    with serving(scheme, port), pytest.MonkeyPatch.context() as patch:
        parse, error = {
            "s3": (proxies.parse_s3, proxies.s3_error),
            "gs": (proxies.parse_gcs, proxies.gcs_error),
        }[scheme]
        store = Store(scheme, proxies.Proxy(port, parse, error))
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in store.environment.items():
            patch.setenv(name, value)
        try:
            yield store
        finally:
            store.proxy.stop()


def objects(url: str) -> ts.KvStore:
    """What is stored below a URL, past everything that this package makes of it."""
    context = new_context()
    return ts.KvStore.open(open_directory(url, context).kvstore(), context=context).result()


def keys(url: str) -> list[str]:
    """The keys of the objects below a URL, sorted."""
    return sorted(key.decode() for key in objects(url).list().result())


def _wait_listening(process: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + _START_SECS
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}: {process.args}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < deadline, f"the server did not begin to listen: {process.args}"
        time.sleep(0.02)
