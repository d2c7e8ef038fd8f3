"""A long run: memory, threads and open files stay what they were."""

import os
import pathlib
import threading

import jax
import numpy as np
import pytest

import flax_rpsave as rps
from tests.faults.runs import config
from tests.faults.sizes import SIZES
from tests.trees import mesh_of, on

WARM = 10  # saves after which all that is kept is there


def resident_nbytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(300 + SIZES.saves)
def test_nothing_grows_with_the_number_of_saves(tmp_path, each_engine, record_property):  # field report 5
    state = {"w": np.ones((256, 1024), np.float32), "b": np.ones(1 << 18, np.float32)}
    nbytes = sum(value.nbytes for value in state.values())
    state["w"] = jax.device_put(state["w"], on(mesh_of((8,))))
    with rps.CheckpointCallback(config(tmp_path / "run", max_to_keep=2)) as checkpoint:
        for step in range(1, SIZES.saves + 1):
            checkpoint(step, state)
            checkpoint.wait()
            if step == WARM:
                memory = resident_nbytes()
                counts = threading.active_count(), len(os.listdir("/proc/self/fd"))
                tasks = len(os.listdir("/proc/self/task"))
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == counts
        assert len(os.listdir("/proc/self/task")) <= tasks + 4  # of pools that JAX and TensorStore fill up to a limit
        grown = resident_nbytes() - memory
    record_property("saves of one run", SIZES.saves)
    record_property("memory grown, MB", round(grown / 1e6, 1))
    assert grown < 5 * nbytes  # were a part of a state kept each time, 20 saves would show a quarter of one
