"""A decoder from a folder in Hugging Face's format, directly sharded over a mesh."""

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from flax_mesh.checkpoint.find import folders_of_files
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.checkpoint.hf.kept import CONFIG
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types, require_names
from flax_mesh.models.config import DecoderConfig
from flax_mesh.models.decoder import Decoder, make_decoder
from flax_mesh.sharding.abstract import abstract_split, abstract_state
from flax_mesh.store import SETTINGS, model_folder, stored_path_problem
from flax_mesh.tree import check_dtype


@check_types
def pretrained_config(config: DecoderConfig, folder: str) -> DecoderConfig:
    """`config` with the settings in the config.json of a Hugging Face folder or id, or of a run or step from one.

    To be used as `model_from` of a recipe. The dtypes and options of the computation, such as `remat` and `scan`, stay
    as in `config`. A folder with mistakes leaves `config` unchanged; the run reports them together with the mistakes of
    all settings.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from flax_mesh.checkpoint import huggingface_config
        >>> from flax_mesh.models import DecoderConfig, pretrained_config
        >>> _ = Path("config.json").write_text(json.dumps(huggingface_config(vars(DecoderConfig(num_layers=3)))))
        >>> pretrained_config(DecoderConfig(remat="full"), ".").num_layers
        3
    """
    try:
        is_path = folder and not stored_path_problem(folder)
        folders = folders_of_files(model_folder(folder, SETTINGS)) if is_path else []
        settings = next((open_decoder(x).settings for x in folders if (x / CONFIG).is_file()), {})
    except (ConfigError, OSError):
        return config
    return replace(config, **{name: value for name, value in settings.items() if not name.endswith("dtype")})


@check_types
def load_decoder(
    folder: str | Path, mesh: Mesh, *, dtype: DTypeLike | None = None, ignore: Iterable[str] = (), **overrides: Any
) -> tuple[Decoder, DecoderConfig]:
    """Load a pretrained decoder from a Hugging Face folder, each device reading only its slices.

    The folder contains config.json and the parameters as safetensors, as a model of the hub does after its download or
    as `save_safetensors` writes it. The supported families are the keys of `DECODER_NAMES`, such as Llama, Qwen3, Gemma
    3, gpt-oss and Phi-3. Parameters are sharded by the rule table of the decoder.

    Args:
        folder: The folder, or an id of the hub: org/name or org/name@revision.
        mesh: Mesh of devices, as made by `fm.create_mesh`. Default axes of the decoder that it lacks have size 1.
        dtype: dtype of the parameters and of the computation: float32, bfloat16 or float16. Default: the dtype in
            config.json. For a training run with float32 parameters and bfloat16 computation pass
            `dtype="bfloat16", param_dtype="float32"`.
        ignore: Keys of config.json, and regular expressions for names of arrays, that have no effect.
        **overrides: Fields of `DecoderConfig` that replace the values of config.json, such as `scan=True`,
            `remat="full"` or `attention="xla"`.

    Returns:
        The model, with its arrays on the devices of the mesh, and its config.

    Raises:
        ConfigError: `folder` is neither a folder nor a model of the hub, or has no config.json; its config.json has
            unsupported or unknown keys; or its arrays do not match the model. Each error lists every key or array.
        ShardingError: The mesh does not divide a dim of a parameter; the error lists every such parameter.
        CheckpointCorruptedError: A safetensors file is damaged.

    Example:
        >>> from flax_mesh.checkpoint import DECODER_NAMES, huggingface_config, save_safetensors
        >>> from flax_mesh.models import DecoderConfig, load_decoder, make_decoder
        >>> small = DecoderConfig(num_layers=2, hidden_size=64, mlp_size=96, head_dim=8)
        >>> parameters = nnx.state(make_decoder(small, nnx.Rngs(0)))
        >>> save_safetensors("pretrained", parameters, DECODER_NAMES["llama"], config=huggingface_config(vars(small)))
        >>> model, config = load_decoder("pretrained", fm.create_mesh((2, 2, 1, 2, 1)), remat="full")  # dp, fsdp, tp
        >>> model.layers[0].mlp.up.kernel.sharding.spec
        P('fsdp', 'tp')
        >>> model(np.zeros((1, 16), np.int32)).shape
        (1, 16, 256)
    """
    require_names("load_decoder", overrides, [item.name for item in fields(DecoderConfig)])
    source = open_decoder(folder, ignore=ignore)
    check_dtype(dtype)
    dtypes = {} if dtype is None else dict.fromkeys(("dtype", "param_dtype"), jnp.dtype(dtype).name)
    config = DecoderConfig(**{**source.settings, **dtypes, **overrides})
    source = source._replace(settings=vars(config))
    if problems := [*config.problems(), *config.problems_on(mesh), *source.problems()]:
        raise ConfigError(problems)
    make = lambda: make_decoder(config, nnx.Rngs(0))  # noqa: E731
    state = source.load(abstract_state(make, mesh))
    return nnx.merge(abstract_split(make, mesh)[0], state), config
