"""Writes tests/checkpoint/hf/data: small random checkpoints, and results of transformers from them: the logits of
reference.npz, and the greedy continuation of generated.npz.

    python -m tests.checkpoint.hf.make_reference [CASE ...]

needs the extra `hf`. The default tests read the files, so that they need neither torch nor transformers.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,  # not hidden_size / num_attention_heads
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
}
# The wavelengths of a head are 6, 35, 199 and 1117 positions: the first is unchanged, the second interpolated.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.5], "long_factor": [1.0, 2.0, 4.0]}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
BALANCED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 4, "norm_topk_prob": True}
BALANCED |= {"routed_scaling_factor": 1.5, "n_group": 3, "topk_group": 2, "n_shared_experts": 1}
TWO_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 12}
GRANITE = {"embedding_multiplier": 3, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "tie_word_embeddings": True, "rope_scaling": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "head_dim": 4},
    "qwen2_window": {
        **{"model_type": "qwen2", "head_dim": 4, "use_sliding_window": True},
        **{"sliding_window": 9, "max_window_layers": 0},
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12},
    "llama_biases": {
        **{"model_type": "llama", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        "rope_scaling": YARN,
    },
    "llama_linear": {"model_type": "llama", "hidden_act": "relu2", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        **{"model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 7, "layer_types": TWO_WINDOWS},
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0, **GEMMA},
    },
    "gemma3": {
        **{"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 7, "layer_types": WINDOWS},
        **{"rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, **GEMMA},
    },
    "gpt_oss": {
        **{"model_type": "gpt_oss", "num_hidden_layers": 3, "sliding_window": 7, "layer_types": TWO_WINDOWS},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12, "swiglu_limit": 2.0},
        "rope_scaling": {**YARN, "truncate": False},
    },
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", "head_dim": 4, "shared_expert_intermediate_size": 20},
        **EXPERTS,
        "norm_topk_prob": False,
    },
    "olmo2": {"model_type": "olmo2", "head_dim": 4},
    "olmo3": {
        **{"model_type": "olmo3", "head_dim": 4, "num_hidden_layers": 4, "sliding_window": 7, "layer_types": WINDOWS},
        "rope_scaling": {**YARN, "attention_factor": 1.2},
    },
    "phi3": {
        **{"model_type": "phi3", "hidden_size": 32, "head_dim": 8, "partial_rotary_factor": 0.75, "pad_token_id": 0},
        **{"rope_scaling": LONGROPE, "original_max_position_embeddings": 16, "max_position_embeddings": 64},
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2, "head_dim": 4}
    | {"pad_token_id": 0, "tie_word_embeddings": True},
    "glm": {"model_type": "glm", "partial_rotary_factor": 0.5, "pad_token_id": 0, "eos_token_id": 1},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "pad_token_id": 0, "eos_token_id": 1}
    | {"attention_bias": True},
    "granite": {"model_type": "granite", "head_dim": 4, **GRANITE},
    "granitemoehybrid": {
        **{"model_type": "granitemoehybrid", "head_dim": 4, "shared_intermediate_size": 24, "num_local_experts": 0},
        **{"layer_types": ["attention"] * 2, "position_embedding_type": "rope", "mamba_n_heads": 4, **GRANITE},
    },
}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"head_dim": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, **BALANCED}
MSCALE_YARN = YARN | {"factor": 32.0, "mscale": 0.8, "mscale_all_dim": 1.2}
CASES["deepseek_v3"] = {"model_type": "deepseek_v3", **LATENT, "rope_scaling": MSCALE_YARN, "first_k_dense_replace": 1}
CASES["deepseek_v2"] = {
    **{
        "model_type": "deepseek_v2",
        **LATENT,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "q_lora_rank": None,
        "v_head_dim": 12,
    },
    **{"topk_method": "group_limited_greedy", "norm_topk_prob": False, "rope_scaling": MSCALE_YARN | {"mscale": 1.2}},
    "v_head_dim": 12,
}
CASES["glm4_moe_lite"] = {
    **{"model_type": "glm4_moe_lite", **LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    **{"attention_bias": True, "mlp_layer_types": ["dense", "sparse"]},
}
CASES["glm4_moe"] = {
    **{"model_type": "glm4_moe", "num_hidden_layers": 3, "partial_rotary_factor": 0.5, "use_qk_norm": True, **BALANCED},
    **{"attention_bias": True, "pad_token_id": 0, "eos_token_id": 1, "n_shared_experts": 2, "first_k_dense_replace": 1},
}
DELTA = {"num_hidden_layers": 4, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4}
CASES["qwen3_next"] = {
    **{"model_type": "qwen3_next", **DELTA, **EXPERTS, "shared_expert_intermediate_size": 20},
    **{"attention_bias": True, "full_attention_interval": 2},
}
CASES["qwen3_5"] = {
    **{"model_type": "qwen3_5_text", **DELTA, "num_hidden_layers": 3},
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
}
CASES["qwen3_5_moe"] = {
    **{"model_type": "qwen3_5_moe_text", **DELTA, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "linear_num_key_heads": 4},
    **{"num_hidden_layers": 2, "full_attention_interval": 2},
}
SHARDED = {"llama": "10KB"}  # cases of several files
SEEDS: dict[str, int] = dict.fromkeys(
    ("glm4_moe", "deepseek_v3", "deepseek_v2", "glm4_moe_lite"), 1
)  # other texts repeat tokens
SCALES = {"qwen3_next": 0.6}  # larger weights amplify the rounding of float32 to 1.3e-5 of the largest logit
LENGTH = 24
PROMPT, GENERATED = 7, 64  # tokens


def write_reference(case: str, folder: Path, dtype: str = "float32", seed: int = 0) -> None:
    """Write a random checkpoint of transformers to `folder`, stored as `dtype`, and reference.npz: tokens (1, S) and
    their logits (1, S, V), computed in float32."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(seed)  # not torch's, whose numbers depend on the vector instructions of the machine
    config = AutoConfig.for_model(**{**SMALL, **CASES[case]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model, rng, dtype, SCALES.get(case, 1.0))
    tokens = tokens_of(rng)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.savez(folder / "reference.npz", tokens=tokens, logits=logits)
    # After the logits, since the cast also rounds the rotary frequencies, which are not parameters.
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=SHARDED.get(case, "5GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)


def randomize(
    model: Any, rng: np.random.Generator, dtype: str = "float32", scale: float = 1.0, norm: float = 1.0
) -> None:
    """Random parameters of a model of torch, with the precision of `dtype`; parameters of norms have the mean `norm`.

    A smaller `scale` amplifies rounding less.
    """
    import torch  # pyright: ignore[reportMissingImports]

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that attention is far from uniform and every part affects the logits.
            spread = scale * (0.2 if "norm" in name else 0.4)
            mean = 1.0 if "linear_attn.norm" in name else norm * ("norm" in name)  # which never adds 1
            value = rng.standard_normal(tuple(parameter.shape), dtype=np.float32) * spread + mean
            parameter.copy_(torch.from_numpy(value).to(getattr(torch, dtype)))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # no parameter
                buffer.copy_(torch.from_numpy(rng.standard_normal(tuple(buffer.shape), dtype=np.float32) * 0.2))


def tokens_of(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, SMALL["vocab_size"], (1, LENGTH)).astype(np.int32)


def write_generated(folder: Path) -> None:
    """Write generated.npz: the first tokens of reference.npz, those that transformers generates after them, and the
    smallest difference between the largest logit of a step and the next."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # random weights do not end a text
    prompt = np.load(folder / "reference.npz")["tokens"][:, :PROMPT]
    with torch.no_grad():
        ids = torch.from_numpy(prompt).long()
        found = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GENERATED,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = found.sequences[0, PROMPT:].numpy().astype(np.int32)
    largest = torch.stack(found.logits).topk(2).values
    margin = (largest[..., 0] - largest[..., 1]).min().numpy()
    np.savez(folder / "generated.npz", prompt=prompt[0], tokens=tokens, margin=margin)


def main() -> None:
    for case in sys.argv[1:] or CASES:
        shutil.rmtree(DATA / case, ignore_errors=True)
        (DATA / case).mkdir(parents=True)
        write_reference(case, DATA / case, seed=SEEDS.get(case, 0))
        write_generated(DATA / case)


if __name__ == "__main__":
    main()
