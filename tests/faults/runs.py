"""The small state that the loops here save: a function of the step, so that a wrong value is always found."""

import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.trees import mesh_of, on

FILES_VARIABLE = "RPSAVE_TEST_FILES"
"""Environment variable: set where each chunk is to be a file."""
_LARGE = 300_000  # elements; from 1 MiB on, chunks are aligned in a data file, and read past the page cache


def state_at(step: int) -> dict[str, Any]:
    """Values that lie in a database's nodes, in its data files, in slices, and in documents."""
    return {
        "sliced": jax.device_put(np.arange(500, dtype=np.float32) * step, on(mesh_of((2,)))),
        "large": np.arange(_LARGE, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(step),
        "inline": np.full(3, step, np.float64),
        "step": step,
        "note": f"step {step}",
    }


def config(root: pathlib.Path, **keys: Any) -> dict[str, Any]:
    return {
        "directory": str(root),
        "save_interval_steps": 1,
        "replica_parallel": {"min_slice_bytes": 500},
        "storage": {"use_ocdbt": FILES_VARIABLE not in os.environ},
        **keys,
    }


def assert_is_of(state: Any, step: int, *, exactly: bool = True) -> None:
    """A state is that of a step, to the last bit; `exactly`: Python numbers and texts, too."""
    expected = state_at(step)
    assert set(state) == set(expected)
    for name, value in expected.items():
        found = state[name]
        assert np.asarray(found).dtype == np.asarray(value).dtype, name
        assert np.asarray(found).tobytes() == np.asarray(value).tobytes(), f"{name} is not that of step {step}"
        assert not exactly or isinstance(found, type(value)), name


def load_as_stock(root: pathlib.Path, step: int) -> Any:
    """What stock Orbax reads, on the host."""

    def how(value: Any) -> ocp.RestoreArgs:
        return ocp.RestoreArgs(restore_type=np.ndarray) if hasattr(value, "shape") else ocp.RestoreArgs()

    arguments = ocp.args.PyTreeRestore(restore_args=jax.tree.map(how, state_at(0)))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(root / str(step) / "default", args=arguments)
