"""Replicas that have drifted apart: which leaves, which shards, on which devices.

What is compared is what R > 1 holders have in the same form: the devices that hold the same shard of a leaf on a mesh,
and, in a run of several processes, the processes that each have a leaf for themselves (a NumPy array, a number, an
array on a single device), of which process 0 saves its own.

Each process compares its own devices and reports to process 0: one fingerprint for each shard that other processes hold
too, and all that it has where its devices disagree. Process 0 compares the processes. What a report is about follows
from the plan, which all have.
"""

from __future__ import annotations

import base64
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flax_rpsave.errors import DivergenceError
from flax_rpsave.planner import LeafLayout, SavePlan

logger = logging.getLogger("flax_rpsave")

Fingerprints = Mapping[int, Mapping[int, int]]
"""Leaf → holder → fingerprint; a holder is a device by its id or, of leaves without a mesh, a process."""
_NAMED_DIVERGENCES = 10  # in a message
_NAMED_HOLDERS = 8  # of equal bytes


@dataclass(frozen=True)
class Divergence:
    """A shard of which not all holders have the same bytes.

    Attributes:
      leaf: Index of its leaf.
      shard: Its index along each dimension; None where the leaf is one shard.
      groups: The (holder, process) that agree with each other, the most of them first.
      of: What a holder is: "device" or "process".
    """

    leaf: int
    shard: tuple[int, ...] | None
    groups: tuple[tuple[tuple[int, int], ...], ...]
    of: str

    def text(self, name: str) -> str:
        """What has happened to it, in words."""
        where = name if self.shard is None else f"{name}, shard {list(self.shard)}"
        texts = [self._holders(group) for group in self.groups[:_NAMED_HOLDERS]]
        if more := len(self.groups) - len(texts):
            texts.append(f"{more} more")
        if len(self.groups[0]) == len(self.groups[1]):
            return f"{where}: no majority: {' | '.join(texts)}"
        return f"{where}: in the minority {' | '.join(texts[1:])}; in the majority {texts[0]}"

    def _holders(self, group: Sequence[tuple[int, int]]) -> str:
        named = group[:_NAMED_HOLDERS]
        if self.of == "process":
            text = ", ".join(str(process) for _, process in named)
        else:
            text = ", ".join(
                f"{', '.join(str(device) for device, _ in devices)} (process {process})"
                for process, devices in itertools.groupby(named, lambda holder: holder[1])
            )
        plural = {"device": "devices", "process": "processes"}
        more = f" and {len(group) - len(named)} more" if len(group) > len(named) else ""
        return f"{self.of if len(group) == 1 else plural[self.of]} {text}{more}"


@dataclass(frozen=True)
class _Kind:
    """Leaves whose shards have the same holders.

    Attributes:
      leaves: Their indices.
      holders: Who holds them, shape (replicas, shards).
      processes: The process of each holder.
    """

    leaves: list[int]
    holders: np.ndarray
    processes: np.ndarray

    def told(self, process: int) -> np.ndarray:
        """The shards that a process and others hold."""
        mine = self.processes == process
        return np.flatnonzero(mine.any(axis=0) & ~mine.all(axis=0))


def compared_leaves(plan: SavePlan, processes: int) -> list[int]:
    """The leaves that have more than one holder."""
    return [leaf for kind in _kinds(plan, processes) for leaf in kind.leaves]


def build_report(plan: SavePlan, process: int, processes: int, found: Fingerprints) -> dict[str, Any]:
    """What a process tells of its fingerprints of the compared leaves."""
    blocks: list[np.ndarray] = []
    differing = []
    for kind in _kinds(plan, processes):
        mine, told = kind.processes == process, kind.told(process)
        block = np.zeros((len(kind.leaves), len(told)), "<u8")
        column = {int(shard): k for k, shard in enumerate(told)}
        for shard in np.flatnonzero(mine.any(axis=0)).tolist():
            holders = kind.holders[mine[:, shard], shard].tolist()
            for row, leaf in enumerate(kind.leaves):
                held = [found[leaf][holder] for holder in holders]
                if held.count(held[0]) < len(held):
                    differing.append([leaf, shard, list(zip(holders, held, strict=True))])
                elif shard in column:
                    block[row, column[shard]] = held[0]
        blocks.append(block.ravel())
    agreed = np.concatenate(blocks) if blocks else np.zeros(0, "<u8")
    return {"agreed": base64.b64encode(agreed.tobytes()).decode(), "differing": differing}


def check(plan: SavePlan, reports: Sequence[Mapping[str, Any]], labels: Sequence[str], step: int, mode: str) -> None:
    """Warns or fails where replicas differ.

    Args:
      plan: The plan.
      reports: Of all processes, by process.
      labels: What to call each leaf.
      step: Of the save.
      mode: "warn" or "fail".

    Raises:
      DivergenceError: They differ, and the mode is "fail".
    """
    if not (found := find(plan, reports)):
        return
    text = describe(found, labels)
    if mode == "warn":
        logger.warning("step %d is saved, but %s", step, text)
        return
    raise DivergenceError(
        f"step {step}: {text}\nResume from an earlier step to make the replicas equal again "
        "(checkpoint.replica_parallel.check_divergence is 'fail'; 'warn' would have saved this one)."
    )


def find(plan: SavePlan, reports: Sequence[Mapping[str, Any]]) -> list[Divergence]:
    """The shards whose holders differ, by leaf.

    Args:
      plan: The plan, which is that of all processes.
      reports: What each process built with `build_report`.
    """
    agreed = [np.frombuffer(base64.b64decode(report["agreed"]), "<u8") for report in reports]
    differing = [{(leaf, shard): dict(held) for leaf, shard, held in report["differing"]} for report in reports]
    at = [0] * len(reports)
    divergences = []
    for kind in _kinds(plan, len(reports)):
        shape = len(kind.leaves), kind.holders.shape[1]
        first, seen, bad = np.zeros(shape, np.uint64), np.zeros(shape[1], bool), np.zeros(shape, bool)
        blocks: list[dict[int, np.ndarray]] = []
        for process, values in enumerate(agreed):
            told = kind.told(process)
            block = values[at[process] : at[process] + shape[0] * len(told)].reshape(shape[0], len(told))
            at[process] += block.size
            bad[:, told] |= seen[told] & (block != first[:, told])
            first[:, told] = np.where(seen[told], first[:, told], block)
            seen[told] = True
            blocks.append(dict(zip(told.tolist(), block.T, strict=True)))
        row_of = {leaf: row for row, leaf in enumerate(kind.leaves)}
        for leaf, shard in itertools.chain.from_iterable(differing):
            if leaf in row_of:
                bad[row_of[leaf], shard] = True
        for row, shard in np.argwhere(bad).tolist():
            leaf = kind.leaves[row]
            groups: dict[int, list[tuple[int, int]]] = {}
            for holder, process in zip(kind.holders[:, shard].tolist(), kind.processes[:, shard].tolist(), strict=True):
                own = differing[process].get((leaf, shard))
                fingerprint = int(blocks[process][shard][row]) if own is None else own[holder]
                groups.setdefault(fingerprint, []).append((holder, process))
            ordered = sorted(map(tuple, groups.values()), key=lambda group: (-len(group), group))
            divergences.append(_divergence(plan.leaves[leaf].layout, leaf, ordered))
    return sorted(divergences, key=lambda divergence: (divergence.leaf, divergence.shard or ()))


def describe(divergences: Sequence[Divergence], labels: Sequence[str]) -> str:
    """Names shards whose holders differ, the first ones, on a line each.

    Args:
      divergences: At least one.
      labels: What to call each leaf.
    """
    leaves = len({divergence.leaf for divergence in divergences})
    lines = [f"  {d.text(labels[d.leaf])}" for d in divergences[:_NAMED_DIVERGENCES]]
    if more := len(divergences) - len(lines):
        lines.append(f"  and {more} more")
    subject = "1 leaf have" if leaves == 1 else f"{leaves} leaves have"
    return "\n".join([f"the replicas of {subject} drifted apart:", *lines])


def _kinds(plan: SavePlan, processes: int) -> list[_Kind]:
    """The leaves that have more than one holder, by who holds them."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(plan.leaves):
        layout = leaf.layout
        everywhere = layout.mesh is None and layout.device is None and processes > 1
        if leaf.slices and (layout.replicas > 1 or everywhere):
            groups.setdefault((layout.mesh, layout.replica_axes), []).append(i)
    kinds = []
    for (mesh, _), members in groups.items():
        if mesh is None:
            each = np.arange(processes)[:, None]
            kinds.append(_Kind(members, each, each))
        else:
            positions = plan.leaves[members[0]].layout.devices_by_replica()
            kinds.append(_Kind(members, np.array(mesh.device_ids)[positions], np.array(mesh.processes)[positions]))
    return kinds


def _divergence(layout: LeafLayout, leaf: int, groups: Sequence[tuple[tuple[int, int], ...]]) -> Divergence:
    if layout.mesh is None:
        return Divergence(leaf, None, tuple(groups), "process")
    _, shard = layout.place(groups[0][0][0])
    return Divergence(leaf, shard if any(n > 1 for n in layout.shards) else None, tuple(groups), "device")
