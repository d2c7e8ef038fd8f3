"""The ways to write that the tests here go through."""

import pytest

from tests.faults.runs import FILES_VARIABLE


@pytest.fixture(params=["direct", "tensorstore", "direct files"])
def each_engine(request, monkeypatch):
    """Runs a test with each engine, and with direct writes to a file a chunk, in the processes that it starts, too."""
    monkeypatch.setenv("RPSAVE_ENGINE", request.param.split()[0])
    if request.param.endswith("files"):
        monkeypatch.setenv(FILES_VARIABLE, "1")
    return request.param
