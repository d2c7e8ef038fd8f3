"""Faults that tests put in place of what writes: a writer that waits, one that fails, file systems that are full."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator

import pytest

import flax_rpsave.engines
import flax_rpsave.writer
from flax_rpsave.engines import ChunkFilesEngine, DirectEngine, TensorStoreEngine

_PATIENCE_SECS = 30  # after which a test that waits for an event has failed


@dataclasses.dataclass
class Gate:
    """Where the writer's thread waits: it has the snapshot, and has written nothing."""

    reached: threading.Event
    opened: threading.Event

    def wait_reached(self) -> None:
        assert self.reached.wait(_PATIENCE_SECS)

    def open(self) -> None:
        self.opened.set()


@contextlib.contextmanager
def waited_for(writer: flax_rpsave.writer.Writer) -> Iterator[threading.Event]:
    """An event that is set once the loop waits for a save under way."""
    event = threading.Event()
    wait = writer.wait

    def announced() -> float:
        if writer.running:
            event.set()
        return wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "wait", announced)
        yield event


@contextlib.contextmanager
def engine(fault: type) -> Iterator[None]:
    """Saves go through engines with a fault: a class whose methods come before the engine's."""
    with pytest.MonkeyPatch.context() as patch:
        for real in (ChunkFilesEngine, DirectEngine, TensorStoreEngine):
            patch.setattr(flax_rpsave.engines, real.__name__, type(real.__name__, (fault, real), {}))
        yield


@contextlib.contextmanager
def gated_writer() -> Iterator[Gate]:
    """Saves in the block are not written before the gate opens; leaving the block opens it."""
    gate = Gate(threading.Event(), threading.Event())

    class Gated:
        def write(self, pieces):
            gate.reached.set()
            assert gate.opened.wait(_PATIENCE_SECS)
            super().write(pieces)

    with engine(Gated):
        try:
            yield gate
        finally:
            gate.open()


@contextlib.contextmanager
def failing_writer(error: BaseException) -> Iterator[None]:
    """Saves in the block fail when their chunks were written. The block must not end before they do."""

    class Failing:
        def finish(self, values):
            raise error

    with engine(Failing):
        yield


def start_python(code: str, *arguments: object, **env: str) -> subprocess.Popen[str]:
    """Another Python that runs `code`, with the tests and the package on its path, and more environment variables."""
    tests = pathlib.Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent)])
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(
    code: str, *arguments: object, timeout: float = 4 * _PATIENCE_SECS, **env: str
) -> subprocess.CompletedProcess[str]:
    """What another Python that ran `code` returned and printed: the stacks of its threads where it hung."""
    process = start_python(code, *arguments, **env)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def files_in(directory: pathlib.Path) -> dict[str, bytes]:
    """All files and directories below a directory, with the files' bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b"directory"
        for path in sorted(directory.rglob("*"))
    }


@contextlib.contextmanager
def mounted(directory: pathlib.Path, options: str, kind: str = "tmpfs") -> Iterator[None]:
    """A file system in memory at a directory; skips the test where that is not permitted."""
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, "-o", options, kind, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a {kind} cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def remount(directory: pathlib.Path, options: str) -> None:
    """Changes the options of a mounted file system."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(directory)], check=True)


@contextlib.contextmanager
def without_rights() -> Iterator[pathlib.Path]:
    """Yields a world-readable folder of root's, for a block that becomes another user; root again after it."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = pathlib.Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)
