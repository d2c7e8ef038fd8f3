"""Resident memory of a process over time, looked at from another one, which takes neither its lock nor its time.

    python -m benchmarks.memory_watch <pid>

prints a line when it has begun; once its standard input ends it prints what it saw, as JSON.
"""

import json
import os
import select
import subprocess
import sys
import time
from typing import Self

_INTERVAL_SECS = 0.02


def _watch(pid: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    samples = []
    print("watching", flush=True)
    with open(f"/proc/{pid}/statm") as statm:
        while not select.select([sys.stdin], [], [], _INTERVAL_SECS)[0]:
            statm.seek(0)
            samples.append([time.perf_counter(), int(statm.read().split()[1]) * page])
    print(json.dumps(samples))


class MemoryWatch:
    """Watches this process; a context manager.

    Attributes:
        samples: once it has ended, [time on the clock of `time.perf_counter`, resident bytes] of every 20 ms.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.memory_watch", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        printed, _ = self._process.communicate()
        self.samples = [(at, nbytes) for at, nbytes in json.loads(printed)]


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
