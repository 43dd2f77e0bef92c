"""TrainConfig: everything that defines a run, as a value that is printed whole, read back and compared.

Behind the dataclasses: the settings that are small texts with a form of their own, read.
"""

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.mesh import parse_mesh_shape
from flax_mesh.train.data.data import DataConfig

PLATFORM = re.compile(r"auto|cpu(:[1-9][0-9]*)?|gpu|cuda|tpu")
AXIS_NAMES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
SAME_RESULT = {"changes_result": False}  # fields that may differ when a run is resumed


@dataclass(frozen=True)
class MeshConfig:
    """`shape` is "dp:2,fsdp:-1,tp:2"; one size may be -1 (what is left); axes not named have size 1."""

    shape: str = field(default="fsdp:-1", metadata=SAME_RESULT)


@dataclass(frozen=True)
class PipelineConfig:
    """`num_microbatches`: the batch is cut into this many, whose gradients are summed.

    The rest is for pp > 1. `schedule`: a name of docs/schedules.md. `cut`: "flops" (the heaviest stage is as light as
    can be), "count" (of layers), or the first layer of every stage but the first, "2,5". `num_virtual_stages`: stages a
    group, none for what the schedule is made for. `remat`: what a stage stores for its backward pass: "none" recomputes
    next to nothing, "cheap" what takes no matrix product, loop or random bits, "full" everything from the stage's
    inputs. `transport` between processes: "server" (JAX's transfer server), "ordered" (`jax.device_put`), or "auto".
    """

    num_microbatches: int = 1
    schedule: str = field(default="1f1b", metadata=SAME_RESULT)
    cut: str = field(default="flops", metadata=SAME_RESULT)
    num_virtual_stages: int | None = field(default=None, metadata=SAME_RESULT)
    remat: str = field(default="none", metadata=SAME_RESULT)
    transport: str = field(default="auto", metadata=SAME_RESULT)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW behind a global-norm clip. The rate rises linearly for `warmup_steps` to `learning_rate`, then falls by a
    cosine to `end_learning_rate` at step `decay_steps` and stays there: when a run ends does not change its steps.

    `shard_over`: a mesh axis, or several joined by commas, over which the moments are split although the parameters are
    copies there, such as dp (ZeRO stage 1); "" for none.
    """

    learning_rate: float = 3e-4
    end_learning_rate: float = 3e-5
    warmup_steps: int = 100
    decay_steps: int = 1000
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    shard_over: str = field(default="", metadata=SAME_RESULT)


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every `every` steps and at the end.

    Those stay that are among the newest `keep`, or the best `keep_best` by `best_metric` of a row of metrics (lower is
    better), or whose step `keep_every` divides (0: none). `on_failure`: "stop" when a checkpoint cannot be written, or
    "continue" without it. `compress`: smaller files, slower saves. `start_from`: a run folder, a checkpoint or a folder
    of safetensors whose parameters a new run begins with, as far as they fit; "" for none.
    """

    every: int = field(default=100, metadata=SAME_RESULT)
    keep: int = field(default=3, metadata=SAME_RESULT)
    keep_best: int = field(default=0, metadata=SAME_RESULT)
    best_metric: str = field(default="eval_loss", metadata=SAME_RESULT)
    keep_every: int = field(default=0, metadata=SAME_RESULT)
    compress: bool = field(default=True, metadata=SAME_RESULT)
    on_failure: str = field(default="stop", metadata=SAME_RESULT)
    start_from: str = ""


@dataclass(frozen=True)
class RunConfig:
    """`steps`: where to stop. `platform`: "auto" (the devices that are there), "cpu", "cpu:8" (virtual devices), "gpu",
    "tpu". `eval_every`: steps between evaluations, 0 for none. `sample_tokens`: length of the text at the end.
    `compiler_options`: of XLA for the training step, NAME=VALUE joined by commas; "" for none."""

    steps: int = field(default=1000, metadata=SAME_RESULT)
    folder: str = field(default="runs/default", metadata=SAME_RESULT)
    seed: int = 0
    platform: str = field(default="auto", metadata=SAME_RESULT)
    eval_every: int = field(default=100, metadata=SAME_RESULT)
    sample_tokens: int = field(default=200, metadata=SAME_RESULT)
    compiler_options: str = field(default="", metadata=SAME_RESULT)


@dataclass(frozen=True)
class TrainConfig:
    """What a recipe returns. The functions come from the recipe alone; the sections can be overridden by text.

    make_model(model, rngs) -> nnx.Module
    loss_fn(module, batch) -> (loss_sum, weight) or (loss_sum, weight, metrics): see `train.step`; a metric
        "cross_entropy", where the loss has more in it, is what counts as held-out loss
    sample(module, prompt (P,), num_tokens, key) -> (P + num_tokens,) token ids, or None for no sample
    flops_per_token(model, num_parameters, sequence_length) -> float, or None for no MFU
    rules: the rule table, None for the one the model carries
    """

    make_model: Callable[[Any, nnx.Rngs], nnx.Module]
    loss_fn: Callable[..., Any]
    model: Any
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()  # noqa: RUF009 (a frozen value)
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    sample: Callable[..., jax.Array] | None = None
    flops_per_token: Callable[[Any, int, int], float] | None = None
    rules: Any = None


def load_recipe(name: str) -> TrainConfig:
    """The config that a recipe returns; `name` is "FILE.py" (its function `recipe`) or "FILE.py:function"."""
    file, _, function = name.partition(":")
    function = function or "recipe"
    path = Path(file)
    if not path.is_file():
        beside = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ConfigError(f"recipe {file}: no such file" + (f"; there are {', '.join(beside)}" if beside else ""))
    spec = importlib.util.spec_from_file_location(f"flax_mesh_recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"recipe {file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the annotations of a recipe's own config
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        own = [k for k, v in vars(module).items() if isinstance(v, types.FunctionType) and v.__module__ == spec.name]
        raise ConfigError(f"recipe {file} has no function {function!r}; it has {', '.join(own) or 'none'}")
    config = make()
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"recipe {name}: {function}() must return a TrainConfig, got {type(config).__name__}")
    return config


def mesh_shape(config: TrainConfig) -> dict[str, int]:
    """Axis sizes of `mesh.shape` in its order, then the axes it leaves out with size 1; one may be -1."""
    return parse_mesh_shape(config.mesh.shape, AXIS_NAMES, omitted=1)


def shard_over(config: TrainConfig) -> tuple[str, ...]:
    return tuple(name.strip() for name in config.optimizer.shard_over.split(",") if name.strip())


def parse_cut(text: str) -> dict[str, Any]:
    """Arguments of `split_stages` for `pipeline.cut`: "flops", "count", or first layers, "2,5". Else ConfigError."""
    if text in ("flops", "count"):
        return {"balance": text}
    try:
        return {"cuts": [int(part) for part in text.split(",")]}
    except ValueError:
        raise ConfigError(
            f"pipeline.cut must be flops, count, or the first layer of every stage but the first, such as 2,5; "
            f"got {text!r}"
        ) from None


CompilerOptions = dict[str, bool | int | str]


def parse_compiler_options(text: str) -> CompilerOptions:
    """name -> value of "NAME=VALUE,NAME=VALUE"; true, false and whole numbers are read as such.

    A value may have commas: what follows one, up to the next NAME=, belongs to it. Raises ConfigError, a line for
    every part that is not of this form or that sets a name twice.
    """
    found, problems = {}, []
    for part in re.split(r",(?=[^,=]*=)", text) if text else []:
        name, equals, value = part.strip().partition("=")
        if not (name and equals) or name.startswith("-"):
            problems.append(
                f"run.compiler_options: {part!r} is no option; write NAME=VALUE, such as "
                "xla_gpu_enable_latency_hiding_scheduler=true"
            )
        elif name in found:
            problems.append(f"run.compiler_options: {name} is set twice")
        else:
            found[name] = _parse_option(value)
    if problems:
        raise ConfigError(problems)
    return found


def options_text(options: CompilerOptions) -> str:
    """The options as `parse_compiler_options` reads them."""
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return ",".join(f"{name}={text}" for name, text in texts.items())


def _parse_option(value: str) -> bool | int | str:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.lstrip("-").isdecimal() else value
