"""How arrays lie in a directory: TensorStore specs of databases and arrays, and the resources of a run."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from flax_rpsave.config import StorageConfig
from flax_rpsave.directory import Directory
from flax_rpsave.errors import ConfigError, RPSaveError

OCDBT_MANIFEST = "manifest.ocdbt"
PRIVATE_PREFIX = ".rpsave/"
"""Keys of this package beside the arrays; stock readers do not look at them."""

MAX_INLINE_NBYTES = 100
"""Values up to this size lie in the nodes of a database, not in its data files."""

_RETRY_SECS = "RPSAVE_RETRY_SECS"
_FIRST_DELAY_SECS, _LAST_DELAY_SECS = 0.1, 10  # the delay doubles from the one to the other
_CHUNK_CACHE = "cache_pool#chunks"
_DATA_FILE_NBYTES = 100 << 20  # several files are written in parallel, and none is too large for one request
# Measured on trained weights and moments: `benchmarks/compression.py`.
_CODECS: Mapping[str | None, list[dict[str, Any]]] = {
    None: [],
    "zstd": [{"name": "zstd", "configuration": {"level": 1}}],
    "blosc": [{"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle"}}],
}


SPAWN = 'start processes by "spawn", not by "fork"'
"""What a forked process is told."""

_made_by: set[int] = set()  # the processes in which contexts were made: this one and, after a fork, its parents


def new_context() -> ts.Context:
    """Resources that all of one save, or of one reader, shares: with one cache it writes one database, not hundreds.

    Chunks that are written are not kept in it: they are views of staging memory, which could then not be reused.

    Raises:
      ConfigError: RPSAVE_RETRY_SECS is no number of seconds.
      RPSaveError: This process is a fork of one that has made contexts: TensorStore would abort it.
    """
    if others := _made_by - {os.getpid()}:
        raise RPSaveError(f"this process is a fork of pid {max(others)}, which has used TensorStore: {SPAWN}")
    _made_by.add(os.getpid())
    retries = _retries(os.environ.get(_RETRY_SECS, "60"))
    spec = {
        "cache_pool": {"total_bytes_limit": 100_000_000},
        _CHUNK_CACHE: {"total_bytes_limit": 0},
        "file_io_concurrency": {"limit": 32},
        "file_io_locking": {"mode": "none"},
        "s3_request_retries": retries,
        "gcs_request_retries": retries,
    }
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}  # else TensorStore looks for an instance's metadata service
    return ts.Context(spec)


def _retries(text: str) -> dict[str, Any]:
    """How often a request to an object store is tried again, so that the delays take some seconds together.

    TensorStore's own default goes on for a quarter of an hour, in which a save looks hung.
    """
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        raise ConfigError(f"{_RETRY_SECS} must be a number of seconds, got {text!r}")
    left, delay, tries = float(text), _FIRST_DELAY_SECS, 0
    while left > 0 and delay < _LAST_DELAY_SECS:
        left -= delay
        delay *= 2
        tries += 1
    tries += max(0, math.ceil(left / _LAST_DELAY_SECS))
    return {"max_retries": tries, "initial_delay": f"{_FIRST_DELAY_SECS}s", "max_delay": f"{_LAST_DELAY_SECS}s"}


def stored_database(directory: Directory, use_ocdbt: bool) -> dict[str, Any]:
    """The spec of the key-value store that the arrays of a directory lie in, whoever wrote it and with what options."""
    return {"driver": "ocdbt", "base": directory.kvstore()} if use_ocdbt else directory.kvstore()


def database(directory: Directory, use_ocdbt: bool) -> dict[str, Any]:
    """The spec of the key-value store that the arrays of a directory are written to; opens none with other options."""
    if not use_ocdbt:
        return directory.kvstore()
    return {
        "driver": "ocdbt",
        "base": directory.kvstore(),
        "config": {"max_inline_value_bytes": MAX_INLINE_NBYTES, "compression": None},
        "target_data_file_size": _DATA_FILE_NBYTES,
    }


def open_database(spec: Mapping[str, Any], context: ts.Context) -> ts.KvStore:
    """Opens a key-value store."""
    return ts.KvStore.open(dict(spec), context=context).result()


def array_spec(
    kvstore: Mapping[str, Any],
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunk_shape: tuple[int, ...],
    storage: StorageConfig,
) -> dict[str, Any]:
    """The spec of a zarr3 array to be created, each chunk one value of the store.

    `store_data_equal_to_fill_value`: TensorStore would drop chunks that are all zero, such as fresh Adam moments, and a
    reader could not tell them from missing ones.
    """
    return {
        "driver": "zarr3",
        "kvstore": within(kvstore, name),
        "cache_pool": _CHUNK_CACHE,
        "metadata": {
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [max(1, c) for c in chunk_shape]},
            },
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *_CODECS[storage.compression]],
        },
        "store_data_equal_to_fill_value": True,
    }


@functools.lru_cache(maxsize=4096)
def array_document(shape: tuple[int, ...], dtype: np.dtype[Any], chunk_shape: tuple[int, ...]) -> bytes:
    """The document that TensorStore writes for an array of `array_spec` without compression."""
    zero = type(np.zeros((), dtype).item())(0)  # float8_e8m0fnu has none of its own
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, c) for c in chunk_shape]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": [zero.real, zero.imag] if isinstance(zero, complex) else zero,
        "codecs": [{"name": "bytes", **endian}],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def chunk_key(name: str, index: tuple[int, ...]) -> str:
    """The key of a chunk of a zarr3 array with the default chunk key encoding."""
    return "/".join([*([name] if name else []), "c", *map(str, index)])


def count_chunks(store: ts.KvStore, name: str) -> int:
    """How many chunks of an array lie in a key-value store."""
    prefix = f"{name}/" if name else ""
    keys = store.list(ts.KvStore.KeyRange(prefix, f"{prefix}\x7f")).result()
    return sum(not key.rpartition(b"/")[2].startswith((b"zarr.json", b".z")) for key in keys)


def document_key(name: str) -> str:
    """The key of a zarr3 array's document."""
    return "/".join([*([name] if name else []), "zarr.json"])


def index_key(process: int) -> str:
    """The key of the digests of what a process wrote."""
    return f"{PRIVATE_PREFIX}process_{process}/index"


def data_key(process: int) -> str:
    """The key of the state of a process's data iterator."""
    return f"{PRIVATE_PREFIX}process_{process}/data"


def within(kvstore: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The spec of the part of a key-value store whose keys begin with `name/`."""
    prefix = f"{name}/" if name else ""
    return {**kvstore, "path": kvstore.get("path", "") + prefix}
