"""Checks that find every mistake in a config before anything large compiles. Each mistake is one line."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import PartitionAxis, as_tuple
from flax_mesh.checkpoint.find import find_step
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.checkpoint.hf.kept import is_huggingface
from flax_mesh.data.config import NO_SOURCE
from flax_mesh.data.evaluation import eval_fn_problems
from flax_mesh.errors import ConfigError, Mistakes, Problem, as_problem, labelled
from flax_mesh.fields import path_problem, type_problems, value_problems
from flax_mesh.hardware import load_chip
from flax_mesh.recipe.compiler_options import parse_compiler_options
from flax_mesh.recipe.config import PLATFORM, TrainConfig, shard_over
from flax_mesh.recipe.model import method_of
from flax_mesh.recipe.schedule import parse_cut, pipeline_schedule
from flax_mesh.recipe.target import AXIS_NAMES, axis_sizes
from flax_mesh.sharding.memory import memory_problem
from flax_mesh.store import SETTINGS, is_present, model_folder, stored_path, stored_path_problem
from flax_mesh.text import shown
from flax_mesh.user_code import check_arguments

MOST_UNROLLED = 1000  # layers that are traced one by one, each of which takes about half a second
MODEL_AXES = AXIS_NAMES[1:]  # pp is the axis of the pipeline's groups
# A dim that the mesh does not divide: how to repair it in a model with `axes`.
WHOLE = "model.axes.vocab_axis=none, which leaves it whole"
REPAIRS = {"model.vocab_size": f"use another mesh.shape, {WHOLE}, or for a new model a multiple"}
# Settings of the model that a new run may change: parameters are cast, these are coefficients of the loss, and modules
# of predictions are read where they are asked for.
MAY_DIFFER = {"dtype", "param_dtype", "load_balance_loss", "router_z_loss", "prediction_layers"}


def check_config(config: TrainConfig) -> list[str]:
    """One line for every mistake that can be found without devices and without tracing the model."""
    wrong = type_problems(config)
    problems: list[str] = [*wrong, *value_problems(config), *method_of(config.model, "problems", list[str])()]
    if not wrong:  # otherwise values cannot be compared
        problems += _check_together(config)
    return list(dict.fromkeys(problems))  # a model's own check repeats the lines about its fields


def _check_together(config: TrainConfig) -> list[str]:
    """One line for every mistake in the texts of settings, and in settings that depend on each other."""
    run, mistakes, over = config.run, Mistakes(), shard_over(config.optimizer)
    problems = mistakes.problems
    problems += _unknown_axes("optimizer.shard_over", over)
    if twice := sorted({name for name in over if over.count(name) > 1}):
        problems.append(f"optimizer.shard_over={config.optimizer.shard_over} has {', '.join(twice)} twice; remove one")
    if config.mesh.rules:
        problems += _unknown_axes("mesh.rules", [*map(str.strip, config.mesh.rules.split("+"))], ", joined by +")
    problems += _check_axes("model.axes", getattr(config.model, "axes", None))
    problems += _check_axes("rules.axes", getattr(config.rules, "axes", None))
    problems += check_start(config.checkpoint.start_from, config.model)
    replaced = {"own_optimizer": config.make_optimizer is not None, "own_schedule": config.make_schedule is not None}
    problems += config.optimizer.problems(**replaced)
    batch, parts = config.data.batch_size, config.pipeline.num_microbatches
    if parts >= 1 and batch % parts:
        problems.append(f"data.batch_size={batch} is not divisible by pipeline.num_microbatches={parts}")
    if not PLATFORM.fullmatch(run.platform):
        problems.append(f"run.platform must be auto, cpu, cpu:N (N devices), gpu or tpu, got {run.platform!r}")
    try:
        if (num_groups := axis_sizes(config.mesh)["pp"]) == -1:
            problems.append(f"mesh.shape={config.mesh.shape} leaves the size of pp to the number of devices; set it")
        with mistakes:
            parse_cut(config.pipeline.cut)
        if num_groups > 1 and config.pipeline.num_microbatches >= 1:
            with mistakes:
                pipeline_schedule(config.pipeline, num_groups)
        problems += _check_layers(config.model, num_groups)
    except ValueError as error:
        problems.append(f"mesh.shape: {error}")
    with mistakes:
        parse_compiler_options(run.compiler_options)
    if run.hardware and not path_problem(run.hardware):
        with mistakes, labelled("run.hardware"):
            load_chip(run.hardware)
    if config.make_batches is not None and config.sample is not None:
        problems.append(
            "sample continues text and requires the tokens of data.source; with make_batches, set sample=None"
        )
    problems += _check_lora(config)
    if config.make_batches is None and not config.data.resumable:
        problems.append("data.resumable=false is for iterators that make_batches returns; remove it")
    if config.make_batches is None and config.data.rows == "process":
        problems.append("data.rows=process is for make_batches; tokens of files need no setting, so remove it")
    problems += [*_check_filter(config.wrt), *eval_fn_problems(config.eval_fns)]
    if config.data.source == "":
        problems.append(NO_SOURCE)
    if run.folder == "":
        problems.append("run.folder is empty; name a folder, such as runs/default")
    return problems


def check_functions(config: TrainConfig) -> list[str]:
    """One line for every function of a recipe that cannot be called as its field requires."""
    functions: dict[str, tuple[Callable[..., object] | None, tuple[str, ...]]] = {
        "make_model": (config.make_model, ("config", "rngs")),
        "loss_fn": (config.loss_fn, ("model", "batch")),
        "make_optimizer": (config.make_optimizer, ("config", "parameters")),
        "make_schedule": (config.make_schedule, ("config",)),
        "make_batches": (config.make_batches, ("config", "rows")[: 1 + (config.data.rows == "process")]),
        "flops_per_token": (config.flops_per_token, ("config", "num_parameters", "sequence_length")),
    }
    functions |= {f"constants[{name!r}]": (function, ("config",)) for name, function in config.constants.items()}
    functions |= {
        f"eval_fns[{name!r}]": (function, ("config", "evaluate")) for name, function in config.eval_fns.items()
    }
    mistakes = Mistakes()
    for name, (function, arguments) in functions.items():
        if callable(function):  # others are reported with the types of the fields
            with mistakes:
                check_arguments(name, function, *arguments)
    return mistakes.problems


def sequence_length_of(config: TrainConfig) -> int | None:
    """The length of the sequences of tokens; None for batches of `make_batches`."""
    return config.data.sequence_length if config.make_batches is None else None


def _unknown_axes(setting: str, names: Sequence[str], hint: str = "") -> list[str]:
    """One line if a setting names axes that no mesh of a recipe has, besides the axis of the groups."""
    unknown = [name for name in names if name not in MODEL_AXES]
    text = f"{', '.join(map(repr, unknown))} is not a mesh axis; use {', '.join(MODEL_AXES)}{hint}"
    return [f"{setting}: {text}"] if unknown else []


def _check_axes(prefix: str, axes: object) -> list[str]:
    """One line for every field of a PartitionAxis that names an axis which no mesh of a recipe has."""
    if not isinstance(axes, PartitionAxis):
        return []
    values = {item.name: getattr(axes, item.name) for item in dataclasses.fields(axes) if item.name != "extra"}
    values |= {f"extra[{name!r}]": value for name, value in axes.extra}
    return [
        line
        for name, value in values.items()
        for line in _unknown_axes(f"{prefix}.{name}", as_tuple(value), " or none")
    ]


def _check_lora(config: TrainConfig) -> list[str]:
    """One line for every setting that adapters leave without a meaning."""
    if not config.lora.rank:
        return []
    problems: list[str] = []
    try:
        re.compile(config.lora.modules)
    except re.error as error:
        problems.append(f"lora.modules={config.lora.modules} is not a regular expression: {error}")
    if config.wrt is not nnx.Param:
        problems.append(
            "wrt selects the trained variables, but with lora.rank above 0 these are the adapters; remove wrt"
        )
    if config.optimizer.name == "muon" and config.make_optimizer is None:
        problems.append(
            "optimizer.name=muon is for the matrices of the model, not for adapters; use adamw with lora.rank"
        )
    return problems


def _check_filter(wrt: object) -> list[str]:
    """One line if `wrt` is not a filter of NNX, or selects everything."""
    if wrt is ... or wrt is True:
        return [
            f"wrt={'...' if wrt is ... else wrt} selects all variables, also the counts of random streams, which "
            "cannot be trained; name the types that are trained, such as nnx.Param"
        ]
    try:
        nnx.filterlib.to_predicate(cast("Filter", wrt))
    except (TypeError, ValueError):  # some versions of Flax fail to format their own message
        text = shown(wrt)
        return [f"wrt must be a filter of NNX, such as nnx.Param or a function of path and variable, got {text}"]
    return []


def _check_layers(model: object, num_groups: int) -> list[str]:
    """One line if a model has too many layers to trace them; only a scan over a stack traces one for all."""
    count, scan = getattr(model, "num_layers", None), getattr(model, "scan", None)
    if not isinstance(count, int) or count <= MOST_UNROLLED or (scan and num_groups == 1):
        return []
    reason = "the stages of a pipeline trace every layer" if num_groups > 1 else "every layer is traced"
    repair = "" if scan or not isinstance(scan, bool) else ", or set model.scan=true"
    where = " and a mesh without pp" if repair and num_groups > 1 else ""
    return [f"model.num_layers={count} must be at most {MOST_UNROLLED:,}, because {reason}; use fewer{repair}{where}"]


def check_start(folder: str, model: object) -> list[str]:
    if not folder or stored_path_problem(folder):
        return []
    try:
        if not is_huggingface(folder, parameters=False):
            find_step(folder)
            return []
        # A plan needs no parameters, and a run that loads them from the hub checks them.
        source = open_decoder(model_folder(folder, SETTINGS))
        is_here = is_present(stored_path(folder)) and is_huggingface(folder)
        problems = [f"checkpoint.start_from: {line}" for line in (source.problems() if is_here else ())]
    except ConfigError as error:
        hint = ["  To ignore them: flax-mesh checkpoint import FOLDER OUT --ignore NAME, and checkpoint.start_from=OUT"]
        lines = [f"checkpoint.start_from: {line}" for line in error.lines]
        return lines + (hint if error.can_ignore else [])
    except OSError as error:
        return [f"checkpoint.start_from={folder} cannot be read: {error.strerror}"]
    return problems + [
        f"model.{name}={getattr(model, name)} differs from {value} in checkpoint.start_from={folder}; "
        f"set model.{name}={value}"
        for name, value in source.settings.items()
        if name not in MAY_DIFFER and getattr(model, name, value) != value
    ]


def check_on_mesh(config: TrainConfig, mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> list[Problem]:
    """One problem for every dim of the batch and of the model that is not divisible by its mesh axes.

    A model config may define `dims() -> [(setting, logical axis, size)]`: one line about the number of heads is clearer
    than the error of `abstract_state`, which has one line for every array. `problems_on(mesh, sequence_length)` returns
    further lines; the length is None for batches of `make_batches`.
    """
    data, parts = config.data, config.pipeline.num_microbatches
    divisor = f" / pipeline.num_microbatches={parts}" if parts > 1 else ""
    dims = [("data.batch_size", f"{data.batch_size}{divisor}", "batch", data.batch_size // parts)]
    if config.make_batches is None:
        dims.append(("data.sequence_length", str(data.sequence_length), "sequence", data.sequence_length))
    problems = [*_undivided(dims, mesh, axes, {}), *check_model_on_mesh(config, mesh, axes, sequence_length_of(config))]
    if problem := memory_problem(mesh, config.optimizer.memory):
        problems.append(Problem("optimizer.memory", f": {problem}", "use optimizer.memory=device"))
    return problems


def check_model_on_mesh(
    config: TrainConfig, mesh: Mesh | AbstractMesh, axes: PartitionAxis, sequence_length: int | None = None
) -> list[Problem]:
    """The problems of `check_on_mesh` with the model alone."""
    dims = []
    if config.rules is None and not config.mesh.rules:  # the model's own table; another one may not split these dims
        model_dims = method_of(config.model, "dims", list[tuple[str, str, int]])()
        dims = [(setting, str(size), logical, size) for setting, logical, size in model_dims]
    problems_on = method_of(config.model, "problems_on", lambda *_: [])
    repairs = REPAIRS if isinstance(getattr(config.model, "axes", None), PartitionAxis) else {}
    return [*_undivided(dims, mesh, axes, repairs), *map(as_problem, problems_on(mesh, sequence_length))]


def _undivided(
    dims: Sequence[tuple[str, str, str, int]],
    mesh: Mesh | AbstractMesh,
    axes: PartitionAxis,
    repairs: Mapping[str, str],
) -> list[Problem]:
    """One problem for every (setting, its value, logical axis, size) that is not divisible by its mesh axes.

    `repairs`: setting -> its repair, where it is not a multiple or another mesh.
    """
    problems: list[Problem] = []
    for setting, value, logical, size in dims:
        names = [name for name in axes.mesh_axes(logical) if name in mesh.axis_names]
        ways = math.prod(mesh.shape[name] for name in names)
        if size % ways:
            over = " * ".join(f"{name}={mesh.shape[name]}" for name in names if mesh.shape[name] > 1)
            problem = f"is not divisible by {ways} ({over})"
            general = f"{setting}={size} is not divisible by its mesh axes"
            if setting == "data.batch_size":
                general = f"{setting} is not divisible by its mesh axes and pipeline.num_microbatches"
            repair = repairs.get(setting, "use a multiple, or another mesh.shape")
            problems.append(Problem(setting, problem, repair, value=value, general=general))
    return problems
