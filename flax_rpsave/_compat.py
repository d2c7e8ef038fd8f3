"""The one place where something that is not public is used, and why."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src.lax import lax as _lax


def as_weak(array: Any) -> Any:
    """The array with a weak type. No public function makes a weakly typed array of given values and sharding."""
    return jax.jit(lambda x: _lax._convert_element_type(x, x.dtype, weak_type=True))(array)


def is_ready(array: Any) -> bool:
    """Whether an array's values are there already. Arrays have such a method, but `jax.Array` does not declare it."""
    return bool(array.is_ready())


def is_tracing() -> bool:
    """Whether this thread traces a function for a transformation: what JAX computes then has no values.

    No public function says so; that an array is no tracer says nothing of what is made from it.
    """
    return not _core.trace_state_clean()


def shard_addresses(array: Any) -> list[int]:
    """Where an array's first two shards of this process lie in memory.

    The public way, `addressable_shards`, makes an object a shard: 0.2 ms an array on eight devices, in the train loop.
    """
    return [buffer.unsafe_buffer_pointer() for buffer in array._arrays[:2]]


def has_preemption_service() -> bool:
    """Whether JAX's preemption service runs, without which its public function raises a bare `RuntimeError`."""
    return _distributed.global_state.preemption_sync_manager is not None


def coordination_client() -> Any:
    """The client of the coordination service that `jax.distributed` runs; None in a program of one process.

    The public functions over it (`multihost_utils`) are device collectives, which queue behind the train steps and have
    no time-out, or barriers, which carry no reason for a failure.
    """
    return _distributed.global_state.client
