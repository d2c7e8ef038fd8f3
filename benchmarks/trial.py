"""One trial: one kind of work by one peer in this process, which `launch` starts fresh for every trial.

A process of its own gives each peer the same empty heap and an honest first save and first restore; within it
the first run is kept apart from the warm ones. Saving and restoring are two trials, as in real life: a run that resumes
has none of the saved state in its memory. Before every measured piece of work dirty pages are flushed, and before a
restore the checkpoint's files are put out of the page cache. What the allocator keeps between saves is the peer's: a
train loop does not give memory back either. A trial of several processes is this program in each of them; they begin
every piece of work together.

    python -m benchmarks.trial '<request as JSON>' <file for the answer>
"""

import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from benchmarks import alongside, limits, meters, peers, restores, states, throttled
from benchmarks.request import IDLE_SECS, Request

_MOST_DONATED = 1000
"""Leaves of a state that a donating step is compiled for: XLA's time for that grows faster than their number."""


def save(request: Request) -> dict[str, Any]:
    """Saves `1 + repeats` times into fresh directories. Leaves the last checkpoint and its digests for `restore`."""
    root = Path(request.directory)
    case = states.CASES[request.case]
    state, digests = states.materialize(case.abstract(request.scale), request.seed, case.shared)
    if request.process == 0:
        (root / "digests.json").write_text(json.dumps(digests))
    meters.give_back()
    baseline = meters.resident_bytes()
    peer = peers.PEERS[request.peer].open(root / "checkpoints")
    peer.prepare(state)
    meter, saves = meters.Meter(), []
    for step in range(1, request.repeats + 2):
        multihost_utils.sync_global_devices(f"counted the files of save {step - 1}")
        if request.process == 0:
            shutil.rmtree(root / "checkpoints" / str(step - 1), ignore_errors=True)
            os.sync()
        time.sleep(IDLE_SECS)
        multihost_utils.sync_global_devices(f"before save {step}")
        meter.start()
        blocking_secs = peer.save(step, state)
        peer.wait()
        usage = meter.stop()
        multihost_utils.sync_global_devices(f"after save {step}")
        record = meters.save_record(blocking_secs, usage, baseline, root / "checkpoints" / str(step))
        saves.append(record | {"own_stats": peer.stats()})
    peer.close()
    budget = {} if peer.budget_bytes is None else {"budget_bytes": peer.budget_bytes}
    return {"saves": saves} | budget


def restore(request: Request) -> dict[str, Any]:
    """Restores what `save` left `1 + repeats` times from cold files; every restore is compared bit by bit.

    Each is followed by a step that is given the state as a donation and does next to nothing: replicas that share
    memory get their own there. A peer that can read without placing does that once more, from cold files again.
    """
    root = Path(request.directory)
    abstract = states.CASES[request.case].abstract(request.scale)
    digests = json.loads((root / "digests.json").read_text())
    (step,) = [int(path.name) for path in (root / "checkpoints").iterdir() if path.name.isdigit()]
    donating = None
    if len(jax.tree.leaves(abstract)) <= _MOST_DONATED:
        donating = jax.jit(states.negated, donate_argnums=0).lower(abstract).compile()
    meter, restores, state = meters.Meter(), [], None
    for _ in range(request.repeats + 1):
        peer = peers.PEERS[request.peer].open(root / "checkpoints")
        multihost_utils.sync_global_devices("every process has opened the directory")  # and left no probe behind
        if request.process == 0:
            meters.drop_from_page_cache(root / "checkpoints")
        del state  # last of all: the host of a virtual machine takes freed memory back within seconds
        gc.collect()
        multihost_utils.sync_global_devices("before restore")
        before = meters.resident_bytes()
        meter.start()
        state = jax.block_until_ready(peer.restore(step, abstract))
        usage = meter.stop()
        wrong = states.differences(state, abstract, digests)
        shared_bytes = states.shared_bytes(state)
        restores.append(meters.restore_record(usage, before, shared_bytes, wrong))
        if donating is not None:
            began = time.perf_counter()
            state = jax.block_until_ready(donating(state))
            first_step_secs = time.perf_counter() - began
            restores[-1] |= {"first_step_secs": first_step_secs, "restore_and_step_secs": usage.secs + first_step_secs}
        if request.processes == 1:
            meters.drop_from_page_cache(root / "checkpoints")
            began = time.perf_counter()
            if peer.read(step) is not None:
                restores[-1]["read_secs"] = time.perf_counter() - began
        peer.close()
    return {"restores": restores}


def soak(request: Request) -> dict[str, Any]:
    """Saves `1 + repeats` times with the garbage collector off and notes resident memory after each save.

    With the collector off, memory that only a cycle holds shows up as growth instead of being hidden by a late sweep.
    """
    root = Path(request.directory)
    abstract = states.CASES[request.case].abstract(request.scale)
    state, _ = states.materialize(abstract, request.seed)
    peer = peers.PEERS[request.peer].open(root / "checkpoints")
    peer.prepare(state)
    meters.give_back()
    gc.disable()
    resident = []
    for step in range(1, request.repeats + 2):
        peer.save(step, state)
        peer.wait()
        shutil.rmtree(root / "checkpoints" / str(step))
        resident.append(meters.resident_bytes())
    peer.close()
    return {
        "state_bytes": states.state_bytes(abstract),
        "resident_bytes": resident,
        "growth_after_third_bytes": resident[-1] - resident[2],
    }


def loop(request: Request) -> dict[str, Any]:
    """See `train_loop.loop`."""
    from benchmarks import train_loop  # loads NNX, which the other trials do without

    return train_loop.loop(request)


def machine(request: Request) -> dict[str, Any]:
    """Measures the machine's limits for the bytes of the case's state."""
    case = states.CASES[request.case]
    nbytes = states.state_bytes(case.build(request.scale))
    return {"limits": limits.measure(Path(request.directory), nbytes, case.processes)}


KINDS: dict[str, Callable[[Request], dict[str, Any]]] = {
    "save": save,
    "restore": restore,
    "restore_variants": restores.restore_variants,
    "soak": soak,
    "machine": machine,
    "throttled_save": throttled.save,
    "loop": loop,
    "alongside": alongside.alongside,
}


def answer(request: Request) -> dict[str, Any]:
    """Does what is asked for."""
    return {"load_before": os.getloadavg()[0]} | KINDS[request.kind](request)


def main() -> None:
    request = Request.from_json(sys.argv[1])
    if request.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(request.coordinator, request.processes, request.process)
    try:
        found = answer(request)
    except BaseException:  # noqa: BLE001 - whatever it is, the process must end
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an exit in good order waits for the other processes, and they wait for this one
    Path(sys.argv[2]).write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
