"""A decoder with the habits of MaxText's NNX layers.

Dims have logical names, which rules of the config map to the axes of a mesh, which have other names. The constructor
takes the config and the mesh. The layers are a stack, made by nnx.vmap and called by jax.lax.scan over its state, with
a checkpoint policy that saves values by name; or a list. Batches are packed: they have positions and segments.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import spmd
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from tests.mpmd.zoo.base import LENGTH, VOCAB, cross_entropy, text
from tests.sharding.foreign.layers import attend, hashed_uniform, rms_norm, rotate

AXES = ("data", "fsdp", "tensor")  # of the mesh
LOGICAL_RULES = [
    ["activation_batch", ["data", "fsdp"]],
    ["activation_embed", None],
    ["embed", "fsdp"],
    ["heads", "tensor"],
    ["kv", None],
    ["mlp", "tensor"],
    ["norm", "tensor"],
    ["vocab", "tensor"],
    ["layers", None],
]


@dataclasses.dataclass
class Config:  # cannot be hashed: it is a dataclass that is not frozen
    emb_dim: int = 16
    num_heads: int = 4
    head_dim: int = 4
    mlp_dim: int = 32
    num_layers: int = 2
    dropout_rate: float = 0.1
    scan_layers: bool = True
    param_scan_axis: int = 0
    logical_axis_rules: list[Any] = dataclasses.field(default_factory=lambda: LOGICAL_RULES)


class Dense(nnx.Module):
    """A product over the last dims of the input; the dims of the kernel have logical names."""

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], kernel_axes, *, rngs: nnx.Rngs):
        self.inputs, self.kernel_axes = inputs, kernel_axes
        self.kernel = nnx.Param(hashed_uniform(rngs.params(), (*inputs, *outputs)), out_sharding=kernel_axes)

    def __call__(self, x):
        count = len(self.inputs)
        dims = tuple(range(x.ndim - count, x.ndim)), tuple(range(count))
        return jax.lax.dot_general(x, self.kernel[...], (dims, ((), ())))


class Norm(nnx.Module):
    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones((width,)), out_sharding=("norm",))

    def __call__(self, x):
        return rms_norm(x, self.scale[...])


class DecoderLayer(nnx.Module):
    def __init__(self, config: Config, mesh: Mesh | AbstractMesh | None, *, rngs: nnx.Rngs):
        self.config, self.mesh = config, mesh
        width, heads = config.emb_dim, (config.num_heads, config.head_dim)
        self.pre_norm, self.post_norm = Norm(width), Norm(width)
        for name in ("query", "key", "value"):
            setattr(self, name, Dense((width,), heads, ("embed", "heads", "kv"), rngs=rngs))
        self.out = Dense(heads, (width,), ("heads", "kv", "embed"), rngs=rngs)
        self.wi = Dense((width,), (2, config.mlp_dim), ("embed", None, "mlp"), rngs=rngs)
        self.wo = Dense((config.mlp_dim,), (width,), ("mlp", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, broadcast_dims=(-2,), rngs=rngs)

    def __call__(self, x, segments, positions, deterministic=False):
        x = self._constrain(x, ("activation_batch", None, "activation_embed"))
        h = self.pre_norm(x)
        q, k, v = (checkpoint_name(getattr(self, name)(h), f"{name}_proj") for name in ("query", "key", "value"))
        q, k = rotate(q, positions), rotate(k, positions)
        mask = (segments[:, :, None] == segments[:, None]) & (positions[:, :, None] >= positions[:, None])
        x = x + self.dropout(self.out(attend(q, k, v, mask)), deterministic=deterministic)
        gate, up = jnp.moveaxis(checkpoint_name(self.wi(self.post_norm(x)), "mlpwi"), -2, 0)
        return x + self.dropout(self.wo(jax.nn.silu(gate) * up), deterministic=deterministic), None

    def _constrain(self, x, names):
        if self.mesh is None:  # the mesh in context
            return spmd.with_logical_constraint(x, names)
        spec: Any = spmd.logical_to_mesh_axes(names, self.config.logical_axis_rules)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


class Decoder(nnx.Module):
    def __init__(self, config: Config, mesh: Mesh | AbstractMesh | None = None, *, rngs: nnx.Rngs):
        self.config, self.mesh = config, mesh
        table = hashed_uniform(rngs.params(), (VOCAB, config.emb_dim))
        self.token_embedder = nnx.Dict(embedding=nnx.Param(table, out_sharding=("vocab", "embed")))
        self.decoder_norm = Norm(config.emb_dim)
        make = lambda rngs: DecoderLayer(config, mesh, rngs=rngs)  # noqa: E731
        if config.scan_layers:
            keys = rngs.fork()
            nnx.split_rngs(keys, splits=config.num_layers)
            named = {nnx.PARTITION_NAME: "layers"}
            out = nnx.StateAxes({nnx.Param: config.param_scan_axis, ...: 0})
            stack = nnx.vmap(make, in_axes=0, out_axes=out, axis_name="layers", transform_metadata=named)
            self.layers = stack(keys)
        else:
            self.layers = nnx.List([make(rngs.fork()) for _ in range(config.num_layers)])

    def __call__(self, tokens, segments, positions):
        x = self.token_embedder["embedding"][tokens] * self.config.emb_dim**0.5
        if self.config.scan_layers:
            x = self._scan(x, segments, positions)
        else:
            layers: Any = self.layers
            for layer in layers:
                x, _ = layer(x, segments, positions)
        return self.decoder_norm(x) @ self.token_embedder["embedding"][...].T

    def _scan(self, x, *context):
        graphdef, params, rest = nnx.split(self.layers, nnx.Param, ...)
        params = jax.tree.map(lambda x: jnp.moveaxis(x, self.config.param_scan_axis, 0), params)

        def body(x, layer):
            merged = nnx.merge(graphdef, *layer)
            x, _ = merged(x, *context)
            return x, nnx.state(merged, nnx.Not(nnx.Param))

        names = jax.checkpoint_policies.save_only_these_names("query_proj", "key_proj", "value_proj", "mlpwi")
        x, rest = jax.lax.scan(jax.checkpoint(body, policy=names, prevent_cse=False), x, (params, rest))
        nnx.update(self.layers, rest)  # the counters of dropout
        return x


def make(depth: int = 2, **kinds: Any) -> Decoder:
    return Decoder(Config(num_layers=depth, **kinds), rngs=nnx.Rngs(params=0, dropout=1))


def packed(rows: int) -> dict[str, np.ndarray]:
    """Two sequences in each row, of different lengths."""
    first = np.random.default_rng(5).integers(1, LENGTH, (rows, 1))
    at = np.arange(LENGTH)
    segments = 1 + (at >= first)
    positions = np.where(segments > 1, at - first, at)
    return text(rows) | {"segments": segments.astype(np.int32), "positions": positions.astype(np.int32)}


def loss_fn(model, batch):
    return cross_entropy(model(batch["tokens"], batch["segments"], batch["positions"]), batch)
