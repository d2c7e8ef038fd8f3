"""The benchmark's command runs, and its results hold every field that the report reads. No time is asserted."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

import flax_rpsave
from benchmarks import compression

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    out = directory / "results.json"
    command = ["--quick", "--peers", "rpsave,orbax_default", "--dir", str(directory), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *command], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in directory.iterdir()] == ["results.json"], "trials left files behind"
    return json.loads(out.read_text())


def test_quick_run_has_one_trial_of_each_kind_and_peer(results):
    ran = [(trial["kind"], trial["peer"]) for trial in results["trials"]]
    assert ran == [
        ("machine", ""),
        ("save", "rpsave"),
        ("restore", "rpsave"),
        ("save", "orbax_default"),
        ("restore", "orbax_default"),
        ("soak", "rpsave"),
    ]
    assert not [trial["error"] for trial in results["trials"] if trial["error"]]


def test_environment_names_versions_and_command(results):
    about = results["environment"]
    assert about["command"].startswith("./scripts/bench --quick")
    assert {"jax", "orbax-checkpoint", "tensorstore"} <= set(about["packages"])
    assert about["cpus"] >= 1
    assert about["memory_bytes"] > 0


@pytest.mark.parametrize("peer", ["rpsave", "orbax_default"])
def test_every_save_is_measured(results, peer):
    (trial,) = [trial for trial in results["trials"] if (trial["kind"], trial["peer"]) == ("save", peer)]
    assert len(trial["saves"]) == 2
    for save in trial["saves"]:
        assert 0 < save["blocking_secs"] <= save["commit_secs"]
        assert save["cpu_secs"] > 0
        assert save["stored_bytes"] >= results["cases"]["gpt2_small"]["state_bytes"] * 0.9
        assert save["written_bytes"] > 0
        assert save["files"] > 0
        assert {"peak_over_state_bytes", "kept_over_state_bytes", "own_stats"} <= set(save)


@pytest.mark.parametrize("peer", ["rpsave", "orbax_default"])
def test_every_restore_is_bit_equal_and_measured(results, peer):
    (trial,) = [trial for trial in results["trials"] if (trial["kind"], trial["peer"]) == ("restore", peer)]
    for restore in trial["restores"]:
        assert restore["bit_equal"], restore["differences"]
        assert restore["restore_secs"] > 0
        assert restore["called_read_bytes"] > 0
        assert {"cpu_secs", "peak_bytes", "storage_read_bytes"} <= set(restore)


def test_limits_and_soak_are_measured(results):
    by_kind = {trial["kind"]: trial for trial in results["trials"]}
    limits = by_kind["machine"]["limits"]
    assert set(limits) == {
        "memcpy_first_touch",
        "memcpy",
        "direct_write_1_thread",
        "direct_write",
        "direct_read",
        "buffered_write",
        "buffered_read_cold",
    }
    assert len(by_kind["soak"]["resident_bytes"]) == 5
    assert "growth_after_third_bytes" in by_kind["soak"]


def test_report_shows_every_peer_and_target(results):
    from benchmarks import report

    body = report.render(results, "results.json")
    page = report.insert(f"before\n{report.BEGIN}\nfigures of the last run\n{report.END}\nafter\n", body)
    assert "figures of the last run" not in page
    assert page.startswith("before")
    assert page.endswith("after\n")
    for text in ("| flax_rpsave |", "| Orbax defaults |", "save to commit, checksums on", "2 of 2 restores"):
        assert text in page


def test_case_that_does_not_fit_in_memory_is_skipped_and_says_so(monkeypatch, capsys):
    from benchmarks import meters, run

    monkeypatch.setattr(meters, "available_bytes", lambda: 10**9)
    entry = run.Bench(run.parse(["--case", "one_array_full"])).run_case("one_array_full")
    assert "needs 47 GB of memory, and 1 GB are available" in entry["skipped"]
    assert "skipped" in capsys.readouterr().out


def test_a_flipped_bit_in_one_replica_is_found():
    import jax
    import numpy as np

    from benchmarks import states

    case = dataclasses.replace(states.CASES["one_array"], axes=(("data", 1),))
    abstract = case.abstract(0.0001)
    state, digests = states.materialize(abstract, seed=0)
    assert states.differences(state, abstract, digests) == []
    host = np.array(state["array"])
    host[0, 0] = -host[0, 0]
    flipped = {"array": jax.device_put(host, state["array"].sharding)}
    (found,) = states.differences(flipped, abstract, digests)
    assert "['array']: bytes on" in found


def test_gpu_script_runs_on_any_device(tmp_path):
    out = tmp_path / "gpu.json"
    tiny = ["--scale", "0.001", "--rounds", "1", "--seconds", "0.2", "--size", "64"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *tiny, "--dir", str(tmp_path), "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert set(found["dtypes"]) == {"float32", "bfloat16"}
    assert found["dtypes"]["bfloat16"]["state_bytes"] < 0.51 * found["dtypes"]["float32"]["state_bytes"]
    for case in found["dtypes"].values():
        for peer in case["peers"].values():
            assert len(peer["blocking_secs"]) == len(peer["commit_secs"]) == 1
            assert peer["loop_step_secs"]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    assert "flax_rpsave" in done.stdout


def test_compression_script_compares_codecs_on_a_checkpoint(tmp_path):
    params = {"kernel": np.linspace(-1, 1, 5000, dtype=np.float32)}
    flax_rpsave.save(tmp_path / "one", {"params": params, "opt_state": optax.adam(1e-3).init(params)})
    out = tmp_path / "found.json"
    compression.main(["--checkpoint", str(tmp_path / "one"), "--rounds", "1", "--megabytes", "0", "--out", str(out)])
    found = json.loads(out.read_text())
    assert {case.split("/")[1] for case in found} == {"float32", "bfloat16"}
    assert all(turn["ratio"] == 1 for case, turns in found.items() if case.endswith("/null") for turn in turns)
    assert all(turn["ratio"] < 0.1 for turn in found["second moments/float32/zstd 1"])  # zeros
