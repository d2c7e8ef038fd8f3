"""Restores other than the one of a run that resumes as it was: what was read before, another mesh, one device.

The ways to restore take turns, each verified bit by bit. Then the state is read to the host and placed from there, on
each of the targets: what placing takes of a restore, beside what a copy in memory takes.
"""

import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import meters, peers, states
from benchmarks.request import Request

PyTree = Any
SAME, OTHER, ONE = "the saved mesh", "another mesh", "one device"
VARIANTS = {
    "saved mesh, cold": (SAME, True),
    "saved mesh, page cache warm": (SAME, False),
    "4x2 mesh, sharded over 4, cold": (OTHER, True),
    "one device, cold": (ONE, True),
}
"""Way to restore -> onto what, and whether the files are out of the page cache."""


def _targets(case: states.Case) -> dict[str, states.Case]:
    """The case as it is, and the same state lying otherwise."""
    return {
        SAME: case,
        OTHER: dataclasses.replace(case, axes=(("model", 4), ("data", 2)), spec=states.over_model),
        ONE: dataclasses.replace(case, axes=(("data", 1),)),
    }


def restore_variants(request: Request) -> dict[str, Any]:
    """Restores what `save` left `1 + repeats` times in every way, and places it as often onto every target."""
    root = Path(request.directory)
    (step,) = [int(path.name) for path in (root / "checkpoints").iterdir() if path.name.isdigit()]
    cases = _targets(states.CASES[request.case])
    abstracts = {name: case.abstract(request.scale) for name, case in cases.items()}
    digests = {name: states.digests_of(abstract, request.seed) for name, abstract in abstracts.items()}
    if digests[SAME] != json.loads((root / "digests.json").read_text()):
        raise RuntimeError(f"the seed {request.seed} gives other values here than in the process that saved")
    restores, placements = [], []
    for turn in range(request.repeats + 1):
        for variant, (target, cold) in VARIANTS.items():
            record = _restored(request.peer, root / "checkpoints", step, abstracts[target], digests[target], cold)
            restores.append({"variant": variant, "turn": turn} | record)
        placements += [{"turn": turn} | record for record in _placed(request.peer, root / "checkpoints", step, cases)]
    return {"restores": restores, "placements": placements}


def _restored(
    name: str, directory: Path, step: int, abstract: PyTree, digests: states.Digests, cold: bool
) -> dict[str, Any]:
    peer = peers.PEERS[name].open(directory)
    if cold:
        meters.drop_from_page_cache(directory)
    else:
        meters.read_into_page_cache(directory)
    gc.collect()
    before, meter = meters.resident_bytes(), meters.Meter()
    meter.start()
    state = jax.block_until_ready(peer.restore(step, abstract))
    usage = meter.stop()
    peer.close()
    wrong = states.differences(state, abstract, digests)
    return meters.restore_record(usage, before, states.shared_bytes(state), wrong)


def _placed(name: str, directory: Path, step: int, cases: dict[str, states.Case]) -> list[dict[str, Any]]:
    """Reads from cold files, then places leaf by leaf on each target; empty where the peer cannot read alone."""
    peer = peers.PEERS[name].open(directory)
    meters.drop_from_page_cache(directory)
    began = time.perf_counter()
    host = peer.read(step)
    read_secs = time.perf_counter() - began
    records = []
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(host)]
    for target, case in cases.items() if leaves else ():
        shardings = [case.sharding(leaf) for leaf in leaves]
        began = time.perf_counter()
        arrays = jax.block_until_ready([peer.place(*each) for each in zip(leaves, shardings, strict=True)])
        place_secs = time.perf_counter() - began
        records.append(
            {
                "target": target,
                "read_secs": read_secs,
                "place_secs": place_secs,
                "bytes": sum(leaf.nbytes for leaf in leaves),
                "shared_bytes": states.shared_bytes(arrays),
            }
        )
        del arrays
    peer.close()
    return records
