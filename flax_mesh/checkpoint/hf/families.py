"""The families of decoders in Hugging Face's format, as data: the keys of config.json.

A family is a table of names (`names`) and the settings of `flax_mesh.models.DecoderConfig` that its keys determine.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from flax_mesh.checkpoint.hf.family import USE_WINDOW, WINDOW, Family, Json, Key, whole
from flax_mesh.checkpoint.hf.layer_keys import DELTA

Value = TypeVar("Value")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
_OF_ACTIVATION = {"swish": "silu", "gelu_new": "gelu_tanh"} | _ACTIVATIONS


def _activation(value: str) -> str:
    if value not in _OF_ACTIVATION:
        raise ValueError(f"must be one of {', '.join(_OF_ACTIVATION)}, got {value!r}")
    return _OF_ACTIVATION[value]


def _without(table: Mapping[str, Value], *keys: str) -> dict[str, Value]:
    return {key: value for key, value in table.items() if key not in keys}


_CAP: dict[str, Any] = {"kind": float, "write": lambda value: value or None, "null": 0.0}
_ACT = Key(("activation",), str, _activation, {ours: name for name, ours in _ACTIVATIONS.items()}.get)
# transformers reads the first files of Gemma so: the gelu in them is the one with tanh.
_GEMMA_1_ACT = _ACT._replace(read=lambda value: _activation("gelu_pytorch_tanh" if value == "gelu" else value))
_BIAS = Key(("qkv_bias", "output_bias"), bool)
_MLP_BIAS = Key(("mlp_bias",), bool)
KEYS = {
    "vocab_size": Key(("vocab_size",)),
    "hidden_size": Key(("hidden_size",)),
    "num_hidden_layers": Key(("num_layers",)),
    "num_attention_heads": Key(("num_heads",)),
    "num_key_value_heads": Key(("num_kv_heads",)),
    "head_dim": Key(("head_dim",)),
    "intermediate_size": Key(("mlp_size",)),
    "rms_norm_eps": Key(("norm_epsilon",), float),
    "tie_word_embeddings": Key(("tied",), bool),
    "hidden_act": _ACT,
}
_EXPERT_KEYS = {"num_experts_per_tok": Key(("experts_per_token",))}
_QWEN_MOE_KEYS = {
    **_without(KEYS, "intermediate_size"),
    **_EXPERT_KEYS,
    "num_experts": Key(("num_experts",)),
    "moe_intermediate_size": Key(("mlp_size",)),
    "norm_topk_prob": Key(("normalize_router",), bool),
}
_BALANCED_KEYS = {
    **_without(KEYS, "intermediate_size"),
    **_EXPERT_KEYS,
    "intermediate_size": Key(("dense_mlp_size",)),
    "moe_intermediate_size": Key(("mlp_size",)),
    "n_routed_experts": Key(("num_experts",)),
    "n_shared_experts": Key(
        ("shared_expert_size",),
        null=0,
        join=lambda count, settings: count * settings["mlp_size"],
        part=lambda size, settings: None if size % settings["mlp_size"] else size // settings["mlp_size"],
    ),
    "n_group": Key(("router_groups",), null=1),
    "topk_group": Key(("router_top_groups",), null=1),
    "routed_scaling_factor": Key(("router_scale",), float),
    "norm_topk_prob": Key(("normalize_router",), bool),
    "first_k_dense_replace": Key(("dense_layers",)),
}
_LATENT_KEYS = {
    **_without(_BALANCED_KEYS, "num_key_value_heads", "head_dim"),
    "num_attention_heads": Key(("num_heads", "num_kv_heads")),
    "q_lora_rank": Key(("query_latent_size",), write=lambda size: size or None, null=0),
    "kv_lora_rank": Key(("latent_size",)),
    "qk_nope_head_dim": Key(
        ("head_dim",),
        join=lambda size, settings: size + settings["rotary_dims"],
        part=lambda size, settings: size - settings["rotary_dims"],
    ),
    "qk_rope_head_dim": Key(("rotary_dims",)),
    "v_head_dim": Key(("value_head_dim",)),
    "attention_bias": _BIAS,
    "rope_interleave": Key(("rope_interleaved",), bool),
}
_DELTA_KEYS = {
    "attention_bias": _BIAS,
    "linear_num_key_heads": Key(("delta_key_heads",)),
    "linear_num_value_heads": Key(("delta_value_heads",)),
    "linear_key_head_dim": Key(("delta_key_dim",)),
    "linear_value_head_dim": Key(("delta_value_dim",)),
    "linear_conv_kernel_dim": Key(("delta_conv",)),
}
_SHARED_KEY = {"shared_expert_intermediate_size": Key(("shared_expert_size",))}
_GEMMA_KEYS = _without(KEYS, "hidden_act") | {"hidden_activation": _ACT}
_GEMMA_2_KEYS = _GEMMA_KEYS | {
    "attention_bias": _BIAS,
    "query_pre_attn_scalar": Key(
        ("attention_scale",), float, lambda value: value**-0.5, lambda value: whole(round(value**-2, 6))
    ),
    "attn_logit_softcapping": Key(("attention_softcap",), **_CAP),
    "final_logit_softcapping": Key(("logit_softcap",), **_CAP),
}
_GRANITE_KEYS = {
    "attention_bias": _BIAS,
    "embedding_multiplier": Key(("embedding_scale",), float),
    "attention_multiplier": Key(("attention_scale",), float),
    "residual_multiplier": Key(("residual_scale",), float),
    "logits_scaling": Key(("logits_scaling",), float),
}


def _divide(size: object, parts: object) -> int | None:
    return size // parts if type(size) is int and type(parts) is int and parts else None


def _heads(config: Json) -> object:
    return config.get("num_attention_heads")


def _method(config: Json) -> str:
    return "group_limited_greedy" if (config.get("n_group") or 1) > 1 else "greedy"


def _count_dense(types: list[str]) -> int:
    count = types.count("dense")
    if types != ["dense"] * count + ["sparse"] * (len(types) - count):
        raise ValueError("must be dense layers, and sparse ones after them")
    return count


_DENSE_FIRST = Key(
    ("dense_layers",),
    list,
    _count_dense,
    part=lambda count, settings: ["dense"] * count + ["sparse"] * (settings["num_layers"] - count),
)


def _dense_types(config: Json) -> list[str]:
    layers = config.get("num_hidden_layers")
    return ["dense"] + ["sparse"] * (layers - 1 if type(layers) is int else 0)


ABSENT = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "head_dim": lambda config: _divide(config.get("hidden_size"), config.get("num_attention_heads")),
}
_BIASED = ABSENT | {"num_key_value_heads": _heads, "attention_bias": False, "mlp_bias": False}
_GEMMA_ABSENT = _without(ABSENT, "hidden_act") | {
    **{"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    **{"attention_bias": False, "query_pre_attn_scalar": 256, WINDOW: 4096},
}
_MUST = {"attention_dropout": 0.0, "quantization_config": None, "partial_rotary_factor": 1.0}
_BIASES = {"attention_bias": False}
_NO_ROTARY = _without(_MUST, "partial_rotary_factor")
_NO_EXPERTS = {"num_experts": 0}
_GEMMA = {**_NO_EXPERTS, "zero_centered": True, "embedding_scale": lambda settings: settings["hidden_size"] ** 0.5}
_GEMMA_MUST = _MUST | {"use_bidirectional_attention": False}

_PHI_MUST = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "mlp_bias": False, "lm_head_bias": False}
_PHI_MUST |= {"full_attn_mod": 1, "interpolate_factor": 1}
# Modules of predictions are read only where they are asked for.
_BALANCED = {"router_scores": "sigmoid", "router_balance": True}
_BALANCED["prediction_layers"] = lambda settings: settings.get("prediction_layers", 0)
_BALANCED_ABSENT = ABSENT | {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_LATENT_ABSENT = _without(_BALANCED_ABSENT, "head_dim")
_LATENT_ABSENT |= {"attention_bias": False, "rope_interleave": True, "q_lora_rank": 1536, "kv_lora_rank": 512}
_LATENT_ABSENT |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_LATENT_MUST = _MUST | {
    "num_key_value_heads": _heads,
    "head_dim": lambda config: config.get("qk_rope_head_dim", 64),
    "qk_head_dim": lambda config: config.get("qk_nope_head_dim", 128) + config.get("qk_rope_head_dim", 64),
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
}
_DELTA_MUST = _NO_ROTARY | {"attn_output_gate": True, USE_WINDOW: False, "hidden_act": "silu"}  # of convolutions too
_DELTA = {"qk_norm": True, "zero_centered": True, "attention_gate": True}
_DELTA_ABSENT = ABSENT | {"head_dim": 256, "attention_bias": False, "linear_conv_kernel_dim": 4}
_DELTA_ABSENT |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
_DELTA_ABSENT |= {"linear_num_value_heads": 32}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}

_GLM = Family(
    "GlmForCausalLM",
    KEYS | {"attention_bias": Key(("qkv_bias",), bool)},
    {**ABSENT, "rms_norm_eps": 1.5625e-07, "head_dim": 128, "attention_bias": True},
    _NO_ROTARY,
    {**_NO_EXPERTS, "rope_interleaved": True},
    rotary=0.5,
)


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", KEYS | {"attention_bias": _BIAS, "mlp_bias": _MLP_BIAS}, _BIASED, _MUST, _NO_EXPERTS
    ),
    "mistral": Family(
        "MistralForCausalLM", KEYS, {**ABSENT, "num_key_value_heads": 8, WINDOW: 4096}, _MUST, _NO_EXPERTS, WINDOW
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", KEYS, {**ABSENT, WINDOW: 4096}, _MUST, {**_NO_EXPERTS, "qkv_bias": True}, USE_WINDOW
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        KEYS,
        {**ABSENT, "head_dim": 128, WINDOW: 4096},
        _MUST | _BIASES,
        {**_NO_EXPERTS, "qk_norm": True},
        USE_WINDOW,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _QWEN_MOE_KEYS,
        {**ABSENT, "norm_topk_prob": False},
        {**_MUST, **_BIASES, USE_WINDOW: False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"qk_norm": True},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**KEYS, **_EXPERT_KEYS, "num_local_experts": Key(("num_experts",))},
        {**ABSENT, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        {**_MUST, "router_jitter_noise": 0.0},
        {},
        WINDOW,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _QWEN_MOE_KEYS | {"qkv_bias": Key(("qkv_bias",), bool)} | _SHARED_KEY,
        {**ABSENT, "norm_topk_prob": False, "qkv_bias": True},
        {**_MUST, USE_WINDOW: False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"shared_expert_gate": True},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        KEYS | {"attention_bias": _BIAS, "hidden_act": _GEMMA_1_ACT},
        _GEMMA_ABSENT | {"hidden_act": "gelu_pytorch_tanh"},
        _GEMMA_MUST,
        _GEMMA,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_2_KEYS,
        _GEMMA_ABSENT | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA_MUST,
        {**_GEMMA, "norms": "both"},
        "local,global",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _without(_GEMMA_2_KEYS, "attn_logit_softcapping"),
        _GEMMA_ABSENT | {"final_logit_softcapping": None, "rope_theta": 1e6},
        _GEMMA_MUST | {"attn_logit_softcapping": None},  # transformers has the key and does not use it
        {**_GEMMA, "norms": "both", "qk_norm": True},
        "local:5,global",
        "rope_local_base_freq",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {**KEYS, **_EXPERT_KEYS, "num_local_experts": Key(("num_experts",)), "attention_bias": _BIAS}
        | {"swiglu_limit": Key(("swiglu_limit",), float)},
        {**ABSENT, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "head_dim": 64, WINDOW: 128, "attention_bias": True}
        | {"swiglu_limit": 7.0, "rope_scaling": _GPT_OSS_ROPE},
        {**_MUST, "swiglu_alpha": 1.702},
        {"attention_sinks": True, "mlp_bias": True},
        "local,global",
        packed="mxfp4",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        KEYS | {"attention_bias": _BIAS},
        {**_BIASED, "rms_norm_eps": 1e-5},
        _MUST,
        {**_NO_EXPERTS, "norms": "after", "qk_norm": True, "qk_norm_all_heads": True},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        KEYS | {"attention_bias": _BIAS},
        {**_BIASED, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, WINDOW: 4096},
        _MUST,
        {**_NO_EXPERTS, "norms": "after", "qk_norm": True, "qk_norm_all_heads": True},
        "local:3,global",
        "",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        KEYS,
        {**ABSENT, "num_key_value_heads": _heads, "rms_norm_eps": 1e-5, WINDOW: None},
        {**_NO_ROTARY, **_BIASES, **_PHI_MUST},
        _NO_EXPERTS,
        WINDOW,
        rotary=1.0,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        KEYS | {"attention_bias": _BIAS, "mlp_bias": _MLP_BIAS},
        {**_BIASED, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
        {**_MUST, USE_WINDOW: False},
        _NO_EXPERTS,
        "global:3,global_nope",
    ),
    "glm": _GLM,
    "glm4": _GLM._replace(architecture="Glm4ForCausalLM", settings={**_GLM.settings, "norms": "both"}),
    "granite": Family(
        "GraniteForCausalLM",
        KEYS | _GRANITE_KEYS | {"mlp_bias": _MLP_BIAS},
        {**_BIASED, **dict.fromkeys(_GRANITE_KEYS, 1.0), "attention_bias": False},
        _MUST,
        _NO_EXPERTS,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        _without(KEYS, "intermediate_size") | _GRANITE_KEYS | {"shared_intermediate_size": Key(("mlp_size",))},
        {**_BIASED, **dict.fromkeys(_GRANITE_KEYS, 1.0), "attention_bias": False},
        {**_MUST, "num_local_experts": 0, "normalization_function": "rmsnorm"},
        _NO_EXPERTS,
        "global",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _BALANCED_KEYS | {"attention_bias": Key(("qkv_bias",), bool), "use_qk_norm": Key(("qk_norm",), bool)},
        {**_BALANCED_ABSENT, "rms_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1},
        _NO_ROTARY,
        _BALANCED,
        rotary=0.5,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _LATENT_KEYS,
        {**_LATENT_ABSENT, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
        | {"n_shared_experts": 1},
        _LATENT_MUST,
        _BALANCED,
        packed="fp8",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _without(_LATENT_KEYS, "norm_topk_prob", "rope_interleave"),
        {**_LATENT_ABSENT, "first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": False}
        | {"topk_method": "greedy"},
        # transformers ignores norm_topk_prob, and groups if topk_method is greedy.
        {**_LATENT_MUST, "scoring_func": "softmax", "topk_method": _method, "norm_topk_prob": False, "mlp_bias": False},
        {"rope_interleaved": True, "normalize_router": False},
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        _without(_LATENT_KEYS, "first_k_dense_replace") | {"mlp_layer_types": _DENSE_FIRST},
        {**_LATENT_ABSENT, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "n_shared_experts": 1}
        | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "mlp_layer_types": _dense_types},
        _LATENT_MUST
        | {"first_k_dense_replace": lambda config: (config.get("mlp_layer_types") or ["dense"]).count("dense")},
        _BALANCED,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _without(_QWEN_MOE_KEYS | _SHARED_KEY | _DELTA_KEYS, "hidden_act"),
        _DELTA_ABSENT | {"norm_topk_prob": True},
        {**_DELTA_MUST, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {**_DELTA, "shared_expert_gate": True},
        DELTA,
        rotary=0.25,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _without(KEYS | _DELTA_KEYS, "hidden_act"),
        _DELTA_ABSENT,
        _DELTA_MUST,
        {**_NO_EXPERTS, **_DELTA},
        DELTA,
        rotary=0.25,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _without(_QWEN_MOE_KEYS | _SHARED_KEY | _DELTA_KEYS, "hidden_act", "norm_topk_prob"),
        _DELTA_ABSENT,
        _DELTA_MUST,
        {**_DELTA, "shared_expert_gate": True},
        DELTA,
        rotary=0.25,
    ),
}
