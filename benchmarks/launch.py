"""Runs a trial in fresh processes, as many as its case has, and makes one answer of theirs."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.request import Request

ROOT = Path(__file__).parent.parent
_TIMEOUT_SECS = 1800
_POLL_SECS = 0.1

Answer = dict[str, Any]

# Of several processes: what they use together is added up, what each has for itself is listed, and all else is that of
# the slowest or largest: a save takes as long as its last process.
_ADDED = {"cpu_secs", "called_read_bytes", "storage_read_bytes", "shared_bytes"}
_LISTED = {"own_stats", "sent_bytes", "received_bytes"}
_TOGETHER: Mapping[str, Callable[[list], Any]] = {
    **dict.fromkeys(_ADDED, sum),
    **dict.fromkeys(_LISTED, list),
    "bit_equal": all,
    "differences": lambda found: [line for lines in found for line in lines][:5],
}


def interpreter(requirements: Sequence[str], *, make: bool = True) -> str:
    """The Python of an environment that has `requirements`, made once; without any it is this Python.

    Raises:
        RuntimeError: they cannot be installed here, or are not, and nothing is to be made.
    """
    if not requirements:
        return sys.executable
    environment = ROOT / f".venv-{requirements[0].replace('==', '-')}"
    installed = environment / ".installed"
    if not installed.exists():
        if not make:
            raise RuntimeError(f"{environment.name} is not there; it is made where --peers names this peer")
        print(f"installing {' '.join(requirements)} into {environment.name}", flush=True)
        python = str(environment / "bin" / "python")
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(environment)],
            [python, "-m", "pip", "install", "-q", *requirements],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(requirements)} cannot be installed: {done.stderr[-500:]}")
        installed.touch()
    return str(environment / "bin" / "python")


def answer(
    request: Request, devices: int, program: tuple[str, str], variables: Mapping[str, str] = types.MappingProxyType({})
) -> Answer:
    """The answer of a trial, run by `request.processes` processes of their own with that many CPU devices each.

    Args:
        program: an interpreter and a module, to be called with the request and the file for the answer.
        variables: of the processes' environment.

    Raises:
        RuntimeError: a process failed, or they took too long; the message holds the end of what it printed.
    """
    request = dataclasses.replace(request, coordinator=f"127.0.0.1:{_free_port()}")
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        **variables,
    }
    running, logs, answers = [], [], []
    try:
        for process in range(request.processes):
            logs.append(Path(request.directory, f"log-{process}.txt"))
            answers.append(Path(request.directory, f"answer-{process}.json"))
            own = dataclasses.replace(request, process=process)
            with open(logs[-1], "w") as log:
                running.append(
                    subprocess.Popen(
                        [program[0], "-m", program[1], own.to_json(), str(answers[-1])],
                        cwd=ROOT,
                        env=os.environ | environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(running, logs)
    finally:
        for popen in running:
            popen.kill()
            popen.wait()
    return combined([json.loads(path.read_text()) for path in answers])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(running: Sequence[subprocess.Popen], logs: Sequence[Path]) -> None:
    """Waits until all have ended; one that failed ends it, since the others would wait for that one."""
    deadline = time.monotonic() + _TIMEOUT_SECS
    while None in (codes := [popen.poll() for popen in running]) and not any(codes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    for process, code in enumerate(codes):
        if code:
            raise RuntimeError(f"process {process}: exit code {code}: {logs[process].read_text()[-3000:]}")
    if None in codes:
        raise RuntimeError(f"process {codes.index(None)} has not ended within {_TIMEOUT_SECS} s")


def combined(answers: Sequence[Answer]) -> Answer:
    """One answer of those of a trial's processes, of which each has the same fields; lists of runs go run by run."""
    together: Answer = {}
    for name in answers[0]:
        values = [own[name] for own in answers]
        if name in _TOGETHER:
            together[name] = _TOGETHER[name](values)
        elif isinstance(values[0], list) and values[0] and isinstance(values[0][0], dict):
            together[name] = [combined(runs) for runs in zip(*values, strict=True)]
        else:
            together[name] = max(values)
    return together
