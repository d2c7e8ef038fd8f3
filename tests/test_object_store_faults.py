"""What an object store does wrong is survived or named, and leaves the steps before as they were."""

import collections
import os
import threading

import numpy as np
import pytest

import flax_rpsave as rps
from tests import faults
from tests.helpers import assert_same_tree, free_port
from tests.object_stores import BUCKET, MARKER, keys, own_url, serving
from tests.servers.proxy import Loss


@pytest.fixture
def run(store, request, monkeypatch):
    """A URL of this test's own; requests are tried three times."""
    monkeypatch.setenv("RPSAVE_RETRY_SECS", "0.3")
    return own_url(store, request)


def config(directory, **settings):
    return {"directory": directory, "save_interval_steps": 1, **settings}


def state(seed):
    return {"w": np.random.default_rng(seed).normal(size=(40, 6)), "count": seed}


def saved(directory):
    """The newest step that a new run finds, and its state checked against that step's."""
    with rps.CheckpointCallback(config(directory)) as checkpoint:
        resumed, step = checkpoint.resume(state(0))
    assert_same_tree(resumed, state(step))
    return step


class FirstTries:
    """The first try of every n-th request meets a fault, and no later one does."""

    def __init__(self, fault, n):
        self.fault = fault
        self.n = n
        self.faults = 0
        self._seen = set()

    def __call__(self, request):
        if request in self._seen:
            return None
        self._seen.add(request)
        if len(self._seen) % self.n:
            return None
        self.faults += 1
        return self.fault


def test_a_bucket_that_is_not_there_is_named(store):
    nowhere = store.url("run", bucket="no-such-bucket")
    with pytest.raises(rps.ConfigError, match=r"checkpoint\.directory .*no-such-bucket.* bucket does not exist"):
        rps.CheckpointCallback(config(nowhere))
    with pytest.raises(rps.SaveError, match=r"not saved.*no-such-bucket.* bucket does not exist"):
        rps.save(nowhere, state(1))
    with pytest.raises((rps.StorageError, rps.NoCheckpointError), match=r"no-such-bucket.* does not exist"):
        rps.load(nowhere)


def test_a_bucket_that_may_only_be_read_can_be_loaded_from_but_is_no_directory_to_save_to(store, run):
    rps.save(run, state(1))
    with store.proxy.faulty(lambda request: None if request.kind in ("read", "list") else 403):
        assert_same_tree(rps.load(run, state(0)), state(1))
        with pytest.raises(rps.ConfigError, match=r"PERMISSION_DENIED.*credentials"):
            rps.CheckpointCallback(config(run))


@pytest.mark.parametrize("place", ["default/ocdbt.process_0/d/", "default/manifest.ocdbt", MARKER])
def test_a_denied_write_fails_the_save_leaves_nothing_visible_and_the_next_save_works(store, run, place):
    with rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint(1, state(1))
        checkpoint.wait()
        with store.proxy.faulty(lambda r: 403 if r.kind == "write" and f"/2/{place}" in r.key else None):
            checkpoint(2, state(2))
            with pytest.raises(rps.SaveError, match=r"step 2 was not saved to .*PERMISSION_DENIED"):
                checkpoint.wait()
        assert set(keys(run + "/2")) <= {".rpsave-writing"}
        assert checkpoint.all_steps() == [1]
        assert saved(run) == 1
        checkpoint(2, state(2), force=True)
        checkpoint.wait()
        assert checkpoint.all_steps() == [1, 2]
    assert saved(run) == 2


@pytest.mark.parametrize(
    "tell",
    [lambda checkpoint: checkpoint(3, state(3)), rps.CheckpointCallback.wait, rps.CheckpointCallback.close],
    ids=["call", "wait", "close"],
)
def test_a_store_that_dies_in_the_middle_of_a_save_fails_it_and_after_its_restart_the_next_save_works(store, run, tell):
    def dies(request):
        if request.kind == "write" and "/2/" in request.key and "/d/" in request.key:
            store.proxy.stop()

    checkpoint = rps.CheckpointCallback(config(run))
    checkpoint(1, state(1))
    checkpoint.wait()
    try:
        with store.proxy.faulty(dies):
            checkpoint(2, state(2))
            with pytest.raises(rps.SaveError, match=r"step 2 was not saved to .*All 2 retry attempts failed"):
                tell(checkpoint)
        with pytest.raises(rps.StorageError, match="cannot be listed"):
            rps.load(run)
    finally:
        store.proxy.start()
    assert saved(run) == 1
    if tell is not rps.CheckpointCallback.close:
        checkpoint(4, state(4))
        checkpoint.close()
        assert saved(run) == 4
        assert checkpoint.all_steps() == [1, 4]


def test_a_server_that_is_killed_in_the_middle_of_a_save_fails_it_and_a_new_one_is_saved_to(store, monkeypatch):
    port = free_port()
    for name in store.environment:
        if name.endswith("_URL"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("RPSAVE_RETRY_SECS", "0.3")
    run = store.url("run")
    with serving(store.scheme, port) as server:
        checkpoint = rps.CheckpointCallback(config(run))
        with faults.gated_writer() as gate:
            checkpoint(1, state(1))
            gate.wait_reached()
            server.kill()
            server.wait()
            gate.open()
            with pytest.raises(rps.SaveError, match=r"step 1 was not saved to .*All 2 retry attempts failed"):
                checkpoint.wait()
    with serving(store.scheme, port):
        checkpoint(2, state(2))
        checkpoint.close()
        assert saved(run) == 2


@pytest.mark.parametrize("fault", ["throttled", Loss.OF_REQUEST, Loss.OF_ANSWER])
def test_a_store_that_throttles_or_loses_connections_is_saved_to_and_read_from(store, run, fault):
    throttled = FirstTries({"s3": 503, "gs": 429}[store.scheme], 5)  # a delay follows: so not every request
    faulty = throttled if fault == "throttled" else FirstTries(fault, 1)
    with store.proxy.faulty(faulty):
        with rps.CheckpointCallback(config(run, max_to_keep=1)) as checkpoint:
            checkpoint(1, state(1))
            checkpoint(2, state(2))
            checkpoint.wait()
            assert checkpoint.all_steps() == [2]
        assert saved(run) == 2
    assert faulty.faults > 10
    assert {key.partition("/")[0] for key in keys(run)} == {"2"}


def test_a_read_that_is_denied_or_fails_is_an_error_and_no_reason_to_fall_back(store, run):
    with rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint(1, state(1))
        checkpoint(2, state(2))
    for status, reason in ((403, "PERMISSION_DENIED"), (503, "retry attempts failed")):
        for place in ("/d/", "/_METADATA", f"/{MARKER}"):
            with (
                store.proxy.faulty(lambda r, p=place, s=status: s if r.kind == "read" and p in r.key else None),
                rps.CheckpointCallback(config(run)) as checkpoint,
                pytest.raises(rps.StorageError, match=reason),
            ):
                checkpoint.resume(state(0))
    assert saved(run) == 2


@pytest.mark.parametrize(("secs", "tries"), [("0", 1), ("1", 5)])
def test_how_long_requests_are_tried_again_is_the_environments(store, run, monkeypatch, secs, tries):
    monkeypatch.setenv("RPSAVE_RETRY_SECS", secs)
    faulty = collections.Counter()

    def throttled(request):
        faulty[request] += 1
        return 503

    with store.proxy.faulty(throttled), pytest.raises(rps.ConfigError, match="cannot be written"):
        rps.CheckpointCallback(config(run))
    assert list(faulty.values()) == [tries]


@pytest.mark.parametrize("secs", ["", "-1", "nan", "1m"])
def test_a_retry_time_that_is_none_is_refused(monkeypatch, secs):
    monkeypatch.setenv("RPSAVE_RETRY_SECS", secs)
    with pytest.raises(rps.ConfigError, match="RPSAVE_RETRY_SECS must be a number of seconds"):
        rps.CheckpointCallback(config(f"s3://{BUCKET}/run"))


def test_without_credentials_an_error_says_so_though_no_metadata_service_answers(store, monkeypatch, tmp_path):
    script = """
    import sys
    import flax_rpsave as rps
    try:
        rps.CheckpointCallback(dict(directory=sys.argv[1]))
    except rps.ConfigError as error:
        print(error)
    """
    for name in [n for n in os.environ if n.startswith(("AWS_ACCESS", "AWS_SECRET", "AWS_EC2", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    nobody = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{nobody}")
    monkeypatch.setenv("GCE_METADATA_ROOT", nobody)
    done = faults.run_python(script, store.url("run"))
    assert done.returncode == 0, done.stderr
    assert "credentials and their rights come from" in done.stdout, done.stderr


@pytest.mark.parametrize("store", ["gs"], indirect=True)  # what notices is the same for all
def test_a_request_that_stalls_is_given_up_and_tried_again(store, run, monkeypatch):
    script = """
    import sys
    import numpy as np
    import flax_rpsave as rps
    rps.save(sys.argv[1], {"w": np.arange(5.0)})
    """
    released = threading.Event()
    tries = []

    def stalls(request):
        if request.kind == "write" and request.key.endswith(MARKER):
            tries.append(request)
            if len(tries) == 1:
                released.wait()

    monkeypatch.setenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "1")
    with store.proxy.faulty(stalls):
        try:
            done = faults.run_python(script, run)
        finally:
            released.set()
    assert done.returncode == 0, done.stderr
    assert len(tries) == 2
    np.testing.assert_array_equal(rps.load(run)["w"], np.arange(5.0))
