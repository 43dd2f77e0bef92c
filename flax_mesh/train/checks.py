"""From a TrainConfig to what a run needs, every mistake found before anything compiles."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.mesh import create_mesh, parse_mesh_shape
from flax_mesh.sharding import PartitionRules, abstract_model, partition_rules
from flax_mesh.sharding.abstract import ATTRIBUTE
from flax_mesh.sharding.annotations import annotations_of
from flax_mesh.sharding.rules import as_rules
from flax_mesh.text import mesh_text
from flax_mesh.train.compiler import parse_compiler_options
from flax_mesh.train.config import OptimizerConfig, TrainConfig
from flax_mesh.train.cut import check_pipeline
from flax_mesh.train.data.data import Corpus, check_data_config
from flax_mesh.train.warm_start import check_start
from flax_mesh.tree import map_named

PLATFORM = re.compile(r"auto|cpu(:[1-9][0-9]*)?|gpu|cuda|tpu")
AXIS_NAMES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
SHRINK_ORDER = ("pp", "dp", "fsdp", "sp", "ep", "tp")  # stages first, then copies and shards of the batch


def check_config(config: TrainConfig) -> list[str]:
    """One line per mistake that shows without devices, files or tracing."""
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
        found.append(f"optimizer.shard_over: {', '.join(map(repr, unknown))} is no mesh axis; use some of {names}")
    if config.checkpoint.on_failure not in ("stop", "continue"):
        found.append(f"checkpoint.on_failure must be 'stop' or 'continue', got {config.checkpoint.on_failure!r}")
    found += check_start(config.checkpoint.start_from, config.model)
    if not optimizer.clip_norm > 0:
        found.append(f"optimizer.clip_norm must be above 0 (inf for no clipping), got {optimizer.clip_norm}")
    if run.seed >= 2**32:
        found.append(f"run.seed must be below 2**32, got {run.seed}")
    if optimizer.warmup_steps >= optimizer.decay_steps:
        found.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be below "
            f"optimizer.decay_steps={optimizer.decay_steps}, which counts the warm-up too"
        )
    batch, parts = config.data.batch_size, config.pipeline.num_microbatches
    if parts >= 1 and batch % parts:
        found.append(f"data.batch_size={batch} is not divisible by pipeline.num_microbatches={parts}")
    if not PLATFORM.fullmatch(run.platform):
        found.append(f"run.platform must be auto, cpu, cpu:N (N devices), gpu or tpu, got {run.platform!r}")
    try:
        if (num_groups := mesh_shape(config)["pp"]) == -1:
            found.append(f"mesh.shape={config.mesh.shape} leaves pp to the number of devices; give it a size")
        found += check_pipeline(config.pipeline, num_groups)
    except ValueError as error:
        found.append(f"mesh.shape: {error}")
    try:
        parse_compiler_options(run.compiler_options)
    except ConfigError as error:
        found += str(error).splitlines()
    if run.folder == "":
        found.append("run.folder is empty; name a folder, such as runs/default")
    return found


def check_on_corpus(config: TrainConfig, corpus: Corpus) -> list[str]:
    """One line if the model has fewer token ids than the text."""
    ids, found = getattr(config.model, "vocab_size", None), corpus.vocab_size
    if isinstance(ids, int) and found is not None and ids < found:
        return [f"model.vocab_size={ids} is too small for data.source={config.data.source}: text needs {found}"]
    return []


def mesh_shape(config: TrainConfig) -> dict[str, int]:
    """Axis sizes of `mesh.shape` in its order, then the axes it leaves out with size 1; one may be -1."""
    return parse_mesh_shape(config.mesh.shape, AXIS_NAMES, omitted=1)


def make_mesh(config: TrainConfig, say: Callable[[str], None]) -> Mesh:
    """The mesh of the run. `run.platform=auto` shrinks it to the devices that are there and says so."""
    shape = mesh_shape(config)
    if shape["pp"] == 1:
        del shape["pp"]
    devices = jax.devices()
    if config.run.platform == "auto":
        fitted = fit_mesh(shape, len(devices))
        if fitted != {k: v for k, v in shape.items() if v != -1} | {k: fitted[k] for k, v in shape.items() if v == -1}:
            wanted, found = mesh_text(shape), mesh_text(fitted)
            say(f"mesh: {wanted} needs more than the {len(devices)} devices here; shrunk to {found}")
        shape = {name: size for name, size in fitted.items() if (name, size) != ("pp", 1)}
        used = math.prod(shape.values())
        if used < len(devices):
            say(f"mesh: uses {used} of the {len(devices)} devices here")
            devices = devices[:used]
    names = sorted(shape, key=lambda name: name != "pp")  # the groups of a pipeline are far from each other
    try:
        return create_mesh(tuple(shape[name] for name in names), tuple(names), devices=devices)
    except ValueError as error:
        raise ConfigError(f"mesh.shape={config.mesh.shape}: {error}") from error


def fit_mesh(shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """`shape` with axes divided by their smallest factors until it fits `num_devices`; -1 takes what is left."""
    fitted = dict(shape)
    free = [name for name, size in shape.items() if size == -1]
    fitted |= dict.fromkeys(free, 1)
    while math.prod(fitted.values()) > num_devices:
        name = next(axis for axis in SHRINK_ORDER if fitted.get(axis, 1) > 1)
        size = fitted[name]
        fitted[name] = size // next(factor for factor in range(2, size + 1) if size % factor == 0)
    for name in free:
        fitted[name] = num_devices // math.prod(fitted.values())
    return fitted


def run_rules(config: TrainConfig) -> PartitionRules:
    """The rule table of the run: the recipe's, or the one the model carries; an empty one for an annotated model."""
    if config.rules is not None:
        return as_rules(config.rules)
    model = abstract_model(lambda: config.make_model(config.model, nnx.Rngs(config.run.seed)))
    if not hasattr(model, ATTRIBUTE) and annotations_of(nnx.state(model)):
        return PartitionRules([], getattr(model, "axes", DEFAULT_AXES))
    return partition_rules(model)


def check_on_mesh(config: TrainConfig, mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> list[str]:
    """Dims of the batch and of the model that do not divide over the mesh, one line each.

    A model config tells of its own by a method `dims() -> [(setting, logical axis, size)]`: one line about the number
    of heads is clearer than the error of `abstract_state`, which has a line for every array. What else cannot be on
    this mesh it tells by a method `problems_on(mesh)`.
    """
    data, parts = config.data, config.pipeline.num_microbatches
    cut = f" / pipeline.num_microbatches={parts}" if parts > 1 else ""
    dims = [
        (f"data.batch_size={data.batch_size}{cut}", "batch", data.batch_size // parts),
        (f"data.sequence_length={data.sequence_length}", "sequence", data.sequence_length),
    ]
    if config.rules is None:  # the model's own table; another one may leave these dims whole
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


def batch_sharding(mesh: Mesh, axes: PartitionAxis) -> NamedSharding:
    """Layout of inputs and targets, (batch, sequence)."""
    return NamedSharding(mesh, axes.resolve(("batch", "sequence")))


def shard_over(config: TrainConfig) -> tuple[str, ...]:
    """Mesh axes of `optimizer.shard_over`."""
    return tuple(name.strip() for name in config.optimizer.shard_over.split(",") if name.strip())


def make_modules(config: TrainConfig) -> tuple[nnx.Module, nnx.Optimizer]:
    """Model and optimizer of a run; only ever traced."""
    model = config.make_model(config.model, nnx.Rngs(config.run.seed))
    return model, nnx.Optimizer(model, make_optimizer(config.optimizer), wrt=nnx.Param)


def make_learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, cosine to `end_learning_rate` at `decay_steps`, constant from there. Step 0 already learns."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.end_learning_rate,
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) behind a clip of the global norm; scales and biases are not decayed."""

    def decayed(params: Any) -> Any:
        return map_named(lambda path, _: path.rsplit("/", 1)[-1] not in ("scale", "bias"), params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_learning_rate_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
