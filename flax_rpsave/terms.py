"""What the processes of a save must have in common, so that what each of them writes makes one checkpoint.

Process 0 tells its terms as it lets the others begin; each compares them with its own before it writes anything.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from flax_rpsave.config import CheckpointConfig
from flax_rpsave.errors import SaveError
from flax_rpsave.planner import LeafLayout, SavePlan

Terms = Mapping[str, Any]


_OWN = ("directory", "enabled")  # settings that may differ: a directory may have another path in each process
_BLOCKS = ("replica_parallel", "storage")


def terms_of(plan: SavePlan, config: CheckpointConfig, item: str | None, *, has_data_state: bool) -> Terms:
    """The terms of a save, as JSON has them."""
    values: dict[str, Any] = json.loads(json.dumps({**dataclasses.asdict(config), "item": item}))
    settings: dict[str, Any] = {"whether there is a data iterator": has_data_state}
    for block in _BLOCKS:
        settings |= {f"checkpoint.{block}.{key}": value for key, value in values.pop(block).items()}
    settings |= {f"checkpoint.{name}": value for name, value in values.items() if name not in _OWN}
    return {"settings": settings, "leaves": plan.leaf_digests, "owners": plan.owners_digest}


def check(process: int, own: Terms, first: Terms, plan: SavePlan) -> None:
    """Compares a process's terms with those of process 0.

    Raises:
      SaveError: They differ; names the settings, or the first leaf.
    """
    theirs = first["settings"]
    differing = [
        f"{key} is {value!r}, in process 0 {theirs.get(key)!r}"
        for key, value in own["settings"].items()
        if value != theirs.get(key)
    ]
    if differing:
        raise SaveError(f"process {process} has another configuration than process 0: {'; '.join(differing)}")
    mine, others = own["leaves"], first["leaves"]
    if mine == others:
        if own["owners"] != first["owners"]:
            raise SaveError(f"process {process} has the state of process 0, but plans to save other slices of it")
        return
    i = next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), min(len(mine), len(others)))
    here = f"there it is {_described(plan.leaves[i].layout)}" if i < len(mine) else "which it does not have"
    raise SaveError(
        f"process {process} has another state than process 0 ({len(mine)} and {len(others)} arrays). The first that "
        f"differs in name, shape, dtype or sharding is number {i}, {here}. Arrays that several processes hold must lie "
        "on one mesh in all of them."
    )


def _described(layout: LeafLayout) -> str:
    array = f"{layout.name}: {layout.dtype.name}{list(layout.shape)}"
    if layout.mesh is None:
        return f"{array}, on no mesh"
    return f"{array}, {layout.spec} over a mesh {dict(layout.mesh.axes)} of devices {list(layout.mesh.device_ids)[:8]}"
