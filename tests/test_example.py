"""The example trains and resumes through its command line, and its data order can be taken up anywhere."""

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from flax import nnx

import flax_rpsave as rps
from tests import xla_flags

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt_small"
PRESETS = ("config.yaml", "config_gpt2.yaml")
TINY = {
    "steps": 6,
    "seed": 1,
    "model": {"vocab_size": 256, "context": 8, "layers": 1, "heads": 2, "width": 16},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "decay_steps": 6},
    "data": {"batch_size": 4, "max_bytes": 10_000},
    "checkpoint": {"directory": "unused", "save_interval_steps": 2},
}


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules; they import each other as a script's neighbours do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        names = ("data", "model", "settings", "state", "report", "processes", "train", "demo")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in names:
            del sys.modules[name]


def start(work: Path, name: str, *options: str, interval: int = 2) -> subprocess.Popen[bytes]:
    """Begin to train on 2 CPU devices, with a save every `interval` steps.

    The runs of a test share a compilation cache, and XLA optimizes little: most of a tiny run's time is XLA's.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags.OPTIMIZE_LITTLE,
        "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    config = TINY | {"checkpoint": TINY["checkpoint"] | {"save_interval_steps": interval}}
    (work / "tiny.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, EXAMPLE / "train.py", "--config", work / "tiny.yaml", "--devices", "2"]
    return subprocess.Popen(
        [*command, "--directory", work / name, "--log", work / f"{name}.jsonl", *options], env=environment
    )


def logged(work: Path, name: str) -> dict[int, str]:
    """The losses that the runs of a name have logged, each step once."""
    lines = [json.loads(line) for line in (work / f"{name}.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return {line["step"]: line["loss"] for line in steps}


def train(work: Path, name: str, *options: str, interval: int = 2) -> dict[int, str]:
    """Run the example to its end; the losses that it has logged by then."""
    assert start(work, name, *options, interval=interval).wait(timeout=300) == 0
    return logged(work, name)


def test_a_resumed_run_logs_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    straight = train(tmp_path, "straight")
    train(tmp_path, "resumed", "--steps", "3")
    resumed = train(tmp_path, "resumed")
    assert len(straight) == TINY["steps"]
    assert resumed == straight
    saved = {path.name for path in (tmp_path / "resumed").iterdir() if path.name.isdecimal()}
    assert saved == {"2", "3", "4", "6"}


def test_two_processes_that_were_told_to_stop_end_with_the_bits_of_two_that_were_not(tmp_path: Path) -> None:
    steps = 60
    options = ("--processes", "2", "--steps", str(steps))
    straight = train(tmp_path, "straight", *options, interval=50)
    launcher = start(tmp_path, "resumed", *options, interval=50)
    log = tmp_path / "resumed.jsonl"
    while not log.exists() or '"step": 5,' not in log.read_text():
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=300) == 0
    stopped_at = max(logged(tmp_path, "resumed"))
    assert stopped_at < steps
    assert max(int(path.name) for path in (tmp_path / "resumed").iterdir()) == stopped_at
    assert train(tmp_path, "resumed", *options, interval=50) == straight
    ends = [rps.load(tmp_path / name, step=steps) for name in ("straight", "resumed")]
    assert jax.tree.map(np.ndarray.tobytes, ends[0]) == jax.tree.map(np.ndarray.tobytes, ends[1])


def launch(script: str, work: Path, processes: int) -> subprocess.Popen[bytes]:
    """The example's launcher, in a process of its own, with a shell script in place of a training run."""
    code = "import sys; from processes import launch; sys.exit(launch(['sh', '-c', sys.argv[1]], int(sys.argv[2])))"
    return subprocess.Popen(
        [sys.executable, "-c", code, textwrap.dedent(script), str(processes)],
        env=os.environ | {"PYTHONPATH": str(EXAMPLE)},
        cwd=work,
    )


def test_a_process_that_fails_ends_the_others_and_its_code_is_the_launchers(tmp_path: Path) -> None:
    script = """
    echo $$ > pid$JAX_PROCESS_ID
    while [ ! -e pid0 -o ! -e pid1 -o ! -e pid2 ]; do sleep 0.02; done
    if [ $JAX_PROCESS_ID = 1 ]; then exit 7; fi
    trap '' TERM
    while :; do sleep 0.02; done
    """
    assert launch(script, tmp_path, 3).wait(timeout=60) == 7
    for process in range(3):
        assert not Path("/proc", (tmp_path / f"pid{process}").read_text().strip()).exists()


def test_a_signal_to_the_launcher_reaches_every_process(tmp_path: Path) -> None:
    script = """
    trap 'touch told$JAX_PROCESS_ID; exit 0' TERM
    touch ready$JAX_PROCESS_ID
    while :; do sleep 0.02; done
    """
    launcher = launch(script, tmp_path, 2)
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 0
    assert len(list(tmp_path.glob("told*"))) == 2


def test_the_rows_of_all_processes_are_the_batch_of_one(example: SimpleNamespace) -> None:
    arguments = {"tokens": text_of(1000), "batch_size": 6, "context": 16}
    whole = example.data.ShuffledBatches(**arguments)
    shares = [example.data.ShuffledBatches(**arguments, process=p, processes=3) for p in range(3)]
    for _ in range(25):  # 10 batches an epoch
        np.testing.assert_array_equal(np.concatenate([next(share) for share in shares]), next(whole))


def test_processes_that_do_not_divide_the_batch_are_refused(example: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="2 processes must divide the batch size, got 3"):
        example.data.ShuffledBatches(text_of(1000), batch_size=3, context=16, processes=2)


def text_of(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, tokens).astype(np.uint8)


def test_batches_go_on_where_their_state_was_taken(example: SimpleNamespace) -> None:
    arguments = {"tokens": text_of(1000), "batch_size": 3, "context": 16, "seed": 5}
    batches = example.data.ShuffledBatches(**arguments)
    for taken in range(45):  # 20 batches an epoch: the state is taken within epochs and at their ends
        state = json.loads(json.dumps(batches.get_state()))
        again = example.data.ShuffledBatches(**arguments)
        again.set_state(state)
        for _ in range(3):
            np.testing.assert_array_equal(next(again), next(batches), err_msg=f"after {taken} batches")
        batches.set_state(state)
        next(batches)


def test_an_epoch_takes_every_window_once_and_the_next_one_in_another_order(example: SimpleNamespace) -> None:
    tokens = text_of(16 * 60 + 1)
    batches = example.data.ShuffledBatches(tokens, batch_size=3, context=16)
    epochs = [np.concatenate([next(batches) for _ in range(20)]) for _ in range(2)]
    windows = {tokens[start : start + 17].tobytes() for start in range(0, 16 * 60, 16)}
    for epoch in epochs:
        assert {window.astype(np.uint8).tobytes() for window in epoch} == windows
    assert not np.array_equal(*epochs)


def test_the_state_of_another_text_is_refused(example: SimpleNamespace) -> None:
    batches = example.data.ShuffledBatches(text_of(1000), batch_size=3, context=16)
    other = example.data.ShuffledBatches(text_of(999), batch_size=3, context=16)
    with pytest.raises(ValueError, match="data state must be of"):
        other.set_state(batches.get_state())


def test_a_text_shorter_than_a_batch_is_refused(example: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="3 windows of 16 tokens, got a text of 2"):
        example.data.ShuffledBatches(text_of(40), batch_size=3, context=16)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_parse_and_their_data_is_found(example: SimpleNamespace, preset: str) -> None:
    settings = example.settings.Settings.from_yaml(EXAMPLE / preset, steps=7, directory="/elsewhere")
    assert settings.steps == 7
    assert settings.checkpoint.directory == "/elsewhere"
    tokens = example.data.load_tokens(settings.data)
    assert len(tokens) > settings.data.batch_size * settings.model.context


def test_the_gpt2_preset_has_gpt2_smalls_parameters(example: SimpleNamespace) -> None:
    config = example.settings.Settings.from_yaml(EXAMPLE / "config_gpt2.yaml").model
    model = nnx.eval_shape(lambda: example.model.GPT(config, rngs=nnx.Rngs(0)))
    assert sum(param.size for param in jax.tree.leaves(nnx.state(model, nnx.Param))) == 124_439_808


def test_the_demo_sees_every_bit_that_differs(example: SimpleNamespace) -> None:
    def tree() -> dict[str, np.ndarray | jax.Array]:
        return {"zero": np.zeros(2, np.float32), "nan": np.full(2, np.nan, np.float32), "key": jax.random.key(0)}

    assert example.demo.differing_leaves(tree(), tree()) == []
    changed = {"zero": -np.zeros(2, np.float32), "nan": np.full(2, np.nan, np.float16), "key": jax.random.key(1)}
    for name, leaf in changed.items():
        assert example.demo.differing_leaves(tree(), tree() | {name: leaf}) == [f"['{name}']"]
