"""What a save costs on an accelerator, beside the limits of its own copies and links; a few minutes on one GPU.

    python -m benchmarks.gpu                            GPT-2 small under Adam in float32, then in bfloat16
    python -m benchmarks.gpu --scale 0.001 --seconds 1  a tiny state, to see that all of it runs (on CPU, too)

It answers: how long the call blocks, against a copy of the state on the device; how fast the snapshot comes to host,
against one large copy to pageable and to pinned memory; and what a running matmul loop loses while a save is
under way, ours beside Orbax's defaults. Sides take turns within one run; the file has every value, the table medians
with min and max.
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

from benchmarks import limits, peers, states
from benchmarks.tables import spread, table

PyTree = Any
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
PEERS = ("rpsave", "orbax_default")
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


def state_of(dtype: Any, scale: float) -> PyTree:
    """The train state on one device; float leaves in `dtype`."""
    case = dataclasses.replace(states.CASES["gpt2_small"], devices=1, replicas=1, axes=(("data", 1),))
    abstract = jax.tree.map(
        lambda x: x.update(dtype=dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, case.abstract(scale)
    )
    return states.materialize(abstract, seed=0)[0]


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


def measure_saves(state: PyTree, directory: Path, rounds: int, secs: float, size: int) -> dict[str, dict[str, Any]]:
    """Saves by each peer in turn, first with an idle device, then beside the loop."""
    loop = MatmulLoop(size)
    quiet = loop.run(secs)
    found: dict[str, dict[str, Any]] = {}
    opened = {name: peers.PEERS[name].open(directory / name) for name in PEERS}
    for name, peer in opened.items():
        peer.prepare(state)
        found[name] = {
            "quiet_step_secs": quiet,
            "blocking_secs": [],
            "commit_secs": [],
            "loop_step_secs": [],
            "own": [],
        }
    step = 0
    for turn in range(rounds + 1):  # the first one compiles
        for name, peer in opened.items():
            for beside_loop in (False, True):
                step += 1
                began = time.perf_counter()
                blocking = peer.save(step, state)
                steps = loop.run(secs) if beside_loop else []
                peer.wait()
                took = time.perf_counter() - began
                shutil.rmtree(directory / name / str(step))
                if turn == 0:
                    continue
                if beside_loop:
                    found[name]["loop_step_secs"] += steps
                else:
                    found[name]["blocking_secs"].append(blocking)
                    found[name]["commit_secs"].append(took)
                    found[name]["own"].append(peer.stats())
    for peer in opened.values():
        peer.close()
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = jax.devices()[0]
    result: dict[str, Any] = {
        "device": f"{device.device_kind} ({device.platform})",
        "jax": jax.__version__,
        "link_gb_per_sec": link_limits(max(1 << 20, int(_LINK_NBYTES * min(1.0, options.scale))), options.rounds),
        "dtypes": {},
    }
    for name, dtype in DTYPES.items():
        state = state_of(dtype, options.scale)
        nbytes = states.state_bytes(state)
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            result["dtypes"][name] = {
                "state_bytes": nbytes,
                "device_copy_secs": seconds(lambda c=copy, s=state: c(s), options.rounds),
                "limits": limits.measure(Path(directory), nbytes),
                "peers": measure_saves(state, Path(directory), options.rounds, options.seconds, options.size),
            }
        del state
    return result


def report(result: dict[str, Any]) -> str:
    """The tables, as markdown."""
    links = [[name, spread(values, 2)] for name, values in result["link_gb_per_sec"].items()]
    lines = [f"{result['device']}, jax {result['jax']}", "", *table(["one large array", "GB/s"], links), ""]
    for dtype, found in result["dtypes"].items():
        gigabytes = found["state_bytes"] / 1e9
        rows = [["copy on the device", spread(found["device_copy_secs"], 4), "–", "–", "–"]]
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
                ]
            )
        raw = found["limits"]["direct_write"] or found["limits"]["buffered_write"]
        rows.append(["raw write to the disk", "–", "–", f"{raw['secs']:.2f}", "–"])
        headings = ["blocking, s", "snapshot to host, GB/s", "to commit, s", "loop step ÷ quiet step, mean"]
        lines += [f"GPT-2 small under Adam, {dtype}, {gigabytes:.3f} GB, R = 1", "", *table(["", *headings], rows), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="part of GPT-2 small's bytes")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side, after one that compiles")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a matmul loop")
    parser.add_argument("--size", type=int, default=4096, help="of the loop's square matrices")
    parser.add_argument("--dir", type=Path, help="where to save (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args(arguments)
    result = measure(options)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1, default=str))
    print(report(result))


if __name__ == "__main__":
    main()
