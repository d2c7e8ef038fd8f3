"""Kill a training run in the middle of a save, resume it, and prove that nothing was lost: `./scripts/demo`.

1. Train the example in a process of its own; when half of the steps are made and a save is under way, kill it.
2. Resume in a new process, to the end.
3. Train once more, into another directory, without interruption.
4. Compare the two runs bit for bit, read the last step with stock Orbax, show who saved what and what each save cost.

The kill is certain to hit a save: the run is first stopped (SIGSTOP) when a temporary directory shows up, and killed
(SIGKILL) if the step is still uncommitted once it stands still; otherwise it goes on to the next save.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from settings import Settings
from state import create_state
from train import create_mesh

import flax_rpsave as rps

HERE = Path(__file__).parent
TIME_LIMIT_SECS = 600
POLL_SECS = 0.0005
PLAN_ROWS = 16
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""On CPU, XLA's programs repeat bit for bit anyway."""


@dataclass
class Run:
    """One training run: its checkpoints, and its log over all processes that it took."""

    name: str
    config: Path
    work: Path
    losses: dict[int, str] = field(default_factory=dict)
    """Step to loss, exact; steps that were lost and made again count once, the last time."""
    blocked_ms: dict[int, float] = field(default_factory=dict)
    """Saved step to the milliseconds for which the training loop stood still."""

    @property
    def directory(self) -> Path:
        return self.work / self.name

    @property
    def log(self) -> Path:
        return self.work / f"{self.name}.jsonl"

    def start(self) -> subprocess.Popen[bytes]:
        """Begin training, or go on, in a process of its own."""
        command = [sys.executable, HERE / "train.py", "--config", self.config]
        return subprocess.Popen(
            [*command, "--directory", self.directory, "--log", self.log],
            env=os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"},
        )

    def finish(self) -> None:
        """Train to the end.

        Raises:
            SystemExit: the run failed.
        """
        with _killed_at_exit(self.start()) as process:
            if process.wait(TIME_LIMIT_SECS) != 0:
                raise SystemExit(f"FAILED: {self.name} ended with code {process.returncode}")

    def kill_in_a_save(self, *, from_step: int) -> int:
        """Train until a save of `from_step` or later is under way, and kill the process in it.

        Returns:
            The step whose save was cut off.

        Raises:
            SystemExit: the run ended, or went on for too long, before a save could be hit.
        """
        with _killed_at_exit(self.start()) as process:
            deadline = time.monotonic() + TIME_LIMIT_SECS
            while time.monotonic() < deadline and process.poll() is None:
                for step in self.unfinished_steps():
                    if step >= from_step and self._stops_in_save(process, step):
                        process.kill()
                        process.wait()
                        return step
                time.sleep(POLL_SECS)
        raise SystemExit(f"FAILED: {self.name} was not killed in a save; exit code {process.returncode}")

    def _stops_in_save(self, process: subprocess.Popen[bytes], step: int) -> bool:
        """Stop the process; where the step is committed by then, let it go on."""
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if step in self.unfinished_steps() and step not in self.committed_steps():
            return True
        process.send_signal(signal.SIGCONT)
        return False

    def unfinished_steps(self) -> set[int]:
        """Steps that have a temporary directory."""
        names = os.listdir(self.directory) if self.directory.exists() else []
        return {int(name.split(".")[0]) for name in names if ".orbax-checkpoint-tmp" in name}

    def committed_steps(self) -> set[int]:
        """Steps that have a directory of their final name."""
        names = os.listdir(self.directory) if self.directory.exists() else []
        return {int(name) for name in names if name.isdecimal()}

    def read_log(self) -> int:
        """Read the log.

        Returns:
            How many steps had to be made again.
        """
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        steps = [line for line in lines if "step" in line]
        self.losses = {line["step"]: line["loss"] for line in steps}
        self.blocked_ms = {line["saved"]: line["blocked_ms"] for line in lines if "saved" in line}
        return len(steps) - len(self.losses)


@contextlib.contextmanager
def _killed_at_exit(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Checks:
    """Claims, printed as they are checked."""

    def __init__(self) -> None:
        self.all_held = True

    def __call__(self, claim: str, held: bool) -> None:
        print(f"  {'ok    ' if held else 'FAILED'}  {claim}", flush=True)
        self.all_held &= held


def differing_leaves(one: Any, other: Any) -> list[str]:
    """Paths of the leaves of two trees of one structure that differ in dtype, shape or any bit."""

    def bits_of(leaf: Any) -> tuple[Any, ...]:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return array.dtype, array.shape, array.tobytes()

    differs = jax.tree.map(lambda a, b: bits_of(a) != bits_of(b), one, other)
    return [jax.tree_util.keystr(path) for path, found in jax.tree.leaves_with_path(differs) if found]


def _naming(claim: str, differing: list[str]) -> str:
    return f"{claim}; these differ: {', '.join(differing)}" if differing else claim


def show_plan(plan: rps.SavePlan) -> None:
    """The plan's table, of its many rows the first, and the bytes of each device."""
    header, *rows, balance = str(plan).splitlines()
    print("\n".join([header, *rows[:PLAN_ROWS]]))
    if len(rows) > PLAN_ROWS:
        print(f"… and {len(rows) - PLAN_ROWS} rows more")
    print(balance)
    print("bytes by device: " + " · ".join(f"{device}: {nbytes:,}" for device, nbytes in plan.device_bytes.items()))


def demonstrate(config: Path, work: Path, checks: Checks) -> None:
    """The demo, in a directory that is empty."""
    settings = Settings.from_yaml(config)
    interrupted, straight = Run("interrupted", config, work), Run("uninterrupted", config, work)

    print("== Train, and kill the process in the middle of a save ==", flush=True)
    cut_off = interrupted.kill_in_a_save(from_step=settings.steps // 2)
    committed = interrupted.committed_steps()
    print(f"killed (SIGKILL) while step {cut_off} was being saved; committed steps: {sorted(committed)}")
    checks(f"the save of step {cut_off} is unfinished on disk", cut_off in interrupted.unfinished_steps())
    checks(f"step {cut_off} is not visible as a checkpoint", cut_off not in committed)
    checks("an earlier step is", bool(committed))

    print("\n== Resume in a new process ==", flush=True)
    interrupted.finish()
    checks("the remains of the unfinished save are gone", not interrupted.unfinished_steps())

    print("\n== Train once more, without interruption ==", flush=True)
    straight.finish()

    print("\n== Compare the two runs, bit for bit ==", flush=True)
    lost = interrupted.read_log()
    straight.read_log()
    all_steps = set(range(1, settings.steps + 1))
    checks(f"both made all {settings.steps} steps", set(interrupted.losses) == set(straight.losses) == all_steps)
    checks(f"their losses are identical ({lost} steps were lost and made again)", interrupted.losses == straight.losses)
    state = create_state(settings, create_mesh(None))
    target = nnx.state(state)
    ours = rps.load(straight.directory, target, step=settings.steps)
    resumed = rps.load(interrupted.directory, target, step=settings.steps)
    differing = differing_leaves(ours, resumed)
    checks(_naming("so are the arrays of the final states", differing), not differing)

    print("\n== Read the last step with stock Orbax ==", flush=True)
    with ocp.CheckpointManager(interrupted.directory) as manager:
        checks(f"its latest step is {settings.steps}", manager.latest_step() == settings.steps)
        stock = manager.restore(settings.steps, args=ocp.args.StandardRestore(target))
    differing = differing_leaves(ours, stock)
    checks(_naming(f"it restores the same {len(jax.tree.leaves(ours))} arrays", differing), not differing)

    print("\n== Who saved what ==", flush=True)
    show_plan(rps.plan(state, settings.checkpoint))

    print("\n== What each save blocked ==", flush=True)
    for run in (interrupted, straight):
        costs = ", ".join(f"step {step}: {blocked:.1f} ms" for step, blocked in run.blocked_ms.items())
        print(f"{run.name}: {costs}; {sum(run.blocked_ms.values()):.1f} ms in all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml", help="YAML file of the runs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new directory, and leave it there")
    arguments = parser.parse_args()
    started = time.monotonic()
    checks = Checks()
    with contextlib.ExitStack() as stack:
        if arguments.keep is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpsave-demo-")))
        else:
            work = arguments.keep.absolute()
            work.mkdir(parents=True)
        demonstrate(arguments.config, work, checks)
    verdict = "every check held" if checks.all_held else "FAILED"
    print(f"\n{verdict} ({time.monotonic() - started:.0f} s)")
    return 0 if checks.all_held else 1


if __name__ == "__main__":
    sys.exit(main())
