"""Models of published training runs: shapes with the FLOPs, weights and residuals of the originals.

Layers are scanned. `keep` names what the backward pass finds stored: "q", "k", "v", "ctx" (the result of attention),
"o" and "mlpwo" (the projections at the end of attention and of the MLP); the input of a layer is always stored. What
the runs offload to the host is stored here. Experts receive equal numbers of tokens.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from flax_mesh import PartitionAxis
from flax_mesh.sharding.abstract import partitioned
from flax_mesh.sharding.constrain import constrain

AXES = PartitionAxis(hidden_state_axis=None)


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    gated: bool = True
    tied: bool = False
    window: int = 0  # of all layers but every `period`-th
    period: int = 1
    experts: int = 0
    top_k: int = 1
    shared: int = 0  # size of the MLP that all tokens pass
    capacity: float = 1.0
    lora: tuple[int, int] = (0, 0)  # ranks of queries, and of keys and values (MLA)
    keep: tuple[str, ...] = ()
    policy: str = ""  # a name of jax.checkpoint_policies instead
    param_dtype: str = "float32"
    attention: Any = "cudnn"
    split_hidden: bool = False  # activations between the layers over tp

    @property
    def axes(self) -> PartitionAxis:
        return PartitionAxis() if self.split_hidden else AXES

    def problems(self) -> list[str]:
        return []


class Layer(nnx.Module):
    def __init__(self, s: Shape, window: int, rngs: nnx.Rngs):
        self.shape, self.window = s, window
        d, h, k, c = s.hidden, s.heads, s.kv_heads, s.head_dim

        def weight(*dims: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(dims, s.param_dtype))

        if s.lora[0]:
            self.q_down, self.q = weight(d, s.lora[0]), weight(s.lora[0], h, c)
            self.kv_down, self.k, self.v = weight(d, s.lora[1]), weight(s.lora[1], k, c), weight(s.lora[1], k, c)
        else:
            self.q, self.k, self.v = weight(d, h, c), weight(d, k, c), weight(d, k, c)
        self.o = weight(h, c, d)
        dense = s.shared if s.experts else s.mlp
        if dense:
            self.up, self.down = weight(d, dense), weight(dense, d)
            if s.gated:
                self.gate = weight(d, dense)
        if s.experts:
            e, f = s.experts, s.mlp
            self.router = weight(d, e)
            self.expert_gate, self.expert_up, self.expert_down = weight(e, d, f), weight(e, d, f), weight(e, f, d)
        self.norms = weight(2, d)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self._attention(_norm(x, self.norms[0]))
        x = x + self._mlp(_norm(x, self.norms[1]))
        return constrain(x, ("batch", "sequence", "hidden"), axes=self.shape.axes)

    def _attention(self, x: jax.Array) -> jax.Array:
        s = self.shape
        of_q, of_kv = x, x
        if s.lora[0]:
            of_q, of_kv = _dot("bsd,dr->bsr", x, self.q_down), _dot("bsd,dr->bsr", x, self.kv_down)
        q = checkpoint_name(_dot("bsd,dhc->bshc", of_q, self.q), "q")
        k = checkpoint_name(_dot("bsd,dhc->bshc", of_kv, self.k), "k")
        v = checkpoint_name(_dot("bsd,dhc->bshc", of_kv, self.v), "v")
        q = constrain(_rotate(q), ("batch", "query_sequence", "heads", "head_dim"), axes=AXES)
        k = constrain(_rotate(k), ("batch", None, "kv_heads", "head_dim"), axes=AXES)
        v = constrain(v, ("batch", None, "kv_heads", "head_dim"), axes=AXES)
        window: Any = {"local_window_size": (self.window - 1, 0)} if self.window else {}
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=s.attention, **window)
        return checkpoint_name(_dot("bshc,hcd->bsd", checkpoint_name(y, "ctx"), self.o), "o")

    def _mlp(self, x: jax.Array) -> jax.Array:
        s = self.shape
        y = jnp.zeros((), x.dtype)
        if s.shared or not s.experts:
            h = _dot("bsd,df->bsf", x, self.up)
            h = jax.nn.silu(_dot("bsd,df->bsf", x, self.gate)) * h if s.gated else jax.nn.relu(h)
            y = checkpoint_name(_dot("bsf,fd->bsd", h, self.down), "mlpwo")
        if s.experts:
            y = y + self._experts(x)
        return y

    def _experts(self, x: jax.Array) -> jax.Array:
        s, (b, length, d) = self.shape, x.shape
        share = jax.nn.sigmoid(_dot("bsd,de->bse", x, self.router)).mean(-1, keepdims=True)
        rows = -(-int(length * s.top_k * s.capacity) // s.experts)
        repeated = jnp.tile(x, (1, -(-rows * s.experts // length), 1))[:, : rows * s.experts]
        z = constrain(repeated.reshape(b, s.experts, rows, d), ("batch", None, None, None), axes=AXES)
        h = jax.nn.silu(_dot("bend,edf->benf", z, self.expert_gate)) * _dot("bend,edf->benf", z, self.expert_up)
        z = checkpoint_name(_dot("benf,efd->bend", h, self.expert_down), "mlpwo").reshape(b, -1, d)
        return z[:, :length] * share


def _dot(form: str, x: jax.Array, weight: Any) -> jax.Array:
    return jnp.einsum(form, x, weight[...].astype(x.dtype))


def _norm(x: jax.Array, scale: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale.astype(x.dtype)


def _rotate(x: jax.Array) -> jax.Array:
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class Period(nnx.Module):
    """`period` layers; the last one attends globally, the others in a window."""

    def __init__(self, s: Shape, rngs: nnx.Rngs):
        windows = [s.window] * (s.period - 1) + [0] if s.period > 1 else [s.window]
        self.layers = nnx.List([Layer(s, window, rngs) for window in windows])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


@partitioned(
    rules=[
        (r"embed$", ("vocab", "embed")),
        (r"head$", ("embed", "vocab")),
        (r"(q_down|kv_down|router)$", ("embed", None)),
        (r"layers/\d+/q$", ("embed", "heads", "head_dim")),
        (r"layers/\d+/(k|v)$", ("embed", "kv_heads", "head_dim")),
        (r"layers/\d+/o$", ("heads", "head_dim", "embed")),
        (r"layers/\d+/(gate|up)$", ("embed", "mlp")),
        (r"layers/\d+/down$", ("mlp", "embed")),
        (r"expert_(gate|up)$", (None, "embed", "mlp")),
        (r"expert_down$", (None, "mlp", "embed")),
        (r"norms?$", ()),
    ],
    layers="periods",
)
class Model(nnx.Module):
    def __init__(self, s: Shape, rngs: nnx.Rngs):
        self.shape, self.axes = s, AXES
        self.embed = nnx.Param(jnp.zeros((s.vocab, s.hidden), s.param_dtype))
        keys = jax.random.split(rngs.params(), s.layers // s.period)
        self.periods = nnx.vmap(lambda key: Period(s, nnx.Rngs(key)))(keys)
        self.norm = nnx.Param(jnp.zeros(s.hidden, s.param_dtype))
        if not s.tied:
            self.head = nnx.Param(jnp.zeros((s.hidden, s.vocab), s.param_dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        s = self.shape
        x = jnp.take(constrain(self.embed[...], ("vocab", None), axes=AXES), tokens, axis=0).astype(jnp.bfloat16)
        x = constrain(x, ("batch", "sequence", "hidden"), axes=s.axes)
        policies = jax.checkpoint_policies
        policy = getattr(policies, s.policy) if s.policy else policies.save_only_these_names(*s.keep)
        graph, state = nnx.split(self.periods)

        def body(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graph, state)(x), None

        x, _ = jax.lax.scan(jax.checkpoint(body, policy=policy, prevent_cse=False), x, state)
        head = self.embed[...].T if s.tied else self.head[...]
        head = constrain(head.astype(x.dtype), (None, "vocab"), axes=AXES)
        return constrain(_norm(x, self.norm[...]) @ head, ("batch", "sequence", "vocab"), axes=AXES)


def make_model(shape: Shape, rngs: nnx.Rngs) -> Model:
    return Model(shape, rngs)


def loss_fn(model: Model, batch: Any) -> tuple[jax.Array, int]:
    logits = model(batch["inputs"]).astype(jnp.float32)
    mine = jnp.arange(logits.shape[-1]) == batch["targets"][..., None]
    loss = jax.nn.logsumexp(logits, -1) - jnp.where(mine, logits, 0).sum(-1)
    return loss.sum(), loss.size
