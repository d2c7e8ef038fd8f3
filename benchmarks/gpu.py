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
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flax_rpsave
from benchmarks import limits, peers, run, states
from benchmarks.tables import NOTHING, Results, spread, table
from benchmarks.targets import verdict, verdicts
from flax_rpsave.leaves import flatten
from flax_rpsave.snapshot import Snapshotter

PyTree = Any
CASES = {
    "GPT-2 small under Adam, bfloat16": ("gpt2_small", jnp.bfloat16),
    "GPT-2 small under Adam, float32": ("gpt2_small", jnp.float32),
    "4 huge matrices, float32": ("huge_leaves", jnp.float32),
}
"""Title -> a case of `states`, and the type of its float leaves; the larger ones last, for the memory's peak."""
PEERS = ("orbax_default", "orbax_tuned", "rpsave")
"""In the order of what they are thought to need of the device's memory: see `measure_saves`."""
_LINK_NBYTES = 1 << 30
_PCIE_LANE_GB_PER_SEC = {"1": 0.25, "2": 0.5, "3": 0.985, "4": 1.969, "5": 3.938, "6": 7.563}
"""Of one direction, by generation, encoding subtracted."""


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


def link() -> str | None:
    """What connects the first GPU to the host, and its nominal bandwidth; None where nvidia-smi does not say that."""
    query = "--query-gpu=name,pcie.link.gen.current,pcie.link.width.current"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        name, generation, width = done.stdout.splitlines()[0].split(", ")
        speed = _PCIE_LANE_GB_PER_SEC[generation] * int(width)
    except (OSError, subprocess.CalledProcessError, LookupError, ValueError):
        return None
    return f"{name}, PCIe {generation} x{width}: {speed:.1f} GB/s"


def snapshot_to_host(state: PyTree, repeats: int) -> list[float]:
    """Seconds in which a snapshot is taken and comes to the host, written nowhere; the first one is not counted."""
    leaves = [leaf for leaf in flatten(state)[0] if leaf.is_array]
    snapshotter = Snapshotter(flax_rpsave.plan(state), leaves, process=0)
    snapshotter.compile()
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        pieces = list(snapshotter.take([leaf.value for leaf in leaves], group=0).pieces())
        found.append(time.perf_counter() - began)
        del pieces  # where staging memory is kept, the next snapshot goes into it
    return found[1:]


class MatmulLoop:
    """A train loop's stand-in: dependent matmuls that fill the device, dispatched one step ahead."""

    def __init__(self, size: int) -> None:
        self._x = jnp.full((size, size), 1 / size, jnp.bfloat16)
        self._step = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: y @ x, x))
        jax.block_until_ready(self._step(self._x))

    def dispatched(self) -> jax.Array:
        """The result of a step that the device has yet to make."""
        return self._step(self._x)

    def run(self, ended: Callable[[], bool]) -> list[float]:
        """Seconds of each step; at least one is made, and none is begun that finds `ended()` true."""
        found: list[float] = []
        ahead = self.dispatched()
        while not found or not ended():
            start = time.perf_counter()
            following = self.dispatched()
            jax.block_until_ready(ahead)
            ahead = following
            found.append(time.perf_counter() - start)
        jax.block_until_ready(ahead)
        return found


def measure_saves(
    state: PyTree, directory: Path, rounds: int, secs: float, size: int, deadline: float
) -> dict[str, dict[str, Any]]:
    """Saves by each peer in turn, first with an idle device, then beside the loop, which ends with the save.

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
            "blocking_beside_loop_secs": [],
            "commit_secs": [],
            "loop_step_secs": [],
        }
    loop, ends = MatmulLoop(size), time.perf_counter() + secs
    quiet = loop.run(lambda: time.perf_counter() > ends)
    for turn in range(rounds):
        began = time.perf_counter()
        for place in range(len(PEERS)):
            name = PEERS[(turn + place) % len(PEERS)]
            peer = opened[name]
            step += 1
            blocking_secs, commit_secs, _ = _saved(peer, step, state)
            found[name]["blocking_secs"].append(blocking_secs)
            found[name]["commit_secs"].append(commit_secs)
            step += 1
            blocking_secs, _, steps = _saved(peer, step, state, loop)
            found[name]["blocking_beside_loop_secs"].append(blocking_secs)
            found[name]["loop_step_secs"] += steps
        now = time.perf_counter()
        if turn + 1 < rounds and 2 * now - began > deadline:
            print(f"{turn + 1} of {rounds} turns: the time is used up", flush=True)
            break
    for peer in opened.values():
        peer.close()
    return {name: {"quiet_step_secs": quiet} | measured for name, measured in found.items()}


def _saved(
    peer: peers.Peer, step: int, state: PyTree, loop: MatmulLoop | None = None
) -> tuple[float, float, list[float]]:
    """A save: seconds until the call returned, until the commit, and of each step that `loop` made meanwhile."""
    busy = loop.dispatched() if loop else None  # the device, at the call
    began = time.perf_counter()
    blocking_secs = peer.save(step, state)
    with ThreadPoolExecutor(1) as waiter:
        commit = waiter.submit(peer.wait)
        jax.block_until_ready(busy)
        steps = loop.run(commit.done) if loop else []
        commit.result()
    commit_secs = time.perf_counter() - began
    shutil.rmtree(peer.directory / str(step))
    return blocking_secs, commit_secs, steps


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, each within its share of the time; the limits last, for they raise the peak of the device's memory."""
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
        cases[title] = {"state_bytes": nbytes, "limits": raw, "peers": saves}
        del state
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    for title, (name, dtype) in CASES.items():
        state = state_of(name, dtype, options.scale)
        cases[title]["device_copy_secs"] = seconds(lambda s=state: copy(s), options.rounds)
        cases[title]["to_host_secs"] = snapshot_to_host(state, options.rounds)
        del state
    return {
        "device": f"{device.device_kind} ({device.platform})",
        "link_gb_per_sec": link_limits(max(1 << 20, int(_LINK_NBYTES * min(1.0, options.scale))), options.rounds),
        "link": link() if device.platform == "gpu" else None,
        "cases": cases,
    }


def section(results: Results) -> list[str]:
    """The tables of a results file of this program."""
    result = results["gpu"]
    links = [[name, spread(values, 2)] for name, values in result["link_gb_per_sec"].items()]
    about = f"### One accelerator: {result['device']}" + (f", {result['link']}" if result["link"] else "")
    lines = [about, "", *table(["one large array", "GB/s"], links), ""]
    for title, found in result["cases"].items():
        gigabytes = found["state_bytes"] / 1e9
        speeds = [gigabytes / secs for secs in found["to_host_secs"]]
        rows = [
            ["copy on the device", spread(found["device_copy_secs"], 4), *[NOTHING] * 4, f"{gigabytes:.2f}"],
            ["a snapshot of flax_rpsave to host", NOTHING, NOTHING, spread(speeds, 2), *[NOTHING] * 3],
        ]
        for name, peer in found["peers"].items():
            quiet = statistics.median(peer["quiet_step_secs"])
            slower = [secs / quiet for secs in peer["loop_step_secs"]]
            rows.append(
                [
                    peers.PEERS[name].label,
                    spread(peer["blocking_secs"], 4),
                    spread(peer["blocking_beside_loop_secs"], 4),
                    NOTHING,
                    spread(peer["commit_secs"], 2),
                    f"{statistics.mean(slower):.3f} (worst {max(slower):.2f})",
                    _device_peak(peer["device_peak_over_state_bytes"]),
                ]
            )
        raw = found["limits"]["direct_write"] or found["limits"]["buffered_write"]
        rows.append(["raw write to the disk", *[NOTHING] * 3, f"{raw['secs']:.2f}", NOTHING, NOTHING])
        headings = [
            "blocking, s",
            "blocking beside the loop, s",
            "to host, GB/s",
            "to commit, s",
            "loop step ÷ quiet step, mean",
            "device memory over state, GB",
        ]
        ours = found["peers"]["rpsave"]
        links_to_host = [speed for name, speed in result["link_gb_per_sec"].items() if name != "to device"]
        fastest = max(map(statistics.median, links_to_host))
        judged = verdicts(
            [
                verdict("blocking", "a copy on the device", ours["blocking_secs"], found["device_copy_secs"], None),
                verdict("a snapshot to host", "the fastest link", found["to_host_secs"], [gigabytes / fastest], None),
            ]
        )
        turns = len(next(iter(found["peers"].values()))["commit_secs"])
        lines += [f"**{title}, {gigabytes:.3f} GB, R = 1 ({turns} turns; medians, min–max)**", ""]
        lines += [*judged, "", *table(["", *headings], rows), ""]
    return lines


def _device_peak(peak: dict[str, int] | None) -> str:
    if peak is None:
        return NOTHING
    return ("" if peak["after"] > peak["before"] else "≤ ") + f"{peak['after'] / 1e9:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the states' bytes")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each peer at most, after one that compiles")
    parser.add_argument("--minutes", type=float, default=5.5, help="after which no further save begins")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of the matmul loop without a save")
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
