"""A trained decoder on the devices: from a checkpoint of any layout, or from a Hugging Face folder."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.find import step_number
from flax_mesh.checkpoint.read import read_tree
from flax_mesh.errors import ConfigError, as_problem
from flax_mesh.inference.evaluate import length_problem
from flax_mesh.inference.source import DECODER, Settings, Source, find_source, is_decoder, read_settings
from flax_mesh.inference.tokenizer import Tokenizer, open_tokenizer
from flax_mesh.mesh.shape import format_mesh_shape
from flax_mesh.models import Decoder, DecoderConfig
from flax_mesh.mpmd.runtime.placement import MODEL
from flax_mesh.recipe.checks import check_model_on_mesh
from flax_mesh.recipe.resolve import derive
from flax_mesh.recipe.saved import averages
from flax_mesh.recipe.target import local_target
from flax_mesh.sharding.abstract import abstract_split, abstract_state, model_layers
from flax_mesh.text import mesh_text

Say = Callable[[str], None]


class TrainedModel(NamedTuple):
    """A decoder with its arrays on the devices of `mesh`, and its tokenizer, if it has one."""

    model: Decoder
    config: DecoderConfig
    mesh: Mesh
    tokenizer: Tokenizer | None
    description: str


def open_trained(
    folder: str | Path,
    overrides: Sequence[str] = (),
    step: int | None = None,
    *,
    average: bool = True,
    say: Say = lambda text: None,
) -> TrainedModel:
    """Open the newest valid step of a run, or `step`, or a Hugging Face folder, directly sharded over a mesh.

    `overrides` are settings of the model, of the mesh, and run.platform. A run with `optimizer.ema` has the moving
    average of its parameters, unless `average` is False. Raises ConfigError or ShardingError with a line for every
    mistake, and CheckpointCorruptedError.
    """
    source = find_source(folder, step)
    settings = read_settings(source, overrides)
    return load_trained(source, settings, open_tokenizer(source), average=average, say=say)


def load_trained(
    source: Source,
    settings: Settings,
    tokenizer: Tokenizer | None,
    *,
    average: bool = True,
    sequence_length: int | None = None,
    say: Say,
) -> TrainedModel:
    """Load the arrays of `source`, after its settings and its tokenizer have been checked.

    A `sequence_length` is checked as well: that of `evaluate`, as --sequence-length.
    """
    config = settings.config
    _check_layers(source, config.model)
    if not settings.has_mesh:
        sizes = default_mesh(config.model, len(jax.devices()))
        shape = format_mesh_shape(list(sizes), list(sizes.values()))
        config = replace(
            config, mesh=replace(config.mesh, shape=shape), run=replace(config.run, platform="auto")
        )  # auto: the mesh may use fewer devices
    recipe = derive(config, local_target(config.mesh, config.run.platform), {})
    mesh = recipe.device_mesh
    problems = check_model_on_mesh(config, mesh, recipe.rules.axes, sequence_length)
    problems = [
        problem.renamed("--sequence-length") if problem.setting == "data.sequence_length" else problem
        for problem in problems
    ]
    if sequence_length is not None and (problem := length_problem(config.model.axes, mesh, sequence_length)):
        problems.append(as_problem(problem))
    if problems:
        raise ConfigError(problems)
    abstract = abstract_state(recipe.make_model, mesh, recipe.layout.rules)
    graphdef, _ = abstract_split(recipe.make_model, mesh)
    state, what = _load(source, config.model, abstract, average)
    model: Decoder = nnx.merge(graphdef, state)  # pyright: ignore[reportAssignmentType]
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(state))
    for path in source.damaged:
        say(f"{path} is damaged and was skipped")
    say(f"model: {source.path}, {what}, {count / 1e6:.2f}M parameters")
    for note in recipe.target.notes:
        say(note)
    more = "" if settings.has_mesh else "; mesh.shape=... sets another one"
    say(f"mesh: {_mesh_line(mesh)}{more}")
    return TrainedModel(model, config.model, mesh, tokenizer, f"{source.path}, {what}")


def _mesh_line(mesh: Mesh) -> str:
    kind = mesh.devices.flat[0].device_kind
    return f"one {kind}" if mesh.devices.size == 1 else f"{mesh_text(mesh.shape)} on {mesh.devices.size} x {kind}"


def default_mesh(config: DecoderConfig, num_devices: int) -> dict[str, int]:
    """As many devices as the dims of the model allow: on tp what divides the key-value heads, the rest on fsdp.

    >>> default_mesh(DecoderConfig(num_kv_heads=4, hidden_size=256), 8)
    {'fsdp': 2, 'tp': 4}
    """
    for used in range(num_devices, 1, -1):
        for tp in range(math.gcd(used, config.num_kv_heads), 0, -1):
            sizes = {"fsdp": used // tp, "tp": tp}
            if used % tp == 0 and _divides(config, sizes):
                return sizes
    return {"fsdp": 1, "tp": 1}


def _divides(config: DecoderConfig, sizes: Mapping[str, int]) -> bool:
    """Whether a mesh of these sizes divides every dim of the model."""
    ways = lambda logical: math.prod(sizes.get(axis, 1) for axis in config.axes.mesh_axes(logical))  # noqa: E731
    return all(size % ways(logical) == 0 for _, logical, size in config.dims())


def _check_layers(source: Source, config: DecoderConfig) -> None:
    """Settings of a billion layers must fail before a model of that size is traced."""
    if source.decoder is not None:
        if problems := source.decoder._replace(settings=vars(config)).problems():
            raise ConfigError(problems)
    elif config.num_layers > (count := len(read_tree(source.path, source.record))):
        with is_decoder(source.path):
            raise ConfigError(f"model.num_layers={config.num_layers}, but it has only {count} arrays")


def _load(source: Source, config: DecoderConfig, abstract: nnx.State, average: bool) -> tuple[nnx.State, str]:
    """The arrays in the layout of `abstract`, and what they are."""
    if source.decoder is not None:
        return source.decoder._replace(settings=vars(config)).load(abstract), source.decoder.model_type
    arrays = read_tree(source.path, source.record)
    found = averages(source.path, arrays, source.record) if average else {}
    scaled = {MODEL + path: (array.path, factor) for path, (array, factor) in found.items()}
    step = step_number(source.path)
    with Checkpointer(source.path.parent, layers=model_layers(Decoder) or None) as checkpointer:
        tree: Any = {"model": abstract}
        try:
            checkpointer.check(tree, step, include=MODEL, cast=True)
        except ConfigError as error:
            head = f"{source.path} is not a checkpoint of {DECODER} with these settings:"
            raise type(error)(error.problems, head=head) from error
        # `find_source` has verified it.
        state = checkpointer.restore(tree, step, include=MODEL, cast=True, verify=False, scaled=scaled)["model"]
    return state, f"step {step}" + (", moving average of the parameters" if scaled else "")
