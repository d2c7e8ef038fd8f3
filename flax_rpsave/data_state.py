"""The position of a data iterator: to bytes beside the state, and back.

An iterator's state is bytes (grain's `DataLoader`) or something that JSON can hold (grain's datasets). Each process has
its own; what belongs to N processes says nothing about where M would have to go on.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from flax_rpsave.errors import DataStateError
from flax_rpsave.stored import Stored


def encode(data: Any) -> bytes | None:
    """The state of an iterator now; None where there is none, or `False` in its place.

    Raises:
      DataStateError: It is neither bytes nor JSON.
    """
    if data is None or data is False:
        return None
    state = data.get_state()
    if isinstance(state, bytes):
        return json.dumps({"bytes": base64.b64encode(state).decode()}).encode()
    try:
        return exact_json({"json": state}).encode()
    except (TypeError, ValueError) as error:
        raise DataStateError(f"data.get_state() must be bytes or something that JSON can hold: {error}") from error


def stored_state(stored: Stored, data: Any, process: int, processes: int) -> bytes | None:
    """The encoded state that a process's iterator is to get from a checkpoint; None where `data` is `False`.

    Raises:
      DataStateError: The checkpoint has one and there is no iterator, or the other way, or it has those of another
        number of processes.
    """
    if data is False:
        return None
    saved_by = stored.own.get("processes", 1)
    if data is not None and saved_by != processes and stored.data_state(0) is not None:
        raise DataStateError(
            f"{stored.directory} has the data-iterator states of {saved_by} processes, and this run has "
            f"{processes}: they cannot be divided anew without repeating or losing data. Resume with "
            f"{saved_by} processes, or pass data=False and position the data yourself."
        )
    state = stored.data_state(process)
    if state is None and data is not None:
        raise DataStateError(
            f"{stored.directory} has no data-iterator state, so `data` would begin anew and repeat what the state "
            "has seen; pass data=False to resume all the same, and position the data yourself"
        )
    if state is not None and data is None:
        raise DataStateError(
            f"{stored.directory} has data-iterator state, but the callback has no `data`; pass the iterator, or "
            "data=False to pass the state over"
        )
    return state


def put_back(state: bytes, data: Any, stored: Stored) -> None:
    """Positions an iterator.

    Raises:
      DataStateError: The iterator does not take the state.
    """
    document = json.loads(state)
    try:
        data.set_state(base64.b64decode(document["bytes"]) if "bytes" in document else document["json"])
    except Exception as error:
        raise DataStateError(
            f"data.set_state() does not take the state in {stored.directory}. Pass the iterator of the data that it is "
            "of, divided among the processes as it was; or data=False, and position the data yourself. "
            f"{type(error).__name__}: {error}"
        ) from error


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
