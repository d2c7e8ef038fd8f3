"""Checkpointers other than Orbax's manager: its v1 functions, JAX's own array serialization, and NumPy alone."""

import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp1
from jax.experimental.array_serialization import pytree_serialization

from benchmarks.peers import Peer, PyTree


class OrbaxV1(Peer):
    """`save_async` and `load` of Orbax's v1 interface, every option a default."""

    _response: Any = None

    def _save(self, step: int, state: PyTree) -> None:
        self._response = ocp1.save_async(self.directory / str(step), state)

    def wait(self) -> None:
        self._response.result()

    def restore(self, step: int, target: PyTree) -> PyTree:
        return ocp1.load(self.directory / str(step), target)

    def close(self) -> None:
        pass


class JaxSerialization(Peer):
    """`jax.experimental.array_serialization`: the state's leaves as a list, which needs no registered tree types."""

    _future: Any = None

    def _save(self, step: int, state: PyTree) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._future = pytree_serialization.nonblocking_save(jax.tree.leaves(state), self.directory / str(step))

    def wait(self) -> None:
        self._future.result()

    def restore(self, step: int, target: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(target)
        shardings = [leaf.sharding for leaf in leaves]
        return structure.unflatten(pytree_serialization.load(self.directory / str(step), shardings))

    def close(self) -> None:
        pass


class NumpyFile(Peer):
    """`np.savez` of each leaf by the first process, flushed to the disk and renamed; the caller waits for all of it."""

    synchronous = True

    def _save(self, step: int, state: PyTree) -> None:
        if jax.process_index():
            return
        partial = self.directory / f"{step}.partial"
        partial.mkdir(parents=True)
        with (partial / "state.npz").open("wb") as file:
            np.savez(file, *[np.asarray(leaf) for leaf in jax.tree.leaves(state)])
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self.directory / str(step))

    def wait(self) -> None:
        pass

    def restore(self, step: int, target: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(target)
        with np.load(self.directory / str(step) / "state.npz") as stored:
            values = [stored[f"arr_{i}"] for i in range(len(leaves))]
        return structure.unflatten([jax.device_put(v, x.sharding) for v, x in zip(values, leaves, strict=True)])

    def close(self) -> None:
        pass
