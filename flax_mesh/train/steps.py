"""The steps of a run: train, write rows of metrics, evaluate, save checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.base import Base
from flax_mesh.data.corpus import decode
from flax_mesh.errors import ConfigError, SaveError
from flax_mesh.lora import merge_lora
from flax_mesh.mesh.context import in_mesh
from flax_mesh.modes import set_eval_mode
from flax_mesh.mpmd.runtime.profile import costs_of, trace_step
from flax_mesh.mpmd.schedules.simulate import simulate
from flax_mesh.step.loss import Limits, Metrics
from flax_mesh.step.state import TrainState
from flax_mesh.store import working_copy
from flax_mesh.text import count_text
from flax_mesh.train.checks import TRACED
from flax_mesh.train.hooks.load import Hooks
from flax_mesh.train.hooks.profile import Profile, profile_problem
from flax_mesh.train.metadata import config_lines, repeats_rows, step_record
from flax_mesh.train.metrics import Row, Rows, StepCheck
from flax_mesh.train.report import Run
from flax_mesh.train.run_folder import MetricsFile, is_first
from flax_mesh.tree import PyTree
from flax_mesh.user_code import place_of, user_code

Status: TypeAlias = Literal["finished", "already finished", "stopped", "diverged"]
_Batch: TypeAlias = tuple[int, PyTree, float]  # step, batch, seconds waited for it


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

    status: Status
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
    here = working_copy(run.folder)
    hooks = Hooks(run.factories if is_first() else (), here, config, start, run.say)
    repeats = partial(repeats_rows, run.record, config)
    file = MetricsFile(here, config_lines(run.record), start, run.say, repeats) if is_first() else None
    check = StepCheck(settings, saved)
    rows = Rows(
        file, run.program, start, check, hooks=[*run.hooks, hooks], say=run.say, warn_or_raise=run.warn_or_raise
    )
    profile = Profile(here, settings.profile if is_recorded else 0, start, run.say)
    with closing(rows), closing(hooks), closing(profile):
        steps = _Steps(run, checkpointer, state, start, rows, profile)
        status = steps.train()
        sample = _sample(run, steps.state) if status == "finished" else ""
    checkpointer.wait()
    if status != "diverged":
        return TrainResult(status, steps.step, run.folder, rows.last, sample)
    run.say(f"stopped: {check.stopped}; {newest_finite_text(checkpointer)} (run.on_nonfinite)")
    return TrainResult(status, rows.last["step"], run.folder, rows.last)


class _Steps:
    """The loop over the steps of a run: `state` is the state after `step` steps."""

    def __init__(
        self, run: Run, checkpointer: Checkpointer, state: TrainState, start: int, rows: Rows, profile: Profile
    ):
        self.state, self.step = state, start
        self._run, self._checkpointer = run, checkpointer
        self._check, self._rows, self._profile = rows.check, rows, profile
        self._traced = start + TRACED + 1
        self._saved = start  # the last step that was saved

    def train(self) -> Status:
        """All steps that remain."""
        status: Status = "finished"
        model = lambda: self._run.program.model(self.state)  # noqa: E731
        with closing(self._run.data.batches(self.step, self._run.recipe.run.steps, model)) as batches:
            for index, batch, waited in self._made(batches):
                if ended := self._train_step(index + 1, batch, waited):
                    status = ended
                    break
        self._rows.finish()
        return "diverged" if self._check.stopped else status

    def _train_step(self, step: int, batch: PyTree, waited: float) -> Status | None:
        """One step, its row, evaluation and checkpoint. Returns a status if the run ends with it."""
        run, settings, self.step = self._run, self._run.recipe.run, step
        limits = [self._check.limits(step)] if self._check.limits_are_used else []
        with self._profile.step(step):
            if run.trace is not None and step == self._traced:
                self.state, metrics = _traced_step(run, self.state, batch, *limits)
            else:
                self.state, metrics = run.program.step(self.state, batch, *limits)
        self._rows.finish()  # the row of the previous step, while the device computes this one
        if self._check.stopped:
            # Other processes may wait for values of this step, so it must not end with this process.
            _wait_for(self.state, metrics)
            return "diverged"
        self._rows.begin(step, metrics, waited)
        if self._profile.ends_after(step):
            _wait_for(self.state, metrics)
            self._profile.close()
        is_last, is_stopped = step == settings.steps, run.should_stop()
        if run.evaluate and (is_last or step % settings.eval_every == 0):
            self._rows.finish(partial(self._evaluated, run.evaluate))
        if is_last or is_stopped or step % run.recipe.checkpoint.every == 0:
            self._save(final=is_last or is_stopped)
        if self._check.stopped:
            return "diverged"
        return "finished" if is_last else "stopped" if is_stopped else None

    def _made(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        with self._saving_before_failure("the next batch cannot be made"):
            yield from batches

    def _evaluated(self, evaluate: Callable[[TrainState], Row]) -> Row:
        self._check_callbacks()
        with self._saving_before_failure("its evaluation failed"):
            row = evaluate(self.state)
            self._run.program.check()
            return row

    def _check_callbacks(self) -> None:
        _wait_for(self.state)  # the metrics may be known before the callbacks of other devices have ended
        self._run.program.check()

    @contextmanager
    def _saving_before_failure(self, reason: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever it is: code of the recipe may raise anything
            # One of several processes must not wait for the others, which may not have failed.
            if self._saved < self.step and jax.process_count() == 1:
                self._save(final=False)
                if not self._check.stopped:
                    self._run.say(f"the state after step {self.step} is saved, since {reason}")
            raise

    def _save(self, *, final: bool) -> None:
        """Start an asynchronous save, unless the row of the step stops the run.

        A failure of this save or of the previous one is handled according to `checkpoint.on_failure`, except that a
        failure of the final save is always raised.
        """
        self._rows.finish()
        if self._check.stopped:
            return
        self._check_callbacks()
        self._run.data.check_unchanged()
        record = step_record(self._run.record, self.step, self._rows.last, self._check.record(), self._run.data)

        def save() -> None:
            self._run.publish()  # first, so that a step in a store never lacks rows of metrics
            self._checkpointer.save(self.step, self.state, record)

        for call in (self._checkpointer.wait, save):  # a failure of the previous save does not prevent this one
            try:
                call()
            except SaveError as error:
                if final and call is save:
                    raise
                self._run.warn_or_raise(error)
        self._saved = self.step


def _wait_for(*trees: PyTree) -> None:
    """Wait until the devices of this process have finished a step."""
    jax.block_until_ready([x for x in jax.tree.leaves(trees) if x.addressable_shards])


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


def _traced_step(run: Run, state: TrainState, batch: PyTree, *limits: Limits) -> tuple[TrainState, Metrics]:
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
    model = merge_lora(run.program.model(run.recipe.optimizer.evaluated(state)))
    graphdef, leaves = nnx.split(model, graph=True)

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
