"""What the README shows runs, and the package offers what it says it offers."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import yaml

import flax_rpsave as rps
from flax_rpsave.config import CheckpointConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's code blocks in a language, indentation removed."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", README, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


class Batches:
    """An endless iterator that can be positioned."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return jnp.float32(self.position)

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def test_the_loop_of_the_readme_trains_and_resumes(tmp_path, monkeypatch):
    block = yaml.safe_load(blocks("yaml")[0])
    block["checkpoint"] |= {"directory": "run", "save_interval_steps": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(block))
    monkeypatch.chdir(tmp_path)

    @jax.jit
    def train_step(state, batch):
        return jax.tree.map(lambda x: x * 0.9 + batch, state), {"loss": batch}

    def train(num_steps):
        scope = {
            "state": {"w": jnp.ones(8)},
            "train_iter": Batches(),
            "num_steps": num_steps,
            "train_step": train_step,
        }
        exec(blocks("python")[0], scope)
        return scope

    train(5)
    resumed = train(9)
    assert resumed["checkpoint"].all_steps() == [6, 8, 9]
    assert resumed["train_iter"].position == 9
    straight = {"w": jnp.ones(8)}
    for batch in range(1, 10):
        straight, _ = train_step(straight, jnp.float32(batch))
    np.testing.assert_array_equal(resumed["state"]["w"], straight["w"])


def test_the_table_of_the_readme_has_every_key_of_the_config():
    table = set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
    assert table == set(CheckpointConfig.__dataclass_fields__)


def test_the_package_offers_its_public_names():
    assert all(hasattr(rps, name) for name in rps.__all__)
    assert rps.__all__ == sorted(rps.__all__)
    assert set(rps.__all__) >= {"CheckpointCallback", "CheckpointConfig", "load", "plan", "save"}
