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


def bench(directory, *arguments):
    """The results of a run of the command."""
    out = directory / "results.json"
    command = [sys.executable, "-m", "benchmarks.run", *arguments, "--dir", str(directory), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in directory.iterdir()] == ["results.json"], "trials left files behind"
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("bench"), "--quick", "--peers", "rpsave,orbax_default")


@pytest.fixture(scope="module")
def scaling_results(tmp_path_factory):
    cases = [argument for name in ("hosts_1", "hosts_2", "hosts_2x2") for argument in ("--case", name)]
    tiny = ["--scale", "0.005", "--saves", "1", "--card", "2e6"]
    return bench(tmp_path_factory.mktemp("scaling"), "--scaling", *cases, *tiny)


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


def test_every_host_sends_its_share_through_its_card(scaling_results):
    ran = {(trial["case"], trial["peer"]): trial["throttled_saves"] for trial in scaling_results["trials"]}
    assert list(ran) == [
        ("hosts_1", "rpsave"),
        ("hosts_2", "rpsave_single"),
        ("hosts_2", "rpsave"),
        ("hosts_2x2", "rpsave"),
    ]
    nbytes = scaling_results["cases"]["hosts_2"]["state_bytes"]
    for saves in ran.values():
        assert len(saves) == 2
        for save in saves:
            assert 0 < save["blocking_secs"] <= save["commit_secs"]
            assert nbytes < sum(save["sent_bytes"]) < 1.5 * nbytes
    assert min(ran["hosts_2", "rpsave_single"][1]["sent_bytes"]) < 0.05 * nbytes
    for case in ("hosts_2", "hosts_2x2"):
        assert min(ran[case, "rpsave"][1]["sent_bytes"]) > 0.45 * nbytes


def test_report_of_scaling_has_tables_model_and_plot(scaling_results, tmp_path, monkeypatch):
    from benchmarks import report, scaling

    monkeypatch.setattr(report, "IMAGES", tmp_path / "img")
    body = report.render(scaling_results, "results.json")
    for text in ("speed-up", "The model's fixed cost a is", "Sharded over the 2 devices", f"(img/{scaling.IMAGE})"):
        assert text in body
    report.draw(scaling_results)
    assert [path.name for path in (tmp_path / "img").iterdir()] == [scaling.IMAGE]


def test_model_and_speed_up_of_hosts():
    from benchmarks import scaling

    def point(hosts, secs, balance=1.01):
        return scaling.Point(hosts, 40 / hosts, [40.5], [secs], [0.01], balance)

    measured = [point(1, 40.5), point(2, 20.5), point(8, 6.5, balance=1.03)]
    assert scaling.fixed_secs(measured) == pytest.approx((0.5 + 0.5 + 1.5) / 3)
    assert scaling.speed_up(measured, measured[2]) == pytest.approx(40.5 / 6.5)
    rows = scaling.scaling_table(measured)[2:]
    assert ["missed" in row for row in rows] == [False, False, True]


TINY = ["--rounds", "1", "--saves", "1", "--restores", "0", "--soak-saves", "0", "--scale", "0.001"]


def test_processes_save_together_and_each_restores(tmp_path):
    from benchmarks import report

    case = "mlp_4_processes"
    found = bench(tmp_path, "--case", case, "--peers", "rpsave,orbax_rp", *TINY)
    saves = {trial["peer"]: trial["saves"] for trial in found["trials"] if trial["kind"] == "save"}
    restores = {trial["peer"]: trial["restores"] for trial in found["trials"] if trial["kind"] == "restore"}
    assert saves.keys() == restores.keys() == {"rpsave", "orbax_rp"}
    for peer in saves:
        assert all(restore["bit_equal"] for restore in restores[peer])
        assert all(save["stored_bytes"] >= found["cases"][case]["state_bytes"] * 0.9 for save in saves[peer])
        assert len(saves[peer][0]["own_stats"]) == 4
    assert "Orbax replica-parallel" in report.render(found, "results.json")


def test_torch_saves_the_same_bytes_and_restores_them(tmp_path):
    from benchmarks import peers

    case, name = "gpt2_small_2_processes", "torch_dcp_async"
    environment = ROOT / f".venv-{peers.PEERS[name].requirements[0].replace('==', '-')}"
    if not environment.exists():
        pytest.skip(f"{environment.name} is made by the first benchmark that asks for torch")
    found = bench(tmp_path, "--case", case, "--peers", f"rpsave,{name}", *TINY)
    ran = {(trial["kind"], trial["peer"]): trial for trial in found["trials"]}
    for peer in ("rpsave", name):
        assert ran["save", peer]["saves"][-1]["stored_bytes"] >= found["cases"][case]["state_bytes"]
        assert ran["restore", peer]["restores"][0]["bit_equal"]


def test_peer_that_cannot_be_installed_is_left_out_and_says_so(monkeypatch, capsys, tmp_path):
    from benchmarks import launch, run

    def refuse(requirements):
        raise RuntimeError("no network")

    monkeypatch.setattr(launch, "interpreter", refuse)
    options = ["--case", "mlp_4_processes", "--peers", "torch_dcp", "--rounds", "0", "--dir", str(tmp_path)]
    entry = run.Bench(run.parse(options)).run_case("mlp_4_processes")
    assert entry["absent"] == {"torch_dcp": "no network"}
    assert "torch_dcp is left out: no network" in capsys.readouterr().out


def test_process_that_fails_ends_the_trial_with_its_reason(tmp_path):
    from benchmarks import launch
    from benchmarks.request import Request

    (tmp_path / "digests.json").mkdir()  # which process 0 alone wants to write: the other waits for it
    request = Request("save", "gpt2_small_2_processes", 0.001, 0, "rpsave", str(tmp_path), 1, processes=2)
    with pytest.raises(RuntimeError, match=r"process 0: exit code 1(.|\n)*IsADirectoryError"):
        launch.answer(request, 1, (sys.executable, "benchmarks.trial"))


def test_bucket_lets_its_rate_through_whoever_takes(monkeypatch):
    from benchmarks import card

    now = 0.0
    monkeypatch.setattr(card.time, "monotonic", lambda: now)
    bucket = card.Bucket()
    assert bucket.take(10**6) == 0, "no limit is set"
    bucket.bytes_per_sec = 1000.0
    assert bucket.take(500) == pytest.approx(0.5)
    assert bucket.take(500) == pytest.approx(1.0), "two connections share the rate"
    now = 1e6
    assert bucket.take(card.BLOCK + 1000) == pytest.approx(1.0), "no more than one block gathers while it is idle"
    assert bucket.passed_bytes == 10**6 + 1000 + card.BLOCK + 1000


def test_object_store_keeps_the_conditions_that_databases_rely_on():
    from benchmarks.object_store import Store

    store = Store()
    assert store.reply("GET", "/bench/a", {}, b"")[0] == 404
    assert store.reply("PUT", "/bench/a", {"if-none-match": "*"}, b"0123456789")[0] == 200
    assert store.reply("PUT", "/bench/a", {"if-none-match": "*"}, b"other")[0] == 412
    _, headers, data = store.reply("GET", "/bench/a", {}, b"")
    assert data == b"0123456789"
    assert store.reply("GET", "/bench/a", {"if-none-match": headers["ETag"]}, b"")[0] == 304
    assert store.reply("GET", "/bench/a", {"range": "bytes=2-4"}, b"")[2] == b"234"
    assert store.reply("PUT", "/bench/a", {"if-match": headers["ETag"]}, b"new")[0] == 200
    assert store.reply("PUT", "/bench/a", {"if-match": headers["ETag"]}, b"late")[0] == 412
    assert store.reply("GET", "/bench/a", {}, b"")[2] == b"new"
    store.reply("PUT", "/bench/b%20c", {}, b"")
    listed = store.reply("GET", "/bench/?list-type=2&prefix=b%20", {}, b"")[2]
    assert b"<Key>b c</Key>" in listed
    assert b"<Key>a</Key>" not in listed
    assert store.reply("DELETE", "/bench/a", {}, b"")[0] == 204
    assert store.reply("HEAD", "/bench/a", {}, b"")[0] == 404


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
