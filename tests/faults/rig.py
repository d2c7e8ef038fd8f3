"""A library that is preloaded into a process, where it makes chosen calls to the file system fail or take long."""

import ctypes
import os
import pathlib
import shutil
import subprocess

import pytest

_SOURCE = pathlib.Path(__file__).with_name("rig.c")


def environment(directory: pathlib.Path) -> dict[str, str]:
    """Variables for a process that has the rig, which is built in a directory; skips the test where it cannot be."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("the rig needs a C compiler")
    library = directory / "rig.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return {"LD_PRELOAD": str(library)}


class Rig:
    """The rig of this process, which must have been started with `environment`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.rig_calls.restype = ctypes.c_long
        self._library.rig_failed.restype = ctypes.c_long
        self._library.rig_name.restype = ctypes.c_char_p

    def watch(self, directory: pathlib.Path) -> None:
        """Counts from 0 what changes the directory and what lies below; whatever was to fail before no longer does."""
        self.fail("")
        self._library.rig_watch(os.fsencode(directory))

    def fail(self, function: str, number: int = 0, code: int = 0, *, onwards: bool = False) -> None:
        """Lets the call of a function of this number, from 0, fail with this errno, and all that follow, if asked to.

        By function, for the order of different ones is another in each save. An empty name: none fails from here on.
        """
        self._library.rig_fail(function.encode(), ctypes.c_long(number), code, onwards)

    def failed(self) -> str | None:
        """The first call that failed; None where none has yet."""
        number = self._library.rig_failed()
        return None if number < 0 else self.calls()[number]

    def delay(self, secs: float) -> None:
        """Lets every call that counts take longer."""
        self._library.rig_delay(ctypes.c_long(round(secs * 1e6)))

    def calls(self) -> list[str]:
        """The calls so far: name and path."""
        return [self._library.rig_name(ctypes.c_long(k)).decode() for k in range(self._library.rig_calls())]
