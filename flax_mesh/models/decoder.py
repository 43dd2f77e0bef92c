"""A decoder-only language model in plain NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts.

Shape letters: B batch, S sequence, D hidden, H query heads, K key-value heads, C head dim, F mlp, V vocab.
Architecture: Llama (Touvron et al. 2023), grouped queries (Ainslie et al. 2023), SwiGLU (Shazeer 2020); with experts
that of Mixtral (Jiang et al. 2024).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import Mode, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.mesh.context import current_mesh
from flax_mesh.models.cross_entropy import cross_entropy, project
from flax_mesh.models.matmul import dot_float32
from flax_mesh.models.moe import Aux, MoE, router_losses
from flax_mesh.models.remat import call_layers, named, remat_problems
from flax_mesh.models.rotary import RopeScaling, rotate
from flax_mesh.settings import MAX_SIZE, SAME_RESULT, type_problems, value_problems
from flax_mesh.sharding.abstract import partitioned
from flax_mesh.sharding.constrain import constrain
from flax_mesh.sharding.explicit import on_auto_axes
from flax_mesh.text import array_text, axes_text

GREEDY_BELOW = 1e-30  # of the temperature; logits divided by less may be infinite
CUDNN_HEAD_DIM = 256  # the most since Hopper; 128 before
DTYPES = ("float32", "bfloat16", "float16")
MLP_NAMES = ("mlp_gate", "mlp_up")
SIZE = {"at_least": 1, "at_most": MAX_SIZE}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder. `dtype` is the dtype of the computation, `param_dtype` of the parameters.

    `attention`: "xla" on any platform, or "cudnn", a fused kernel for GPUs in half precision that does not store the
    scores.

    `remat`: "none", "full" (recompute every layer in the backward pass), the name of a policy in
    `jax.checkpoint_policies`, which selects the residuals to save, or names of values, "attention+mlp_up"; for all
    layers or for runs of them, "full:16,none". See `models.remat` and `remat_names`. Policies that save dots also save
    the outputs of cuDNN's attention. With `scan` the layers are one stack, run by one loop for each run of `remat`,
    which compiles faster; results and checkpoints are those of the unrolled list. `loss_chunk`: the number of tokens
    per device whose logits the loss computes at a time, 0 for all (`models.cross_entropy`).

    With `num_experts` above 0 every layer has that many MLPs of `mlp_size`, and each token is routed to
    `experts_per_token` of them. `load_balance_loss` and `router_z_loss` are loss coefficients (`models.moe`).

    `qkv_bias`: queries, keys and values have a bias (Qwen2). `qk_norm`: an RMSNorm over the head dim of queries and
    keys before the rotation, with one scale for all heads (Qwen3). `rope_factor` above 1 and the three settings after
    it: see `RopeScaling` (Llama 3.1).
    """

    vocab_size: int = field(default=256, metadata=SIZE)
    hidden_size: int = field(default=256, metadata=SIZE)
    num_layers: int = field(default=4, metadata=SIZE)
    num_heads: int = field(default=8, metadata=SIZE)
    num_kv_heads: int = field(default=4, metadata=SIZE)
    head_dim: int = field(default=32, metadata=SIZE)
    mlp_size: int = field(default=768, metadata=SIZE)
    num_experts: int = field(default=0, metadata={"at_least": 0, "at_most": MAX_SIZE})
    experts_per_token: int = field(default=2, metadata=SIZE)
    load_balance_loss: float = field(default=0.01, metadata={"at_least": 0})
    router_z_loss: float = field(default=0.001, metadata={"at_least": 0})
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = field(default=10_000.0, metadata={"above": 0})
    rope_factor: float = field(default=1.0, metadata={"at_least": 1})
    rope_low_frequency_factor: float = field(default=1.0, metadata={"above": 0})
    rope_high_frequency_factor: float = field(default=4.0, metadata={"above": 0})
    rope_original_length: int = field(default=8192, metadata=SIZE)
    norm_epsilon: float = field(default=1e-6, metadata={"at_least": 0})
    tied: bool = True
    dtype: str = field(default="float32", metadata={"one_of": DTYPES})
    param_dtype: str = field(default="float32", metadata={"one_of": DTYPES})
    attention: str = field(default="xla", metadata=SAME_RESULT | {"one_of": ("xla", "cudnn")})
    remat: str = field(default="none", metadata=SAME_RESULT)
    loss_chunk: int = field(default=0, metadata=SAME_RESULT | {"at_least": 0, "at_most": MAX_SIZE})
    scan: bool = field(default=False, metadata=SAME_RESULT)
    # Activations between the layers are replicated over tp (Megatron's layout). Split over tp, they would need an
    # all-gather before each projection: five times the step time for recipes/tiny.py on 8 CPU devices.
    axes: PartitionAxis = field(default=PartitionAxis(hidden_state_axis=None), metadata=SAME_RESULT)

    @property
    def rope_scaling(self) -> RopeScaling:
        frequency_factors = self.rope_low_frequency_factor, self.rope_high_frequency_factor
        return RopeScaling(self.rope_factor, *frequency_factors, self.rope_original_length)

    def dims(self) -> list[tuple[str, str, int]]:
        """(setting, logical axis, size) of every dim that a mesh can split."""
        found = [
            ("model.vocab_size", "vocab", self.vocab_size),
            ("model.hidden_size", "embed", self.hidden_size),
            ("model.num_heads", "heads", self.num_heads),
            ("model.num_kv_heads", "kv_heads", self.num_kv_heads),
            ("model.mlp_size", "mlp", self.mlp_size),
        ]
        return [*found, ("model.num_experts", "experts", self.num_experts)] if self.num_experts else found

    def remat_names(self) -> tuple[str, ...]:
        """The values of a layer that `remat` may name, in the order in which they are computed.

        "q", "k" and "v" are those that attention reads, "attention" its weighted sums of values, "attention_out" what
        it adds to the residual stream, "mlp_gate" and "mlp_up" the two products of the MLP's input (without experts).
        """
        return ("q", "k", "v", "attention", "attention_out", *(() if self.num_experts else MLP_NAMES))

    def matrices(self) -> str:
        """`optimizer.matrices`: every projection but those of the embedding, the head and the router."""
        mlp = "moe/(gate|up|down)/kernel 1>2" if self.num_experts else "mlp/.*/kernel"
        return f"attention/[qkv]/kernel 0>1,2; attention/o/kernel 0,1>2; {mlp}"

    def problems(self) -> list[str]:
        """Invalid values, one line each."""
        if wrong := type_problems(self, "model."):
            return wrong
        found = value_problems(self, "model.")
        if self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads:
            found.append(
                f"model.num_heads={self.num_heads} must be a multiple of model.num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            found.append(f"model.head_dim must be even for rotary positions, got {self.head_dim}")
        low, high = self.rope_low_frequency_factor, self.rope_high_frequency_factor
        if low >= high:
            found.append(f"model.rope_low_frequency_factor={low} must be below model.rope_high_frequency_factor={high}")
        if 0 < self.num_experts < self.experts_per_token:
            found.append(
                f"model.experts_per_token={self.experts_per_token} must be at most model.num_experts={self.num_experts}"
            )
        if self.attention == "cudnn" and self.dtype == "float32":
            found.append(f"model.attention=cudnn needs model.dtype bfloat16 or float16, got {self.dtype}")
        if self.attention == "cudnn" and (self.head_dim % 8 or self.head_dim > CUDNN_HEAD_DIM):
            found.append(
                f"model.attention=cudnn needs a model.head_dim that is a multiple of 8, at most {CUDNN_HEAD_DIM}, "
                f"got {self.head_dim}"
            )
        return [*found, *remat_problems(self.remat, self.num_layers, self.remat_names())]

    def without_devices(self) -> "DecoderConfig":
        """A config of a model with the same arrays that can be traced on any machine: JAX traces cuDNN with it only."""
        return replace(self, attention="xla")

    def problems_on(self, mesh: Mesh | AbstractMesh) -> list[str]:
        """Options that this mesh does not support, one line each; divisibility of dims is checked elsewhere."""
        if self.attention != "cudnn":
            return []
        found, kinds = [], {d.platform for d in mesh.devices.flat} if isinstance(mesh, Mesh) else set()
        if kinds - {"gpu", "cuda"}:
            found.append(f"model.attention=cudnn needs GPUs, got {', '.join(kinds)}; use model.attention=xla")
        over = [name for name in self.axes.mesh_axes("query_sequence") if mesh.shape.get(name, 1) > 1]
        if over:
            found.append(
                "model.attention=cudnn does not support sequences split over "
                f"{axes_text(mesh.shape, over)}; use model.attention=xla, or another mesh.shape"
            )
        return found


class Attention(nnx.Module):
    """Causal grouped-query attention, (B, S, D) -> (B, S, D)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        options = _linear_options(config, rngs)
        biased: dict[str, Any] = options | {"use_bias": config.qkv_bias}
        self.q = nnx.LinearGeneral(config.hidden_size, (heads, width), **biased)
        self.k = nnx.LinearGeneral(config.hidden_size, (kv_heads, width), **biased)
        self.v = nnx.LinearGeneral(config.hidden_size, (kv_heads, width), **biased)
        if config.qk_norm:
            self.q_norm = _norm(config, rngs, width)
            self.k_norm = _norm(config, rngs, width)
        options["dot_general"] = dot_float32  # sums over heads, and over tp, before rounding
        self.o = nnx.LinearGeneral((heads, width), config.hidden_size, axis=(-2, -1), **options)

    def __call__(self, x_BSD: jax.Array, mode: Mode = "train") -> jax.Array:
        axes = self.config.axes
        q_BSHC, k_BSKC = self.q(x_BSD), self.k(x_BSD)
        if self.config.qk_norm:
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        q_BSHC = rotate(q_BSHC, self.config.rope_theta, self.config.rope_scaling)
        k_BSKC = rotate(k_BSKC, self.config.rope_theta, self.config.rope_scaling)
        q_BSHC = constrain(q_BSHC, ("batch", "query_sequence", "heads", "head_dim"), axes=axes, mode=mode)
        # Every query attends to all keys: under sequence parallelism keys and values are gathered here.
        k_BSKC = constrain(k_BSKC, ("batch", None, "kv_heads", "head_dim"), axes=axes, mode=mode)
        v_BSKC = constrain(self.v(x_BSD), ("batch", None, "kv_heads", "head_dim"), axes=axes, mode=mode)
        remat = self.config.remat
        q_BSHC, k_BSKC, v_BSKC = named(q_BSHC, "q", remat), named(k_BSKC, "k", remat), named(v_BSKC, "v", remat)
        y_BSHC = _attend(q_BSHC, k_BSKC, v_BSKC, self.config.attention)
        y_BSHC = constrain(y_BSHC, ("batch", "query_sequence", "heads", "head_dim"), axes=axes, mode=mode)
        return self.o(named(y_BSHC, "attention", remat))


class MLP(nnx.Module):
    """SwiGLU, (B, S, D) -> (B, S, D)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        options = _linear_options(config, rngs)
        self.gate = nnx.LinearGeneral(config.hidden_size, config.mlp_size, **options)
        self.up = nnx.LinearGeneral(config.hidden_size, config.mlp_size, **options)
        self.down = nnx.LinearGeneral(config.mlp_size, config.hidden_size, dot_general=dot_float32, **options)

    def __call__(self, x_BSD: jax.Array, mode: Mode = "train") -> jax.Array:
        gate, up = MLP_NAMES
        h_BSF = jax.nn.silu(named(self.gate(x_BSD), gate, self.config.remat))
        h_BSF = h_BSF * named(self.up(x_BSD), up, self.config.remat)
        return self.down(constrain(h_BSF, ("batch", "sequence", "mlp"), axes=self.config.axes, mode=mode))


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer, (B, S, D) -> (B, S, D) and the statistics of its router, {} without experts."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        if config.num_experts:
            sizes = (config.hidden_size, config.mlp_size, config.num_experts, config.experts_per_token)
            self.moe = MoE(*sizes, axes=config.axes, rngs=rngs, **_dtypes(config))
        else:
            self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, mode: Mode = "train") -> tuple[jax.Array, Aux]:
        # Attention and MLP are summed over tp in float32 and rounded once, here: equal results on every mesh.
        y_BSD, remat = self.attention(self.attention_norm(x_BSD), mode), self.config.remat
        x_BSD = (x_BSD + named(y_BSD, "attention_out", remat)).astype(x_BSD.dtype)
        h_BSD = self.mlp_norm(x_BSD)
        y_BSD, aux = self.moe(h_BSD, mode) if self.config.num_experts else (self.mlp(h_BSD, mode), {})
        x_BSD = (x_BSD + y_BSD).astype(x_BSD.dtype)
        return constrain(x_BSD, ("batch", "sequence", "hidden"), axes=self.config.axes, mode=mode), aux


@partitioned(
    rules=[
        (r"embed/embedding$", ("vocab", "embed")),
        (r"attention/q/kernel$", ("embed", "heads", "head_dim")),
        (r"attention/(k|v)/kernel$", ("embed", "kv_heads", "head_dim")),
        (r"attention/q/bias$", ("heads", "head_dim")),
        (r"attention/(k|v)/bias$", ("kv_heads", "head_dim")),
        (r"attention/o/kernel$", ("heads", "head_dim", "embed")),
        (r"mlp/(gate|up)/kernel$", ("embed", "mlp")),
        (r"mlp/down/kernel$", ("mlp", "embed")),
        (r"moe/router/kernel$", ("embed", "expert_gate")),
        (r"moe/(gate|up)/kernel$", ("experts", "embed", "mlp")),
        (r"moe/down/kernel$", ("experts", "mlp", "embed")),
        (r"head/kernel$", ("embed", "vocab")),
        (r"norm/scale$", ()),
    ],
    layers="layers",
)
class Decoder(nnx.Module):
    """Token ids (B, S) int32 -> logits (B, S, V) float32."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        if problems := config.problems():
            raise ConfigError(problems)
        self.config = config
        self.axes = config.axes
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs, **_dtypes(config))
        # One key per layer, so that a list and a stack of layers have bitwise equal initial values.
        keys = jax.random.split(rngs.params(), config.num_layers)
        make_layer = lambda key: DecoderLayer(config, rngs=nnx.Rngs(params=key))  # noqa: E731
        self.layers: Any = nnx.vmap(make_layer)(keys) if config.scan else nnx.List([make_layer(key) for key in keys])
        self.norm = _norm(config, rngs)
        if not config.tied:
            self.head = nnx.LinearGeneral(config.hidden_size, config.vocab_size, **_linear_options(config, rngs))

    def __call__(self, tokens_BS: jax.Array, mode: Mode = "train") -> jax.Array:
        return self.forward(tokens_BS, mode)[0]

    def forward(self, tokens_BS: jax.Array, mode: Mode = "train") -> tuple[jax.Array, Aux]:
        """Logits, and the statistics of the routers: the dict of `MoE` with a leading layer dim, {} without experts."""
        x_BSD, weights_DV, aux = self.hidden(tokens_BS, mode)
        return project(x_BSD, weights_DV, self.config.axes, mode), aux

    def hidden(self, tokens_BS: jax.Array, mode: Mode = "train") -> tuple[jax.Array, jax.Array, Aux]:
        """As `forward`, but with the two factors of the logits: hidden states (B, S, D) and output weights (D, V)."""
        out = ("batch", "sequence", "hidden"), (None if self.config.tied else "embed", "vocab"), ()
        call = lambda model, tokens_BS: model._hidden(tokens_BS, mode)  # noqa: E731
        return on_auto_axes(call, self, tokens_BS, out=out, axes=self.config.axes, mode=mode)

    def _hidden(self, tokens_BS: jax.Array, mode: Mode) -> tuple[jax.Array, jax.Array, Aux]:
        axes = self.config.axes
        # The table stays split over the vocabulary: each shard looks up its own rows, and a sum combines them.
        table_VD = self.embed.embedding[...].astype(self.config.dtype)
        table_VD = constrain(table_VD, ("vocab", None), axes=axes, mode=mode)
        x_BSD = jnp.take(table_VD, tokens_BS, axis=0)
        x_BSD = constrain(x_BSD, ("batch", "sequence", "hidden"), axes=axes, mode=mode)
        # cuDNN's attention contains dots, but is one opaque primitive.
        also = _is_fused_attention if self.config.attention == "cudnn" else None
        call = lambda layer, x_BSD: layer(x_BSD, mode)  # noqa: E731
        x_BSD, aux = call_layers(call, self.layers, x_BSD, self.config.remat, also=also, scan=self.config.scan)
        x_BSD = self.norm(x_BSD)
        return x_BSD, table_VD.T if self.config.tied else self.head.kernel[...].astype(x_BSD.dtype), aux


def make_decoder(config: DecoderConfig, rngs: nnx.Rngs) -> Decoder:
    """Make a Decoder; to be used as `make_model` of a recipe."""
    return Decoder(config, rngs=rngs)


def _tokens_of(batch: Any) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets; ConfigError if a recipe's own batches do not have them."""
    found = batch if isinstance(batch, Mapping) else {}
    tokens = [found.get(name) for name in ("inputs", "targets")]
    if any(x is None or x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer) for x in tokens):
        names = {name: array_text(x) for name, x in found.items() if hasattr(x, "dtype")} or type(batch).__name__
        raise ConfigError(
            "next_token_loss takes a batch with 'inputs' and 'targets', integers of shape (batch, sequence), got "
            f"{names}; write a loss_fn for other batches"
        )
    return tokens[0], tokens[1]  # pyright: ignore[reportReturnType] (neither is None)


def next_token_loss(model: Decoder, batch: dict[str, jax.Array]) -> tuple[Any, ...]:
    """(summed cross-entropy in nats, number of tokens) of targets (B, S); targets below 0 do not count.

    With experts (loss_sum, weight, metrics):

        loss_sum = cross-entropy sum + weight * sum over layers of (a load_balance_loss + z router_z_loss)

    with the coefficients a and z of these names in the config, and the values of `router_losses`. Divided by the summed
    weight of all microbatches it is the mean over microbatches, weighted by their number of targets. The metrics are
    weighted likewise: the cross-entropy alone, both losses as means over layers, and expert_load_max of the worst
    layer. Tokens without a target are routed too, and count in the losses of the router.
    """
    inputs_BS, targets_BS = _tokens_of(batch)
    x_BSD, weights_DV, aux = model.hidden(inputs_BS)
    config = model.config
    loss = cross_entropy(x_BSD, weights_DV, targets_BS, axes=config.axes, chunk=config.loss_chunk)
    weight = jnp.sum(targets_BS >= 0, dtype=jnp.float32)
    if not aux:
        return loss, weight
    found = router_losses(aux)
    metrics = {"cross_entropy": loss}
    for name, combine in (("load_balance_loss", jnp.mean), ("router_z_loss", jnp.mean), ("expert_load_max", jnp.max)):
        metrics[name] = weight * combine(found[name])
    for name in ("load_balance_loss", "router_z_loss"):
        loss = loss + weight * getattr(config, name) * jnp.sum(found[name])
    return loss, weight, metrics


def sample(model: Decoder, prompt: jax.Array, num_tokens: int, key: jax.Array, temperature: float = 0.8) -> jax.Array:
    """Continue `prompt` (P,) int32 by `num_tokens` sampled ids; returns all (P + num_tokens,) ids.

    Temperature 0 is greedy: every id is that of the largest logit. A negative temperature or nan raises ConfigError; if
    it is traced, the sampled ids are -1.

    Runs the model on the full sequence for every token, without a cache: meant for short samples during training.
    """
    if not isinstance(temperature, Tracer) and not temperature >= 0:
        raise ConfigError(f"temperature must be at least 0 (0: greedy), got {temperature}")
    if num_tokens < 0:
        raise ConfigError(f"num_tokens must be at least 0, got {num_tokens}")
    is_greedy = temperature < GREEDY_BELOW
    start = prompt.shape[0]
    mesh = current_mesh()
    ways = math.prod(mesh.shape.get(name, 1) for name in model.axes.mesh_axes("sequence")) if mesh is not None else 1
    unit = math.lcm(32, ways)  # the window must divide over sp like any sequence
    tokens = jnp.zeros(-(-(start + num_tokens) // unit) * unit, jnp.int32).at[:start].set(prompt)

    def add_token(i: jax.Array, tokens: jax.Array) -> jax.Array:
        logits_V = model(tokens[None], mode="decode")[0, i - 1]
        token = jax.random.categorical(jax.random.fold_in(key, i), logits_V / jnp.where(is_greedy, 1.0, temperature))
        token = jnp.where(is_greedy, jnp.argmax(logits_V), token)
        return tokens.at[i].set(jnp.where(temperature >= 0, token, -1).astype(jnp.int32))

    return jax.lax.fori_loop(start, start + num_tokens, add_token, tokens)[: start + num_tokens]


def flops_per_token(config: DecoderConfig, num_parameters: int, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: 6 (N - N_idle) + 6 L D S, with causal attention.

    N_idle are the parameters that a token does not multiply: the embedding of a model with an untied head, and the
    experts that the token is not routed to. S is the sequence length, D = heads * head_dim. Recomputation is not
    counted: this is the numerator of MFU, not of hardware utilization (PaLM, appendix B).
    """
    idle = 0 if config.tied else config.vocab_size * config.hidden_size
    if config.num_experts:
        expert = 3 * config.hidden_size * config.mlp_size
        idle += config.num_layers * (config.num_experts - config.experts_per_token) * expert
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * sequence_length
    return 6.0 * (num_parameters - idle) + attention


def _attend(q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, implementation: Any) -> jax.Array:
    try:
        return jax.nn.dot_product_attention(q_BSHC, k_BSKC, v_BSKC, is_causal=True, implementation=implementation)
    except RuntimeError as error:  # JAX could not find the version of cuDNN
        if implementation != "cudnn":
            raise
        raise ConfigError(
            f"model.attention={implementation} cannot be traced here: {error} Use model.attention=xla, or JAX for CUDA"
        ) from error


def _is_fused_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name.startswith("dot_product_attention_fwd")


def _norm(config: DecoderConfig, rngs: nnx.Rngs, size: int | None = None) -> nnx.RMSNorm:
    return nnx.RMSNorm(size or config.hidden_size, epsilon=config.norm_epsilon, rngs=rngs, **_dtypes(config))


def _linear_options(config: DecoderConfig, rngs: nnx.Rngs) -> dict[str, Any]:
    return {"use_bias": False, "rngs": rngs, **_dtypes(config)}


def _dtypes(config: DecoderConfig) -> dict[str, Any]:
    return {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
