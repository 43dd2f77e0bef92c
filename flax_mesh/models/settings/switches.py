"""Checks of the sizes of a decoder, and of its settings that are switches of families."""

import math
from collections.abc import Mapping
from types import SimpleNamespace

from flax_mesh.errors import Problem
from flax_mesh.models.settings.pattern import parse_pattern, pattern_problem

NEEDS_EXPERTS = (
    *("shared_expert_size", "router_scores", "normalize_router", "router_groups", "router_top_groups"),
    *("router_scale", "router_balance", "dense_layers"),
)
_NEEDS_LATENTS = ("query_latent_size", "value_head_dim", "rope_mscale", "rope_mscale_all_dims")
_NOT_WITH_LATENTS = ("qk_norm", "attention_sinks", "layer_pattern", "sliding_window", "attention_gate")
_OF_DELTA = ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_conv")


def switch_problems(config: SimpleNamespace, defaults: Mapping[str, object]) -> list[Problem]:
    """Invalid values of the switches of families, and switches without effect; `config` has all settings."""
    problems = _size_problems(config)
    if config.layer_pattern and (problem := pattern_problem(config.layer_pattern)):
        problems.append(Problem("model.layer_pattern", problem))
    elif config.layer_pattern and any(x.local for x in parse_pattern(config.layer_pattern)) > config.sliding_window:
        text = "has local layers, which need a model.sliding_window above 0"
        problems.append(Problem("model.layer_pattern", text, value=config.layer_pattern))
    if config.rotary_dims % 2 or config.rotary_dims > config.head_dim:
        text = f"must be even and at most model.head_dim={config.head_dim}"
        problems.append(Problem("model.rotary_dims", text, value=config.rotary_dims))
    if config.rope_kind == "yarn" and config.rope_theta == 1:
        problems.append(Problem("model.rope_theta", "must not be 1 with model.rope_kind=yarn"))
    rotated = (config.rotary_dims or config.head_dim) // 2
    for name in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(config, name)
        if factors and config.rope_kind != "longrope":
            problems.append(Problem(f"model.{name}", "needs model.rope_kind=longrope"))
        elif config.rope_kind == "longrope" and [0 < x < math.inf for x in factors] != [True] * rotated:
            text = f"must be {rotated} numbers above 0, one for each rotary frequency, got {len(factors)}"
            problems.append(Problem(f"model.{name}", text))
    without_effect = {"qk_norm_all_heads": "qk_norm", "shared_expert_gate": "shared_expert_size"}
    without_effect |= {"router_balance_rate": "router_balance", "prediction_loss": "prediction_layers"}
    without_effect |= dict.fromkeys(NEEDS_EXPERTS, "num_experts") | dict.fromkeys(_NEEDS_LATENTS, "latent_size")
    for name, needed in without_effect.items():
        if getattr(config, name) != defaults[name] and not getattr(config, needed):
            problems.append(Problem(f"model.{name}", f"has no effect without model.{needed}"))
    problems += _group_problems(config)
    if not (config.layer_pattern and pattern_problem(config.layer_pattern)):
        problems += _delta_problems(config)
    for name in _NOT_WITH_LATENTS if config.latent_size else ():
        if getattr(config, name):
            problems.append(Problem(f"model.{name}", "has no meaning in latent attention; set model.latent_size=0"))
    if config.prediction_layers and config.layer_pattern:
        text = f"must be empty with model.prediction_layers={config.prediction_layers}, whose layers are of one kind"
        problems.append(Problem("model.layer_pattern", text, value=config.layer_pattern))
    if config.num_experts and config.dense_layers and not config.dense_mlp_size:
        problems.append(Problem("model.dense_mlp_size", "must be above 0 with model.dense_layers"))
    if 0 < config.num_layers <= config.dense_layers:
        text = f"must be below model.num_layers={config.num_layers}; for no experts at all set model.num_experts=0"
        problems.append(Problem("model.dense_layers", text, value=config.dense_layers))
    if config.swiglu_limit and config.activation != "silu":
        problems.append(Problem("model.swiglu_limit", "needs model.activation=silu"))
    return problems


def _size_problems(config: SimpleNamespace) -> list[Problem]:
    problems: list[Problem] = []
    if config.num_kv_heads >= 1 and config.num_heads % config.num_kv_heads:
        text = f"must be a multiple of model.num_kv_heads={config.num_kv_heads}"
        problems.append(Problem("model.num_heads", text, value=config.num_heads))
    if config.head_dim % 2:
        problems.append(Problem("model.head_dim", f"must be even for rotary positions, got {config.head_dim}"))
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    if low > high or (low == high and config.rope_kind != "yarn"):
        text = f"must be below model.rope_high_frequency_factor={high}"
        problems.append(Problem("model.rope_low_frequency_factor", text, value=low))
    if 0 < config.num_experts < config.experts_per_token:
        text = f"must be at most model.num_experts={config.num_experts}"
        problems.append(Problem("model.experts_per_token", text, value=config.experts_per_token))
    return problems


def _group_problems(config: SimpleNamespace) -> list[Problem]:
    groups, experts = config.router_groups, config.num_experts
    if groups <= 1 or not experts:
        return []
    if experts % groups:
        text = f"must divide model.num_experts={experts} into groups of equal size"
        return [Problem("model.router_groups", text, value=groups)]
    if not 1 <= config.router_top_groups <= groups:
        text = f"must be from 1 to model.router_groups={groups}"
        return [Problem("model.router_top_groups", text, value=config.router_top_groups)]
    size, smallest = experts // groups, 2 if config.router_balance else 1
    if size < smallest or size * config.router_top_groups < config.experts_per_token:
        text = f"must leave {smallest} experts in a group, and model.experts_per_token in the best groups"
        return [Problem("model.router_groups", text, value=groups)]
    return []


def _delta_problems(config: SimpleNamespace) -> list[Problem]:
    """Of the settings of delta nets, whose patterns are repeated in blocks."""
    kinds = parse_pattern(config.layer_pattern) if config.layer_pattern else ()
    sizes = {name: getattr(config, name) for name in _OF_DELTA}
    if not any(kind.delta for kind in kinds):
        return [
            Problem(f"model.{name}", "has no effect without delta layers in model.layer_pattern")
            for name, size in sizes.items()
            if size
        ]
    problems = [Problem(f"model.{x}", "must be above 0 with delta layers") for x, size in sizes.items() if size < 1]
    keys, values, count = config.delta_key_heads, config.delta_value_heads, len(kinds)
    if keys > 0 and values % keys:
        text = f"must be a multiple of model.delta_key_heads={keys}"
        problems.append(Problem("model.delta_value_heads", text, value=values))
    if all(kind.delta for kind in kinds):
        text = "must have layers with attention beside delta layers, such as delta:3,global"
        problems.append(Problem("model.layer_pattern", text, value=config.layer_pattern))
    if config.num_layers % count:
        text = f"must be a multiple of the {count} layers of model.layer_pattern={config.layer_pattern}, a block"
        problems.append(Problem("model.num_layers", text, value=config.num_layers))
    for name in ("router_balance", "dense_layers"):
        if getattr(config, name):
            problems.append(Problem(f"model.{name}", "is not supported with delta layers in model.layer_pattern"))
    return problems
