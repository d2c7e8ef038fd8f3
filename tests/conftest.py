"""Gives every test eight CPU devices, and those that ask for it each engine."""

import os

import pytest

from tests import xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags.devices(8)}".strip()

# Files of few tests that start programs of their own; begun last, one of them would keep one worker busy alone.
_LONG = (
    "test_multiprocess_failures.py",
    "test_multiprocess.py",
    "test_multiprocess_out_of_step.py",
    "test_benchmarks.py",
    "test_example.py",
    "test_object_stores.py",
    "test_object_store_faults.py",
    "test_field_reports.py",
    "test_state_kinds.py",
)


def pytest_collection_modifyitems(items):
    """Long files first, else the order stays."""
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(request):
    """A server on the loopback interface, of each kind."""
    from tests.object_stores import running  # TensorStore is to be loaded by those only who need it

    with running(request.param) as store:
        yield store


@pytest.fixture(params=["direct", "tensorstore"])
def each_engine(request, monkeypatch):
    """Runs a test with each engine, in the processes that it starts, too."""
    monkeypatch.setenv("RPSAVE_ENGINE", request.param)
    return request.param
