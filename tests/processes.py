"""Runs a script in several local processes under `jax.distributed` (CPU, gloo), as several hosts would."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import xla_flags
from tests.helpers import free_port

ROOT = Path(__file__).parents[1]

# What every script begins with: the runtime, this process's number, a mesh of all devices, and arrays on it.
PRELUDE = """
import logging, os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
process, processes = int(os.environ["TEST_PROCESS"]), int(os.environ["TEST_PROCESSES"])
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(os.environ["TEST_COORDINATOR"], processes, process, initialization_timeout=60)
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
import flax_rpsave as rps
mesh = Mesh(np.array(jax.devices()), ("data",))

def put(values, spec=P(), on=None):
    sharding = NamedSharding(on if on is not None else mesh, spec)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index], dtype=values.dtype)

def say(*words):
    print("\\nSAY", *words, flush=True)  # the runtime may have written a part of a line
"""


@dataclass
class Ended:
    """How a process ended.

    Attributes:
      code: Its exit code; negative for a signal.
      said: Lines that it printed with `say`.
      output: All that it printed.
    """

    code: int
    said: list[str]
    output: str


@contextlib.contextmanager
def started(
    script: str,
    processes: int,
    *,
    devices: int = 1,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[list[subprocess.Popen]]:
    """Starts the processes; kills what still runs at the end of the block."""
    port = free_port()
    program = PRELUDE + textwrap.dedent(script)
    running = []
    try:
        for process in range(processes):
            variables = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": xla_flags.devices(devices),
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
                "TEST_PROCESS": str(process),
                "TEST_PROCESSES": str(processes),
                "TEST_COORDINATOR": f"127.0.0.1:{port}",
                **(env or {}),
            }
            running.append(
                subprocess.Popen(
                    [sys.executable, "-c", program, *args],
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield running
    finally:
        for popen in running:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
            popen.stdout.close()


def ended(running: Sequence[subprocess.Popen], timeout: float = 120) -> list[Ended]:
    """Waits for processes to end by themselves; fails with all output where one does not in time."""
    deadline = time.monotonic() + timeout
    results = []
    for number, popen in enumerate(running):
        try:
            output, _ = popen.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            popen.kill()
            output, _ = popen.communicate()
            raise AssertionError(f"process {number} did not end within {timeout} s; it printed:\n{output}") from None
        said = [line[4:] for line in output.splitlines() if line.startswith("SAY ")]
        results.append(Ended(popen.returncode, said, output))
    return results


def run(script: str, processes: int, *, timeout: float = 120, **options) -> list[Ended]:
    """Runs a script in several processes to its end; all must exit with 0."""
    with started(script, processes, **options) as running:
        results = ended(running, timeout)
    for number, result in enumerate(results):
        assert result.code == 0, f"process {number} exited with {result.code}:\n{result.output}"
    return results
