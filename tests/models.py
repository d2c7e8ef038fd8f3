"""Abstract train states of real models: shapes and shardings, no memory."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P


def adam_state(params, mesh, dtype=np.float32):
    """(name, `jax.ShapeDtypeStruct`) of params, Adam's first and second moments and the step, as optax has them."""
    leaves = [
        (f"{part}.{name}", jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)))
        for part in ("params", "mu", "nu")
        for name, (shape, spec) in params.items()
    ]
    return [("step", jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P()))), *leaves]


def megatron_gpt(layers, hidden, *, vocab=50257, positions=2048, tp="tp", tp_size=8):
    """Parameters of a Megatron-LM GPT, a leaf a layer.

    Shapes and shardings are those of megatron/core/tensor_parallel/layers.py: VocabParallelEmbedding (the vocabulary
    padded to a multiple of 128 × TP, arguments.py `make_vocab_size_divisible_by`), ColumnParallelLinear for QKV and the
    first MLP matrix (bias sharded too), RowParallelLinear for the attention output and the second MLP matrix (bias
    replicated); position embedding and layer norms are replicated. Kernels are (in, out), as Flax has them.
    """
    padded = -(-vocab // (128 * tp_size)) * 128 * tp_size
    params = {
        "word_embeddings": ((padded, hidden), P(tp, None)),
        "position_embeddings": ((positions, hidden), P()),
        "final_layernorm.scale": ((hidden,), P()),
        "final_layernorm.bias": ((hidden,), P()),
    }
    for k in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            params[f"layers.{k}.{norm}.scale"] = ((hidden,), P())
            params[f"layers.{k}.{norm}.bias"] = ((hidden,), P())
        for name, inner, outer in (("qkv", hidden, 3 * hidden), ("mlp_in", hidden, 4 * hidden)):
            params[f"layers.{k}.{name}.kernel"] = ((inner, outer), P(None, tp))
            params[f"layers.{k}.{name}.bias"] = ((outer,), P(tp))
        for name, inner, outer in (("attention_out", hidden, hidden), ("mlp_out", 4 * hidden, hidden)):
            params[f"layers.{k}.{name}.kernel"] = ((inner, outer), P(tp, None))
            params[f"layers.{k}.{name}.bias"] = ((outer,), P())
    return params


def maxtext_gpt3(layers, hidden, heads, *, vocab=50304, positions=2048, fsdp="fsdp", tp="tp", stacked=False):
    """Parameters of MaxText's GPT-3 (models/gpt3.py), sharded by its logical axis rules (configs/base.yml).

    `embed` is sharded over fsdp; `heads`, `mlp` and `vocab` over tensor; norms over tensor. With `stacked` the layers
    are one array, the layer axis second (`param_scan_axis: 1`).
    """
    head = hidden // heads
    layer = {
        "pre_self_attention_norm.scale": ((hidden,), P(tp)),
        "pre_self_attention_norm.bias": ((hidden,), P(tp)),
        "self_attention.qkv_proj.kernel": ((hidden, 3, heads, head), P(fsdp, None, tp, None)),
        "self_attention.qkv_proj.bias": ((3, heads, head), P(None, tp, None)),
        "self_attention.out.kernel": ((heads, head, hidden), P(tp, None, fsdp)),
        "self_attention.out.bias": ((hidden,), P(fsdp)),
        "mlp.mlp_layer_norm.scale": ((hidden,), P(tp)),
        "mlp.mlp_layer_norm.bias": ((hidden,), P(tp)),
        "mlp.wi.kernel": ((hidden, 4 * hidden), P(fsdp, tp)),
        "mlp.wi.bias": ((4 * hidden,), P(tp)),
        "mlp.wo.kernel": ((4 * hidden, hidden), P(tp, fsdp)),
        "mlp.wo.bias": ((hidden,), P(fsdp)),
    }
    params = {
        "token_embedder.embedding": ((vocab, hidden), P(tp, fsdp)),
        "position_embedder.embedding": ((positions, hidden), P(None, fsdp)),
        "decoder.decoder_norm.scale": ((hidden,), P(tp)),
        "decoder.decoder_norm.bias": ((hidden,), P(tp)),
    }
    for name, (shape, spec) in layer.items():
        if stacked:
            params[f"decoder.layers.{name}"] = ((shape[0], layers, *shape[1:]), P(spec[0], None, *spec[1:]))
        else:
            for k in range(layers):
                params[f"decoder.layers_{k}.{name}"] = (shape, spec)
    return params


def replicated(params):
    """The same parameters, all of them replicated."""
    return {name: (shape, P()) for name, (shape, _) in params.items()}


def abstract_mesh(**axes):
    """An `AbstractMesh` with these axis sizes."""
    return AbstractMesh(tuple(axes.values()), tuple(axes))
