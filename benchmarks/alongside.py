"""What a save does to the program beside it: its memory over time, and the pauses of its Python code.

A program that computes nothing is watched first: the memory of a save is then all its own. Then the main thread
spins on the clock without a save, and then while one is under way; the longest time between two looks at the clock is
the worst pause: what a callback, a data loader or a server in the same interpreter would feel. A save that needs the
interpreter itself takes longer beside such a thread. What the spinning
thread did not run of that time (wall time less its own processor time), beyond its like without a save, is the most
that other threads can have held the interpreter's lock: where it waited for a core because threads without the lock
computed, that is in it, too.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import meters, peers, states
from benchmarks.memory_watch import MemoryWatch
from benchmarks.request import IDLE_SECS, Request

PyTree = Any
_QUIET_SECS = 5.0


def alongside(request: Request) -> dict[str, Any]:
    """Saves `1 + repeats` times with the memory watched, then `repeats` times beside a spinning main thread."""
    abstract = states.CASES[request.case].abstract(request.scale)
    state, _ = states.materialize(abstract, request.seed)
    meters.give_back()
    baseline = meters.resident_bytes()
    peer = peers.PEERS[request.peer].open(Path(request.directory, "checkpoints"))
    peer.prepare(state)
    steps = range(1, 2 * request.repeats + 2)
    watched = [_watched(peer, step, state, baseline) for step in steps[: request.repeats + 1]]
    spun = [_spun(peer, step, state) for step in steps[request.repeats + 1 :]]
    peer.close()
    return {"watched": watched, "spun": spun}


def _watched(peer: peers.Peer, step: int, state: PyTree, baseline: int) -> dict[str, Any]:
    """One save; memory relative to what was resident before the peer was made, until things have come to rest."""
    _settle()
    meter = meters.Meter()
    with MemoryWatch() as watch:
        time.sleep(IDLE_SECS)
        meter.start()
        began = time.perf_counter()
        blocking_secs = peer.save(step, state)
        peer.wait()
        usage = meter.stop()
        time.sleep(IDLE_SECS)
    shutil.rmtree(peer.directory / str(step))
    return {
        "blocking_secs": blocking_secs,
        "commit_secs": usage.secs,
        "cpu_secs": usage.cpu_secs,
        "at_ms": [round(1e3 * (at - began)) for at, _ in watch.samples],
        "over_state_mb": [round((nbytes - baseline) / 1e6) for _, nbytes in watch.samples],
    }


def _spun(peer: peers.Peer, step: int, state: PyTree) -> dict[str, Any]:
    """One save beside a spinning main thread; the call itself, which blocks that thread anyway, is not counted."""
    _settle()
    ends = time.perf_counter() + _QUIET_SECS
    quiet = _spin(lambda: time.perf_counter() > ends)
    with ThreadPoolExecutor(1) as waiter:
        peer.save(step, state)
        save = waiter.submit(peer.wait)
        done: list[Future[None]] = []  # to look at it takes no lock
        save.add_done_callback(done.append)
        beside = _spin(lambda: bool(done))
        save.result()
    shutil.rmtree(peer.directory / str(step))
    return beside | {f"quiet_{name}": value for name, value in quiet.items()}


def _spin(ended: Callable[[], bool]) -> dict[str, float]:
    """Spins until `ended()`.

    Returns:
        Seconds: how long it took, the longest time between two looks at the clock, and how much of it the thread did
        not run.
    """
    ran = time.thread_time()
    worst, began = 0.0, time.perf_counter()
    last = began
    while not ended():
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    secs = time.perf_counter() - began
    return {"secs": secs, "worst_secs": worst, "lost_secs": secs - (time.thread_time() - ran)}


def _settle() -> None:
    """Lets what was done before come to rest."""
    os.sync()
    time.sleep(IDLE_SECS)
