"""Runs peers side by side and writes one JSON file of everything that was measured.

    ./scripts/bench                                    every peer, both cases, 3 rounds: some two hours on 2 cores
    ./scripts/bench --quick                            a tiny state, one round, two peers: does it all still work?
    ./scripts/bench --scaling                          1 to 8 hosts with a network card of 4 MB/s each: 11 minutes
    ./scripts/bench --case alongside                   any other case: its own peers and rounds
    ./scripts/bench --case gpt2_small --peers rpsave,orbax_rp --rounds 1 --scale 0.1

Round robin: in each round every peer has its turn (another one goes first in each round), and the machine's limits are
measured at its beginning and after every four turns, so that a noisy spell of the machine hits all of them.
`benchmarks.trial` says what a turn is.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import launch, meters, object_store
from benchmarks.launch import ROOT
from benchmarks.peers import ELSEWHERE, OTHERS, PEERS
from benchmarks.request import LEAVES, Request
from benchmarks.states import CASES, Case, leaf_shapes, state_bytes

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "xxhash")
_DEFAULTS = {
    "case": ["gpt2_small", "one_array"],
    "peers": ["rpsave", "rpsave_unchecked", "rpsave_check", *OTHERS, *ELSEWHERE],
    "rounds": 3,
    "saves": 3,
    "restores": 1,
    "scale": 1.0,
    "soak_peers": ["rpsave", "orbax_rp"],
    "soak_saves": 50,
    "soak_scale": 0.1,
}
_TURNS_A_LIMIT = 4
_QUICK = {
    "case": ["gpt2_small"],
    "peers": ["rpsave", "orbax_default"],
    "rounds": 1,
    "saves": 1,
    "restores": 0,
    "scale": 0.001,
    "soak_peers": ["rpsave"],
    "soak_saves": 5,
    "soak_scale": 0.001,
}
_SCALING = {
    "case": [name for name, case in CASES.items() if case.throttled],
    "peers": ["rpsave_single", "rpsave"],
    "rounds": 1,
    "soak_saves": 0,
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; what is not given is None, but for the cases and the memory test."""
    parser = argparse.ArgumentParser("bench", description="Measures checkpointers side by side.")
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--quick", action="store_true", help="tiny state, one round, two peers: under 40 s")
    preset.add_argument("--scaling", action="store_true", help="1 to 8 hosts, a network card each: 11 minutes")
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated")
    parser.add_argument("--peers", type=peer_names, help=",".join(PEERS))
    parser.add_argument("--rounds", type=int, help="turns of each peer")
    parser.add_argument("--saves", type=int, help="warm saves a turn, after the first one")
    parser.add_argument("--restores", type=int, help="warm restores a turn, after the first one")
    parser.add_argument("--scale", type=float, help="factor on the bytes of the states")
    parser.add_argument("--card", type=float, default=4e6, help="bytes/s of a network card (default: 4e6)")
    parser.add_argument("--soak-peers", type=peer_names, help="peers of the memory test")
    parser.add_argument(
        "--soak-saves", type=int, help="saves of the memory test, at least 4; 0, as with --case, leaves it out"
    )
    parser.add_argument("--soak-scale", type=float, help="scale of its state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=ROOT / "runs", help="on the disk to be measured (default: runs/)")
    parser.add_argument("--out", type=Path, help="the JSON file (default: runs/bench-<date>.json)")
    options = parser.parse_args(arguments)
    options.preset = _QUICK if options.quick else _SCALING if options.scaling else {}
    if options.soak_saves is None and options.case and not options.preset:
        options.soak_saves = 0
    for name in ("case", "soak_saves"):
        if getattr(options, name) is None:
            setattr(options, name, (_DEFAULTS | options.preset)[name])
    return options


def settings(options: argparse.Namespace, case: Case | None = None) -> argparse.Namespace:
    """What holds for a case: what is given, else what the preset says, else the case, else the general default."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    return argparse.Namespace(**_DEFAULTS | dict(case.defaults if case else {}) | options.preset | given)


def peer_names(text: str) -> list[str]:
    """Peers from a comma-separated list."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"unknown peers {unknown}; there are {list(PEERS)}")
    return names


def environment(command: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """What one must know to judge or repeat a run of a command; None: with the arguments of this program."""
    given = sys.argv[1:] if arguments is None else arguments
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([command, *map(shlex.quote, given)]),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def _absent(peers: Sequence[str], *, make: bool) -> dict[str, str]:
    """The peers that cannot run here, and why; `make`: whether environments that are not there are to be made."""
    absent = {}
    for peer in peers:
        try:
            launch.interpreter(PEERS[peer].requirements, make=make)
        except RuntimeError as error:
            absent[peer] = str(error)
            print(f"{peer} is left out: {error}", flush=True)
    return absent


class Bench:
    """The trials of one command, in the order in which they ran."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.trials: list[dict[str, Any]] = []

    def run_case(self, name: str) -> dict[str, Any]:
        """Runs all rounds of a case, if its state fits. Returns the case's entry in the results."""
        case = CASES[name]
        options = settings(self.options, case)
        entry = {
            "about": case.about,
            "devices": case.devices,
            "processes": case.processes,
            "scale": options.scale,
            "state_bytes": state_bytes(case.build(options.scale)),
            "skipped": None,
        }
        needed, available = case.needed_bytes(options.scale), meters.available_bytes()
        if needed > available:
            entry["skipped"] = f"needs {needed / 1e9:.0f} GB of memory, and {available / 1e9:.0f} GB are available"
            print(f"{name}: skipped: {entry['skipped']}", flush=True)
            return entry
        peers = [peer for peer in options.peers if case.peers is None or peer in case.peers]
        entry["absent"] = absent = _absent(peers, make=self.options.peers is not None)
        peers = [peer for peer in peers if peer not in absent]
        if case.throttled:
            entry["card_bytes_per_sec"] = options.card
        for turn in range(options.rounds):
            first = turn % max(1, len(peers))
            for place, peer in enumerate(peers[first:] + peers[:first]):
                if not case.throttled and place % _TURNS_A_LIMIT == 0:  # there it is the cards that limit
                    self._trials(name, "", turn, options.scale, {"machine": 0})
                repeats = {
                    kind: options.restores if kind.startswith("restore") else options.saves for kind in case.kinds
                }
                if case.throttled and (peer == "rpsave_single" or case.replicas == 1):
                    # One host writes everything: it takes as long whatever the number of hosts, and minutes in all.
                    repeats["throttled_save"] = 1
                self._trials(name, peer, turn, options.scale, repeats)
        return entry

    def run_soak(self) -> None:
        """Runs the memory test of its peers."""
        options = settings(self.options)
        for peer in options.soak_peers:
            self._trials("gpt2_small", peer, 0, options.soak_scale, {"soak": options.soak_saves - 1})

    def _trials(self, case: str, peer: str, turn: int, scale: float, repeats: dict[str, int]) -> None:
        """Runs trials that share a directory, up to the first one that fails."""
        with tempfile.TemporaryDirectory(prefix="bench-", dir=self.options.dir) as directory:
            for kind, count in repeats.items():
                trial = {"kind": kind, "case": case, "peer": peer, "round": turn, "error": None}
                self.trials.append(trial)
                try:
                    trial |= self._answer(kind, case, scale, peer, directory, count)
                except Exception as error:  # noqa: BLE001 - of one trial; the others' results are worth keeping
                    trial["error"] = str(error) or repr(error)
                print(summary(trial), flush=True)
                if trial["error"]:
                    break

    def _answer(self, kind: str, name: str, scale: float, peer: str, directory: str, repeats: int) -> dict[str, Any]:
        """What came out of a trial."""
        case, options = CASES[name], self.options
        processes = 1 if kind == "machine" else case.processes
        request = Request(kind, name, scale, options.seed, peer, directory, repeats, processes)
        entry = PEERS.get(peer)
        program = entry.program if entry else "benchmarks.trial"
        python = launch.interpreter(entry.requirements if entry else ())
        Path(directory, LEAVES).write_text(json.dumps(leaf_shapes(case.build(scale))))
        with object_store.served() if case.throttled else contextlib.nullcontext(0) as port:
            request = dataclasses.replace(request, server_port=port, bytes_per_sec=options.card)
            return launch.answer(request, case.devices, (python, program), entry.environment if entry else {})


def summary(trial: dict[str, Any]) -> str:
    """A line for whoever watches."""
    head = f"{trial['case']} round {trial['round'] + 1} {trial['peer'] or 'machine'} {trial['kind']}: "
    if trial["error"]:
        return head + "FAILED: " + trial["error"]
    if trial["kind"] == "throttled_save":
        times = " ".join(f"{save['commit_secs']:.2f}" for save in trial["throttled_saves"][1:])
        return f"{head}commit {times} s (at full speed {trial['throttled_saves'][0]['commit_secs']:.2f})"
    if trial["kind"] == "save":
        first, *warm = trial["saves"]
        names = ("blocking_secs", "commit_secs", "cpu_secs")
        blocking, commit, cpu = (statistics.median(save[name] for save in warm or [first]) for name in names)
        blocked = f"blocking {blocking:.3f} s (first {first['blocking_secs']:.3f})"
        return f"{head}{blocked}, commit {commit:.2f} s, CPU {cpu:.2f} s"
    if trial["kind"] == "restore":
        times = " ".join(f"{restore['restore_secs']:.2f}" for restore in trial["restores"])
        return f"{head}{times} s, bit-equal: {all(restore['bit_equal'] for restore in trial['restores'])}"
    if trial["kind"] == "restore_variants":
        last = {restore["variant"]: restore for restore in trial["restores"]}
        times = ", ".join(f"{variant} {restore['restore_secs']:.2f} s" for variant, restore in last.items())
        return f"{head}{times}, bit-equal: {all(restore['bit_equal'] for restore in trial['restores'])}"
    if trial["kind"] == "loop":
        pairs = zip(trial["windows"][::2], trial["windows"][1::2], strict=True)
        costs = " ".join(f"{(saving['secs'] - quiet['secs']) * 1e3:.0f}" for quiet, saving in pairs)
        return f"{head}windows with a save took {costs} ms longer"
    if trial["kind"] == "alongside":
        pauses = " ".join(f"{1e3 * spin['worst_secs']:.1f}" for spin in trial["spun"])
        peak = max(trial["watched"][-1]["over_state_mb"]) / 1e3
        return f"{head}worst pauses {pauses} ms, at most {peak:.2f} GB over the state"
    if trial["kind"] == "soak":
        return f"{head}grew by {trial['growth_after_third_bytes'] / 1e6:.1f} MB after the third save"
    return head + ", ".join(f"{name} {limit['secs']:.2f} s" for name, limit in trial["limits"].items() if limit)


def main(arguments: Sequence[str]) -> int:
    """Runs what `arguments` ask for; returns 1 if a trial failed or a restore was not bit-equal."""
    options = parse(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    about = environment("./scripts/bench", arguments)
    bench = Bench(options)
    out = options.out or options.dir / f"bench-{about['date'].replace(':', '')}.json"
    cases: dict[str, Any] = {}

    def write() -> None:
        """After each case: a run that is cut off has measured something."""
        out.write_text(json.dumps({"environment": about, "cases": cases, "trials": bench.trials}, indent=1) + "\n")

    for name in options.case:
        cases[name] = bench.run_case(name)
        write()
    if options.soak_saves:
        bench.run_soak()
        write()
    print(f"wrote {out}")
    bad = [
        trial
        for trial in bench.trials
        if trial["error"] or not all(restore["bit_equal"] for restore in trial.get("restores", []))
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
