"""The train state and the step of `examples/gpt_small`, as the real loop of `train_loop` runs them.

19 million parameters in float32 under AdamW: 0.23 GB with both moments. A step of `TOKENS` fills two cores for about
half a second.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from benchmarks.launch import ROOT

PyTree = Any
TOKENS = (4, 65)
"""Shape of a batch: sequences, and their tokens with the one that the last is to predict."""
VOCABULARY = 256


def _parts(scale: float) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The model: its definition, its parameters, all else. `scale` multiplies the parameters, roughly."""
    sys.path.insert(0, str(ROOT / "examples" / "gpt_small"))
    from model import GPT, ModelConfig  # the example is run as a program, not installed

    width = max(16, round(512 * math.sqrt(scale) / 16) * 16)
    config = ModelConfig(VOCABULARY, context=TOKENS[1] - 1, layers=6, heads=8, width=width, dropout=0.0)
    return nnx.split(GPT(config, rngs=nnx.Rngs(0)), nnx.Param, ...)


def train_state(scale: float) -> PyTree:
    """Fresh parameters and moments; may be traced."""
    params = nnx.to_pure_dict(_parts(scale)[1])
    return {"params": params, "opt_state": _optimizer().init(params)}


def train_step(scale: float) -> Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]]:
    """A function of the state and a batch that returns the next state and the loss."""
    graph, params, rest = _parts(scale)
    optimizer = _optimizer()

    def step(state: PyTree, tokens: jax.Array) -> tuple[PyTree, jax.Array]:
        def loss_of(values: PyTree) -> jax.Array:
            nnx.replace_by_pure_dict(params, values)
            logits = nnx.merge(graph, params, rest)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": moments}, loss

    return step


def _optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3)
