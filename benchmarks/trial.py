"""One trial: one kind of work by one peer in this process, which `run` starts fresh for every trial.

A process of its own gives each peer the same empty heap and an honest first save and first restore; within it
the first run is kept apart from the warm ones. Saving and restoring are two trials, as in real life: a run that resumes
has none of the saved state in its memory. Before every measured piece of work dirty pages are flushed, and before a
restore the checkpoint's files are put out of the page cache. What the allocator keeps between saves is the peer's: a
train loop does not give memory back either.

    python -m benchmarks.trial '<request as JSON>' <file for the answer>
"""

import dataclasses
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import limits, meters, peers, states

_IDLE_SECS = 0.5
"""Between saves, so that the peer's threads have come to rest."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a trial is to do.

    Attributes:
        kind: a key of `KINDS`.
        case, scale, seed: the state.
        peer: a key of `peers.PEERS`; empty where the trial has none.
        directory: exists, empty but for what the trial before left for this one.
        repeats: how many saves or restores after the first one.
    """

    kind: str
    case: str
    scale: float
    seed: int
    peer: str
    directory: str
    repeats: int


def save(request: Request) -> dict[str, Any]:
    """Saves `1 + repeats` times into fresh directories. Leaves the last checkpoint and its digests for `restore`."""
    root = Path(request.directory)
    abstract = states.CASES[request.case].abstract(request.scale)
    state, digests = states.materialize(abstract, request.seed)
    (root / "digests.json").write_text(json.dumps(digests))
    meters.give_back()
    baseline = meters.resident_bytes()
    began = time.perf_counter()
    peer = peers.PEERS[request.peer].open(root / "checkpoints")
    peer.prepare(state)
    setup_secs = time.perf_counter() - began
    meter, saves = meters.Meter(), []
    for step in range(1, request.repeats + 2):
        shutil.rmtree(root / "checkpoints" / str(step - 1), ignore_errors=True)
        os.sync()
        time.sleep(_IDLE_SECS)
        meter.start()
        blocking_secs = peer.save(step, state)
        peer.wait()
        usage = meter.stop()
        files = meters.files_under(root / "checkpoints" / str(step))
        saves.append(
            {
                "blocking_secs": blocking_secs,
                "commit_secs": usage.secs,
                "cpu_secs": usage.cpu_secs,
                "peak_over_state_bytes": usage.peak_bytes - baseline,
                "kept_over_state_bytes": usage.after_bytes - baseline,
                "written_bytes": usage.called_write_bytes,
                "stored_bytes": sum(path.stat().st_size for path in files),
                "files": len(files),
                "own_stats": peer.stats(),
            }
        )
    peer.close()
    return {"setup_secs": setup_secs, "saves": saves}


def restore(request: Request) -> dict[str, Any]:
    """Restores what `save` left `1 + repeats` times from cold files; every restore is compared bit by bit.

    Each is followed by a step that is given the state as a donation and does next to nothing: replicas that share
    memory get their own there.
    """
    root = Path(request.directory)
    abstract = states.CASES[request.case].abstract(request.scale)
    digests = json.loads((root / "digests.json").read_text())
    (step,) = [int(path.name) for path in (root / "checkpoints").iterdir() if path.name.isdigit()]
    donating = jax.jit(states.negated, donate_argnums=0).lower(abstract).compile()
    meter, restores, state = meters.Meter(), [], None
    for _ in range(request.repeats + 1):
        peer = peers.PEERS[request.peer].open(root / "checkpoints")
        meters.drop_from_page_cache(root / "checkpoints")
        del state  # last of all: the host of a virtual machine takes freed memory back within seconds
        gc.collect()
        before = meters.resident_bytes()
        meter.start()
        state = jax.block_until_ready(peer.restore(step, abstract))
        usage = meter.stop()
        wrong = states.differences(state, abstract, digests)
        shared_bytes = states.shared_bytes(state)
        began = time.perf_counter()
        state = jax.block_until_ready(donating(state))
        first_step_secs = time.perf_counter() - began
        restores.append(
            {
                "restore_secs": usage.secs,
                "cpu_secs": usage.cpu_secs,
                "peak_bytes": usage.peak_bytes - before,
                "called_read_bytes": usage.called_read_bytes,
                "storage_read_bytes": usage.storage_read_bytes,
                "shared_bytes": shared_bytes,
                "first_step_secs": first_step_secs,
                "restore_and_step_secs": usage.secs + first_step_secs,
                "bit_equal": not wrong,
                "differences": wrong[:5],
            }
        )
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


def machine(request: Request) -> dict[str, Any]:
    """Measures the machine's limits for the bytes of the case's state."""
    nbytes = states.state_bytes(states.CASES[request.case].abstract(request.scale))
    return {"limits": limits.measure(Path(request.directory), nbytes)}


KINDS: dict[str, Callable[[Request], dict[str, Any]]] = {
    "save": save,
    "restore": restore,
    "soak": soak,
    "machine": machine,
}


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    answer = {"load_before": os.getloadavg()[0]} | KINDS[request.kind](request)
    Path(sys.argv[2]).write_text(json.dumps(answer, default=str))


if __name__ == "__main__":
    main()
