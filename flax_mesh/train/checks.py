"""Checks before the first step of a run: its trace and profile, the stages of its pipeline, changed settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.errors import ConfigError
from flax_mesh.mesh.context import in_mesh
from flax_mesh.mpmd import Pipeline
from flax_mesh.processes import broadcast_from_process_0
from flax_mesh.recipe.overrides import Change
from flax_mesh.step.loss import is_sum_over_rows
from flax_mesh.train.hooks.profile import profile_problem
from flax_mesh.train.metadata import check_resume
from flax_mesh.train.report import Run

TRACED = 2  # steps before the traced one: they include compilation


def check_trace(path: Path, shape: str, pipeline: Pipeline | None) -> list[str]:
    """Why the run cannot write its trace to `path`, one line per mistake."""
    problems = []
    if pipeline is None:
        problems.append(f"--trace {path}: only a pipeline can be traced; add pp to mesh.shape={shape}")
    elif pipeline.channel is not None:
        problems.append(
            f"--trace {path}: all groups must be in one process; this run has {jax.process_count()} processes"
        )
    if path.suffix == ".svg":
        problems.append(
            f"--trace {path}: the trace is a JSON file, with an .svg beside it; use {path.with_suffix('.json')}"
        )
    if path.is_dir():
        problems.append(f"--trace {path}: this is a folder; name a JSON file")
    elif not path.parent.is_dir():
        problems.append(f"--trace {path}: folder {path.parent} does not exist; create it first")
    return problems


def check_stages(run: Run, *, is_new: bool) -> None:
    """`pipeline.check`: process 0 compares the stages with the model before the split, on its data."""
    pipeline, setting = run.program.pipeline, run.recipe.pipeline.check
    if pipeline is None or setting == "never" or (setting == "auto" and not is_new):
        return

    batches = run.recipe.user_batches
    is_divided = batches is not None and batches.own_rows is not None and batches.own_rows.num_shards > 1

    def check() -> str:
        if is_divided:
            return "pipeline.check: left out, because no process has all rows (data.rows=process)"
        if setting == "auto" and not pipeline.staged.is_cheap_to_check:
            return "pipeline.check: left out, because a microbatch takes more than 1e10 FLOPs or 1 GiB"
        pipeline.staged.check(
            run.data.first(),
            seed=run.recipe.step_options.seed,
            remat=pipeline.remat,  # pyright: ignore[reportArgumentType] (checked with the config)
            split_backward=pipeline.schedule.splits_backward,
        )
        return "pipeline.check: the stages compute the same as the model, on two microbatches"

    run.say(broadcast_from_process_0("check of the stages", check))


def check_recording(run: Run, start: int) -> None:
    """Whether the steps that --trace and run.profile record belong to this run, which starts after `start` steps."""
    last, problems = run.recipe.run.steps, []
    if run.trace is not None and start < last <= start + TRACED:
        problems.append(
            f"--trace {run.trace} records step {start + TRACED + 1}, the third of this run, but run.steps={last} ends "
            "before it; increase run.steps"
        )
    if start < last and (problem := profile_problem(run.recipe.run.profile, start, last)):
        if start:
            run.say(f"note: nothing is recorded: {problem}")
        else:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)


def changes_since(
    run: Run, checkpointer: Checkpointer, saved: Mapping[str, Any], *, allow_changes: bool
) -> list[Change]:
    """The settings that differ from the `saved` ones; ConfigError if a run cannot resume with them."""

    def is_sum() -> bool:
        with in_mesh(run.recipe.mesh):
            return is_sum_over_rows(run.recipe.loss_fn, run.recipe.make, run.recipe.batch)

    try:
        return check_resume(saved, run.record, run.recipe.config, allow_changes=allow_changes, is_sum=is_sum)
    except ConfigError as changed:
        try:
            checkpointer.check(run.program.layout, saved["step"])
        except ConfigError as differing:  # --allow-changes would not help, so its line is left out
            head = ConfigError(changed.problems, head=changed.head).lines
            raise ConfigError([*head, *differing.lines]) from differing
        raise


def not_resumable(folder: Path, step: int) -> str:
    """The problem of a run with data.resumable=false that has a checkpoint."""
    return (
        f"{folder} has a checkpoint of step {step}, from which a run with data.resumable=false cannot resume: its "
        "iterator has no set_state, and would repeat the batches from the first one. Start a new run (--restart, or "
        f"another run.folder); checkpoint.start_from={folder} starts it from these parameters."
    )
