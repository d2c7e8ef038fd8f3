"""A real train loop beside its saves: the example's GPT, donated steps, on as many devices as the machine has cores.

Windows of `STEPS` steps without a save and with one at their start take turns. A window ends when its save is
committed, so whatever a save costs, at once or later, is in its window; the difference to the window before it is what
the save costs. One more window is traced, so that the stages of its save can be shown beside its steps.
"""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import example, meters, peers, states
from benchmarks.request import Request

PyTree = Any
STEPS = 10
"""Of a window."""
_STEPS_BEFORE = 2
"""Steps of the traced window before its save."""


class Training:
    """The loop's state and its compiled step.

    Args:
        request: names the case and the scale.
    """

    def __init__(self, request: Request) -> None:
        abstract = states.CASES[request.case].abstract(request.scale)
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        mesh = jax.tree.leaves(shardings)[0].mesh
        split = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        # Copied: a donated state whose replicas share memory would be copied by the first step.
        fresh = jax.tree.map(jnp.copy, example.train_state(request.scale))
        self.state: PyTree = jax.device_put(fresh, shardings)
        rng = np.random.default_rng(request.seed)
        self._batches = [
            jax.device_put(rng.integers(0, example.VOCABULARY, example.TOKENS, np.int32), split) for _ in range(4)
        ]
        self._step = jax.jit(
            example.train_step(request.scale),
            donate_argnums=0,
            out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        )
        self.done = 0

    def step(self) -> None:
        """One step, and its loss read, which bounds the steps in flight to one."""
        self.state, loss = self._step(self.state, self._batches[self.done % len(self._batches)])
        self.done += 1
        float(loss)


def waited(peer: peers.Peer) -> float:
    """Waits for the save in flight; returns when it was committed."""
    peer.wait()
    return time.perf_counter()


def _window(training: Training, peer: peers.Peer, waiter: ThreadPoolExecutor, *, saves: bool) -> dict[str, Any]:
    """Runs one window; see `loop` for what is noted."""
    meter, step_secs, starts = meters.Meter(), [], []
    meter.start()
    began = time.perf_counter()
    blocking_secs = peer.save(training.done + 1, training.state) if saves else 0.0
    commit = waiter.submit(waited, peer) if saves and not peer.synchronous else None
    returned = time.perf_counter()
    for _ in range(STEPS):
        starts.append(time.perf_counter())
        training.step()
        step_secs.append(time.perf_counter() - starts[-1])
    committed = commit.result() if commit else returned
    usage = meter.stop()
    return {
        "saves": saves,
        "secs": usage.secs,
        "cpu_secs": usage.cpu_secs,
        "blocking_secs": blocking_secs,
        "commit_secs": committed - began if saves else 0.0,
        "step_secs": step_secs,
        "steps_beside_save": sum(start < committed for start in starts),
    }


def loop(request: Request) -> dict[str, Any]:
    """Runs `1 + repeats` pairs of windows, one without and one with a save; the first pair compiles and is left out.

    But what the run's first save blocks is noted. Between it and the look for a checkpoint lies what lies there in
    any loop: the compilation of its own step, and steps.
    """
    training = Training(request)
    checkpoints = Path(request.directory, "checkpoints")
    peer = peers.PEERS[request.peer].open(checkpoints)
    peer.prepare(training.state)
    windows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as waiter:
        for _ in range(request.repeats + 1):
            for saves in (False, True):
                step = training.done + 1
                windows.append(_window(training, peer, waiter, saves=saves))
                if saves:
                    shutil.rmtree(checkpoints / str(step))
    spans = _traced(training, peer, request.directory)
    peer.close()
    return {
        "state_bytes": states.state_bytes(training.state),
        "first_blocking_secs": windows[1]["blocking_secs"],
        "windows": windows[2:],
        "spans": spans,
    }


def _traced(training: Training, peer: peers.Peer, directory: str) -> list[dict[str, Any]]:
    """One window with a save after a few steps, as the profiler sees it.

    Returns:
        The loop's steps (`step`), its call (`call`) and the stages that this project annotates: a name, and from when
        to when, in seconds since the call.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(directory, profiler_options=options):
        for i in range(STEPS):
            if i == _STEPS_BEFORE:
                with jax.profiler.TraceAnnotation("call"):
                    peer.save(training.done + 1, training.state)
            with jax.profiler.TraceAnnotation("step"):
                training.step()
        peer.wait()
    (file,) = Path(directory).rglob("*.xplane.pb")
    events = [
        (event.name, event.start_ns, event.end_ns)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name in ("step", "call") or event.name.startswith("rpsave:")
    ]
    called = next(start for name, start, _ in events if name == "call")
    return [
        {"name": name, "from_secs": (start - called) / 1e9, "to_secs": (end - called) / 1e9}
        for name, start, end in sorted(events, key=lambda event: event[1])
    ]
