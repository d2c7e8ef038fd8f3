"""What a save costs on an accelerator, beside the limits of its own copies and links; 8 minutes at most on one GPU.

    python -m benchmarks.gpu --out FILE                 GPT-2 small under Adam in float32 and bfloat16, 4 huge leaves
    python -m benchmarks.gpu --scale 0.001 --seconds 1  tiny states, to see that all of it runs (on CPU, too)

It answers: how long the call blocks, against a copy of the state on the device; how fast the snapshot comes to host,
against one large copy to pageable and to pinned memory; what a running matmul loop loses while a save is under way; and
what a save needs of the device's memory. Peers take turns within one run; the file has every value, the table medians
with min and max. `benchmarks.report` makes a section of the page from the file.
"""

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import limits, peers, run, states
from benchmarks.tables import NOTHING, Results, spread, table

PyTree = Any
CASES = {
    "GPT-2 small under Adam, float32": ("gpt2_small", jnp.float32),
    "GPT-2 small under Adam, bfloat16": ("gpt2_small", jnp.bfloat16),
    "4 huge matrices, float32": ("huge_leaves", jnp.float32),
}
"""Title -> a case of `states`, and the type of its float leaves."""
PEERS = ("orbax_default", "orbax_tuned", "rpsave")
"""In the order of what they are thought to need of the device's memory: see `measure_saves`."""
_LINK_NBYTES = 1 << 30


def seconds(work: Callable[[], Any], repeats: int) -> list[float]:
    """Wall time of each of `repeats` calls, after one that is not counted."""
    jax.block_until_ready(work())
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(work())
        found.append(time.perf_counter() - began)
    return found


def state_of(name: str, dtype: Any, scale: float) -> PyTree:
    """The train state on one device; float leaves in `dtype`."""
    case = dataclasses.replace(states.CASES[name], devices=1, replicas=1, axes=(("data", 1),))
    abstract = jax.tree.map(
        lambda x: x.update(dtype=dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, case.abstract(scale)
    )
    return states.materialize(abstract, seed=0)[0]


def device_memory(name: str) -> int | None:
    """A figure of the device's allocator; None where it keeps none (CPU)."""
    return (jax.devices()[0].memory_stats() or {}).get(name)


def link_limits(nbytes: int, repeats: int) -> dict[str, list[float]]:
    """GB/s between device and host, of one array of `nbytes`; pinned memory where the device has such a space."""
    device = jax.devices()[0]
    source = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    there = jax.block_until_ready(jax.device_put(source, device))
    refresh = jax.jit(lambda x: x + jnp.uint8(1))  # an array remembers its host copy: each turn needs a fresh one

    def to_host() -> list[float]:
        found = []
        for _ in range(repeats + 1):
            fresh = jax.block_until_ready(refresh(there))
            began = time.perf_counter()
            np.asarray(fresh)
            found.append(time.perf_counter() - began)
        return found[1:]

    result = {"to device": seconds(lambda: jax.device_put(source, device), repeats), "to pageable host": to_host()}
    if "pinned_host" in {memory.kind for memory in device.addressable_memories()}:
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        result["to pinned host"] = seconds(lambda: jax.device_put(there, pinned), repeats)
    return {name: [nbytes / secs / 1e9 for secs in found] for name, found in result.items()}


class MatmulLoop:
    """A train loop's stand-in: dependent matmuls that fill the device, dispatched one step ahead."""

    def __init__(self, size: int) -> None:
        self._x = jnp.full((size, size), 1 / size, jnp.bfloat16)
        self._step = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: y @ x, x))
        jax.block_until_ready(self._step(self._x))

    def run(self, secs: float) -> list[float]:
        """Seconds of each step, for at least `secs`."""
        found, began = [], time.perf_counter()
        ahead = self._step(self._x)
        while time.perf_counter() - began < secs:
            start = time.perf_counter()
            following = self._step(self._x)
            jax.block_until_ready(ahead)
            ahead = following
            found.append(time.perf_counter() - start)
        jax.block_until_ready(ahead)
        return found


def measure_saves(
    state: PyTree, directory: Path, rounds: int, secs: float, size: int, deadline: float
) -> dict[str, dict[str, Any]]:
    """Saves by each peer in turn, first with an idle device, then beside the loop.

    The first turn compiles, and tells what a save needs of the device's memory. The allocator's peak cannot be reset,
    so what it was before is noted, too: a peer that has not raised it needs no more than that.

    Args:
        deadline: when no further turn is to begin that takes as long as the last, on the clock of
            `time.perf_counter`; one turn is always measured.
    """
    found: dict[str, dict[str, Any]] = {}
    opened = {name: peers.PEERS[name].open(directory / name) for name in PEERS}
    step = 0
    for name, peer in opened.items():
        in_use, before = device_memory("bytes_in_use"), device_memory("peak_bytes_in_use")
        peer.prepare(state)
        step += 1
        _saved(peer, step, state)
        after = device_memory("peak_bytes_in_use")
        known = in_use is not None and before is not None and after is not None
        found[name] = {
            "device_peak_over_state_bytes": {"before": before - in_use, "after": after - in_use} if known else None,
            "blocking_secs": [],
            "commit_secs": [],
            "loop_step_secs": [],
            "own": [],
        }
    loop = MatmulLoop(size)
    quiet = loop.run(secs)
    for turn in range(rounds):
        began = time.perf_counter()
        for name, peer in opened.items():
            step += 1
            blocking_secs, commit_secs, _ = _saved(peer, step, state)
            found[name]["blocking_secs"].append(blocking_secs)
            found[name]["commit_secs"].append(commit_secs)
            found[name]["own"].append(peer.stats())
            step += 1
            found[name]["loop_step_secs"] += _saved(peer, step, state, lambda: loop.run(secs))[2]
        now = time.perf_counter()
        if turn + 1 < rounds and 2 * now - began > deadline:
            print(f"{turn + 1} of {rounds} turns: the time is used up", flush=True)
            break
    for peer in opened.values():
        peer.close()
    return {name: {"quiet_step_secs": quiet} | measured for name, measured in found.items()}


def _saved(
    peer: peers.Peer, step: int, state: PyTree, beside: Callable[[], list[float]] = list
) -> tuple[float, float, list[float]]:
    """A save: seconds until the call returned and until the commit, and what `beside`, run meanwhile, returned."""
    began = time.perf_counter()
    blocking_secs = peer.save(step, state)
    steps = beside()
    peer.wait()
    commit_secs = time.perf_counter() - began
    shutil.rmtree(peer.directory / str(step))
    return blocking_secs, commit_secs, steps


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, each within its share of the time; the links last, for they raise the peak of the device's memory."""
    ends = time.perf_counter() + 60 * options.minutes
    device = jax.devices()[0]
    cases: dict[str, Any] = {}
    for title, (name, dtype) in CASES.items():
        began = time.perf_counter()
        state = state_of(name, dtype, options.scale)
        nbytes = states.state_bytes(state)
        deadline = began + (ends - began) / (len(CASES) - len(cases))
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            raw = limits.measure(Path(directory), nbytes)
            saves = measure_saves(state, Path(directory), options.rounds, options.seconds, options.size, deadline)
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        cases[title] = {
            "state_bytes": nbytes,
            "device_copy_secs": seconds(lambda c=copy, s=state: c(s), options.rounds),
            "limits": raw,
            "peers": saves,
        }
        del state
    return {
        "device": f"{device.device_kind} ({device.platform})",
        "link_gb_per_sec": link_limits(max(1 << 20, int(_LINK_NBYTES * min(1.0, options.scale))), options.rounds),
        "cases": cases,
    }


def section(results: Results) -> list[str]:
    """The tables of a results file of this program."""
    result = results["gpu"]
    links = [[name, spread(values, 2)] for name, values in result["link_gb_per_sec"].items()]
    lines = [f"### One accelerator: {result['device']}", "", *table(["one large array", "GB/s"], links), ""]
    for title, found in result["cases"].items():
        gigabytes = found["state_bytes"] / 1e9
        rows = [
            ["copy on the device", spread(found["device_copy_secs"], 4), NOTHING, NOTHING, NOTHING, f"{gigabytes:.2f}"]
        ]
        for name, peer in found["peers"].items():
            quiet = statistics.median(peer["quiet_step_secs"])
            slower = [secs / quiet for secs in peer["loop_step_secs"]]
            to_host = [gigabytes / own["snapshot_secs"] for own in peer["own"] if own.get("snapshot_secs")]
            rows.append(
                [
                    peers.PEERS[name].label,
                    spread(peer["blocking_secs"], 4),
                    spread(to_host, 2),
                    spread(peer["commit_secs"], 2),
                    f"{statistics.mean(slower):.3f} (worst {max(slower):.2f})",
                    _device_peak(peer["device_peak_over_state_bytes"]),
                ]
            )
        raw = found["limits"]["direct_write"] or found["limits"]["buffered_write"]
        rows.append(["raw write to the disk", NOTHING, NOTHING, f"{raw['secs']:.2f}", NOTHING, NOTHING])
        headings = [
            "blocking, s",
            "snapshot to host, GB/s",
            "to commit, s",
            "loop step ÷ quiet step, mean",
            "device memory over state, GB",
        ]
        turns = len(next(iter(found["peers"].values()))["commit_secs"])
        lines += [f"**{title}, {gigabytes:.3f} GB, R = 1 ({turns} turns; medians, min–max)**", ""]
        lines += [*table(["", *headings], rows), ""]
    return lines


def _device_peak(peak: dict[str, int] | None) -> str:
    if peak is None:
        return NOTHING
    return ("" if peak["after"] > peak["before"] else "≤ ") + f"{peak['after'] / 1e9:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the states' bytes")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each peer at most, after one that compiles")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further turn begins")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a matmul loop")
    parser.add_argument("--size", type=int, default=4096, help="of the loop's square matrices")
    parser.add_argument("--dir", type=Path, help="where to save (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args(arguments)
    results = {"environment": run.environment("python -m benchmarks.gpu", arguments), "gpu": measure(options)}
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1, default=str) + "\n")
    print("\n".join(section(results)))


if __name__ == "__main__":
    main()
