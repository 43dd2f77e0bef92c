"""TrainConfig: everything that defines a run, as frozen dataclasses that can be printed, parsed and compared.

The functions after the dataclasses load recipes and parse the settings whose text has a special syntax.
"""

# pyright: reportMissingTypeStubs=false

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from flax_mesh.blockwise.transform import MODES
from flax_mesh.data.config import DataConfig
from flax_mesh.fields import SAME_RESULT, changed_repr
from flax_mesh.lora.config import LoraConfig
from flax_mesh.mpmd.runtime.pipeline import REMAT_MODES, TRANSPORTS
from flax_mesh.recipe.optimizers.config import AT_LEAST_0, AT_LEAST_1, OptimizerConfig
from flax_mesh.store import stored_path_problem
from flax_mesh.tree import Constant, PyTree

PLATFORM = re.compile(r"auto|cpu(:[1-9][0-9]*)?|gpu|tpu")
SECTIONS = ("model", "loss_fn", "lora", "mesh", "pipeline", "data", "optimizer", "checkpoint", "run")


@dataclass(frozen=True)
class MeshConfig:
    """The device mesh.

    Attributes:
        shape: Axis sizes, such as "dp:2,fsdp:-1,tp:2". One size may be -1: the remaining devices. Axes that are not
            listed have size 1.
        rules: Mesh axes such as "fsdp" or "fsdp+dp". Every array is then split over them on its largest dim that
            divides; the rule table of the recipe or of the model is not used.
        axis_types: "auto": XLA chooses the shardings of activations. "explicit": the sharding of an array is part of
            its type, for models that are written so (`jax.sharding.AxisType`).
    """

    __repr__ = changed_repr

    shape: str = field(default="fsdp:-1", metadata=SAME_RESULT)
    rules: str = field(default="", metadata=SAME_RESULT)
    axis_types: str = field(default="auto", metadata=SAME_RESULT | {"one_of": ("auto", "explicit")})


@dataclass(frozen=True)
class PipelineConfig:
    """Microbatches and, for a mesh with pp > 1, the pipeline. Every field but the first has no effect with pp = 1.

    Attributes:
        num_microbatches: Number of equal parts of the batch whose gradients are accumulated, with or without pp.
        schedule: One of the schedule names in docs/schedules.md; a file that `flax-mesh schedule --out FILE` wrote; or
            "search": the first steps are measured, and the run continues with the best schedule for them.
        memory_limit: Of schedule=search: the most activations that a group may store, each of one stage. None: as many
            as there are stages, the memory of 1f1b's first group.
        cut: How layers are assigned to stages: "flops" minimizes the FLOPs of the largest stage, "count" balances the
            number of layers, and "2,5" lists the first layer of every stage but the first.
        num_virtual_stages: Stages per group. None: the schedule's default.
        remat: The operations that the backward pass of a stage recomputes: "none" almost none, "cheap" every operation
            except matrix products, loops and random bits, "full" everything from the stage's inputs.
        transport: Transfers between processes: "server" (JAX's transfer server), "ordered" (`jax.device_put`), or
            "auto".
        check: Whether the stages are compared with the model before the split, on two microbatches and one device:
            "auto" at the start of a new run, if a microbatch takes less than 1e10 FLOPs and 1 GiB; "always", whatever
            it takes and also if the run is resumed; or "never".
    """

    __repr__ = changed_repr

    num_microbatches: int = field(default=1, metadata=AT_LEAST_1)
    schedule: str = field(default="1f1b", metadata=SAME_RESULT)
    memory_limit: int | None = field(default=None, metadata=SAME_RESULT | AT_LEAST_1)
    cut: str = field(default="flops", metadata=SAME_RESULT)
    num_virtual_stages: int | None = field(default=None, metadata=SAME_RESULT | AT_LEAST_1)
    remat: str = field(default="none", metadata=SAME_RESULT | {"one_of": REMAT_MODES})
    transport: str = field(default="auto", metadata=SAME_RESULT | {"one_of": TRANSPORTS})
    check: str = field(default="auto", metadata=SAME_RESULT | {"one_of": ("auto", "always", "never")})


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved and which are kept. The last step is always saved.

    Attributes:
        every: Steps between checkpoints.
        keep: Number of newest checkpoints to keep.
        keep_best: Number of best checkpoints to keep in addition, by `best_metric`.
        best_metric: Name of a metric in metrics.jsonl; lower is better.
        keep_every: Keep in addition every checkpoint whose step is a multiple of this. 0: none.
        compress: Compress with zstd: smaller files, slower saves.
        on_failure: If a checkpoint cannot be written: "stop" the run, "continue" without it, or "auto": continue if
            `run.folder` is in a store, which may work again, else stop.
        start_from: A run folder, a checkpoint, a folder of safetensors, or the id of a model of the hub (org/name or
            org/name@revision), from which a new run takes its initial parameters, as far as their paths and shapes
            match. "": random initialization.
    """

    __repr__ = changed_repr

    every: int = field(default=100, metadata=SAME_RESULT | AT_LEAST_1)
    keep: int = field(default=3, metadata=SAME_RESULT | AT_LEAST_1)
    keep_best: int = field(default=0, metadata=SAME_RESULT | AT_LEAST_0)
    best_metric: str = field(default="eval_loss", metadata=SAME_RESULT)
    keep_every: int = field(default=0, metadata=SAME_RESULT | AT_LEAST_0)
    compress: bool = field(default=True, metadata=SAME_RESULT)
    on_failure: str = field(default="auto", metadata=SAME_RESULT | {"one_of": ("auto", "stop", "continue")})
    start_from: str = field(default="", metadata={"path": stored_path_problem})


@dataclass(frozen=True)
class RunConfig:
    """Length, folder and devices of the run.

    Attributes:
        steps: Step at which training stops. It does not affect the learning rate.
        folder: The run folder: metrics.jsonl, config.txt and checkpoints/. It may be an address in a store, such as
            s3://bucket/run, gs://bucket/run or, of another server, s3+https://host:port/bucket/run.
        seed: Seed of parameters, random streams and, unless `data.seed` is set, the order of the data.
        platform: "auto" (the devices that JAX finds; the mesh is shrunk to fit them), "cpu", "cpu:8" (8 virtual CPU
            devices), "gpu" or "tpu".
        eval_every: Steps between evaluations on held-out data. 0: none.
        sample_tokens: Number of tokens to sample at the end of the run. 0: no sample.
        compiler_options: XLA options of the training step, "NAME=VALUE,NAME=VALUE".
        attention: How the attention of the loss function is computed: by a "kernel" or in blocks ("blockwise"), both
            with memory that is linear in the length of sequences, "as_written", or "auto": by the kernel of the devices
            if it computes the same, else in blocks if its scores take more than an eighth of the memory of a device.
        on_nonfinite: The reaction to a step whose loss or gradient norm is NaN or infinite: "stop" the run, "skip"
            the update (the state stays as it is, and the next step takes the next batch), or "continue".
        spike_factor: Treat a step in the same way if its loss or gradient norm is above this factor times its median
            over up to 64 recent steps, from the 18th step on. 0: no limit.
        hardware: A TOML file with the figures of the chip, for the MFU and for plans; see
            `flax_mesh.hardware.load_chip`. "": the table of known chips.
        hooks: Functions to call with every row of metrics, comma-separated: "tensorboard", "wandb", "trackio", or
            dotted paths of functions `make_hook(folder, config, start) -> hook` (see docs/watching.md).
        profile: Number of steps that jax.profiler records, from the third step of this run on. 0: none.
        compilation_cache: Whether `flax-mesh train` keeps compiled programs in RUN_FOLDER/compiled, so that a resumed
            run does not compile them again. A cache that JAX is configured with is used instead.
    """

    __repr__ = changed_repr

    steps: int = field(default=1000, metadata=SAME_RESULT | AT_LEAST_1)
    folder: str = field(default="runs/default", metadata=SAME_RESULT | {"path": stored_path_problem})
    seed: int = field(default=0, metadata={"at_least": 0, "below": 2**32})
    platform: str = field(default="auto", metadata=SAME_RESULT)
    eval_every: int = field(default=100, metadata=SAME_RESULT | AT_LEAST_0)
    sample_tokens: int = field(default=200, metadata=SAME_RESULT | AT_LEAST_0)
    compiler_options: str = field(default="", metadata=SAME_RESULT)
    attention: str = field(default="auto", metadata=SAME_RESULT | {"one_of": MODES})
    on_nonfinite: str = field(default="stop", metadata=SAME_RESULT | {"one_of": ("stop", "skip", "continue")})
    spike_factor: float = field(default=0.0, metadata=SAME_RESULT | {"above": 1, "also": (0, "no limit")})
    hardware: str = field(default="", metadata=SAME_RESULT | {"path": True})
    hooks: str = field(default="", metadata=SAME_RESULT)
    profile: int = field(default=0, metadata=SAME_RESULT | AT_LEAST_0)
    compilation_cache: bool = field(default=True, metadata=SAME_RESULT)


@dataclass(frozen=True)
class TrainConfig:
    """The complete definition of a run: the result of a recipe, and the argument of `train`.

    The fields of the sections (`model`, `lora`, `mesh`, `pipeline`, `data`, `optimizer`, `checkpoint`, `run`) can be
    overridden on the command line as `section.key=value`; see `apply_overrides`. The functions can be set by a recipe
    only.

    Attributes:
        make_model: `make_model(model, rngs) -> nnx.Module`. It is only traced: parameters are initialized directly
            sharded.
        loss_fn: `loss_fn(module, batch) -> (loss_sum, weight)` or `(loss_sum, weight, metrics)`, sums over the batch,
            or another form of `LossFn`; `batch` has "inputs" and "targets", int32 of shape (batch_size,
            sequence_length), or has the arrays that `make_batches` defines. If the loss has further terms, return the
            metric "cross_entropy" (a sum too): evaluation then reports it as the held-out loss. Metrics are real
            scalars, and their names must differ from other fields of rows, such as "step" and "seconds". The fields of
            a dataclass with such a method `__call__` are the settings `loss_fn.*`.
        model: The config of the model, a dataclass. Its fields are the settings `model.*`.
        lora: Low-rank adapters of the model, which are then trained alone; none by default.
        mesh: Mesh shape, "fsdp:-1" by default.
        pipeline: Number of microbatches (gradient accumulation) and, for pp > 1, schedule, stages, remat and transport.
        data: Text or token files, sequence length, batch size and held-out share.
        optimizer: The optimizer by name, its learning rate schedule, its parameter groups, and ZeRO-1 sharding.
        checkpoint: When checkpoints are saved, which are kept, and where a new run takes its parameters from.
        run: Number of steps, run folder, seed, platform, evaluation.
        sample: `sample(module, prompt, num_tokens, key) -> tokens`, token ids of shape (P,) -> (P + num_tokens,). None:
            no text is sampled at the end.
        flops_per_token: `flops_per_token(model, num_parameters, sequence_length) -> float`. None: no MFU is reported.
        rules: Rule table for the parameters. None: the table or the annotations of the model.
        make_optimizer: `make_optimizer(config, parameters) -> optax transformation`, called with this config and the
            trained parameters as an nnx.State of ShapeDtypeStructs. It replaces the optimizer of `optimizer.name` and
            its clipping; `optimizer.ema`, `optimizer.shard_over` and frozen groups apply to it too. None: the one of
            `optimizer.name`.
        make_schedule: `make_schedule(config) -> optax schedule`, the learning rate as a function of the step. With
            `make_optimizer` it is only reported. None: the schedule `optimizer.schedule`, which is not reported with
            `make_optimizer`.
        wrt: Filter of NNX that selects the trained variables, such as nnx.LoRAParam. All others are constants: they
            have no gradients and no moments.
        hooks: Functions `make_hook(folder, config, start) -> hook`, in addition to `run.hooks`: the hook is called
            with every row of metrics, in process 0 only.
        make_batches: `make_batches(config) -> batch_fn`, called with this config; `batch_fn(step)` returns the global
            batch of a step, a pytree of numpy arrays whose first dim is `data.batch_size`. It must be a pure function
            of the step, equal in all processes. Or an iterator with `get_state` and `set_state` (see
            `data.resumable`). With `data.rows=process`, `make_batches(config, rows)`: batches have the rows of the
            process. None: the tokens of `data.source`.
        model_from: `model_from(model, folder) -> model`, called when an override sets `checkpoint.start_from`: the
            config of the model in this folder, such as `flax_mesh.models.pretrained_config`. Overrides of `model.*` are
            applied to its result. None: `model` must equal the model of the folder.
        constants: Name -> `constant(config) -> (make, folder)`: a module that `loss_fn` finds as this attribute of the
            model, such as the teacher of recipes/distill.py. `make() -> nnx.Module` is only traced, and its variables
            are those of `folder`, a Hugging Face folder or id of a decoder. They are read there whenever the run starts
            or resumes, in the layout of the model's rules, and have neither gradients nor moments; a checkpoint has
            only a checksum of their files. If `folder` is a field of a loss, give it `metadata={"of_hub": "model"}`:
            the run then records the commit of an id, as for `checkpoint.start_from`.
        eval_fns: Name -> `eval_fn(config, evaluate) -> metrics`, a dict of numbers, which rows contain as
            "NAME/METRIC". `evaluate(batch)` returns the sums "loss", "weight" and the metrics of `loss_fn` in eval mode
            as floats. Called every `run.eval_every` steps and at the end.

    Example:
        >>> from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
        >>> from flax_mesh.train import MeshConfig, TrainConfig, apply_overrides
        >>> config = TrainConfig(make_decoder, next_token_loss, DecoderConfig(), mesh=MeshConfig("fsdp:4,tp:2"))
        >>> apply_overrides(config, ["run.steps=20"]).run.steps
        20
    """

    make_model: Callable[..., nnx.Module]
    loss_fn: Callable[..., Any]
    model: Any = field(metadata={"of_user": True})
    mesh: MeshConfig = MeshConfig()
    lora: LoraConfig = LoraConfig()  # noqa: RUF009
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()  # noqa: RUF009 (a frozen value)
    optimizer: OptimizerConfig = OptimizerConfig()  # noqa: RUF009
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    sample: Callable[..., jax.Array] | None = None
    flops_per_token: Callable[..., float] | None = None
    rules: Any = None
    make_optimizer: Callable[["TrainConfig", PyTree], optax.GradientTransformation] | None = None
    make_schedule: Callable[["TrainConfig"], optax.Schedule] | None = None
    wrt: Any = field(default=nnx.Param, metadata={"of_user": True})  # some filters of NNX are dataclasses
    hooks: tuple[Callable[..., object], ...] = ()
    make_batches: Callable[["TrainConfig"], object] | None = None
    model_from: Callable[..., object] | None = None
    constants: Mapping[str, "MakeConstant"] = field(default_factory=dict[str, "MakeConstant"], hash=False)
    eval_fns: Mapping[str, Callable[..., Mapping[str, float]]] = field(
        default_factory=dict[str, Callable[..., Mapping[str, float]]], hash=False
    )


MakeConstant = Callable[[TrainConfig], tuple[Callable[[], nnx.Module], str]]


def trained_variables(config: TrainConfig) -> Filter:
    """The filter of NNX that selects the trained variables: with adapters, these alone."""
    trained = nnx.LoRAParam if config.lora.rank else config.wrt
    return nnx.All(trained, nnx.Not(Constant)) if config.constants else trained  # a filter of paths selects both


def data_seed(data: DataConfig, run: RunConfig) -> int:
    return run.seed if data.seed is None else data.seed


def tokens_per_step(config: TrainConfig) -> int | None:
    """None for batches of a recipe without `flops_per_token`, whose number of tokens is unknown."""
    if config.make_batches is not None and config.flops_per_token is None:
        return None
    return config.data.batch_size * config.data.sequence_length


def shard_over(optimizer: OptimizerConfig) -> tuple[str, ...]:
    return tuple(name.strip() for name in optimizer.shard_over.split(",") if name.strip())
