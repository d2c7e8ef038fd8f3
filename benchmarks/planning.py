"""How planning scales, on paper: no devices, no memory, meshes of up to thousands of devices.

    python -m benchmarks.planning --out FILE       plans; about a minute
    python -m benchmarks.report                    the table of docs/performance.md, of benchmarks/results

The states are those of a transformer under Adam, hosts have `DEVICES_A_HOST` devices; kernels are sharded over the
devices of a host and replicated over the hosts, all else is replicated. Each is planned by `flax_rpsave.plan`, which is
what every process does once a run. Time is that of the first plan of such a state on such a mesh.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import flax_rpsave as rps
from benchmarks import run
from benchmarks.tables import table

DEVICES = (1, 8, 64, 256, 1024, 4096)
LEAVES = (100, 1000, 5000, 20_000)
DEVICES_A_HOST = 8
TARGET_SECS, TARGET_DEVICES, TARGET_LEAVES = 1.0, 4096, 1000
_WIDTH = 4096
_DATA_FILE_BYTES = 100 << 20


def train_state(devices: int, leaves: int, *, alike: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """So many leaves of a transformer under Adam in float32; its layers are all `alike`, or no two are."""
    model = min(devices, DEVICES_A_HOST)
    mesh = AbstractMesh((devices // model, model), ("data", "model"))

    def layer(width: int) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
        kernels = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        found = {}
        for name, shape in kernels.items():
            found[f"{name}.kernel"] = (shape, PartitionSpec(None, "model"))
            found[f"{name}.bias"] = (shape[1:], PartitionSpec())
        for norm in ("norm_1", "norm_2"):
            found |= {f"{norm}.{part}": ((width,), PartitionSpec()) for part in ("scale", "bias")}
        return found

    names = (
        (f"{part}.{i}.{name}", jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)))
        for i in itertools.count()
        for name, (shape, spec) in layer(_WIDTH if alike else _WIDTH + 8 * i).items()
        for part in ("params", "mu", "nu")
    )
    return dict(itertools.islice(names, leaves))


def measure(devices: int, leaves: int) -> dict[str, Any]:
    """Plans both kinds of state."""
    found: dict[str, Any] = {"devices": devices, "leaves": leaves}
    for kind in ("alike", "distinct"):
        state = train_state(devices, leaves, alike=kind == "alike")
        began = time.perf_counter()
        plan = rps.plan(state)
        secs = time.perf_counter() - began
        found[kind] = {"secs": secs, "balance": plan.device_balance, "state_bytes": plan.nbytes}
    return found


def files(hosts: int) -> int:
    """Files of a step on a file system, written past the page cache: see the tables of measured cases.

    A data file and a manifest of each process's database, and of the merged one; six documents.
    """
    return 2 * hosts + 2 + 6


def requests(hosts: int, state_bytes: int) -> int:
    """About so many requests a save makes of an object store, whatever the number of leaves.

    A request a data file of 100 MiB; what else there is was counted with 1, 2 and 4 processes (tests/test_requests.py
    counts that of one): databases opened, their manifests, the merge, the documents. How often TensorStore looks again
    at a manifest depends on timing: with one process, 37 to 55 were seen.
    """
    data_files = hosts * math.ceil(state_bytes / hosts / _DATA_FILE_BYTES)
    return 28 + 23 * hosts + data_files


def section(results: dict[str, Any]) -> list[str]:
    """The page's part."""
    rows = []
    for found in results["planning"]:
        hosts = math.ceil(found["devices"] / DEVICES_A_HOST)
        alike, distinct = found["alike"], found["distinct"]
        aimed = (found["devices"], found["leaves"]) == (TARGET_DEVICES, TARGET_LEAVES)
        slowest = max(alike["secs"], distinct["secs"])
        rows.append(
            [
                f"{found['devices']:,}",
                f"{found['leaves']:,}",
                f"{alike['state_bytes'] / 1e9:.1f}",
                f"{alike['secs']:.3f}",
                f"{distinct['secs']:.3f}",
                f"{alike['balance']:.4f}",
                f"{distinct['balance']:.4f}",
                f"{files(hosts):,}",
                f"{requests(hosts, alike['state_bytes']):,}",
                ("met" if slowest <= TARGET_SECS else "**missed**") if aimed else "",
            ]
        )
    headings = [
        "leaves",
        "state, GB",
        "planning, s",
        "no two layers alike, s",
        "largest ÷ mean bytes",
        "no two alike",
        "files a save",
        "requests a save, about",
        f"≤ {TARGET_SECS:g} s",
    ]
    return ["### Planning, on paper", "", *table(["devices", *headings], rows), ""]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.planning", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--leaves", type=int, nargs="+", default=LEAVES)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args(arguments)
    measured = [measure(devices, leaves) for devices in options.devices for leaves in options.leaves]
    results = {"environment": run.environment("python -m benchmarks.planning", arguments), "planning": measured}
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(section(results)))


if __name__ == "__main__":
    main()
