"""The train state, NNX modules replicated on a mesh of all devices, and the data-parallel train step."""

from typing import TypedDict

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from model import GPT
from settings import OptimizerConfig, Settings


class TrainState(TypedDict):
    """What is trained, and what is saved: a dict of NNX objects."""

    model: GPT
    optimizer: nnx.Optimizer[GPT]


def create_state(settings: Settings, mesh: Mesh) -> TrainState:
    """A fresh train state, every array of it replicated on the mesh."""

    @nnx.jit(out_shardings=NamedSharding(mesh, PartitionSpec()))
    def create() -> TrainState:
        model = GPT(settings.model, rngs=nnx.Rngs(settings.seed))
        optimizer = nnx.Optimizer(model, create_optimizer(settings.optimizer), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer}

    return create()


def create_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW behind a clipped gradient, with a warm-up and a cosine as its learning rate."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.learning_rate / 10,
    )

    def is_matrix(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda param: param.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b2=config.b2, weight_decay=config.weight_decay, mask=is_matrix),
    )


def shard_batch(batch: np.ndarray, mesh: Mesh) -> jax.Array:
    """Split a batch over the mesh's `data` axis; each process has the rows of its own devices."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), batch)


@nnx.jit(donate_argnums=0)
def train_step(state: TrainState, batch: jax.Array) -> jax.Array:
    """Update the state in place by one step on tokens `[batch, context + 1]`; returns the mean loss."""

    def loss_of(model: GPT) -> jax.Array:
        logits = model(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(state["model"])
    state["optimizer"].update(state["model"], gradients)
    return loss
