"""How the config.json of a family of decoders is described: keys, their settings, and keys without effect."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Json = Mapping[str, Any]  # of a config.json, or the settings that follow from one
WINDOW, USE_WINDOW, FIRST_WITH_WINDOW = "sliding_window", "use_sliding_window", "max_window_layers"


def same(value: object) -> object:
    return value


def whole(value: float) -> float:
    """An int if the value is one, as other programs write it."""
    return int(value) if value == int(value) else value


class Key(NamedTuple):
    """A key of config.json and the settings that have its value, converted by `read`; `write` is the inverse.

    `null` is the setting for null in config.json, None if the key must not be null. `join(value, settings)` is the
    setting if it depends on others too, and `part(setting, settings)` the inverse, None where there is none.
    """

    settings: tuple[str, ...]
    kind: type = int
    read: Callable[..., object] = same
    write: Callable[..., object] = same
    null: object = None
    join: Callable[[int, Json], object] | None = None
    part: Callable[[int, Json], object] | None = None

    def value(self, settings: Json) -> object:
        """The value of the key for all settings."""
        setting = settings[self.settings[0]]
        return self.write(self.part(setting, settings) if self.part else setting)


class Family(NamedTuple):
    """How the config.json of a `model_type` is read.

    keys: key of config.json -> the settings that it determines
    absent: default of a key that config.json lacks: a value, or a function of the config; other keys are required
    must: key -> the only value that this decoder computes, or a function of the config that returns it; also the
        default of the key where `absent` has none
    settings: settings that all models of the family share, values or functions of the other settings; others have the
        defaults of the decoder
    layers: how the kinds of the layers are read: the key that decides whether tokens attend to the last
        `sliding_window` only, or a pattern that `layer_types` replaces; "" if all layers attend to all tokens
    local_rope: whether local layers have a separate rotary base, and no scaling: the key of the base, "" if they
        have the base of the other layers
    rotary: the default of partial_rotary_factor; 0: all dims are rotated
    """

    architecture: str
    keys: Mapping[str, Key]
    absent: Json
    must: Json
    settings: Json
    layers: str = ""
    local_rope: str | None = None
    rotary: float = 0.0
    packed: str = ""  # the quantization of weights that are read: mxfp4, or fp8 with scales of blocks

    @property
    def is_latent(self) -> bool:
        return any("latent_size" in key.settings for key in self.keys.values())

    def must_of(self, config: Json) -> dict[str, object]:
        return {key: value(config) if callable(value) else value for key, value in self.must.items()}

    def free(self) -> set[str]:
        """The settings of switches that models of the family may have."""
        settings = {setting for key in self.keys.values() for setting in key.settings}
        settings |= {"local_rope_theta"} if self.local_rope is not None else set()
        settings |= {"rope_mscale", "rope_mscale_all_dims"} if self.is_latent else set()
        return settings | ({"rotary_dims"} if self.rotary else set())


# Keys without effect on the logits of a full sequence, and why.
WITHOUT_EFFECT = {
    **dict.fromkeys(("_name_or_path", "transformers_version", "return_dict", "auto_map"), "of the program"),
    "_attn_implementation": "of the program",
    **dict.fromkeys(("output_router_logits", "output_attentions", "output_hidden_states"), "what a call returns"),
    **dict.fromkeys(("use_cache", "cache_implementation"), "how a text is generated"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "of the tokenizer"),
    **dict.fromkeys(("initializer_range", "initial_context_length"), "of the first training"),
    **dict.fromkeys(("router_aux_loss_coef", "pretraining_tp"), "of losses, or of the order of sums"),
    **dict.fromkeys(("is_encoder_decoder", "id2label", "label2id", "problem_type"), "of other tasks"),
    **dict.fromkeys(("chunk_size_feed_forward",), "of other programs"),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), "read where a rope needs it"),
    **dict.fromkeys((FIRST_WITH_WINDOW, WINDOW), "read where layers have a window"),
    "intermediate_size": "of layers that these models lack, where it is no key of the family",
}

_MAMBA = ("expand", "n_heads", "n_groups", "d_state", "d_head", "d_conv", "chunk_size", "conv_bias", "proj_bias")
_OF_GEMMA = {"hidden_act": "an older name of hidden_activation"}
_OF_GEMMA_1 = {"hidden_activation": "hidden_act has it, as in transformers 5"}
PREDICTION = {"num_nextn_predict_layers": "of layers that predict the tokens after the next one"}
_OF_QWEN_3_5 = {
    **{"mamba_ssm_dtype": "of a kernel; states are float32", "full_attention_interval": "of layer_types"},
    **dict.fromkeys(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), "of prediction, as above"),
}
_OF_DEEPSEEK = {"aux_loss_alpha": "of losses", "seq_aux": "of losses", "ep_size": "of the program"}
# Models that also read images -> what the config.json of their text decoder has if their `text_config` lacks it.
WITH_IMAGES: dict[str, Json] = {
    "gemma3": {"model_type": "gemma3_text", "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
    "mistral3": {"model_type": "mistral"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
}
# Keys outside of `text_config` that the text decoder has too.
OF_ALL = (
    *("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# How their files name "model." and "lm_head." of the text decoder: since transformers 4.52, and before.
TEXT_NAMES = (("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head."))
OF_FAMILY: dict[str, dict[str, str]] = {  # as WITHOUT_EFFECT, in one family
    "glm4_moe": PREDICTION,
    "glm4_moe_lite": PREDICTION,
    "deepseek_v3": PREDICTION | _OF_DEEPSEEK,
    "deepseek_v2": _OF_DEEPSEEK,
    "gemma2": _OF_GEMMA | {"sliding_window_size": "an older name of sliding_window"},
    "gemma3_text": _OF_GEMMA,
    "gemma": _OF_GEMMA_1,
    "gpt_oss": {"experts_per_token": "another name of num_experts_per_tok"},
    "qwen2": {"use_mrope": "of images"},
    "qwen3_5_text": _OF_QWEN_3_5,
    "qwen3_5_moe_text": _OF_QWEN_3_5,
    "granitemoehybrid": {
        **dict.fromkeys([f"mamba_{name}" for name in _MAMBA], "of Mamba layers, which dense models lack"),
        **dict.fromkeys(("time_step_limit", "layers_block_type"), "of Mamba layers, which dense models lack"),
        "num_experts_per_tok": "of experts, which dense models lack",
        "init_method": "of the first training",
    },
}
