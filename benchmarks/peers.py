"""The checkpointers that are compared, behind one small interface. Adding one: a class or a line in `PEERS`."""

import abc
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

PyTree = Any


class Peer(abc.ABC):
    """A checkpointer that writes `<directory>/<step>/`.

    Attributes:
        synchronous: a save is committed when its call returns.
        budget_bytes: of staging memory, where the peer has to keep one; known once it is prepared.
    """

    synchronous = False
    budget_bytes: int | None = None

    def __init__(self, directory: Path | str) -> None:
        self.directory = directory

    def prepare(self, state: PyTree) -> None:  # noqa: B027 (most peers have nothing to do here)
        """What a train loop does before its first step: look for a checkpoint of `state`, where there is none yet."""

    def save(self, step: int, state: PyTree) -> float:
        """Starts to save `state`; returns the seconds for which the caller was blocked."""
        began = time.perf_counter()
        self._save(step, state)
        return time.perf_counter() - began

    @abc.abstractmethod
    def _save(self, step: int, state: PyTree) -> None: ...

    @abc.abstractmethod
    def wait(self) -> None:
        """Returns once the save in flight is committed; raises if it failed."""

    @abc.abstractmethod
    def restore(self, step: int, target: PyTree) -> PyTree:
        """The saved state on the shardings of `target` (a tree of `jax.ShapeDtypeStruct`s)."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def read(self, step: int) -> PyTree | None:
        """The saved state as NumPy arrays, placed nowhere; None where the peer has no such way."""
        return None

    def place(self, values: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        """Puts a leaf that was read where a restore would."""
        return jax.device_put(values, sharding)

    def stats(self) -> dict[str, Any]:
        """The peer's own account of its last save, where it gives one."""
        return {}


class OrbaxDefault(Peer):
    """`ocp.CheckpointManager` as its documentation shows it: asynchronous, StandardSave, every option a default."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._manager = ocp.CheckpointManager(directory)

    def _save(self, step: int, state: PyTree) -> None:
        if not self._manager.save(step, args=ocp.args.StandardSave(state)):
            raise RuntimeError(f"Orbax skipped step {step}")

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, step: int, target: PyTree) -> PyTree:
        return self._manager.restore(step, args=ocp.args.StandardRestore(target))

    def close(self) -> None:
        self._manager.close()


class OrbaxPyTree(OrbaxDefault):
    """`ocp.CheckpointManager` with a PyTreeCheckpointHandler whose format and replica mode are set explicitly.

    Args:
        replica_parallel: every replica saves a slice of each array; false: replica 0 saves all of it.
        use_ocdbt, use_zarr3, use_compression: options of `ocp.PyTreeCheckpointHandler`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        replica_parallel: bool,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
    ) -> None:
        Peer.__init__(self, directory)
        handlers = ocp.type_handlers
        registry = handlers.create_type_handler_registry(
            (int, handlers.ScalarHandler()),
            (np.ndarray, handlers.NumpyHandler()),
            (jax.Array, handlers.ArrayHandler(use_replica_parallel=replica_parallel)),
        )
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            use_compression=use_compression,
            type_handler_registry=registry,
        )
        self._manager = ocp.CheckpointManager(directory, item_handlers=handler)

    def _save(self, step: int, state: PyTree) -> None:
        if not self._manager.save(step, args=ocp.args.PyTreeSave(state)):
            raise RuntimeError(f"Orbax skipped step {step}")

    def restore(self, step: int, target: PyTree) -> PyTree:
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        return self._manager.restore(step, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))

    def read(self, step: int) -> PyTree:
        tree = self._manager.item_metadata(step).tree
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return self._manager.restore(step, args=ocp.args.PyTreeRestore(restore_args=restore_args))


class RPSave(Peer):
    """This project with its defaults (checksums on), but for keys of the configuration.

    The directory is a path or an s3:// URL.
    """

    def __init__(self, directory: Path | str, **settings: Any) -> None:
        super().__init__(directory)
        from flax_rpsave import CheckpointCallback  # so that a trial of another peer does not load it

        self._settings = {"directory": str(directory), **settings}
        self._checkpoint = CheckpointCallback(self._settings)
        self.synchronous = not settings.get("async_save", True)

    def prepare(self, state: PyTree) -> None:
        self._checkpoint.resume(state)

    def _save(self, step: int, state: PyTree) -> None:
        if not self._checkpoint(step, state, force=True):
            raise RuntimeError(f"flax_rpsave skipped step {step}")

    def wait(self) -> None:
        self._checkpoint.wait()

    def restore(self, step: int, target: PyTree) -> PyTree:
        return self._checkpoint.resume(target, step=step)[0]

    def read(self, step: int) -> PyTree:
        from flax_rpsave import load

        return load(self.directory, step=step)

    def place(self, values: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        from flax_rpsave.restore import (
            put,
        )  # a restore places each leaf as it has been read: nothing public does it alone

        return put(values, sharding, "a leaf")

    def close(self) -> None:
        self._checkpoint.close()

    def stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self._checkpoint.stats)


class RPSaveWithin(RPSave):
    """The same with `max_staging_gb`.

    Args:
        share: the budget, as a part of what this process saves of the state.
    """

    def __init__(self, directory: Path | str, share: float) -> None:
        super().__init__(directory)
        self._share = share

    def prepare(self, state: PyTree) -> None:
        from flax_rpsave import CheckpointCallback, plan

        self._checkpoint.close()
        self.budget_bytes = int(self._share * plan(state).process_bytes[jax.process_index()])
        self._checkpoint = CheckpointCallback(self._settings | {"max_staging_gb": self.budget_bytes / 1e9})
        super().prepare(state)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the tables.

    Attributes:
        label: what it is called there.
        make: makes the peer for a directory; None where `program` has its own way.
        options: further arguments of `make`.
        program: the module that does its trials.
        requirements: what pip is to install into an environment of its own, in which the program runs; it must not need
            JAX then. None: the program runs in this one.
        environment: variables that its processes get.
    """

    label: str
    make: Callable[..., Peer] | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    program: str = "benchmarks.trial"
    requirements: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def open(self, directory: Path) -> Peer:
        return self.make(directory, **self.options)


def _other(directory: Path, name: str) -> Peer:
    """A peer of `other_peers`; loaded here, so that the trial of another peer does not load it."""
    from benchmarks import other_peers

    return getattr(other_peers, name)(directory)


_TORCH = {"make": None, "program": "benchmarks.torch_dcp", "requirements": ("torch==2.13.0", "numpy")}
_FASTEST = {"use_ocdbt": False, "use_zarr3": True, "use_compression": False}

PEERS = {
    "rpsave": Entry("flax_rpsave", RPSave),
    "rpsave_unchecked": Entry("flax_rpsave, checksum: false", RPSave, {"storage": {"checksum": False}}),
    "rpsave_check": Entry(
        "flax_rpsave, check_divergence: fail", RPSave, {"replica_parallel": {"check_divergence": "fail"}}
    ),
    "rpsave_single": Entry("flax_rpsave, single-replica", RPSave, {"replica_parallel": {"enable": False}}),
    "rpsave_budget_half": Entry("flax_rpsave, max_staging_gb: 1/2 of the slices", RPSaveWithin, {"share": 1 / 2}),
    "rpsave_budget_quarter": Entry("flax_rpsave, max_staging_gb: 1/4 of the slices", RPSaveWithin, {"share": 1 / 4}),
    "rpsave_files": Entry("flax_rpsave, use_ocdbt: false", RPSave, {"storage": {"use_ocdbt": False}}),
    "rpsave_tensorstore": Entry(
        "flax_rpsave, RPSAVE_ENGINE=tensorstore", RPSave, environment={"RPSAVE_ENGINE": "tensorstore"}
    ),
    "rpsave_blosc": Entry("flax_rpsave, compression: blosc", RPSave, {"storage": {"compression": "blosc"}}),
    "rpsave_sync": Entry("flax_rpsave, async_save: false", RPSave, {"async_save": False}),
    "orbax_default": Entry("Orbax defaults", OrbaxDefault),
    "orbax_rp": Entry("Orbax replica-parallel", OrbaxPyTree, {"replica_parallel": True}),
    "orbax_single": Entry("Orbax single-replica", OrbaxPyTree, {"replica_parallel": False}),
    "orbax_tuned": Entry("Orbax tuned, replica-parallel", OrbaxPyTree, {"replica_parallel": True} | _FASTEST),
    "orbax_tuned_single": Entry("Orbax tuned, single-replica", OrbaxPyTree, {"replica_parallel": False} | _FASTEST),
    "orbax_v1": Entry("Orbax v1 save_async", _other, {"name": "OrbaxV1"}),
    "jax_serialization": Entry("jax.experimental array_serialization", _other, {"name": "JaxSerialization"}),
    "numpy": Entry("np.savez, one replica", _other, {"name": "NumpyFile"}),
    "torch_dcp": Entry("torch DCP, synchronous", **_TORCH),
    "torch_dcp_async": Entry("torch DCP, asynchronous", **_TORCH),
}

OTHERS = [
    name for name, entry in PEERS.items() if entry.program == "benchmarks.trial" and not name.startswith("rpsave")
]
"""Those that run in this environment and are not this project."""
ELSEWHERE = [name for name, entry in PEERS.items() if entry.requirements]
"""Those that run in an environment of their own."""
MODES = [
    "rpsave",
    "rpsave_budget_half",
    "rpsave_budget_quarter",
    "rpsave_files",
    "rpsave_tensorstore",
    "rpsave_blosc",
    "rpsave_sync",
]
"""This project's ways to save."""
