"""DecoderConfig: sizes and options of a decoder, and the values derived from them for a layer."""

from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import Mode, PartitionAxis, num_parts
from flax_mesh.errors import ConfigError, Problem, as_problem
from flax_mesh.fields import ADDED, MAX_SIZE, SAME_RESULT, type_problems, value_problems
from flax_mesh.kernels import platform_of
from flax_mesh.mesh.context import AnyMesh, current_mesh
from flax_mesh.models.cache import num_copies
from flax_mesh.models.ops.activations import ACTIVATIONS
from flax_mesh.models.ops.kernels import Call, choice_text, choose, problem_lines
from flax_mesh.models.ops.rotary import KINDS, Rope, RopeScaling
from flax_mesh.models.ops.router import SCORES, Routing
from flax_mesh.models.settings.matrices import matrices_of
from flax_mesh.models.settings.pattern import LayerKind, parse_pattern, pattern_problem
from flax_mesh.models.settings.remat import remat_problems
from flax_mesh.models.settings.switches import NEEDS_EXPERTS, switch_problems
from flax_mesh.text import axes_text

ATTENTION = ("auto", "xla", "cudnn", "splash")
DTYPES = ("float32", "bfloat16", "float16")
MLP_NAMES = ("mlp_gate", "mlp_up")
NORMS = ("before", "after", "both")
_SIZE = {"at_least": 1, "at_most": MAX_SIZE}
_AT_LEAST_0 = ADDED | {"at_least": 0}
_ABOVE_0 = ADDED | {"above": 0}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder. `dtype` is the dtype of the computation, `param_dtype` of the parameters.

    `attention`: "xla" on any platform; or a kernel that does not store the scores, "cudnn" for GPUs in half precision
    or "splash", JAX's Pallas kernel for TPUs (interpreted on CPUs, for tests); or "auto", the kernel of the platform
    where it fits, else xla (`models.ops.kernels`).

    `remat`: "none", "full" (recompute every layer in the backward pass), the name of a policy in
    `jax.checkpoint_policies`, which selects the residuals to save, or names of values, "attention+mlp_up"; for all
    layers or for runs of them, "full:16,none". See `models.settings.remat` and `remat_names`. Policies that save dots
    also save the outputs of these kernels. With `scan` the layers are one stack, run by one loop for each run of
    `remat`, which compiles faster; results and checkpoints equal those with an unrolled list. `loss_chunk`: the number
    of tokens per device whose logits the loss computes at a time, 0 for all (`models.cross_entropy`).

    With `num_experts` above 0 every layer has that many MLPs of `mlp_size`, and each token is routed to
    `experts_per_token` of them. `load_balance_loss` and `router_z_loss` are loss coefficients (`models.moe`).

    `qkv_bias`: queries, keys and values have a bias (Qwen2). `qk_norm`: an RMSNorm over the head dim of queries and
    keys before the rotation, with one scale for all heads (Qwen3). `sliding_window` above 0:
    a token attends to that many tokens at most, itself included (Mistral). `rope_factor` above 1 and the three settings
    after it: see `RopeScaling` (Llama 3.1).

    The settings from `layer_pattern` on are switches of other families, off by default:

    - `layer_pattern`: kinds of layers, such as local:5,global; only local ones have the window.
    - `norms`: RMSNorms before each sub-layer, after it (OLMo 2), or both (Gemma 2, GLM-4).
    - `zero_centered`: the weights of norms are 1 + scale (Gemma).
    - `qk_norm_all_heads`: `qk_norm` over all heads together, with a scale for each (OLMo 2).
    - `attention_scale`: of the scores; 0 is 1 / sqrt(head_dim) (Gemma, Granite).
    - `attention_softcap`, `logit_softcap`: limits of scores and logits; 0 is none (Gemma 2; `ops.scores.soft_cap`).
    - `attention_sinks`: a learned score of no key for each head (gpt-oss).
    - `embedding_scale`, `residual_scale`: factors of embeddings, and of the results of sub-layers (Gemma, Granite).
    - `logits_scaling`: logits are divided by it (Granite).
    - `output_bias`, `mlp_bias`: biases of the output projection of attention, and of MLPs, experts and routers.
    - `activation`: of the gate: silu, gelu, gelu_tanh (Gemma) or relu2. `swiglu_limit` above 0: `ops.activations`.
    - `rotary_dims`: rotated dims of a head; 0 is all (Phi-4-mini, GLM-4).
    - `rope_interleaved`: rotary positions of the dims 2i and 2i + 1 (GLM-4).
    - `rope_kind` and the settings after it: `RopeScaling`.
    - `local_rope_theta`: rotary base of local layers, which then have no scaling; 0 is the base of all (Gemma 3).
    - `router_scores`, `normalize_router`: `ops.router.Routing`.
    - `router_groups`, `router_top_groups`, `router_scale`: `ops.router.Routing` (DeepSeek).
    - `router_balance`: a bias of the choice of experts that has no gradient (DeepSeek-V3, GLM-4.5). With
      `router_balance_rate` above 0, `next_token_loss` changes it by that much in every microbatch of training: up for
      experts with fewer tokens than the mean, down for those with more. It replaces `load_balance_loss`.
    - `latent_size` above 0: keys and values come from latents of that size, queries from latents of `query_latent_size`
      if that is above 0; the last `rotary_dims` of `head_dim` are rotated, and `value_head_dim` is the head dim of
      values, 0 for `head_dim` (DeepSeek; `models.latent`).
    - `rope_mscale`, `rope_mscale_all_dims`: factors of yarn in latent attention (`RopeScaling`).
    - `dense_layers`: the first layers, which have an MLP of `dense_mlp_size` instead of experts (DeepSeek).
    - `prediction_layers`: modules for the tokens after the next one, which `next_token_loss` alone uses, with the
      coefficient `prediction_loss` (DeepSeek-V3, GLM-4.5; `models.layer.Prediction`).
    - `attention_gate`: weighted sums of values are multiplied by a sigmoid of the token, for each head and head dim.
    - `delta_key_heads` and the settings after it: of the delta layers in `layer_pattern` (`models.delta`).
    - `shared_expert_size`: width of an MLP that every token passes beside its experts; 0 is none. With
      `shared_expert_gate` its output is multiplied by a sigmoid of the token (Qwen2-MoE).

    These kernels compute neither soft caps nor sinks: the scores are then arrays (`ops.scores`), which the option
    `attention` of a step computes by a kernel or in blocks.
    """

    vocab_size: int = field(default=256, metadata=_SIZE)
    hidden_size: int = field(default=256, metadata=_SIZE)
    num_layers: int = field(default=4, metadata=_SIZE)
    num_heads: int = field(default=8, metadata=_SIZE)
    num_kv_heads: int = field(default=4, metadata=_SIZE)
    head_dim: int = field(default=32, metadata=_SIZE)
    mlp_size: int = field(default=768, metadata=_SIZE)
    num_experts: int = field(default=0, metadata={"at_least": 0, "at_most": MAX_SIZE})
    experts_per_token: int = field(default=2, metadata=_SIZE)
    load_balance_loss: float = field(default=0.01, metadata={"at_least": 0})
    router_z_loss: float = field(default=0.001, metadata={"at_least": 0})
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = field(default=0, metadata=ADDED | {"at_least": 0, "at_most": MAX_SIZE})
    rope_theta: float = field(default=10_000.0, metadata={"above": 0})
    rope_factor: float = field(default=1.0, metadata={"at_least": 1})
    rope_low_frequency_factor: float = field(default=1.0, metadata={"above": 0})
    rope_high_frequency_factor: float = field(default=4.0, metadata={"above": 0})
    rope_original_length: int = field(default=8192, metadata=_SIZE)
    norm_epsilon: float = field(default=1e-6, metadata={"at_least": 0})
    tied: bool = True
    layer_pattern: str = field(default="", metadata=ADDED)
    norms: str = field(default="before", metadata=ADDED | {"one_of": NORMS})
    zero_centered: bool = field(default=False, metadata=ADDED)
    qk_norm_all_heads: bool = field(default=False, metadata=ADDED)
    attention_scale: float = field(default=0.0, metadata=_AT_LEAST_0)
    attention_softcap: float = field(default=0.0, metadata=_AT_LEAST_0)
    logit_softcap: float = field(default=0.0, metadata=_AT_LEAST_0)
    attention_sinks: bool = field(default=False, metadata=ADDED)
    embedding_scale: float = field(default=1.0, metadata=_ABOVE_0)
    residual_scale: float = field(default=1.0, metadata=_ABOVE_0)
    logits_scaling: float = field(default=1.0, metadata=_ABOVE_0)
    output_bias: bool = field(default=False, metadata=ADDED)
    mlp_bias: bool = field(default=False, metadata=ADDED)
    activation: str = field(default="silu", metadata=ADDED | {"one_of": tuple(ACTIVATIONS)})
    swiglu_limit: float = field(default=0.0, metadata=_AT_LEAST_0)
    rotary_dims: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    rope_interleaved: bool = field(default=False, metadata=ADDED)
    rope_kind: str = field(default="llama3", metadata=ADDED | {"one_of": KINDS})
    rope_attention_factor: float = field(default=0.0, metadata=_AT_LEAST_0)
    rope_truncate: bool = field(default=True, metadata=ADDED)
    rope_short_factors: tuple[float, ...] = field(default=(), metadata=ADDED)
    rope_long_factors: tuple[float, ...] = field(default=(), metadata=ADDED)
    local_rope_theta: float = field(default=0.0, metadata=_AT_LEAST_0)
    router_scores: str = field(default="softmax", metadata=ADDED | {"one_of": SCORES})
    normalize_router: bool = field(default=True, metadata=ADDED)
    shared_expert_size: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    shared_expert_gate: bool = field(default=False, metadata=ADDED)
    router_groups: int = field(default=1, metadata=ADDED | _SIZE)
    router_top_groups: int = field(default=1, metadata=ADDED | _SIZE)
    router_scale: float = field(default=1.0, metadata=_ABOVE_0)
    router_balance: bool = field(default=False, metadata=ADDED)
    router_balance_rate: float = field(default=0.0, metadata=_AT_LEAST_0)
    latent_size: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    query_latent_size: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    value_head_dim: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    rope_mscale: float = field(default=0.0, metadata=_AT_LEAST_0)
    rope_mscale_all_dims: float = field(default=0.0, metadata=_AT_LEAST_0)
    dense_layers: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    dense_mlp_size: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    prediction_layers: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    prediction_loss: float = field(default=0.3, metadata=_AT_LEAST_0)
    attention_gate: bool = field(default=False, metadata=ADDED)
    delta_key_heads: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    delta_value_heads: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    delta_key_dim: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    delta_value_dim: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    delta_conv: int = field(default=0, metadata=_AT_LEAST_0 | {"at_most": MAX_SIZE})
    dtype: str = field(default="float32", metadata={"one_of": DTYPES})
    param_dtype: str = field(default="float32", metadata={"one_of": DTYPES})
    attention: str = field(default="auto", metadata=SAME_RESULT | {"one_of": ATTENTION})
    remat: str = field(default="none", metadata=SAME_RESULT)
    loss_chunk: int = field(default=0, metadata=SAME_RESULT | {"at_least": 0, "at_most": MAX_SIZE})
    scan: bool = field(default=False, metadata=SAME_RESULT)
    # Activations between the layers are replicated over tp (Megatron's layout). Split over tp, they would need an
    # all-gather before each projection: five times the step time for recipes/tiny.py on 8 CPU devices.
    axes: PartitionAxis = field(default=PartitionAxis(hidden_state_axis=None), metadata=SAME_RESULT)

    @property
    def rope_scaling(self) -> RopeScaling:
        frequency_factors = self.rope_low_frequency_factor, self.rope_high_frequency_factor
        first = self.rope_factor, *frequency_factors, self.rope_original_length, self.rope_kind
        rest = self.rope_attention_factor, self.rope_truncate, self.rope_short_factors, self.rope_long_factors
        return RopeScaling(*first, *rest, self.rope_mscale, self.rope_mscale_all_dims)

    @property
    def value_size(self) -> int:
        return self.value_head_dim or self.head_dim

    @property
    def score_scale(self) -> float:
        """The factor of scores of latent attention."""
        return self.attention_scale or self.head_dim**-0.5 * self.rope_scaling.score_multiplier()

    def cached(self, mesh: AnyMesh | None) -> tuple[int, int]:
        """The heads of the cache, with copies, and the numbers that it has for a token and each of them."""
        if self.latent_size:
            return 1, self.latent_size + (self.rotary_dims or self.head_dim)
        return self.num_kv_heads * num_copies(self.axes, mesh, self.num_kv_heads, "decode"), 2 * self.head_dim

    @property
    def routing(self) -> Routing:
        groups = self.router_groups, self.router_top_groups
        return Routing(self.router_scores, self.normalize_router, *groups, self.router_scale)

    @property
    def of_dense_layers(self) -> "DecoderConfig":
        """The config of the first `dense_layers` layers, without the settings of experts."""
        names = [*NEEDS_EXPERTS, "num_experts", "dense_layers", "dense_mlp_size", "shared_expert_gate"]
        return replace(self, mlp_size=self.dense_mlp_size, **{name: getattr(type(self), name) for name in names})

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the first layers, which repeat."""
        return parse_pattern(self.layer_pattern) if self.layer_pattern else (LayerKind(self.sliding_window > 0),)

    @property
    def has_blocks(self) -> bool:
        """Whether the layers are in blocks, each of them one repetition of the pattern."""
        return any(kind.delta for kind in self.kinds)

    def num_of(self, *, delta: bool) -> int:
        """The number of delta nets, or of layers with attention."""
        return sum(kind.delta == delta for kind in self.kinds) * self.num_layers // len(self.kinds)

    def window(self, kind: LayerKind) -> int:
        return self.sliding_window if kind.local else 0

    def rope(self, kind: LayerKind) -> Rope | None:
        if not kind.rope:
            return None
        if kind.local and self.local_rope_theta:
            return Rope(self.local_rope_theta, RopeScaling(), self.rotary_dims, self.rope_interleaved)
        return Rope(self.rope_theta, self.rope_scaling, self.rotary_dims, self.rope_interleaved)

    def dims(self) -> list[tuple[str, str, int]]:
        """(setting, logical axis, size) of every dim that a mesh can split."""
        dims = [
            ("model.vocab_size", "vocab", self.vocab_size),
            ("model.hidden_size", "embed", self.hidden_size),
            ("model.num_heads", "heads", self.num_heads),
            ("model.mlp_size", "mlp", self.mlp_size),
        ]
        if not self.latent_size:
            dims.insert(3, ("model.num_kv_heads", "kv_heads", self.num_kv_heads))
        others = {"delta_key_heads": "heads", "latent_size": "embed", "query_latent_size": "embed"}
        dims += [(f"model.{name}", axis, size) for name, axis in others.items() if (size := getattr(self, name))]
        dims += [("model.dense_mlp_size", "mlp", self.dense_mlp_size)] if self.dense_layers else []
        return [*dims, ("model.num_experts", "experts", self.num_experts)] if self.num_experts else dims

    def remat_names(self) -> tuple[str, ...]:
        """The values of a layer that `remat` may name, in the order in which they are computed.

        "layer_input" is saved in any case, and is named to save it in the memory of the host. "q", "k" and "v" are the
        inputs of attention, "attention" its weighted sums of values, "attention_out" its addition to the residual
        stream, "mlp_gate" and "mlp_up" the two products of the MLP's input (without experts).
        """
        return ("layer_input", "q", "k", "v", "attention", "attention_out", *(() if self.num_experts else MLP_NAMES))

    def matrices(self) -> str:
        """`optimizer.matrices`: every projection except the embedding, the head and the router."""
        return matrices_of(SimpleNamespace(**vars(self)), delta=self.has_blocks)

    def problems(self) -> list[Problem]:
        """Invalid values."""
        if wrong := type_problems(self, "model."):
            return wrong
        problems = value_problems(self, "model.")
        problems += switch_problems(SimpleNamespace(**vars(self)), {item.name: item.default for item in fields(self)})
        if self.attention in ("cudnn", "splash"):
            problems += map(as_problem, problem_lines(self.attention, self._call()))
        block = len(self.kinds) if self.scan and not pattern_problem(self.layer_pattern) and self.has_blocks else 1
        return [*problems, *map(as_problem, remat_problems(self.remat, self.num_layers, self.remat_names(), block))]

    def without_devices(self) -> "DecoderConfig":
        """A config of a model with the same arrays that is traced on any machine: JAX traces cuDNN only where it is."""
        return replace(self, attention="xla")

    def problems_on(self, mesh: Mesh | AbstractMesh, sequence_length: int | None = None) -> list[str]:
        """Options that this mesh does not support, one line each; divisibility of dims is checked elsewhere.

        Abstract meshes have no devices that could be wrong: plans count the kernel of one platform on any other.
        """
        if self.attention in ("auto", "xla"):
            return []
        platform = platform_of(mesh) if isinstance(mesh, Mesh) else ""
        known = set(self.problems())
        call = self.on_mesh(mesh)._call(mesh=mesh, platform=platform, queries=sequence_length, keys=sequence_length)
        return [line for line in problem_lines(self.attention, call) if line not in known]

    def notes_on(self, mesh: Mesh | AbstractMesh, sequence_length: int | None = None) -> list[str]:
        """Copied key-value heads, and the choices of `auto` with their reasons, as lines for the output of a run."""
        platform = platform_of(mesh)
        call = self.on_mesh(mesh)._call(mesh=mesh, platform=platform, queries=sequence_length, keys=sequence_length)
        return [text for text in (self.copies_on(mesh), choice_text(self.attention, call)) if text]

    def on_mesh(self, mesh: AnyMesh) -> "DecoderConfig":
        """This config on `mesh`: its `axes` replicate key-value heads that the mesh does not divide."""
        if not self.copies_on(mesh):
            return self
        return replace(self, axes=replace(self.axes, extra={**dict(self.axes.extra), "kv_heads": None}))

    def copies_on(self, mesh: AnyMesh) -> str:
        """One line if `mesh` does not divide the key-value heads, "" if it does or if `axes.extra` maps "kv_heads"."""
        names = [name for name in self.axes.mesh_axes("kv_heads") if name in mesh.axis_names]
        parts = num_parts(self.axes, mesh.shape, "kv_heads")
        if self.latent_size or self.num_kv_heads % parts == 0 or "kv_heads" in dict(self.axes.extra):
            return ""
        problem = f"model.num_kv_heads={self.num_kv_heads} is not divisible by {axes_text(mesh.shape, names)}"
        return f"{problem}, whose devices have copies of the key-value heads; query heads stay split"

    def attention_kernel(self, queries: int, keys: int, *, has_segments: bool = False, mode: Mode = "train") -> str:
        """The kernel of an attention in a trace on the current mesh.

        A kernel that was asked for must fit in a training step. In generation, where the length follows from the
        prompt, splash attention is replaced by xla where it does not fit.
        """
        if self.attention == "xla":
            return "xla"
        mesh = current_mesh()
        call = self._call(mesh=mesh, queries=queries, keys=keys, has_segments=has_segments, mode=mode)
        call = replace(call, platform=platform_of(mesh))
        if self.attention == "auto":
            return choose(call)[0]
        if self.attention == "cudnn":  # JAX itself checks the devices
            call = replace(call, platform="")
        if not (problems := problem_lines(self.attention, call)):
            return self.attention
        if mode == "train" or has_segments:
            raise ConfigError(problems)
        return "xla" if self.attention == "splash" else self.attention

    def _call(self, **known: Any) -> Call:
        names = ("attention_softcap", "attention_sinks")
        width = max(self.head_dim, self.value_size)
        return Call(self.dtype, width, self.axes, scores=tuple(x for x in names if getattr(self, x)), **known)
