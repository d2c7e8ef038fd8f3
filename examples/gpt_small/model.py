"""A GPT in Flax NNX: pre-LN blocks, learned positions, tied output embedding; GPT-2's layout and initialisation.

Unlike GPT-2 there is no dropout on the attention weights, so that attention may use a fused kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class ModelConfig:
    """Size of the model: the `model:` section of the YAML file."""

    vocab_size: int
    """Rows of the token embedding; byte-level tokens use the first 256."""
    context: int
    """Tokens of a training sequence, and rows of the position embedding."""
    layers: int
    heads: int
    width: int
    """Features of the residual stream; a multiple of `heads`."""
    dropout: float = 0.1
    dtype: str = "float32"
    """Of the computation; parameters and optimizer state are float32 always."""


class Attention(nnx.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dense = _dense_of(config)
        self.heads = config.heads
        self.qkv = dense(config.width, 3 * config.width, rngs=rngs)
        self.out = dense(config.width, config.width, residual=True, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        query, key, value = (
            part.reshape(batch, length, self.heads, width // self.heads) for part in jnp.split(self.qkv(x), 3, axis=-1)
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.out(mixed.reshape(batch, length, width)))


class MLP(nnx.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dense = _dense_of(config)
        self.up = dense(config.width, 4 * config.width, rngs=rngs)
        self.down = dense(4 * config.width, config.width, residual=True, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.down(jax.nn.gelu(self.up(x))))


class Block(nnx.Module):
    """One pre-LN transformer block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    """Tokens `[batch, length]` to next-token logits `[batch, length, vocab_size]` in float32.

    The dropout layers keep their PRNG keys and counters as Variables: they are part of the train state, so a resumed
    run draws the masks that an uninterrupted one would.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(config.vocab_size, config.width, dtype=config.dtype, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, dtype=config.dtype, embedding_init=init, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.dropout(self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)


def _dense_of(config: ModelConfig) -> Callable[..., nnx.Linear]:
    """A maker of dense layers with GPT-2's initialisation: those that write to the residual stream start smaller."""

    def dense(inputs: int, outputs: int, *, residual: bool = False, rngs: nnx.Rngs) -> nnx.Linear:
        scale = 0.02 / (2 * config.layers) ** 0.5 if residual else 0.02
        init = nnx.initializers.normal(scale)
        return nnx.Linear(inputs, outputs, dtype=config.dtype, kernel_init=init, rngs=rngs)

    return dense
