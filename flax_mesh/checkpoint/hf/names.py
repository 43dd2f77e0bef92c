"""The names of the arrays of decoders in Hugging Face's format, as tables for `mapping`."""

from collections.abc import Mapping

from flax_mesh.checkpoint.hf.mapping import ParamMapping

_LAYER = "model.layers.{i}"


def _lines(rows: Mapping[str, tuple[str, str]], joined: str = "") -> tuple[ParamMapping, ...]:
    """Rows of (name in a layer, dims) for paths in a layer."""
    return tuple(
        ParamMapping(f"layers/{{i}}/{path}", f"{_LAYER}.{name}", dims, joined) for path, (name, dims) in rows.items()
    )


def _dense_first(
    rows: tuple[ParamMapping, ...], dense: tuple[ParamMapping, ...], experts: tuple[ParamMapping, ...]
) -> tuple[ParamMapping, ...]:
    """Rows of all layers, of the first ones, which are dense, of those with experts, and of predictions after them."""
    first = tuple(line._replace(path=f"dense_{line.path}") for line in rows + dense)
    layers = tuple(line._replace(after="dense_layers") for line in rows + experts)
    later = [line._replace(path=line.path.replace("layers/{i}", "predictions/{i}/layer")) for line in rows + experts]
    return first + layers + tuple(line._replace(after="dense_layers layers") for line in (*later, *_PREDICTION))


_ENDS = (
    ParamMapping("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
    ParamMapping("norm/scale", "model.norm.weight", "d -> d"),
    ParamMapping("head/kernel", "lm_head.weight", "v d -> d v"),
)
_PREDICTION = tuple(
    ParamMapping(f"predictions/{{i}}/{path}", f"{_LAYER}.{name}.weight", dims)
    for path, name, dims in (
        ("embedding_norm/scale", "enorm", "d -> d"),
        ("hidden_norm/scale", "hnorm", "d -> d"),
        ("projection/kernel", "eh_proj", "d e -> e d"),
        ("norm/scale", "shared_head.norm", "d -> d"),
    )
)
_OUTPUT = {
    "attention/o/kernel": ("self_attn.o_proj.weight", "d (h c) -> h c d"),
    "attention/o/bias": ("self_attn.o_proj.bias", "d -> d"),
}
_PROJECTIONS = {
    "attention/q/kernel": ("self_attn.q_proj.weight", "(h c) d -> d h c"),
    "attention/k/kernel": ("self_attn.k_proj.weight", "(k c) d -> d k c"),
    "attention/v/kernel": ("self_attn.v_proj.weight", "(k c) d -> d k c"),
    "attention/q/bias": ("self_attn.q_proj.bias", "(h c) -> h c"),
    "attention/k/bias": ("self_attn.k_proj.bias", "(k c) -> k c"),
    "attention/v/bias": ("self_attn.v_proj.bias", "(k c) -> k c"),
    "attention/q_norm/scale": ("self_attn.q_norm.weight", "c -> c"),
    "attention/k_norm/scale": ("self_attn.k_norm.weight", "c -> c"),
}
_LATENT = {
    "attention/q/kernel": ("self_attn.q_proj.weight", "(h c) d -> d h c"),
    "attention/q_down/kernel": ("self_attn.q_a_proj.weight", "l d -> d l"),
    "attention/q_down/bias": ("self_attn.q_a_proj.bias", "l -> l"),
    "attention/q_norm/scale": ("self_attn.q_a_layernorm.weight", "l -> l"),
    "attention/q_up/kernel": ("self_attn.q_b_proj.weight", "(h c) l -> l h c"),
    "attention/kv_down/kernel": ("self_attn.kv_a_proj_with_mqa.weight", "l d -> d l"),
    "attention/kv_down/bias": ("self_attn.kv_a_proj_with_mqa.bias", "l -> l"),
    "attention/kv_norm/scale": ("self_attn.kv_a_layernorm.weight", "l -> l"),
    "attention/kv_up/kernel": ("self_attn.kv_b_proj.weight", "(h c) l -> l h c"),
}
_BEFORE = {
    "attention_norm/scale": ("input_layernorm.weight", "d -> d"),
    "mlp_norm/scale": ("post_attention_layernorm.weight", "d -> d"),
}
_AFTER = {
    "attention_out_norm/scale": ("post_attention_layernorm.weight", "d -> d"),
    "mlp_out_norm/scale": ("post_feedforward_layernorm.weight", "d -> d"),
}
_GEMMA_NORMS = _BEFORE | _AFTER | {"mlp_norm/scale": ("pre_feedforward_layernorm.weight", "d -> d")}
_GLM_NORMS = _BEFORE | {
    "attention_out_norm/scale": ("post_self_attn_layernorm.weight", "d -> d"),
    "mlp_out_norm/scale": ("post_mlp_layernorm.weight", "d -> d"),
}
ATTENTION = _ENDS + _lines(_BEFORE | _PROJECTIONS | _OUTPUT)


def _mlp(path: str, name: str) -> dict[str, tuple[str, str]]:
    rows = {}
    for part, dims in (("gate", "f d -> d f"), ("up", "f d -> d f"), ("down", "d f -> f d")):
        rows[f"{path}/{part}/kernel"] = (f"{name}.{part}_proj.weight", dims)
        rows[f"{path}/{part}/bias"] = (f"{name}.{part}_proj.bias", "n -> n")
    return rows


_DENSE = _lines(_mlp("mlp", "mlp"))
_FUSED_DENSE = _lines(
    {f"mlp/{part}/kernel": ("mlp.gate_up_proj.weight", "f d -> d f") for part in ("gate", "up")}, "concatenated"
)
_FUSED_DENSE += _lines({"mlp/down/kernel": ("mlp.down_proj.weight", "d f -> f d")})
_FUSED_QKV = _lines(
    {
        f"attention/{part}/kernel": ("self_attn.qkv_proj.weight", dims)
        for part, dims in (("q", "(h c) d -> d h c"), ("k", "(k c) d -> d k c"), ("v", "(k c) d -> d k c"))
    },
    "concatenated",
)
_GRANITE_DENSE = _lines(
    {f"mlp/{part}/kernel": ("shared_mlp.input_linear.weight", "f d -> d f") for part in ("gate", "up")}, "concatenated"
)
_GRANITE_DENSE += _lines({"mlp/down/kernel": ("shared_mlp.output_linear.weight", "d f -> f d")})


def _experts(block: str, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    rows = {"moe/router/kernel": (f"{block}.gate.weight", "e d -> d e")}
    for path, name, dims in (
        ("gate", gate, "f d -> e d f"),
        ("up", up, "f d -> e d f"),
        ("down", down, "d f -> e f d"),
    ):
        rows[f"moe/{path}/kernel"] = (f"{block}.experts.{{e}}.{name}.weight", dims)
    return _lines(rows)


_QWEN_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_FUSED_EXPERTS = _lines(
    {f"moe/{part}/kernel": ("mlp.experts.gate_up_proj", "e f d -> e d f") for part in ("gate", "up")},
    "concatenated experts",
)
_FUSED_EXPERTS += _lines({"moe/down/kernel": ("mlp.experts.down_proj", "e d f -> e f d")})
_FUSED_EXPERTS += _QWEN_EXPERTS[:1]  # the router
_SHARED_EXPERT = _lines(
    {**_mlp("shared_mlp", "mlp.shared_expert"), "shared_gate/kernel": ("mlp.shared_expert_gate.weight", "o d -> d o")}
)
_GPT_OSS = _lines({f"moe/{part}/kernel": ("mlp.experts.gate_up_proj", "e d f -> e d f") for part in ("gate", "up")},
                  "alternating")  # fmt: skip
_GPT_OSS += _lines({f"moe/{part}/bias": ("mlp.experts.gate_up_proj_bias", "e f -> e f") for part in ("gate", "up")},
                   "alternating")  # fmt: skip
_GPT_OSS += _lines(
    {
        "moe/down/kernel": ("mlp.experts.down_proj", "e f d -> e f d"),
        "moe/down/bias": ("mlp.experts.down_proj_bias", "e d -> e d"),
        "moe/router/kernel": ("mlp.router.weight", "e d -> d e"),
        "moe/router/bias": ("mlp.router.bias", "e -> e"),
        "attention/sinks": ("self_attn.sinks", "h -> h"),
    }
)
_QKVZ, _GATES = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
_DELTA_IN = _lines({f"delta/{x}/kernel": (_QKVZ, "(h x) d -> d h x") for x in ("q", "k", "v", "gate")}, "inner")
_DELTA_IN += _lines({f"delta/{x}/kernel": (_GATES, "(h x) d -> d h x") for x in ("beta", "decay")}, "inner")
_DELTA_IN_APART = _lines(
    {f"delta/{x}/kernel": ("linear_attn.in_proj_qkv.weight", "(h x) d -> d h x") for x in "qkv"}, "concatenated"
)
_DELTA_IN_APART += _lines(
    {
        f"delta/{x}/kernel": (f"linear_attn.in_proj_{name}.weight", "(h x) d -> d h x")
        for x, name in (("gate", "z"), ("beta", "b"), ("decay", "a"))
    }
)
_DELTA = _lines(
    {f"delta/{x}_conv": ("linear_attn.conv1d.weight", "(h x) o w -> w o h x") for x in "qkv"}, "concatenated"
)
_DELTA += _lines(
    {
        "delta/log_rate": ("linear_attn.A_log", "(h g) -> h g"),
        "delta/decay_bias": ("linear_attn.dt_bias", "(h g) -> h g"),
        "delta/norm/scale": ("linear_attn.norm.weight", "c -> c"),
        "delta/o/kernel": ("linear_attn.out_proj.weight", "d (h x) -> h x d"),
    }
)
_GATED = _lines(
    {f"attention/{x}/kernel": ("self_attn.q_proj.weight", "(h c) d -> d h c") for x in ("q", "gate")}, "inner"
)
_GATED += _lines({f"attention/{x}/bias": ("self_attn.q_proj.bias", "(h c) -> h c") for x in ("q", "gate")}, "inner")
_GATED += _lines({path: row for path, row in _PROJECTIONS.items() if "/q/" not in path} | _BEFORE | _OUTPUT)


def _in_blocks(rows: tuple[ParamMapping, ...]) -> tuple[ParamMapping, ...]:
    """Rows of layers that are in blocks."""
    return _ENDS + tuple(line._replace(path=line.path.replace("{i}/", "{i}/each/{j}/")) for line in rows)


_BALANCED_EXPERTS = _QWEN_EXPERTS + _lines(
    {**_mlp("shared_mlp", "mlp.shared_experts"), "moe/balance": ("mlp.gate.e_score_correction_bias", "e -> e")}
)
_LATENT_DECODER = _ENDS + _dense_first(_lines(_BEFORE | _LATENT | _OUTPUT), _DENSE, _BALANCED_EXPERTS)
_SHARED_NORMS = _ENDS + _lines(_PROJECTIONS | _OUTPUT)
# model_type -> its table. A table may have lines for parameters that a model lacks.
DECODER_NAMES: dict[str, tuple[ParamMapping, ...]] = {
    "llama": ATTENTION + _DENSE,
    "mistral": ATTENTION + _DENSE,
    "qwen2": ATTENTION + _DENSE,
    "qwen3": ATTENTION + _DENSE,
    "qwen3_moe": ATTENTION + _QWEN_EXPERTS,
    "mixtral": ATTENTION + _experts("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": ATTENTION + _QWEN_EXPERTS + _SHARED_EXPERT,
    "gemma": ATTENTION + _DENSE,
    "gemma2": _SHARED_NORMS + _lines(_GEMMA_NORMS) + _DENSE,
    "gemma3_text": _SHARED_NORMS + _lines(_GEMMA_NORMS) + _DENSE,
    "gpt_oss": ATTENTION + _GPT_OSS,
    "olmo2": _SHARED_NORMS + _lines(_AFTER) + _DENSE,
    "olmo3": _SHARED_NORMS + _lines(_AFTER) + _DENSE,
    "phi3": _ENDS + _lines(_BEFORE | _OUTPUT) + _FUSED_QKV + _FUSED_DENSE,
    "smollm3": ATTENTION + _DENSE,
    "glm": ATTENTION + _FUSED_DENSE,
    "glm4": _SHARED_NORMS + _lines(_GLM_NORMS) + _FUSED_DENSE,
    "granite": ATTENTION + _DENSE,
    "granitemoehybrid": ATTENTION + _GRANITE_DENSE,
    "glm4_moe": _ENDS + _dense_first(_lines(_BEFORE | _PROJECTIONS | _OUTPUT), _DENSE, _BALANCED_EXPERTS),
    "qwen3_next": _in_blocks(_GATED + _DELTA + _DELTA_IN + _QWEN_EXPERTS + _SHARED_EXPERT),
    "qwen3_5_text": _in_blocks(_GATED + _DELTA + _DELTA_IN_APART + _DENSE),
    "qwen3_5_moe_text": _in_blocks(_GATED + _DELTA + _DELTA_IN_APART + _QWEN_EXPERTS + _SHARED_EXPERT),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT_DECODER),
}
# model_type -> its table in files with one array for all experts of a layer.
FUSED_NAMES = {
    "qwen3_5_moe_text": _in_blocks(_GATED + _DELTA + _DELTA_IN_APART + _FUSED_EXPERTS + _SHARED_EXPERT),
}
