"""Checks that find every mistake in a config before anything large compiles. Each mistake is one line."""

import math
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import PartitionAxis
from flax_mesh.checkpoint.find import find_step
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.errors import ConfigError
from flax_mesh.mpmd import Pipeline
from flax_mesh.mpmd.schedules.schedule import make_schedule
from flax_mesh.mpmd.split.remat import REMAT_MODES
from flax_mesh.mpmd.transport.ordered import TRANSPORTS
from flax_mesh.train.config import (
    AXIS_NAMES,
    CHECKS,
    PLATFORM,
    CompilerOptions,
    PipelineConfig,
    TrainConfig,
    mesh_shape,
    options_text,
    parse_compiler_options,
    parse_cut,
    shard_over,
)
from flax_mesh.train.data.data import Corpus, check_data_config
from flax_mesh.train.warm_start import MAY_DIFFER, is_huggingface


def check_config(config: TrainConfig) -> list[str]:
    """One line for every mistake that can be found without devices and without tracing the model."""
    found = [*check_data_config(config.data), *getattr(config.model, "problems", list)()]
    optimizer, run = config.optimizer, config.run
    at_least_one = {
        "pipeline.num_microbatches": config.pipeline.num_microbatches,
        "optimizer.decay_steps": optimizer.decay_steps,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        "run.steps": run.steps,
    }
    not_negative = {
        "optimizer.learning_rate": optimizer.learning_rate,
        "optimizer.end_learning_rate": optimizer.end_learning_rate,
        "optimizer.warmup_steps": optimizer.warmup_steps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "checkpoint.keep_best": config.checkpoint.keep_best,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "run.eval_every": run.eval_every,
        "run.sample_tokens": run.sample_tokens,
        "run.seed": run.seed,
    }
    found += [f"{key} must be at least 1, got {value}" for key, value in at_least_one.items() if value < 1]
    found += [f"{key} must not be negative, got {value}" for key, value in not_negative.items() if not value >= 0]
    if unknown := [name for name in shard_over(config) if name not in AXIS_NAMES[1:]]:
        names = ", ".join(AXIS_NAMES[1:])
        found.append(f"optimizer.shard_over: {', '.join(map(repr, unknown))} is not a mesh axis; use {names}")
    if config.mesh.rules and (unknown := [a for a in config.mesh.rules.split("+") if a.strip() not in AXIS_NAMES[1:]]):
        names = ", ".join(AXIS_NAMES[1:])
        found.append(f"mesh.rules: {', '.join(map(repr, unknown))} is not a mesh axis; use {names}, joined by +")
    if config.checkpoint.on_failure not in ("stop", "continue"):
        found.append(f"checkpoint.on_failure must be 'stop' or 'continue', got {config.checkpoint.on_failure!r}")
    if run.on_nonfinite not in ("stop", "skip", "continue"):
        found.append(f"run.on_nonfinite must be 'stop', 'skip' or 'continue', got {run.on_nonfinite!r}")
    if not (run.spike_factor == 0 or run.spike_factor > 1):
        found.append(f"run.spike_factor must be above 1, or 0 for no limit, got {run.spike_factor}")
    found += check_start(config.checkpoint.start_from, config.model)
    if not optimizer.clip_norm > 0:
        found.append(f"optimizer.clip_norm must be above 0 (inf disables clipping), got {optimizer.clip_norm}")
    if run.seed >= 2**32:
        found.append(f"run.seed must be below 2**32, got {run.seed}")
    if optimizer.warmup_steps >= optimizer.decay_steps:
        found.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be below "
            f"optimizer.decay_steps={optimizer.decay_steps}, which includes the warm-up"
        )
    batch, parts = config.data.batch_size, config.pipeline.num_microbatches
    if parts >= 1 and batch % parts:
        found.append(f"data.batch_size={batch} is not divisible by pipeline.num_microbatches={parts}")
    if not PLATFORM.fullmatch(run.platform):
        found.append(f"run.platform must be auto, cpu, cpu:N (N devices), gpu or tpu, got {run.platform!r}")
    try:
        if (num_groups := mesh_shape(config)["pp"]) == -1:
            found.append(f"mesh.shape={config.mesh.shape} leaves the size of pp to the number of devices; set it")
        found += check_pipeline(config.pipeline, num_groups)
    except ValueError as error:
        found.append(f"mesh.shape: {error}")
    try:
        parse_compiler_options(run.compiler_options)
    except ConfigError as error:
        found += error.problems
    if run.folder == "":
        found.append("run.folder is empty; name a folder, such as runs/default")
    return found


def check_pipeline(config: PipelineConfig, num_groups: int) -> list[str]:
    """One line for every mistake in the settings of a pipeline over `num_groups` groups."""
    found = []
    try:
        parse_cut(config.cut)
    except ConfigError as error:
        found.append(str(error))
    if config.remat not in REMAT_MODES:
        found.append(f"pipeline.remat must be one of {', '.join(REMAT_MODES)}, got {config.remat!r}")
    if config.transport not in TRANSPORTS:
        found.append(f"pipeline.transport must be one of {', '.join(TRANSPORTS)}, got {config.transport!r}")
    if config.check not in CHECKS:
        found.append(f"pipeline.check must be one of {', '.join(CHECKS)}, got {config.check!r}")
    if num_groups > 1 and config.num_microbatches >= 1:
        try:
            make_schedule(
                config.schedule,
                num_groups=num_groups,
                num_microbatches=config.num_microbatches,
                num_virtual_stages=config.num_virtual_stages,
            )
        except ValueError as error:
            found.append(f"pipeline.schedule={config.schedule}: {error}")
    return found


def check_start(folder: str, model: Any) -> list[str]:
    if not folder:
        return []
    try:
        if not is_huggingface(folder):
            find_step(folder)
            return []
        source = open_decoder(folder)
        problems = [f"checkpoint.start_from: {problem}" for problem in source.problems()]
    except ConfigError as error:
        hint = ["  To ignore them: flax-mesh checkpoint import FOLDER OUT --ignore NAME, and checkpoint.start_from=OUT"]
        found = [f"checkpoint.start_from: {problem}" for problem in error.problems]
        return found + (hint if "ignore=" in str(error) else [])
    return problems + [
        f"model.{name}={getattr(model, name)} differs from {value} in checkpoint.start_from={folder}; "
        f"set model.{name}={value}"
        for name, value in source.settings.items()
        if name not in MAY_DIFFER and getattr(model, name, value) != value
    ]


def check_compiler_options(options: CompilerOptions, device: Any) -> list[str]:
    """One line for every option that the compiler of `device` rejects, found by compiling `x + 1` with it."""
    found, sharding = [], jax.sharding.SingleDeviceSharding(device)
    for name, value in options.items():
        add_one = jax.jit(lambda x: x + 1, compiler_options={name: value})
        try:
            add_one.lower(jax.ShapeDtypeStruct((), "float32", sharding=sharding)).compile()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            found.append(
                f"run.compiler_options: {options_text({name: value})} is refused: {str(error).splitlines()[0]}"
            )
    return found


def check_on_mesh(config: TrainConfig, mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> list[str]:
    """One line for every dim of the batch and of the model that is not divisible by its mesh axes.

    A model config may define `dims() -> [(setting, logical axis, size)]`: one line about the number of heads is clearer
    than the error of `abstract_state`, which has one line for every array. `problems_on(mesh)` returns further lines.
    """
    data, parts = config.data, config.pipeline.num_microbatches
    divisor = f" / pipeline.num_microbatches={parts}" if parts > 1 else ""
    dims = [
        (f"data.batch_size={data.batch_size}{divisor}", "batch", data.batch_size // parts),
        (f"data.sequence_length={data.sequence_length}", "sequence", data.sequence_length),
    ]
    if config.rules is None and not config.mesh.rules:  # the model's own table; another one may not split these dims
        model_dims = getattr(config.model, "dims", list)()
        dims += [(f"{setting}={size}", logical, size) for setting, logical, size in model_dims]
    found = []
    for text, logical, size in dims:
        names = [name for name in axes.mesh_axes(logical) if name in mesh.axis_names]
        ways = math.prod(mesh.shape[name] for name in names)
        if size % ways:
            over = " * ".join(f"{name}={mesh.shape[name]}" for name in names if mesh.shape[name] > 1)
            found.append(f"{text} is not divisible by {ways} ({over}); use a multiple, or another mesh.shape")
    return [*found, *getattr(config.model, "problems_on", lambda mesh: [])(mesh)]


def check_on_corpus(config: TrainConfig, corpus: Corpus) -> list[str]:
    """One line if the model's vocabulary is smaller than that of the text."""
    ids, found = getattr(config.model, "vocab_size", None), corpus.vocab_size
    if isinstance(ids, int) and found is not None and ids < found:
        return [f"model.vocab_size={ids} is too small for data.source={config.data.source}: text needs {found}"]
    return []


def check_trace(path: Path, shape: str, pipeline: Pipeline | None) -> list[str]:
    found = []
    if pipeline is None:
        found.append(f"--trace {path}: only a pipeline can be traced; add pp to mesh.shape={shape}")
    elif pipeline.channel is not None:
        found.append(f"--trace {path}: all groups must be in one process; this run has {jax.process_count()} processes")
    if path.suffix == ".svg":
        found.append(
            f"--trace {path}: the trace is a JSON file, with an .svg beside it; use {path.with_suffix('.json')}"
        )
    if not path.parent.is_dir():
        found.append(f"--trace {path}: folder {path.parent} does not exist; create it first")
    return found
