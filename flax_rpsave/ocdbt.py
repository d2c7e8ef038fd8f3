"""OCDBT databases as bytes: B+tree nodes and manifest. Pure, no file is touched.

The format is the one that TensorStore documents (https://google.github.io/tensorstore/kvstore/ocdbt/, "Storage format",
version 0). A manifest refers to the root node, interior nodes to their children, leaf nodes to values; each by data
file, offset and length. A node stores its entries in columns, and each key without what it shares with the one before;
the prefix that all keys below a node share is left out of the node, and known from its parent.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import google_crc32c
import numpy as np

T = TypeVar("T")

MAX_KEY_NBYTES = 65535
MAX_NODE_NBYTES = 8 << 20  # TensorStore's default

_MANIFEST = 0x0CDB3A2A
_BTREE_NODE = 0x0CDB20DE
_HEADER = struct.Struct("<QBB")  # after the magic number: length of everything, format version, compression
_VERSION_TREE_ARITY_LOG2 = 4  # TensorStore's default
_MISSING = (1 << 64) - 1  # offset and length of the root of a database without keys
# What TensorStore counts for an entry when it splits nodes, beside key, inline value and file name.
_LEAF_ENTRY_NBYTES = 32
_INTERIOR_ENTRY_NBYTES = 56


class Location(NamedTuple):
    """Where a value lies: the data file's path in the database's directory, and the bytes of it."""

    file: str
    offset: int
    length: int


Entry = tuple[bytes, bytes | Location]
"""A key, and its value or where that lies."""


class _Node(NamedTuple):
    """An encoded node; `prefix` is how many bytes its keys share."""

    first: bytes
    last: bytes
    prefix: int
    offset: int
    length: int
    keys: int
    tree_nbytes: int
    value_nbytes: int


def encode(
    entries: Sequence[Entry],
    file: str,
    offset: int,
    *,
    uuid: bytes,
    commit_ns: int,
    max_inline_nbytes: int,
    max_node_nbytes: int = MAX_NODE_NBYTES,
) -> tuple[bytes, bytes]:
    """Encodes a database of one version.

    Args:
      entries: All keys and values, ascending by key.
      file: The data file that the nodes will lie in.
      offset: Where in it they begin.
      uuid: 16 bytes that identify the database.
      commit_ns: Time of the version, in ns since 1970.
      max_inline_nbytes: Written into the configuration: how large a value later writers store in a node.
      max_node_nbytes: About how large a node may be, decoded.

    Returns:
      The nodes, one after the other, and the manifest.

    Raises:
      ValueError: The keys are not ascending, or one is too long.
    """
    _check_keys(entries)
    blob = bytearray()

    def add(encoded: bytes, first: bytes, last: bytes, prefix: int, keys: int, below: int, values: int) -> _Node:
        at = offset + len(blob)
        blob.extend(encoded)
        return _Node(first, last, prefix, at, len(encoded), keys, len(encoded) + below, values)

    height = 0
    weights = [_LEAF_ENTRY_NBYTES + len(k) + (len(v) if isinstance(v, bytes) else len(v.file)) for k, v in entries]
    leaves = list(_groups(entries, weights, max_node_nbytes, least=1))
    nodes = []
    for leaf in leaves:
        first, last = leaf[0][0], leaf[-1][0]
        prefix = _shared(first, last) if len(leaves) > 1 else 0  # nothing tells a root its prefix
        values = sum(v.length for _, v in leaf if isinstance(v, Location))
        nodes.append(add(_leaf(leaf, prefix), first, last, prefix, len(leaf), 0, values))
    while len(nodes) > 1:
        height += 1
        weights = [_INTERIOR_ENTRY_NBYTES + len(node.first) + len(file) for node in nodes]
        groups = list(_groups(nodes, weights, max_node_nbytes, least=2))
        nodes = []
        for group in groups:
            first, last = group[0].first, group[-1].last
            prefix = _shared(first, last) if len(groups) > 1 else 0
            keys, below, values = (sum(c) for c in zip(*[n[-3:] for n in group], strict=True))
            nodes.append(add(_interior(group, prefix, height, file), first, last, prefix, keys, below, values))
    return bytes(blob), _manifest(nodes[0] if nodes else None, height, file, uuid, commit_ns, max_inline_nbytes)


def _check_keys(entries: Sequence[Entry]) -> None:
    for (key, _), (following, _) in itertools.pairwise(entries):
        if key >= following:
            raise ValueError(f"keys must ascend, got {key!r} before {following!r}")
    longest = max((key for key, _ in entries), key=len, default=b"")
    if len(longest) > MAX_KEY_NBYTES:
        raise ValueError(f"a key must have at most {MAX_KEY_NBYTES} bytes, got {len(longest)}: {longest[:80]!r}…")


def _groups(items: Sequence[T], weights: Sequence[int], limit: int, least: int) -> Iterator[Sequence[T]]:
    """Neighbours whose weights add up to no more than the limit, but at least `least` together."""
    begin = total = 0
    for i, weight in enumerate(weights):
        if total + weight > limit and i - begin >= least:
            yield items[begin:i]
            begin, total = i, 0
        total += weight
    if begin < len(items):
        yield items[begin:]


def _manifest(root: _Node | None, height: int, file: str, uuid: bytes, commit_ns: int, max_inline_nbytes: int) -> bytes:
    """A manifest of one version, generation 1. Its time is in ns, unlike what the documentation says."""
    return _framed(
        _MANIFEST,
        b"".join([
            uuid,
            _varints([0, max_inline_nbytes, MAX_NODE_NBYTES]),
            bytes([_VERSION_TREE_ARITY_LOG2]),
            _varints([0]),  # nodes are not compressed
            _file_table([file if root else ""]),
            _varints([1, 1]),
            bytes([height]),
            _references([root or _Node(b"", b"", 0, _MISSING, _MISSING, 0, 0, 0)]),
            commit_ns.to_bytes(8, "little"),
            _varints([0]),  # no older versions
        ]),
    )  # fmt: skip


def _leaf(entries: Sequence[Entry], prefix: int) -> bytes:
    values = [value for _, value in entries]
    located = [value for value in values if isinstance(value, Location)]
    files = sorted({location.file for location in located}, key=str.encode)
    number = {file: i for i, file in enumerate(files)}
    return _framed(
        _BTREE_NODE,
        b"".join([
            b"\0",
            _file_table(files),
            _varints([len(entries)]),
            *_keys([key[prefix:] for key, _ in entries]),
            _varints([v.length if isinstance(v, Location) else len(v) for v in values]),
            bytes(isinstance(v, Location) for v in values),
            _varints([number[location.file] for location in located]),
            _varints([location.offset for location in located]),
            *[v for v in values if not isinstance(v, Location)],
        ]),
    )  # fmt: skip


def _interior(children: Sequence[_Node], prefix: int, height: int, file: str) -> bytes:
    shared, lengths, suffixes = _keys([child.first[prefix:] for child in children])
    return _framed(
        _BTREE_NODE,
        b"".join([
            bytes([height]),
            _file_table([file]),
            _varints([len(children)]),
            shared,
            lengths,
            _varints([child.prefix - prefix for child in children]),
            suffixes,
            _references(children),
        ]),
    )  # fmt: skip


def _references(nodes: Sequence[_Node]) -> bytes:
    """The columns that refer to nodes: number of the file (there is one), place, statistics."""
    columns: list[Callable[[_Node], int]] = [
        lambda _: 0,
        lambda node: node.offset,
        lambda node: node.length,
        lambda node: node.keys,
        lambda node: node.tree_nbytes,
        lambda node: node.value_nbytes,
    ]
    return b"".join(_varints(map(column, nodes)) for column in columns)


def _file_table(files: Sequence[str]) -> bytes:
    """Data files, ascending, without base paths: all lie below the database's own directory."""
    paths = [file.encode() for file in files]
    shared, lengths, suffixes = _keys(paths)
    return b"".join([_varints([len(paths)]), shared, lengths, _varints([0] * len(paths)), suffixes])


def _keys(keys: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Columns: bytes shared with the key before (not of the first), lengths of the rest, the rests."""
    shared = [0, *itertools.starmap(_shared, itertools.pairwise(keys))][: len(keys)]
    suffixes = [key[n:] for key, n in zip(keys, shared, strict=True)]
    return _varints(shared[1:]), _varints(map(len, suffixes)), b"".join(suffixes)


def _shared(a: bytes, b: bytes) -> int:
    """How many bytes two keys have in common at their beginning."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return n - (differing.bit_length() + 7) // 8


def _varints(values: Iterable[int]) -> bytes:
    """LEB128: seven bits a byte, the lowest first; the eighth says that another byte follows."""
    rest = np.fromiter(values, np.uint64)
    there, digits, present = np.ones(len(rest), np.bool_), [], []
    while there.any():
        present.append(there)
        digits.append((rest & np.uint64(127)).astype(np.uint8))
        rest >>= np.uint64(7)
        there = rest > 0
        digits[-1][there] |= 128
    return np.stack(digits, axis=1)[np.stack(present, axis=1)].tobytes() if digits else b""


def _framed(magic: int, body: bytes) -> bytes:
    head = magic.to_bytes(4, "big") + _HEADER.pack(4 + _HEADER.size + len(body) + 4, 0, 0)
    return b"".join([head, body, google_crc32c.value(head + body).to_bytes(4, "little")])
