"""What a piece of work costs this process: wall and CPU seconds, peak memory, bytes through read calls.

Memory is resident memory of the whole process; the peak is the kernel's own high-water mark, reset before the work, so
nothing is missed between samples and no sampling thread takes CPU time from what is measured.
"""

import ctypes
import dataclasses
import gc
import os
import time
from pathlib import Path
from typing import Any

_READ_NBYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Usage:
    """What the work between `Meter.start` and `Meter.stop` used.

    Attributes:
        secs: wall time.
        cpu_secs: user + system time of all threads of the process. What kernel threads do (write-back) is not in it.
        peak_bytes: highest resident memory of the process.
        called_read_bytes: bytes returned by read calls, from the page cache or the disk.
        storage_read_bytes: bytes fetched from the disk, read-ahead included.
    """

    secs: float
    cpu_secs: float
    peak_bytes: int
    called_read_bytes: int
    storage_read_bytes: int


class Meter:
    """Measures from `start()` to `stop()`; starting anew is allowed."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present size: man 5 proc
        self._io = _counters("io")
        self._cpu_secs = time.process_time()
        self._began = time.perf_counter()

    def stop(self) -> Usage:
        secs = time.perf_counter() - self._began
        cpu_secs = time.process_time() - self._cpu_secs
        io = {name: value - self._io[name] for name, value in _counters("io").items()}
        return Usage(
            secs=secs,
            cpu_secs=cpu_secs,
            peak_bytes=_counters("status")["VmHWM"] * 1024,
            called_read_bytes=io["rchar"],
            storage_read_bytes=io["read_bytes"],
        )


def save_record(blocking_secs: float, usage: Usage, baseline: int, step: Path) -> dict[str, Any]:
    """What is kept of a save; `baseline` is what was resident before the peer was made.

    Raises:
        RuntimeError: Nothing was saved: there are checkpointers that pass over a step without a word.
    """
    files = files_under(step)
    if not files:
        raise RuntimeError(f"there is no checkpoint in {step}")
    return {
        "blocking_secs": blocking_secs,
        "commit_secs": usage.secs,
        "cpu_secs": usage.cpu_secs,
        "peak_over_state_bytes": usage.peak_bytes - baseline,
        "stored_bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
    }


def restore_record(usage: Usage, before: int, shared_bytes: int, differences: list[str]) -> dict[str, Any]:
    """What is kept of a restore; `before` is what was resident when it began."""
    return {
        "restore_secs": usage.secs,
        "cpu_secs": usage.cpu_secs,
        "peak_bytes": usage.peak_bytes - before,
        "called_read_bytes": usage.called_read_bytes,
        "storage_read_bytes": usage.storage_read_bytes,
        "shared_bytes": shared_bytes,
        "bit_equal": not differences,
        "differences": differences[:5],
    }


def _counters(name: str) -> dict[str, int]:
    """The numeric `key: value` lines of /proc/self/<name>."""
    lines = (line.split() for line in Path("/proc/self", name).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def resident_bytes() -> int:
    """Resident memory of this process."""
    return _counters("status")["VmRSS"] * 1024


def give_back() -> None:
    """Returns freed memory to the system, so that what was done before does not hide what comes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """Memory that the machine could still give without swapping."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def files_under(directory: Path) -> list[Path]:
    """Every regular file below `directory`."""
    return [path for path in directory.rglob("*") if path.is_file()]


def drop_from_page_cache(directory: Path) -> None:
    """Makes the files below `directory` cold, as they are for a run that resumes. Needs no privileges."""
    os.sync()
    for path in files_under(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_into_page_cache(directory: Path) -> None:
    """Makes the files below `directory` warm."""
    for path in files_under(directory):
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_NBYTES):
                pass
