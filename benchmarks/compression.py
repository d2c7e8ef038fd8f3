"""What compressing a checkpoint saves and costs, on weights and moments that were really trained.

    python -m benchmarks.compression                     trains the example for 120 steps, then tries every codec
    python -m benchmarks.compression --checkpoint DIR    takes a run's newest step: a state with Adam moments
    python -m benchmarks.report                          the table of docs/performance.md, of benchmarks/results

Each codec encodes and decodes the same arrays through TensorStore's zarr3 driver into memory, so that no disk is in the
figures; sides take turns, medians with min and max. CPU-seconds are those of all threads.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

import flax_rpsave as rps
from benchmarks import run
from benchmarks.tables import Results, table

ROOT = Path(__file__).parent.parent
_COSTS = {
    "encode_secs_per_gb": "encode, s a GB",
    "encode_cpu_per_gb": "CPU-s a GB",
    "decode_secs_per_gb": "decode, s a GB",
    "decode_cpu_per_gb": "CPU-s a GB",
}
_CHUNK = 1 << 18  # elements: less than the part of the smallest model, so that no codec sees a repetition


def _blosc(name: str, shuffle: str, typesize: int) -> dict[str, Any]:
    configuration = {"cname": name, "clevel": 5, "shuffle": shuffle, "typesize": typesize, "blocksize": 0}
    return {"name": "blosc", "configuration": configuration}


def codecs(itemsize: int) -> dict[str, list[dict[str, Any]]]:
    """The codecs that are compared, by the name that the tables give them."""
    return {
        "null": [],
        **{f"zstd {n}": [{"name": "zstd", "configuration": {"level": n}}] for n in (-5, 1, 3, 9)},
        **{
            f"blosc {name} {'byte' if shuffle == 'shuffle' else 'bit'} shuffle": [_blosc(name, shuffle, itemsize)]
            for name in ("lz4", "zstd")
            for shuffle in ("shuffle", "bitshuffle")
        },
    }


def groups(checkpoint: Path) -> dict[str, np.ndarray]:
    """The float32 leaves of a state in one vector each: weights, first moments, second moments."""
    found: dict[str, list[np.ndarray]] = {"weights": [], "first moments": [], "second moments": []}

    def walk(path: tuple[str, ...], tree: Any) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                walk((*path, str(key)), value)
        elif isinstance(tree, list):
            for i, value in enumerate(tree):
                walk((*path, str(i)), value)
        elif isinstance(tree, np.ndarray) and tree.dtype == np.float32 and tree.size > 1:
            kind = "first moments" if "mu" in path else "second moments" if "nu" in path else "weights"
            found[kind].append(tree.ravel())

    walk((), rps.load(checkpoint))
    empty = [kind for kind, arrays in found.items() if not arrays]
    if empty:
        raise SystemExit(f"{checkpoint} has no float32 {' and no '.join(empty)}")
    return {kind: np.concatenate(arrays) for kind, arrays in found.items()}


def train(directory: Path, steps: int) -> Path:
    """Trains the example and returns its run's directory."""
    found = directory / "run"
    command = [sys.executable, str(ROOT / "examples/gpt_small/train.py"), "--devices", "2", "--directory", str(found)]
    subprocess.run([*command, "--steps", str(steps)], check=True, stdout=subprocess.DEVNULL)
    return found


def turn(values: np.ndarray, codec: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Encodes and decodes once."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://x/",
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": list(values.shape),
            "data_type": values.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [min(_CHUNK, values.size)]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *codec],
        },
    }
    array = ts.open(spec, create=True, context=context).result()
    began, cpu = time.perf_counter(), time.process_time()
    array.write(values).result()
    encoded, encoded_cpu = time.perf_counter(), time.process_time()
    back = array.read().result()
    decoded, decoded_cpu = time.perf_counter(), time.process_time()
    if not np.array_equal(back.view(np.uint8), values.view(np.uint8)):
        raise RuntimeError(f"{codec} changed the values")
    store = array.kvstore
    stored = sum(len(store.read(key).result().value) for key in store.list().result() if b"zarr.json" not in key)
    return {
        "ratio": stored / values.nbytes,
        "encode_secs_per_gb": (encoded - began) / values.nbytes * 1e9,
        "encode_cpu_per_gb": (encoded_cpu - cpu) / values.nbytes * 1e9,
        "decode_secs_per_gb": (decoded - encoded) / values.nbytes * 1e9,
        "decode_cpu_per_gb": (decoded_cpu - encoded_cpu) / values.nbytes * 1e9,
    }


def measure(parts: dict[str, np.ndarray], rounds: int, nbytes: int) -> dict[str, Any]:
    """All codecs on all parts in float32 and bfloat16, each part repeated to about `nbytes`."""
    cases: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for _ in range(rounds + 1):  # the first one warms up
        for kind, part in parts.items():
            for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
                values = np.resize(part.astype(dtype), max(part.size, nbytes // dtype.itemsize))
                for name, codec in codecs(dtype.itemsize).items():
                    cases.setdefault((kind, dtype.name, name), []).append(turn(values, codec))
    return {"/".join(case): turns[1:] for case, turns in cases.items()}


def best(costs: Mapping[str, tuple[float, float]]) -> list[tuple[float, str]]:
    """Which codec is the least dear, by how long storage takes.

    Args:
        costs: by codec the seconds that a GB takes to encode, and its stored ÷ raw bytes.

    Returns:
        (from how many seconds that storage takes for a GB, codec), in rising order; a GB costs the time to encode it
        and its part of that time, one after the other.
    """
    name = min(costs, key=lambda each: costs[each])
    found = [(0.0, name)]
    while True:
        secs, ratio = costs[name]
        smaller = ((more, less, other) for other, (more, less) in costs.items() if less < ratio)
        crossings = [((more - secs) / (ratio - less), less, other) for more, less, other in smaller]
        if not crossings:
            return found
        begin, _, name = min(crossings)
        found.append((begin, name))


def section(results: Results) -> list[str]:
    """The page's part: which codec when; then medians of all turns, of all parts together where one column has them."""
    measured = results["compression"]
    kinds, dtypes, names = (list(dict.fromkeys(case.split("/")[i] for case in measured)) for i in range(3))
    rows, choices = [], []
    for dtype in dtypes:
        medians: dict[str, tuple[float, dict[str, float]]] = {}
        for name in names:
            turns = [measured[f"{kind}/{dtype}/{name}"] for kind in kinds]
            ratios = [statistics.median(t["ratio"] for t in of_kind) for of_kind in turns]
            costs = {cost: statistics.median(t[cost] for of_kind in turns for t in of_kind) for cost in _COSTS}
            medians[name] = statistics.mean(ratios), costs
            rows.append(
                [f"{dtype}, {name}", *(f"{each:.3f}" for each in ratios), *(f"{each:.2f}" for each in costs.values())]
            )
        for counted, cost in (("by the clock", "encode_secs_per_gb"), ("by processor time", "encode_cpu_per_gb")):
            chosen = best({name: (costs[cost], ratio) for name, (ratio, costs) in medians.items()})
            title = f"{dtype}, encoding {counted}"
            choices += [[title, f"{begin:.2f}", name, f"{medians[name][0]:.3f}"] for begin, name in chosen]
    headings = ["stored ÷ raw: " + kinds[0], *kinds[1:], *_COSTS.values()]
    return [
        "### Compression of trained weights and moments",
        "",
        "**Which, when: the codec whose encoding and writing take the least**",
        "",
        *table(["", "where a GB takes to write, s: from", "codec", "stored ÷ raw, all three"], choices),
        "",
        "**Every codec (medians)**",
        "",
        *table(["", *headings], rows),
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.compression", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="a step, or a run's directory; default: trains the example")
    parser.add_argument("--steps", type=int, default=120, help="of that training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=64, help="each part is repeated to about this size")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        parts = groups(options.checkpoint or train(Path(directory), options.steps))
    measured = measure(parts, options.rounds, options.megabytes << 20)
    results = {"environment": run.environment("python -m benchmarks.compression", arguments), "compression": measured}
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(section(results)))


if __name__ == "__main__":
    main()
