"""Which process writes something: told to other runs, so that none takes a save under way for an interrupted one.

Locks are no help: file systems of clusters may have none, object stores have none, and who is killed must not keep one.
Clocks are none either, since those of machines differ. What can be known for certain is whether a process of this very
kernel and process namespace is alive; about others nothing is said.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any, Literal


def record(save: str) -> bytes:
    """Who this process is, and which of its saves this is."""
    return json.dumps(
        {"save": save, "pid": os.getpid(), "began": _began(os.getpid()), **_here(), "host": _host()}
    ).encode()


def described(data: bytes) -> str:
    """A record in words, for messages."""
    who = _parsed(data)
    return f"process {who.get('pid', '?')} on {who.get('host', 'an unknown host')}"


def save_of(data: bytes) -> Any:
    """Which save a record is of."""
    return _parsed(data).get("save")


def state(data: bytes | None) -> Literal["own", "alive", "dead", "unknown"]:
    """What is known of the process that left a record.

    Args:
      data: The record; None where there is none, or empty: its writer was stopped before it could say, "dead".
    """
    if not data:
        return "dead"
    who = _parsed(data)
    if {key: who.get(key) for key in _here()} != _here() or not isinstance(who.get("pid"), int):
        return "unknown"
    try:
        os.kill(who["pid"], 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        return "unknown"  # of another user, whose processes may be hidden in /proc
    if _began(who["pid"]) != who.get("began"):
        return "dead"
    return "own" if who["pid"] == os.getpid() else "alive"


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError):
        return {}


@functools.cache
def _here() -> dict[str, Any]:
    """The running kernel and the process namespace: where a process number means what it says."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "namespace": os.stat("/proc/self/ns/pid").st_ino}
    except OSError:  # a sandbox that does not say: nobody is taken for a neighbour
        return {"boot": secrets.token_hex(8), "namespace": 0}


@functools.cache
def _host() -> str:
    return socket.gethostname()


def _began(pid: int) -> int | None:
    """When a process began, in ticks since the kernel did; None where that is not known, or it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    kind, *fields = text.rpartition(")")[2].split()
    return None if kind in "ZX" else int(fields[18])  # a zombie writes nothing any more; see proc_pid_stat(5)
