"""The steps of a run: train, write rows of metrics, evaluate, save checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.base import Base
from flax_mesh.data.batches import prefetch
from flax_mesh.data.corpus import decode
from flax_mesh.errors import ConfigError, SaveError
from flax_mesh.mesh.context import in_mesh
from flax_mesh.modes import set_eval_mode
from flax_mesh.mpmd.runtime.profile import costs_of, trace_step
from flax_mesh.mpmd.schedules.simulate import simulate
from flax_mesh.step.loss import Limits
from flax_mesh.step.state import TrainState
from flax_mesh.text import count_text
from flax_mesh.train.checks import TRACED
from flax_mesh.train.hooks.load import Hooks
from flax_mesh.train.hooks.profile import Profile, profile_problem
from flax_mesh.train.metadata import config_lines, repeats_rows, step_record
from flax_mesh.train.metrics import Row, Rows, StepCheck
from flax_mesh.train.report import Run
from flax_mesh.train.run_folder import MetricsFile, is_first
from flax_mesh.user_code import place_of, user_code


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        status: "finished" at `run.steps`, "already finished" if nothing was left to do, "stopped" by `should_stop`,
            "diverged" if a step was refused (`run.on_nonfinite`, `run.spike_factor`).
        step: Number of completed steps.
        folder: The run folder.
        last_row: The last row of metrics; empty if no step ran.
        sample: Sampled text; "" if the recipe samples none.
    """

    status: Literal["finished", "already finished", "stopped", "diverged"]
    step: int
    folder: Path
    last_row: Row = field(default_factory=dict)
    sample: str = ""


def run_steps(
    run: Run, checkpointer: Checkpointer, state: TrainState, start: int, saved: Mapping[str, Any]
) -> TrainResult:
    """Train from `start` completed steps to `run.steps`. The row of a step is written before its state is saved.

    `saved` is the metadata of the checkpoint of step `start`.
    """
    _say_base(run, checkpointer.base)
    settings, config = run.recipe.run, run.recipe.config
    is_recorded = is_first() and not profile_problem(settings.profile, start, settings.steps)
    profile = Profile(run.folder, settings.profile if is_recorded else 0, start, run.say)
    check = StepCheck(settings, saved)
    own_hooks = Hooks(run.factories if is_first() else (), run.folder, config, start, run.say)
    repeats = partial(repeats_rows, run.record, config)
    rows = Rows(
        MetricsFile(run.folder, config_lines(run.record), start, run.say, repeats) if is_first() else None,
        run.program,
        start,
        check,
        hooks=[*run.hooks, own_hooks],
        say=run.say,
        warn_or_raise=run.warn_or_raise,
    )
    step, saved_step, status = start, start, "finished"

    def check_callbacks() -> None:
        _wait_for(state, ())  # the metrics may be known before the callbacks of other devices have ended
        run.program.check()

    def save(*, final: bool) -> None:
        nonlocal saved_step
        rows.finish()
        if not check.stopped:
            check_callbacks()
            run.data.check_unchanged()
            record = step_record(run.record, step, rows.last, check.record(), run.data)
            _save(run, checkpointer, step, state, record, final=final)
            saved_step = step

    @contextmanager
    def saving_before_failure(reason: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever it is: code of the recipe may raise anything
            # One of several processes must not wait for the others, which may not have failed.
            if saved_step < step and jax.process_count() == 1:
                save(final=False)
                if not check.stopped:
                    run.say(f"the state after step {step} is saved, since {reason}")
            raise

    def made(batches: Iterator[Any]) -> Iterator[Any]:
        with saving_before_failure("the next batch cannot be made"):
            yield from batches

    def evaluated(evaluate: Callable[[TrainState], Row], state: TrainState) -> Row:
        check_callbacks()
        with saving_before_failure("its evaluation failed"):
            row = evaluate(state)
            run.program.check()
            return row

    with ExitStack() as stack:
        stack.callback(rows.close)
        stack.callback(own_hooks.close)
        stack.callback(profile.close)
        batches = stack.enter_context(closing(prefetch(run.data.batch, start, settings.steps)))
        for index, batch, waited in made(batches):
            step = index + 1
            limits = [check.limits(step)] if check.limits_are_used else []
            with profile.step(step):
                if run.trace is not None and index == start + TRACED:
                    state, metrics = _traced_step(run, state, batch, *limits)
                else:
                    state, metrics = run.program.step(state, batch, *limits)
            rows.finish()  # the row of the previous step, while the device computes this one
            if check.stopped:
                # Other processes may wait for values of this step, so it must not end with this process.
                _wait_for(state, metrics)
                break
            rows.begin(step, metrics, waited)
            if profile.ends_after(step):
                _wait_for(state, metrics)
                profile.close()
            last = step == settings.steps
            stop = run.should_stop()
            if run.evaluate and (last or step % settings.eval_every == 0):
                rows.finish(partial(evaluated, run.evaluate, state))
            if last or stop or step % run.recipe.checkpoint.every == 0:
                save(final=last or stop)
                if check.stopped:
                    break
            if stop and not last:
                status = "stopped"
                break
        rows.finish()
        status = "diverged" if check.stopped else status
        sample = _sample(run, state) if status == "finished" else ""
    checkpointer.wait()
    if check.stopped:
        run.say(f"stopped: {check.stopped}; {newest_finite_text(checkpointer)} (run.on_nonfinite)")
        step = rows.last["step"]
    return TrainResult(status, step, run.folder, rows.last, sample)


def _wait_for(state: TrainState, metrics: Any) -> None:
    """Wait until the devices of this process have finished a step."""
    jax.block_until_ready([x for x in jax.tree.leaves((state, metrics)) if x.addressable_shards])


def _say_base(run: Run, base: Base | None) -> None:
    if base is not None:
        what = f"leave out {count_text(len(base.arrays), 'frozen array')}; keep {base.folder}, where they are read"
    else:
        what = "contain the frozen weights too, since no checkpoint.start_from is their base"
    if run.recipe.has_adapters:
        run.say(f"checkpoints: they {what}")


def newest_finite_text(checkpointer: Checkpointer) -> str:
    step = checkpointer.newest_finite_step()
    return (
        "no checkpoint has finite numbers"
        if step is None
        else f"the newest checkpoint with finite ones is of step {step}"
    )


def _save(
    run: Run, checkpointer: Checkpointer, step: int, state: TrainState, record: dict[str, Any], *, final: bool
) -> None:
    """Start an asynchronous save.

    A failure of this save or of the previous one is handled according to `checkpoint.on_failure`, except that a failure
    of the final save is always raised.
    """
    save = partial(checkpointer.save, step, state, record)
    for call in (checkpointer.wait, save):  # a failure of the previous save does not prevent this one
        try:
            call()
        except SaveError as error:
            if final and call is save:
                raise
            run.warn_or_raise(error)


def _traced_step(run: Run, state: TrainState, batch: Any, *limits: Limits) -> tuple[TrainState, Any]:
    assert run.program.pipeline is not None and run.trace is not None
    state, metrics, timeline = trace_step(run.program.pipeline, state, batch, *limits)
    try:
        trace, picture = timeline.write(run.trace)
    except (OSError, ValueError) as error:
        run.say(f"trace: {run.trace} cannot be written: {error}")
        return state, metrics
    simulated = simulate(timeline.schedule, costs_of(timeline))
    run.say(
        f"trace: {trace} and {picture}; bubble {timeline.bubble:.0%} (simulated {simulated.bubble:.0%}), "
        f"{timeline.overlap:.1f} of {timeline.schedule.num_groups} groups busy on average"
    )
    return state, metrics


def _sample(run: Run, state: TrainState) -> str:
    """Sample text after the first 64 bytes of the held-out part; "" if tokens are not bytes."""
    num_tokens, sample = run.recipe.run.sample_tokens, run.recipe.sample
    prompt = run.data.prompt
    if not num_tokens or sample is None or prompt is None:
        return ""
    graphdef, leaves = nnx.split(run.program.model(run.recipe.optimizer.evaluated(state)), graph=True)

    def continue_text(leaves: nnx.State, prompt: jax.Array, key: jax.Array) -> jax.Array:
        with in_mesh(run.program.mesh):
            model = nnx.merge(graphdef, leaves)
            set_eval_mode(model)
            return sample(model, prompt, num_tokens, key)

    replicated = NamedSharding(run.program.mesh, PartitionSpec())  # so that every process can read them
    try:
        with user_code("sample", place_of(sample)):
            key = jax.random.key(run.recipe.run.seed)
            tokens = jax.jit(continue_text, out_shardings=replicated)(leaves, prompt, key)
    except ConfigError as error:  # the run itself is finished and saved
        run.say(f"warning: no text was sampled: {error}")
        return ""
    return decode(np.asarray(tokens))
