"""Adapters in the format of the library PEFT: two matrices for each linear layer, and adapter_config.json."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flax_mesh.checkpoint.hf.family import whole
from flax_mesh.checkpoint.hf.mapping import MappedArray, MappedParam
from flax_mesh.errors import ConfigError
from flax_mesh.text import path_lines

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LINEAR = re.compile(
    r"(.*(_proj(_\w+)?|_linear|\.shared_expert_gate)|lm_head)\.weight"
)  # others, such as routers, are parameters of no torch.nn.Linear

Part = tuple[MappedArray, np.ndarray, np.ndarray]  # with the factors A and B of the parameter


def adapted_arrays(params: Iterable[MappedParam], adapted: Sequence[str]) -> dict[str, MappedArray]:
    """The array in the files of every adapted path. ConfigError with all that are not linear layers for PEFT."""
    arrays = {param.path: param.arrays for param in params}
    names = {path: [array.name for array in arrays[path]] for path in adapted}
    is_linear = {
        path: not path.startswith("predictions/") and len(x) == 1 and _LINEAR.fullmatch(x[0])
        for path, x in names.items()
    }
    if wrong := [f"{path}: {', '.join(names[path])}" for path, fits in is_linear.items() if not fits]:
        raise ConfigError(
            path_lines(wrong),
            head="PEFT adapts linear layers only, but these adapted weights are none in transformers:",
            repair="--to safetensors writes the merged weights; or train with a lora.modules that does not match them.",
        )
    return {path: arrays[path][0] for path in names}


def peft_factors(parts: Iterable[Part]) -> dict[str, np.ndarray]:
    """Name -> lora_A (rank, in) and lora_B (out, rank), from A with the dims that are contracted first and B.

    Several parameters that are one array in the files are one adapter, whose rank is the sum of theirs: their As follow
    each other, and each B has the rows of its parameter.
    """
    layers: dict[str, list[Part]] = {}
    for part in parts:
        layers.setdefault(part[0].name, []).append(part)
    factors: dict[str, np.ndarray] = {}
    for name, joined in layers.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        a = np.asarray([_rows_of_a(array, a) for array, a, _ in joined])
        b = np.asarray([_columns_of_b(*part) for part in joined])
        factors[f"{layer}.lora_A.weight"] = a.reshape(-1, a.shape[-1])
        factors[f"{layer}.lora_B.weight"] = b.swapaxes(0, 1).reshape(b.shape[1], -1)
    return factors


def _rows_of_a(array: MappedArray, a: np.ndarray) -> np.ndarray:
    """A with the contracted dims as in the file, (rank, in)."""
    contracted = a.ndim - 1
    order = sorted(range(contracted), key=array.order[:contracted].__getitem__)
    return a.transpose(*order, contracted).reshape(-1, a.shape[-1]).T


def _columns_of_b(array: MappedArray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """B with the other dims as in the file, (out, rank), zero in the rows of other parameters."""
    rank, of_out = a.shape[-1], array.order[a.ndim - 1 :]
    columns = b.transpose(*(d + 1 for d in sorted(range(len(of_out)), key=of_out.__getitem__)), 0)
    if not array.within:
        return columns.reshape(-1, rank)
    whole = np.zeros((*array.whole[:-1], rank), b.dtype)
    whole[array.within[: whole.ndim - 1]] = columns.reshape(*array.shape[:-1], rank)
    return whole.reshape(-1, rank)


def adapter_config(
    ranks: Mapping[str, int],
    names: Iterable[str],
    rank: int,
    scale: float,
    base: str | None,
    revision: str | None = None,
) -> Mapping[str, object]:
    """The adapter_config.json of adapted arrays of these `ranks` in a model with `names`; alpha / rank is `scale`."""
    of_layers = {name.removesuffix(".weight"): of_layer for name, of_layer in ranks.items()}
    others = {_last(layer) for name in names if (layer := name.removesuffix(".weight")) not in of_layers}
    # The last part of a name selects the layers that end in it, so that only layers all of which are adapted have one.
    targets = sorted({layer if _last(layer) in others else _last(layer) for layer in of_layers})
    pairs = {(_last(layer), of_layer) for layer, of_layer in of_layers.items()}
    counts = Counter(last for last, _ in pairs)  # of different ranks
    differing = {
        layer if counts[_last(layer)] > 1 else _last(layer): of_layer
        for layer, of_layer in of_layers.items()
        if of_layer != rank
    }
    patterns = {
        "rank_pattern": differing,
        "alpha_pattern": {x: whole(scale * of_layer) for x, of_layer in differing.items()},
    }
    return {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank},
        **({"revision": revision} if revision else {}),
        **{"lora_alpha": whole(scale * rank), "lora_dropout": 0.0, "target_modules": targets},
        **(patterns if differing else {}),
        **{"bias": "none", "fan_in_fan_out": False, "inference_mode": True},
    }


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]
