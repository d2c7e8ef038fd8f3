"""The position of a data iterator: to bytes beside the state, and back.

An iterator's state is bytes (grain's `DataLoader`), or made of what JSON has (grain's datasets), tuples, bytes and
NumPy numbers and arrays. It comes back with the same types, or is refused when it is saved: an iterator may compare
them, and a list is no tuple. Each process has its own state; what belongs to N processes says nothing about where M
would have to go on.

Stored is JSON in which every value is an object with one key, which says how it is written: `{"json": …}` for what JSON
gives back as it was, else `bytes`, `list`, `tuple`, `dict`, `array` or `scalar`. A list of many indices so takes no
more room than it must.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from flax_rpsave.errors import DataStateError
from flax_rpsave.stored import Stored

_IN_JSON = (str, int, float, bool, type(None))


def encode(data: Any) -> bytes | None:
    """The state of an iterator now; None where there is none, or `False` in its place.

    Raises:
      DataStateError: Something in it would not come back as it is.
    """
    if data is None or data is False:
        return None
    state = data.get_state()
    try:
        return json.dumps(_encoded(state, "data.get_state()")).encode()
    except DataStateError:
        raise
    except (RecursionError, ValueError) as error:  # ValueError: a number of more digits than Python writes
        raise DataStateError(f"data.get_state() cannot be stored: {error}") from error


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
    position = _decoded(json.loads(state), stored)
    try:
        data.set_state(position)
    except Exception as error:
        raise DataStateError(
            f"data.set_state() does not take the state in {stored.directory}. Pass the iterator of the data that it is "
            "of, divided among the processes as it was; or data=False, and position the data yourself. "
            f"{type(error).__name__}: {error}"
        ) from error


def _encoded(value: Any, where: str) -> dict[str, Any]:
    """A value as it is stored; `where` it stands, for errors."""
    kind = type(value)
    if _is_json(value):
        return {"json": value}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (list, tuple):
        return {kind.__name__: [_encoded(part, f"{where}[{i}]") for i, part in enumerate(value)]}
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise DataStateError(f"{where} has the key {key!r}, which would come back as text; use strings as keys")
        return {"dict": {key: _encoded(part, f"{where}[{key!r}]") for key, part in value.items()}}
    if kind is np.ndarray or isinstance(value, np.generic):
        dtype = value.dtype
        if dtype.kind in "biufc" and np.dtype(dtype.str).type is dtype.type:
            raw = base64.b64encode(value.tobytes()).decode()
            return {"array" if kind is np.ndarray else "scalar": [dtype.str, list(value.shape), raw]}
        raise DataStateError(f"{where} has dtype {dtype.name}, which cannot be stored; make numbers or bytes of it")
    raise DataStateError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which would not come back as one; a data state must be "
        "made of dicts with strings as keys, lists, tuples, text, bytes, numbers, bools, None, and NumPy arrays"
    )


def _is_json(value: Any) -> bool:
    """Whether JSON gives a value back as it is: subclasses would lose their type."""
    if type(value) is dict:
        return all(type(key) is str and _is_json(part) for key, part in value.items())
    return all(map(_is_json, value)) if type(value) is list else type(value) in _IN_JSON


def _decoded(document: dict[str, Any], stored: Stored) -> Any:
    ((how, value),) = document.items()
    match how:
        case "json":
            return value
        case "bytes":
            return base64.b64decode(value)
        case "list":
            return [_decoded(part, stored) for part in value]
        case "tuple":
            return tuple(_decoded(part, stored) for part in value)
        case "dict":
            return {key: _decoded(part, stored) for key, part in value.items()}
        case "array" | "scalar":
            dtype, shape, raw = value
            array = np.frombuffer(bytearray(base64.b64decode(raw)), dtype).reshape(shape)
            return array if how == "array" else array[()]
        case _:
            raise DataStateError(
                f"{stored.directory} has data-iterator state written as {how!r}, which this version does not know; "
                "resume with the version that saved it, or pass data=False and position the data yourself"
            )
