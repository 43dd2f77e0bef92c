"""A trained decoder on the devices: from a checkpoint of any layout, or from a Hugging Face folder."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import jax
from flax import nnx
from jax.sharding import Mesh

from flax_mesh.axes import num_parts
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.checksums import noticing_deletion
from flax_mesh.checkpoint.find import of_newest, step_number
from flax_mesh.checkpoint.read import read_tree
from flax_mesh.errors import ConfigError, StepDeletedError, UnreadableError
from flax_mesh.fields import check_types
from flax_mesh.inference.evaluate import length_problems
from flax_mesh.inference.source import DECODER, Settings, Source, find_source, is_decoder, read_settings
from flax_mesh.inference.tokenizer import Tokenizer, open_tokenizer, stop_tokens
from flax_mesh.inference.trained import TrainedModel
from flax_mesh.lora import merge_lora
from flax_mesh.mesh.create import create_mesh
from flax_mesh.mesh.shape import format_mesh_shape
from flax_mesh.models import Decoder, DecoderConfig
from flax_mesh.recipe.checks import check_model_on_mesh
from flax_mesh.recipe.optimizers.schedule_free import NOT_EVALUATED, schedule_free_sources
from flax_mesh.recipe.resolve import Recipe, derive
from flax_mesh.recipe.saved import averages
from flax_mesh.recipe.target import local_target
from flax_mesh.sharding.abstract import abstract_split, abstract_state, model_layers
from flax_mesh.sharding.transfer import reshard
from flax_mesh.text import mesh_text
from flax_mesh.tree import MODEL, Constant, PyTree

Say = Callable[[str], None]


@check_types
def open_trained(
    folder: str | Path,
    overrides: str | Sequence[str] = (),
    step: int | None = None,
    *,
    average: bool = True,
    say: Say = lambda text: None,
) -> TrainedModel:
    """Open a trained decoder, each device reading only its slices: a run on any mesh, or a Hugging Face folder.

    Its settings are the ones in the metadata of the checkpoint. The recipe that it names is not executed.

    Args:
        folder: A run folder, its `checkpoints/`, one step in it, or the folder or the id of a model of Hugging Face.
        overrides: Settings of the mesh and of the model, such as "mesh.shape=fsdp:4,tp:2" and "model.dtype=bfloat16".
            A single one may be a text. Default mesh: as many of the devices as the dims of the model allow.
        step: The number of a step. Default: the newest valid one.
        average: Whether a run with `optimizer.ema` has the moving average of its parameters, not the parameters.
        say: Called with lines of text: the step, the number of parameters, the mesh, and damaged steps that were
            skipped.

    Returns:
        The decoder on its mesh, with its tokenizer: bytes for a run on text, or else tokenizer.json, if there is one.

    Raises:
        ConfigError: `folder` has no decoder, a setting is wrong or has no effect here, or the mesh does not divide a
            dim of the model. The error has a line for every mistake.
        ShardingError: The mesh does not divide a dim of a parameter.
        CheckpointCorruptedError: The step, or every step, is damaged.

    Example:
        >>> from flax_mesh.inference import open_trained
        >>> from flax_mesh.train import apply_overrides, load_recipe, train
        >>> settings = ["run.steps=1", "model.num_layers=1", "run.eval_every=0", "run.sample_tokens=0"]
        >>> result = train(apply_overrides(load_recipe("recipes/tiny.py"), [*settings, "run.folder=runs/tiny"]))
        >>> trained = open_trained("runs/tiny", ["mesh.shape=fsdp:4,tp:2"])
        >>> text = trained.generate("def main", max_tokens=4)
        >>> trained.evaluate("stdlib", max_tokens=1001).num_tokens
        1000
    """
    source = find_source(folder, step)
    settings = read_settings(source, [overrides] if isinstance(overrides, str) else overrides)
    return load_trained(source, settings, open_tokenizer(source), stop_tokens(source), average=average, say=say)


def load_trained(
    source: Source,
    settings: Settings,
    tokenizer: Tokenizer | None = None,
    stops: Sequence[int] = (),
    *,
    average: bool = True,
    sequence_length: int | None = None,
    say: Say,
) -> TrainedModel:
    """Load the arrays of `source`, or of a newer step if a run deletes that one meanwhile.

    Its settings and its tokenizer have been checked. A `sequence_length`, of `evaluate`, is checked as well, as
    --sequence-length.
    """
    given = [source]

    def load() -> TrainedModel:
        current = given.pop() if given else find_source(*source.asked)
        if current.model != source.model:
            raise ConfigError(f"{source.path} was deleted, and {current.path} has another model; repeat the command")
        with noticing_deletion(current.path):
            recipe = _checked_recipe(current, settings, sequence_length)
            mesh, config = recipe.device_mesh, cast(DecoderConfig, recipe.model)
            abstract = abstract_state(recipe.make_model, mesh, recipe.layout.rules)
            graphdef, _ = abstract_split(recipe.make_model, mesh)
            state, what = _load(current, config, abstract, average)
            model: Decoder = merge_lora(nnx.merge(graphdef, state))
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, graph=True)))
        for path in current.damaged:
            say(f"{path} is damaged and was skipped")
        say(f"model: {current.path}, {what}, {count / 1e6:.2f}M parameters")
        for note in filter(None, (*recipe.target.notes, config.copies_on(mesh))):
            say(note)
        hint = "" if settings.has_mesh else "; mesh.shape=... sets another one"
        say(f"mesh: {_mesh_line(mesh)}{hint}")
        return TrainedModel(model, config, mesh, tokenizer, tuple(stops), current, f"{current.path}, {what}")

    return of_newest(load, source.asked[0], step=source.asked[1])


def _checked_recipe(source: Source, settings: Settings, sequence_length: int | None) -> Recipe:
    """The recipe of the model on its mesh; ConfigError if the mesh or `source` does not fit the settings."""
    config = settings.config
    _check_layers(source, config.model)
    if not settings.has_mesh:
        sizes = default_mesh(config.model, len(jax.devices()))
        shape = format_mesh_shape(list(sizes), list(sizes.values()))
        config = replace(
            config, mesh=replace(config.mesh, shape=shape), run=replace(config.run, platform="auto")
        )  # auto: the mesh may use fewer devices
    recipe = derive(config, local_target(config.mesh, config.run.platform), {})
    problems = check_model_on_mesh(config, recipe.device_mesh, recipe.rules.axes)
    if sequence_length is not None:
        problems += length_problems(config.model, recipe.device_mesh, sequence_length, "--sequence-length")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return recipe


def _mesh_line(mesh: Mesh) -> str:
    kind = mesh.devices.flat[0].device_kind
    return f"one {kind}" if mesh.devices.size == 1 else f"{mesh_text(mesh.shape)} on {mesh.devices.size} x {kind}"


@check_types
def for_generation(model: Decoder, shape: str = "") -> Decoder:
    """A decoder in the layout in which it generates, on the devices that its arrays are on, with its adapters merged.

    Arrays that have this layout already are not copied. Constants of a recipe, such as a teacher, are left out. `model`
    itself does not change.

    Args:
        model: A `Decoder` on a mesh, such as the one that `Rollouts` pass.
        shape: The mesh, such as "fsdp:2,tp:4". "": the default mesh of `open_trained`.

    Example:
        >>> from flax_mesh.inference import for_generation
        >>> from flax_mesh.models import DecoderConfig, make_decoder
        >>> config = DecoderConfig(num_layers=1, num_heads=2, num_kv_heads=2)
        >>> make = lambda: make_decoder(config, nnx.Rngs(0))
        >>> model = fm.init_model(make, fm.abstract_state(make, fm.create_mesh("fsdp:8")))
        >>> for_generation(model).embed.embedding[...].sharding.mesh.shape["tp"]
        2
    """
    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))  # new Variables: those of `model` do not change
    for name in nnx.state(copy, Constant):
        delattr(copy, str(name))
    graphdef, state = nnx.split(merge_lora(copy))
    devices = [*jax.tree.leaves(state)[0].sharding.mesh.devices.flat]
    mesh = create_mesh(shape or default_mesh(model.config, len(devices)), devices=devices)
    layout = abstract_state(lambda: type(model)(model.config, rngs=nnx.Rngs(0)), mesh)
    return nnx.merge(graphdef, reshard(state, layout))


def default_mesh(config: DecoderConfig, num_devices: int) -> dict[str, int]:
    """As many devices as the dims of the model allow: on tp a divisor of the key-value heads, the rest on fsdp.

    >>> default_mesh(DecoderConfig(num_kv_heads=4, hidden_size=256), 8)
    {'fsdp': 2, 'tp': 4}
    """
    for used in range(num_devices, 1, -1):
        for tp in range(math.gcd(used, config.num_kv_heads), 0, -1):
            sizes = {"fsdp": used // tp, "tp": tp}
            parts = [size % num_parts(config.axes, sizes, logical) for _, logical, size in config.dims()]
            if used % tp == 0 and not any(parts):
                return sizes
    return {"fsdp": 1, "tp": 1}


def _check_layers(source: Source, config: DecoderConfig) -> None:
    """Settings of a billion layers must fail before a model of that size is traced."""
    if source.decoder is not None:
        if problems := source.decoder._replace(settings=vars(config)).problems():
            raise ConfigError(problems)
    elif config.num_layers > (count := len(read_tree(source.path, source.record))):
        with is_decoder(source.path):
            raise ConfigError(f"model.num_layers={config.num_layers}, but it has only {count} arrays")


def _load(source: Source, config: DecoderConfig, abstract: nnx.State, average: bool) -> tuple[nnx.State, str]:
    """The arrays in the layout of `abstract`, and their description."""
    if source.decoder is not None:
        return source.decoder._replace(settings=vars(config)).load(abstract), source.decoder.model_type
    arrays = read_tree(source.path, source.record)
    averaged = averages(source.path, arrays, source.record) if average else {}
    scaled = {MODEL + path: (array.path, factor) for path, (array, factor) in averaged.items()}
    step = step_number(source.path)
    what = ", moving average of the parameters" if scaled else ""
    what += f", {NOT_EVALUATED}" if schedule_free_sources(arrays) else ""
    with Checkpointer(source.path.parent, layers=model_layers(Decoder) or None) as checkpointer:
        tree: PyTree = {"model": abstract}
        try:
            checkpointer.check(tree, step, include=MODEL, cast=True)
        except (StepDeletedError, UnreadableError):
            raise
        except ConfigError as error:
            head = f"{source.path} is not a checkpoint of {DECODER} with these settings:"
            raise type(error)(error.problems, head=head) from error
        # `find_source` has verified it.
        state = checkpointer.restore(tree, step, include=MODEL, cast=True, verify=False, scaled=scaled)["model"]
    return state, f"step {step}{what}"
