"""Runs under Ray, which starts the workers, initializes JAX in each, and restarts all workers if one is lost."""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from flax_mesh.checkpoint.find import find_step
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.config import RunConfig, TrainConfig
from flax_mesh.store import stored_path, stored_path_problem
from flax_mesh.text import shown
from flax_mesh.train.loop import train
from flax_mesh.train.metrics import Row
from flax_mesh.train.steps import TrainResult
from flax_mesh.user_code import check_arguments

POINTER = "flax_mesh.json"  # in a checkpoint of Ray: {"path": the folder of a step}
# The CPU is required to divide stacked layers of checkpoints.
PLATFORMS = {"TPU": "tpu,cpu", "GPU": "cuda,cpu", "CPU": "cpu"}


@check_types
def ray_trainer(
    make_config: Callable[[], TrainConfig],
    num_workers: int,
    resources: Mapping[str, float],
    *,
    report_every: int | None = None,
    run_config: Any = None,
    **scaling: Any,
) -> Any:
    """A trainer of Ray whose workers call `train`. Its method `fit()` runs them and returns a `ray.train.Result`.

    Ray places the workers on the machines of its cluster and initializes JAX in them. If one is lost, all are started
    again, up to `max_failures` times, also on machines that have replaced others. The run then continues from its
    newest checkpoint, bit for bit. Requires the extra `ray`.

    Rows of metrics are reported to Ray, and the newest checkpoint: a checkpoint of Ray contains no arrays, but a file
    flax_mesh.json with the path of a step in `run.folder`. `Result.return_value` is the `TrainResult`.

    Args:
        make_config: A function without arguments that returns the config. It is called here, to check the config, and
            in every worker: a function can be sent to workers, but the functions of a recipe file cannot.
        num_workers: The number of processes.
        resources: The resources of each worker, such as {"GPU": 8}, {"TPU": 4} or {"CPU": 1}. Without GPU and TPU the
            workers compute on CPUs, and divide the devices of `run.platform=cpu:N`.
        report_every: Report the row of every step that this number divides, and the last one. None: `checkpoint.every`.
            The workers wait for a report, of which Ray takes one every 2 s (RAY_TRAIN_HEALTH_CHECK_INTERVAL_S).
            metrics.jsonl has all rows in any case.
        run_config: A `ray.train.RunConfig`, such as `RunConfig(failure_config=FailureConfig(max_failures=3))`.
        **scaling: Other fields of `ray.train.ScalingConfig`. Several workers with TPUs need `topology` and
            `accelerator_type`.

    Returns:
        A `ray.train.v2.jax.JaxTrainer`.

    Raises:
        TypeError: An argument, or the result of `make_config`, is of another type.
        ConfigError: An argument or the config has mistakes; `run.folder` is relative; `run.platform` does not fit
            `resources`; or Ray is not installed. All mistakes are reported in one error.
    """
    check_arguments("make_config", make_config)
    config = make_config()
    if not isinstance(config, TrainConfig):
        raise TypeError(f"ray_trainer: make_config must return a TrainConfig, got {shown(config)}")
    if problems := [*check_config(config), *_problems(config.run, num_workers, resources, report_every)]:
        raise ConfigError(problems)
    return _trainer(config.run, lambda: _work(make_config, report_every), num_workers, resources, run_config, scaling)


def _trainer(
    run: RunConfig,
    work: Callable[[], TrainResult],
    num_workers: int,
    resources: Mapping[str, float],
    run_config: Any,
    scaling: Mapping[str, object],
) -> Any:
    from ray import train as of_ray  # pyright: ignore[reportMissingImports]
    from ray.train.v2.jax import JaxConfig, JaxTrainer  # pyright: ignore[reportMissingImports]

    kind, devices = _kind(resources), run.platform.partition(":")[2]
    variables = {"JAX_PLATFORMS": PLATFORMS[kind]}
    if devices:
        variables["JAX_NUM_CPU_DEVICES"] = str(int(devices) // num_workers)
    run_config = of_ray.RunConfig() if run_config is None else run_config
    environment = run_config.worker_runtime_env or {}
    environment = {**environment, "env_vars": variables | environment.get("env_vars", {})}
    uses = {"use_tpu": kind == "TPU", "use_gpu": kind == "GPU"}
    return JaxTrainer(
        work,
        # If neither is used, Ray initializes no JAX, and every worker would train alone.
        jax_config=JaxConfig(use_tpu=kind == "TPU", use_gpu=kind != "TPU"),
        scaling_config=of_ray.ScalingConfig(
            num_workers=num_workers, resources_per_worker=dict(resources), **uses, **scaling
        ),
        run_config=replace(run_config, worker_runtime_env=environment),
    )


def _kind(resources: Mapping[str, float]) -> str:
    return next((kind for kind in ("TPU", "GPU") if resources.get(kind)), "CPU")


def _problems(run: RunConfig, num_workers: int, resources: Mapping[str, float], report_every: int | None) -> list[str]:
    """One line for every mistake that concerns Ray."""
    problems, kind = [], _kind(resources)
    if find_spec("ray") is None:
        problems.append("ray_trainer requires the package ray, which is not installed: pip install 'flax-mesh[ray]'")
    for name, value in (("num_workers", num_workers), ("report_every", report_every)):
        if value is not None and value < 1:
            problems.append(f"{name} must be at least 1, got {value}")
    if wrong := {
        name: value
        for name, value in resources.items()
        if not isinstance(value, int | float) or not 0 <= value < math.inf
    }:
        problems.append(f"resources must be finite numbers of at least 0, got {shown(wrong)}")
    if not stored_path_problem(str(run.folder)) and not stored_path(run.folder).is_absolute():
        problems.append(
            f"run.folder must be absolute, got {run.folder}: every worker runs in another folder; use one "
            "that all of them have access to"
        )
    platform, _, devices = str(run.platform).partition(":")
    if platform not in ("auto", kind.lower()):
        problems.append(
            f"run.platform={run.platform} must be auto or {kind.lower()}, because the resources of a worker are "
            f"{dict(resources)}"
        )
    elif devices.isdecimal() and num_workers > 0 and int(devices) % num_workers:
        problems.append(f"run.platform={run.platform} cannot be divided among {num_workers} workers; use a multiple")
    return problems


def _work(make_config: Callable[[], TrainConfig], report_every: int | None) -> TrainResult:
    """The work of every worker. All of them report equally often, as Ray requires."""
    config = make_config()
    every, folder, reported = report_every or config.checkpoint.every, stored_path(config.run.folder), None

    def report(row: Row) -> None:
        nonlocal reported
        newest = _newest(folder) if jax.process_index() == 0 else None
        _report(row, newest if newest != reported else None)
        reported = newest

    def hook(row: Row) -> None:
        if row["step"] % every == 0:
            report(row)

    result = train(config, say=print, hooks=[hook])
    report(result.last_row or {"step": result.step})  # the last checkpoint is complete now
    return result


def _newest(folder: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    try:
        return find_step(folder)
    except ConfigError:
        return None


def _report(row: Row, step: Path | None) -> None:
    from ray.train import Checkpoint, report  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, POINTER).write_text(json.dumps({"path": str(step)}))
        report(row, checkpoint=None if step is None else Checkpoint.from_directory(folder))
