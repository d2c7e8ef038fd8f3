"""The states that are saved: a table of cases, each an abstract tree that is filled with realistic values.

A case says shapes, dtypes and shardings (`Case.abstract`, which is also the target of a restore); `materialize` makes
the values and notes a digest of every shard, so that a restore in another process can be verified bit for bit.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xxhash
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers import MODES, OTHERS

PyTree = Any
Index = tuple[slice, ...]
Digests = list[dict[str, str]]
"""For each leaf in flattening order: which part of it (`"0:8,0:4"`) -> xxh3 of that part's bytes."""

_ALIGNMENT = 64  # bytes: from this on CPU devices use a NumPy array's memory as it is


@dataclasses.dataclass(frozen=True)
class Case:
    """A state to save.

    Attributes:
        about: one line for the tables.
        devices: how many CPU devices each process has.
        replicas: how many copies of it all devices hold (CPU devices hold real copies).
        build: scale -> tree of `jax.ShapeDtypeStruct`s without shardings; `scale` multiplies the bytes, roughly.
        axes: the mesh; its first axis runs over the processes.
        spec: how a leaf lies on it.
        processes: how many processes hold it.
        kinds: the trials of a peer's turn, in their order; they share a directory.
        peers: the peers that the case is about; None for all that are asked for.
        shared: replicas lie in the same host memory, so that a state fits of which there is no room for all copies; a
            checkpointer that copies or writes each replica's part does as much as if they were apart.
        defaults: what its command takes where nothing is given (`run.settings`), so that it ends within minutes.
    """

    about: str
    devices: int
    replicas: int
    build: Callable[[float], PyTree]
    axes: tuple[tuple[str, int], ...] = (("data", 8),)
    spec: Callable[[jax.ShapeDtypeStruct], PartitionSpec] = lambda leaf: PartitionSpec()
    processes: int = 1
    kinds: tuple[str, ...] = ("save", "restore")
    peers: tuple[str, ...] | None = None
    shared: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def throttled(self) -> bool:
        """Whether each process saves to an object store, through a network card of its own: how saving scales."""
        return self.kinds == ("throttled_save",)

    def needed_bytes(self, scale: float) -> int:
        """Host memory that a trial needs at `scale`: all replicas, two staging copies, the page cache of one save."""
        return state_bytes(self.build(scale)) * ((1 if self.shared else self.replicas) + 3)

    def sharding(self, leaf: Any) -> NamedSharding:
        """Where a leaf of this shape lies."""
        names, sizes = zip(*self.axes, strict=True)
        mesh = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)
        return NamedSharding(mesh, self.spec(leaf))

    def abstract(self, scale: float) -> PyTree:
        """The state's tree of `jax.ShapeDtypeStruct`s, with shardings."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(x)), self.build(scale)
        )


def state_bytes(tree: PyTree) -> int:
    """Bytes of one replica of `tree`."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def leaf_shapes(tree: PyTree) -> dict[str, tuple[tuple[int, ...], str]]:
    """Leaf -> its shape and dtype."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype.name) for path, leaf in leaves}


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _gpt2_small_weights(scale: float) -> PyTree:
    """GPT-2 small: 148 parameters, 0.50 GB.

    `scale` shrinks width, vocabulary and context (bytes go with the product); the 12 layers and 148 leaves stay.
    """
    side = math.sqrt(scale)
    width = max(8, round(768 * side / 8) * 8)
    vocabulary, context = max(8, round(50257 * side)), max(8, round(1024 * side))

    def norm() -> PyTree:
        return {"scale": _float32(width), "bias": _float32(width)}

    def dense(inputs: int, outputs: int) -> PyTree:
        return {"kernel": _float32(inputs, outputs), "bias": _float32(outputs)}

    def layer() -> PyTree:
        return {
            "ln_1": norm(),
            "attn": {"c_attn": dense(width, 3 * width), "c_proj": dense(width, width)},
            "ln_2": norm(),
            "mlp": {"c_fc": dense(width, 4 * width), "c_proj": dense(4 * width, width)},
        }

    return {
        "wte": {"embedding": _float32(vocabulary, width)},
        "wpe": {"embedding": _float32(context, width)},
        "h": {str(i): layer() for i in range(12)},
        "ln_f": norm(),
    }


def _under_adam(params: PyTree) -> PyTree:
    """The train state: the parameters, as many first and second moments, two counters."""
    return jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.adam(1e-3)), params)


def _gpt2_small(scale: float) -> PyTree:
    """GPT-2 small under Adam: 446 leaves, 1.49 GB."""
    return _under_adam(_gpt2_small_weights(scale))


def _one_array(rows: int) -> Callable[[float], PyTree]:
    return lambda scale: {"array": _float32(max(8, round(rows * scale)), 16384)}


def _mlp(width: int) -> Callable[[float], PyTree]:
    """12 dense layers under Adam: 24 parameters, as many first and second moments, two counters: 74 leaves."""

    def build(scale: float) -> PyTree:
        side = max(24, round(width * math.sqrt(scale) / 24) * 24)
        return _under_adam({str(i): {"kernel": _float32(side, side), "bias": _float32(side)} for i in range(12)})

    return build


def _primes(scale: float) -> PyTree:
    """12 dense layers under Adam whose every dimension is a prime, so that no number of replicas divides one."""

    def prime(n: int) -> int:
        return next(k for k in itertools.count(n) if all(k % d for d in range(2, math.isqrt(k) + 1)))

    rows, columns = (prime(max(13, round(n * math.sqrt(scale)))) for n in (2003, 1733))
    return _under_adam({str(i): {"kernel": _float32(rows, columns), "bias": _float32(columns)} for i in range(12)})


def _small_leaves(scale: float) -> PyTree:
    """20,000 vectors of 1 to 64 KB, their sizes drawn once; `scale` goes with their number."""
    sizes = np.random.default_rng(0).integers(1, 65, max(20, round(20_000 * scale)))
    return {str(i): _float32(256 * int(size)) for i, size in enumerate(sizes)}


def _huge_leaves(scale: float) -> PyTree:
    """4 matrices, 1.5 GB in all."""
    return {str(i): _float32(max(8, round(7680 * scale)), 12288) for i in range(4)}


def _example(scale: float) -> PyTree:
    from benchmarks import example  # loads NNX, which the trials of the other cases do without

    return jax.eval_shape(lambda: example.train_state(scale))


def over_model(leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
    """The last dimension over the axis `model`."""
    return PartitionSpec(*[None] * (len(leaf.shape) - 1), "model") if leaf.shape else PartitionSpec()


def _hosts(hosts: int, model: int = 1) -> Case:
    """A state of 160 MB on hosts with a network card each: replicated over them, sharded over the devices of each."""
    sharded = f", sharded over its {model} devices" if model > 1 else ""
    single = ("rpsave_single",) if hosts > 1 and model == 1 else ()
    return Case(
        f"replicated on {hosts} host{'s' * (hosts > 1)}{sharded}",
        devices=model,
        replicas=hosts,
        build=_mlp(1056),
        axes=(("data", hosts), ("model", model)),
        spec=over_model,
        processes=hosts,
        kinds=("throttled_save",),
        peers=(*single, "rpsave"),
    )


def _prime_replicas(replicas: int) -> Case:
    return Case(
        f"12 dense layers in float32 with Adam moments, every dimension a prime, 74 leaves, replicated on {replicas} "
        "devices",
        devices=replicas,
        replicas=replicas,
        build=_primes,
        axes=(("data", replicas),),
        defaults={"peers": _MANAGERS, "rounds": 1},
    )


_MANAGERS = ["rpsave", "orbax_default", "orbax_rp", "orbax_tuned", "orbax_tuned_single"]

CASES = {
    "gpt2_small": Case(
        "GPT-2 small in float32 with Adam moments, 446 leaves, replicated on 8 devices",
        devices=8,
        replicas=8,
        build=_gpt2_small,
    ),
    "gpt2_small_modes": Case(
        "GPT-2 small in float32 with Adam moments, 446 leaves, replicated on 8 devices, saved in every way",
        devices=8,
        replicas=8,
        build=_gpt2_small,
        kinds=("save",),
        defaults={"peers": MODES, "rounds": 1},
    ),
    "gpt2_small_restores": Case(
        "GPT-2 small in float32 with Adam moments, 446 leaves, saved from 8 devices, restored in every way",
        devices=8,
        replicas=8,
        build=_gpt2_small,
        kinds=("save", "restore_variants"),
        defaults={"peers": ["rpsave", "orbax_rp", "orbax_tuned"], "rounds": 1, "saves": 1, "restores": 2},
    ),
    "one_array": Case(
        "one float32 array replicated on 8 devices: the original proposal's case at a quarter of its 4.3 GB, "
        "because 8 CPU devices hold 8 real copies (34 GB at full size)",
        devices=8,
        replicas=8,
        build=_one_array(16384),
    ),
    "one_array_full": Case(
        "one float32 array of 4.3 GB replicated on 8 devices, whose replicas share their memory: the original "
        "proposal's case at its full size",
        devices=8,
        replicas=8,
        build=_one_array(65536),
        kinds=("save",),
        shared=True,
        defaults={"peers": _MANAGERS, "rounds": 1},
    ),
    "one_array_8_processes": Case(
        "one float32 array replicated on 8 processes of one device: the original proposal's case at an eighth of its "
        "4.3 GB",
        devices=1,
        replicas=8,
        build=_one_array(8192),
        processes=8,
        kinds=("save",),
        defaults={"peers": _MANAGERS, "rounds": 1},
    ),
    "small_leaves": Case(
        "20,000 float32 vectors of 1 to 64 KB, replicated on 8 devices",
        devices=8,
        replicas=8,
        build=_small_leaves,
        # Orbax takes nearly three minutes a save.
        defaults={"peers": ["rpsave", "orbax_default"], "rounds": 1, "restores": 0},
    ),
    "huge_leaves": Case(
        "4 float32 matrices of 0.38 GB, replicated on 8 devices",
        devices=8,
        replicas=8,
        build=_huge_leaves,
        defaults={"peers": _MANAGERS, "rounds": 1},
    ),
    "sharded_4x2": Case(
        "the weights of GPT-2 small in float32, 148 leaves, sharded over 4 devices and replicated over 2",
        devices=8,
        replicas=2,
        build=_gpt2_small_weights,
        axes=(("model", 4), ("data", 2)),
        spec=over_model,
        defaults={"peers": _MANAGERS, "rounds": 1},
    ),
    "replicas_3": _prime_replicas(3),
    "replicas_11": _prime_replicas(11),
    "train_loop": Case(
        "the example's GPT of 19 million parameters trained under AdamW, replicated on 2 devices, donated steps",
        devices=2,
        replicas=2,
        build=_example,
        axes=(("data", 2),),
        kinds=("loop",),
        # JAX's serialization reads the arrays after its call has returned: it fails where the next step was given them.
        defaults={
            "peers": ["rpsave", *(name for name in OTHERS if name != "jax_serialization")],
            "rounds": 1,
            "saves": 8,
        },
    ),
    "alongside": Case(
        "GPT-2 small in float32 with Adam moments, 446 leaves, replicated on 8 devices, beside a program that is idle "
        "or spins",
        devices=8,
        replicas=8,
        build=_gpt2_small,
        kinds=("alongside",),
        defaults={"peers": _MANAGERS, "rounds": 1},
    ),
    "mlp_4_processes": Case(
        "12 dense layers in float32 with Adam moments, 74 leaves, replicated on 4 processes of one device",
        devices=1,
        replicas=4,
        build=_mlp(840),
        axes=(("data", 4),),
        processes=4,
        defaults={"peers": ["rpsave", "orbax_rp"], "rounds": 2, "saves": 5, "restores": 3},
    ),
    "gpt2_small_2_processes": Case(
        "GPT-2 small in float32 with Adam moments, 446 leaves, replicated on 2 processes of one device",
        devices=1,
        replicas=2,
        build=_gpt2_small,
        axes=(("data", 2),),
        processes=2,
        defaults={
            "peers": ["rpsave", "orbax_rp", "torch_dcp", "torch_dcp_async"],
            "rounds": 1,
            "saves": 5,
            "restores": 2,
        },
    ),
    **{f"hosts_{hosts}": _hosts(hosts) for hosts in (1, 2, 3, 4, 8)},
    **{f"hosts_{hosts}x2": _hosts(hosts, model=2) for hosts in (1, 2, 4)},
}


def _values(path: str, leaf: jax.ShapeDtypeStruct, rng: np.random.Generator) -> np.ndarray:
    """Values as training leaves them: weights ~ 0.02, first moments ~ 1e-3, second moments their squares' size."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return np.full(leaf.shape, 1000, leaf.dtype)
    values = rng.standard_normal(leaf.shape, np.float32)
    if ".nu" in path:
        np.square(values, out=values)
    values *= 1e-6 if ".nu" in path else 1e-3 if ".mu" in path else 0.02
    return values.astype(leaf.dtype, copy=False)


def _key(index: Index, shape: tuple[int, ...]) -> str:
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in bounds)


def _digest(values: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def materialize(abstract: PyTree, seed: int, shared: bool = False) -> tuple[PyTree, Digests]:
    """Fills `abstract` with random values on its devices.

    Args:
        shared: CPU devices share the memory of a shard's replicas.

    Returns:
        The state, its arrays ready; and the digest of every distinct shard. The same in all
        processes that call this.
    """
    arrays, digests = [], []
    for leaf, host, parts in _filled(abstract, seed):
        digests.append({key: _digest(host[index]) for key, index in parts.items()})
        buffers = {key: _copy(host[index], aligned=True) for key, index in parts.items()} if shared else None

        def on_device(index: Index, leaf=leaf, host=host, buffers=buffers) -> np.ndarray:
            return buffers[_key(index, leaf.shape)] if buffers else _copy(host[index], aligned=False)

        arrays.append(jax.make_array_from_callback(leaf.shape, leaf.sharding, on_device, dtype=leaf.dtype))
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(abstract), arrays)), digests


def digests_of(abstract: PyTree, seed: int) -> Digests:
    """Those that `materialize` returns, without the state."""
    return [{key: _digest(host[index]) for key, index in parts.items()} for _, host, parts in _filled(abstract, seed)]


def _filled(abstract: PyTree, seed: int) -> Iterator[tuple[jax.ShapeDtypeStruct, np.ndarray, dict[str, Index]]]:
    """Each leaf, its values, and its distinct shards by their keys."""
    rng = np.random.default_rng(seed)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        host = _values(jax.tree_util.keystr(path), leaf, rng)
        indices = leaf.sharding.devices_indices_map(leaf.shape).values()
        yield leaf, host, {_key(index, leaf.shape): index for index in indices}


def _copy(values: np.ndarray, aligned: bool) -> np.ndarray:
    """The same values at an address that 64 divides, where all CPU devices use the array itself, or where they copy."""
    buffer = np.empty(values.nbytes + 2 * _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT + (0 if aligned else values.itemsize)
    copy = buffer[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def negated(state: PyTree) -> PyTree:
    """The cheapest of train steps: it reads every byte and writes every byte."""
    return jax.tree.map(lambda x: -x, state)


def shared_bytes(state: PyTree) -> int:
    """Bytes of replicas that are not there: CPU devices may all have the same host memory for a restored array.

    Restoring so is cheap, but the copies are only put off to the first step that donates the state.
    """
    missing = 0
    for leaf in jax.tree.leaves(state):
        shards = [shard.data for shard in leaf.addressable_shards]
        distinct = {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}
        missing += sum(shard.nbytes for shard in shards) - sum(distinct.values())
    return missing


def differences(state: PyTree, abstract: PyTree, digests: Digests) -> list[str]:
    """Where `state` is not what `materialize(abstract, …)` made: tree, dtypes, shardings, the bits of every replica."""
    if jax.tree.structure(state) != jax.tree.structure(abstract):
        return ["tree structure"]
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), target, expected in zip(leaves, jax.tree.leaves(abstract), digests, strict=True):
        name = jax.tree_util.keystr(path)
        if (leaf.shape, leaf.dtype) != (target.shape, target.dtype):
            found.append(f"{name}: {leaf.dtype}{leaf.shape}")
        elif not leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim):
            found.append(f"{name}: {leaf.sharding}")
        else:
            for shard in leaf.addressable_shards:
                if _digest(np.asarray(shard.data)) != expected[_key(shard.index, leaf.shape)]:
                    found.append(f"{name}: bytes on {shard.device}")
    return found
