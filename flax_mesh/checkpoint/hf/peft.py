"""Adapters in the format of the library PEFT: two matrices for each linear layer, and adapter_config.json."""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flax_mesh.checkpoint.hf.mapping import MappedArray, MappedParam
from flax_mesh.errors import ConfigError
from flax_mesh.text import path_lines

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LINEAR = re.compile(
    r"(.*_proj(_with_mqa)?|lm_head)\.weight"
)  # others, such as routers, are parameters of no torch.nn.Linear


def adapted_arrays(params: Iterable[MappedParam], adapted: Sequence[str]) -> dict[str, MappedArray]:
    """The array in the files of every adapted path. ConfigError with all that are not linear layers for PEFT."""
    arrays = {param.path: param.arrays for param in params}
    names = {path: [array.name for array in arrays[path]] for path in adapted}
    joined = {array.name for path in adapted for array in arrays[path] if array.within}  # with weights of other paths
    is_linear = {
        path: not path.startswith("predictions/") and len(x) == 1 and _LINEAR.fullmatch(x[0]) and x[0] not in joined
        for path, x in names.items()
    }
    if wrong := [f"{path}: {', '.join(names[path])}" for path, fits in is_linear.items() if not fits]:
        raise ConfigError(
            path_lines(wrong),
            head="PEFT adapts linear layers only, but these adapted weights are none in transformers:",
            repair="--to safetensors writes the merged weights; or train with a lora.modules that does not match them.",
        )
    return {path: arrays[path][0] for path in names}


def peft_factors(array: MappedArray, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Name -> lora_A (rank, in) and lora_B (out, rank), from A with the dims that are contracted first and B."""
    contracted, rank = a.ndim - 1, a.shape[-1]
    of_a, of_b = np.argsort(array.order[:contracted]), np.argsort(array.order[contracted:])
    layer = f"base_model.model.{array.name.removesuffix('.weight')}"
    return {
        f"{layer}.lora_A.weight": a.transpose(*of_a, contracted).reshape(-1, rank).T,
        f"{layer}.lora_B.weight": b.transpose(0, *(of_b + 1)).reshape(rank, -1).T,
    }


def adapter_config(
    adapted: Iterable[str], names: Iterable[str], rank: int, scale: float, base: str | None, revision: str | None = None
) -> Mapping[str, object]:
    """The adapter_config.json of the `adapted` arrays of a model with these names; alpha / rank is `scale`."""
    chosen = {name.removesuffix(".weight") for name in adapted}
    others = {_last(name.removesuffix(".weight")) for name in names if name.removesuffix(".weight") not in chosen}
    # The last part of a name selects the layers that end in it, so that only layers all of which are adapted have one.
    targets = sorted({layer if _last(layer) in others else _last(layer) for layer in chosen})
    alpha = scale * rank
    return {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank},
        **({"revision": revision} if revision else {}),
        **{"lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "lora_dropout": 0.0, "target_modules": targets},
        **{"bias": "none", "fan_in_fan_out": False, "inference_mode": True},
    }


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]
