"""The JSON documents of an Orbax checkpoint (0.12), built and parsed.

Orbax has no public writer for `_METADATA` and `array_metadatas`; the formats are those that version 0.12.8 writes.
This package's own documents are sealed: they end in a digest of themselves.

    <step>/_CHECKPOINT_METADATA                    item handlers, times, metrics; `custom_metadata.flax_rpsave`
    <step>/metrics/metrics                         the metrics once more, where stock Orbax looks for them
    <step>/commit_success.txt                      digests of the other documents, sealed
    <step>/default/_METADATA                       a tree entry a leaf, empty containers too
    <step>/default/_sharding                       a sharding a `jax.Array`
    <step>/default/_strings.json                   strings
    <step>/default/array_metadatas/process_N       chunk shapes, PRNG implementations
    .rpsave/process_N/index   (in the database)    digests of what process N wrote, sealed
    .rpsave/process_N/data    (in the database)    state of process N's data iterator, sealed
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.metadata
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import xxhash
from etils import epy
from jax.sharding import SingleDeviceSharding

from flax_rpsave._version import __version__
from flax_rpsave.errors import CorruptCheckpointError
from flax_rpsave.leaves import Leaf
from flax_rpsave.planner import LeafPlan, as_named_sharding

with epy.lazy_imports():  # half a second, for the process that writes documents alone
    import orbax.checkpoint as ocp

TREE = "_METADATA"
SHARDINGS = "_sharding"
STRINGS = "_strings.json"
CHECKPOINT = "_CHECKPOINT_METADATA"
COMMIT = "commit_success.txt"
METRICS_ITEM = "metrics"
METRICS = f"{METRICS_ITEM}/metrics"  # where stock Orbax looks for them
ARRAY_METADATAS = "array_metadatas"
DOCUMENT_NAMES = frozenset({TREE, SHARDINGS, STRINGS, CHECKPOINT, COMMIT, ARRAY_METADATAS})
"""Names that no array may have where arrays lie beside the documents."""
FORMAT_VERSION = 1
"""Version of what this package adds to the Orbax format."""

logger = logging.getLogger("flax_rpsave")

_HANDLERS = "orbax.checkpoint._src.handlers"
_STATE_HANDLER = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
_METRICS_HANDLER = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"
_STOCK_COMMIT = b"Checkpoint commit was successful"


def load_writers() -> None:
    """Imports what documents are written with: a save that ends while the interpreter exits could not."""
    _ = ocp.metadata


@dataclass(frozen=True)
class TreeEntry:
    """One entry of `_METADATA`.

    Attributes:
      name: The name of its array.
      path: Its keys; of a part of a checkpoint, those below the part.
      key_types: Orbax's key types.
      kind: "jax.Array", "np.ndarray", "scalar", "string", or an empty node.
    """

    name: str
    path: tuple[str, ...]
    key_types: tuple[int, ...]
    kind: str

    @property
    def is_array(self) -> bool:
        """Whether it has an array."""
        return self.kind in ("jax.Array", "np.ndarray", "scalar")


@dataclass(frozen=True)
class Tree:
    """What `_METADATA` says.

    Attributes:
      entries: The leaves.
      use_ocdbt: Whether the arrays lie in an OCDBT database.
      use_zarr3: Whether they are zarr3, else zarr2.
      all_chunks_stored: Whether a chunk that is missing is an error, else it is zeros.
    """

    entries: tuple[TreeEntry, ...]
    use_ocdbt: bool
    use_zarr3: bool
    all_chunks_stored: bool


def build_tree(leaves: Sequence[Leaf], plans: Mapping[str, LeafPlan], use_ocdbt: bool) -> bytes:
    """`_METADATA`."""
    tree = {}
    for leaf in leaves:
        value: dict[str, Any] = {
            "value_type": _stored_kind(leaf),
            "skip_deserialize": not leaf.is_array and leaf.kind != "string",
        }
        if leaf.kind == "jax.Array":
            value["write_shape"] = list(plans[leaf.name].chunk_shape)
        keys = [{"key": key, "key_type": kind} for key, kind in zip(leaf.path, leaf.key_types, strict=True)]
        tree[str(leaf.path)] = {"key_metadata": keys, "value_metadata": value}
    return _json({
        "tree_metadata": tree,
        "use_ocdbt": use_ocdbt,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    })  # fmt: skip


def _stored_kind(leaf: Leaf) -> str:
    """A leaf's kind on disk: a complex number is a 0-d array, since Orbax reads nothing that has a complex scalar."""
    return "np.ndarray" if leaf.kind == "scalar" and leaf.value.dtype.kind == "c" else leaf.kind


def parse_tree(data: bytes, where: str) -> Tree:
    """Parses `_METADATA`.

    Raises:
      CorruptCheckpointError: It is no such document.
    """
    with _parsing(where):
        document = json.loads(data)
        entries = []
        for entry in document["tree_metadata"].values():
            keys = entry["key_metadata"]
            kind = entry["value_metadata"]["value_type"]
            path = tuple(str(k["key"]) for k in keys)
            name = ".".join(path)
            name.encode()  # JSON may escape what is no text, and no store has it as a key
            entries.append(TreeEntry(name, path, tuple(int(k["key_type"]) for k in keys), str(kind)))
        return Tree(
            tuple(entries),
            use_ocdbt=bool(document.get("use_ocdbt", True)),
            use_zarr3=bool(document.get("use_zarr3", False)),
            all_chunks_stored=bool(document.get("store_array_data_equal_to_fill_value", False)),
        )


def build_shardings(leaves: Sequence[Leaf]) -> bytes:
    """`_sharding`."""
    shardings = {}
    for leaf in leaves:
        if leaf.kind == "jax.Array" and leaf.value.sharding is not None:
            name = base64.urlsafe_b64encode(leaf.name.encode()).decode()
            shardings[name] = _sharding_text(leaf.value.sharding, tuple(leaf.value.shape))
    return _json(shardings)


def parse_shardings(data: bytes, where: str) -> dict[str, str]:
    """Each leaf's sharding in one line, by its name; needs none of the devices that it names.

    "P(data, None) on (data=8, model=2)" for a sharding over a mesh, else the device or the kind.
    """
    with _parsing(where):
        return {
            base64.urlsafe_b64decode(name).decode(): _sharding_in_short(json.loads(text))
            for name, text in json.loads(data).items()
        }


def _sharding_in_short(sharding: Mapping[str, Any]) -> str:
    kind = str(sharding["sharding_type"])
    if kind != "NamedSharding":
        return str(sharding.get("device_str", kind))
    mesh = ", ".join(f"{axis}={size}" for axis, size in zip(sharding["axis_names"], sharding["shape"], strict=True))
    spec = ", ".join("+".join(part) if isinstance(part, list) else str(part) for part in sharding["partition_spec"])
    return f"P({spec}) on ({mesh})"


@functools.lru_cache(maxsize=4096)
def _sharding_text(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    if isinstance(sharding, SingleDeviceSharding):
        return str(ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding).to_serialized_string())
    named = as_named_sharding(sharding, shape)
    return str(ocp.metadata.NamedShardingMetadata.from_jax_sharding(named).to_serialized_string())


def build_array_metadatas(leaves: Sequence[Leaf], plans: Mapping[str, LeafPlan]) -> bytes:
    """`array_metadatas/process_N`."""
    arrays = []
    for leaf in leaves:
        if leaf.kind == "jax.Array":
            chunk = list(plans[leaf.name].chunk_shape)
            impl = {"random_key_impl": leaf.key_impl} if leaf.key_impl is not None else None
            entry = {"param_name": leaf.name, "write_shape": chunk, "chunk_shape": chunk, "ext_metadata": impl}
            arrays.append({"array_metadata": entry})
    return _json({"array_metadatas": arrays})


def parse_key_impls(data: bytes, where: str) -> dict[str, str]:
    """Names of the PRNG implementations, by leaf name, from `array_metadatas/process_N`."""
    with _parsing(where):
        impls = {}
        for entry in json.loads(data)["array_metadatas"]:
            array = entry["array_metadata"]
            if impl := (array.get("ext_metadata") or {}).get("random_key_impl"):
                impls[str(array["param_name"])] = str(impl)
        return impls


def build_strings(leaves: Sequence[Leaf]) -> bytes | None:
    """`_strings.json`, or None where there are no strings."""
    strings = {leaf.name: leaf.value for leaf in leaves if leaf.kind == "string"}
    return _json(strings) if strings else None


def parse_strings(data: bytes, where: str) -> dict[str, str]:
    """Strings by leaf name."""
    with _parsing(where):
        return {str(name): str(text) for name, text in json.loads(data).items()}


def build_checkpoint(
    item: str | None,
    metrics: Mapping[str, Any],
    own: Mapping[str, Any],
    begun_ns: int,
) -> bytes:
    """`_CHECKPOINT_METADATA`.

    Args:
      item: Name of the item in the step's directory; None where the item is that directory.
      metrics: Numbers by name; none where the item is that directory.
      own: What this package keeps there.
      begun_ns: When the save began, in ns since 1970.
    """
    of_metrics = {METRICS_ITEM: _METRICS_HANDLER} if _known(metrics) else {}
    return _json({
        "item_handlers": _STATE_HANDLER if item is None else {item: _STATE_HANDLER, **of_metrics},
        "metrics": dict(metrics),
        "performance_metrics": {},
        "init_timestamp_nsecs": begun_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {"flax_rpsave": {"format": FORMAT_VERSION, "versions": _versions(), **own}},
    })  # fmt: skip


def build_metrics(metrics: Mapping[str, Any]) -> bytes | None:
    """`metrics/metrics`: numbers by name; None where there are none. A null would be compared with numbers by Orbax."""
    return _json(known) if (known := _known(metrics)) else None


def _known(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if value is not None}


def exact_json(value: Any) -> str:
    """JSON that comes back as it was, but for tuples, which become lists.

    Raises:
      TypeError, ValueError: The value cannot be had as such.
    """
    text = json.dumps(value)
    _check_keys(value)
    return text


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, below in value.items():
            if not isinstance(key, str):
                raise TypeError(f"its key {key!r} would come back as text; use strings as keys")
            _check_keys(below)
    elif isinstance(value, (list, tuple)):
        for below in value:
            _check_keys(below)


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON numbers; one that cannot be had is null, since it is worth less than the checkpoint."""
    fetched: dict[str, Any] = {}
    for name, value in metrics.items():
        try:
            array = np.asarray(value)
            if value is None or array.dtype.kind in "cSU":
                raise TypeError(f"{type(value).__qualname__} is no real number")
            fetched[name] = array.astype(float).item() if array.dtype.kind not in "biu" else array.item()
        except Exception as error:  # noqa: BLE001 - a user's value: anything can go wrong
            logger.warning("metric %r cannot be stored: %s", name, error)
            fetched[name] = None
    return fetched


@functools.cache
def _versions() -> dict[str, str]:
    """Versions of what writes: for a reader who wonders why it cannot read this."""
    others = {name: importlib.metadata.version(name) for name in ("jax", "orbax-checkpoint", "tensorstore")}
    return {"flax_rpsave": __version__, **others}


def parse_checkpoint(data: bytes, where: str) -> dict[str, Any]:
    """Parses `_CHECKPOINT_METADATA`."""
    with _parsing(where):
        document = json.loads(data)
        own = dict((document.get("custom_metadata") or {}).get("flax_rpsave") or {})
        for name, kind in (("format", int), ("step", int), ("processes", int), ("versions", dict), ("indices", list)):
            if not isinstance(own.get(name, kind()), kind):
                raise TypeError(f"{name}: {own[name]!r}")
        committed = document.get("commit_timestamp_nsecs")
        handlers = document.get("item_handlers")
        return {
            "metrics": dict(document.get("metrics") or {}),
            "metrics_item": isinstance(handlers, dict) and METRICS_ITEM in handlers,
            "committed_ns": committed if isinstance(committed, int) and 0 <= committed < 2**63 else None,
            "own": own,
        }


def parse_metrics(data: bytes, where: str) -> dict[str, Any]:
    """Parses `metrics/metrics`, the only place in which stock Orbax's `CheckpointManager` has them."""
    with _parsing(where):
        return dict(json.loads(data))


def build_commit(documents: Mapping[str, bytes]) -> bytes:
    """`commit_success.txt`: digests of the documents by their path in the step's directory."""
    return seal(_json({name: digest(data) for name, data in documents.items()}))


def is_stock_marker(marker: bytes) -> bool:
    """Whether `commit_success.txt` is that of stock Orbax, which has no digests."""
    return marker.startswith(_STOCK_COMMIT)


def commit_faults(marker: bytes, documents: Mapping[str, bytes | None], where: str) -> Iterator[tuple[str, str]]:
    """Compares documents with the digests in `commit_success.txt`; a stock one has none.

    Yields:
      (name, what is wrong) of the marker itself, or of each document that is missing, unknown or was changed.
    """
    if is_stock_marker(marker):
        return
    try:
        with _parsing(f"{where}/{COMMIT}"):
            expected = dict(json.loads(unseal(marker, f"{where}/{COMMIT}")))
    except CorruptCheckpointError as error:
        yield COMMIT, str(error)
        return
    for name, wanted in expected.items():
        data = documents.get(name)
        if data is None:
            yield name, f"{where}/{name} is missing"
        elif digest(data) != wanted:
            yield name, f"{where}/{name} was changed after it was written"
    if documents.get(CHECKPOINT) is None:
        return  # an item read by its own path: its marker says only that it is whole
    for name in documents:
        if documents[name] is not None and name not in expected:
            yield name, f"{where}/{name} is not among the documents that were written"


def build_index(digests: Mapping[str, str], save: str) -> bytes:
    """`.rpsave/process_N/index`, sealed: digests of the chunks and arrays of a process by key, "" for none taken.

    Args:
      digests: The digests.
      save: What tells this save from others, so that their indices differ even without digests.
    """
    return seal(_json({"format": FORMAT_VERSION, "algorithm": "xxh3_64", "save": save, "chunks": dict(digests)}))


def parse_index(data: bytes, where: str) -> dict[str, str]:
    """Digests by key.

    Raises:
      CorruptCheckpointError: The index was changed.
    """
    with _parsing(where):
        return {str(key): str(value) for key, value in json.loads(unseal(data, where))["chunks"].items()}


def array_digest(shape: Sequence[int], dtype: str, chunk_shape: Sequence[int]) -> str:
    """Digest of what an array's document must say, which no digest of a chunk shows: a shape may lose whole chunks."""
    return digest(_json([list(shape), dtype, [max(1, c) for c in chunk_shape]]))


def seal(text: bytes) -> bytes:
    """The text and a line with its digest."""
    return text + b"\nxxh3_64:" + digest(text).encode() + b"\n"


def unseal(data: bytes, where: str) -> bytes:
    """The text of a sealed document.

    Raises:
      CorruptCheckpointError: It was changed.
    """
    text, _, tail = data.rpartition(b"\nxxh3_64:")
    if tail != digest(text).encode() + b"\n":
        raise CorruptCheckpointError(f"{where} was changed after it was written, or is cut off")
    return text


def digest(data: Any) -> str:
    """XXH3 (64 bits) of a buffer, in hex."""
    return xxhash.xxh3_64_hexdigest(data)


@contextlib.contextmanager
def _parsing(where: str) -> Iterator[None]:
    """Turns what goes wrong in parsing a document into a `CorruptCheckpointError` that names it."""
    try:
        yield
    except CorruptCheckpointError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is not a document of a checkpoint: {error!r}") from error


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
