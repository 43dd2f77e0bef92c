"""The training loop: start or resume a run, train, evaluate, save checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.checkpoint import Checkpointer, RetentionPolicy
from flax_mesh.checkpoint.base import Base
from flax_mesh.checkpoint.find import CHECKPOINTS
from flax_mesh.checkpoint.hf.kept import KEPT
from flax_mesh.checkpoint.retention import has_finite_numbers
from flax_mesh.data.batches import prefetch
from flax_mesh.data.corpus import Corpus, decode, load_corpus
from flax_mesh.data.evaluation import host_evaluate, run_eval_fns
from flax_mesh.data.run_data import TEXT, RunData, token_data, user_data
from flax_mesh.errors import ConfigError, SaveError
from flax_mesh.fields import check_types
from flax_mesh.mesh.context import in_mesh
from flax_mesh.modes import set_eval_mode
from flax_mesh.mpmd import Pipeline
from flax_mesh.mpmd.runtime.profile import costs_of, trace_step
from flax_mesh.mpmd.runtime.search import SEARCH, ScheduleSearch
from flax_mesh.mpmd.schedules.simulate import simulate
from flax_mesh.processes import Watch, broadcast_from_process_0, stop_together
from flax_mesh.recipe.config import CheckpointConfig, TrainConfig, data_seed
from flax_mesh.recipe.overrides import Change
from flax_mesh.recipe.program import TrainProgram, batch_sharding, build_program
from flax_mesh.recipe.saved import run_metadata
from flax_mesh.step.loss import Limits, is_sum_over_rows
from flax_mesh.step.state import TrainState
from flax_mesh.text import count_text, mesh_text
from flax_mesh.train.hooks.load import Hooks, find_hooks
from flax_mesh.train.hooks.profile import Profile, profile_problem
from flax_mesh.train.metadata import check_resume, config_lines, layout_changes, repeats_rows, run_record, step_record
from flax_mesh.train.metrics import Row, Rows, StepCheck
from flax_mesh.train.report import Run, Say, describe
from flax_mesh.train.run_folder import MetricsFile, check_agreement, folder_of_run, is_first, latest_step
from flax_mesh.train.warm_start import Start, check_start_settings, check_text, find_start, keep_other_files, start_from
from flax_mesh.user_code import place_of, user_code

UINT16_IDS = 2**16
TRACED = 2  # steps before the traced one: they include compilation


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


@check_types
def train(
    config: TrainConfig,
    *,
    recipe: str = "",
    restart: bool = False,
    allow_changes: bool = False,
    say: Say = lambda text: None,
    hooks: Sequence[Callable[[Row], None]] = (),
    on_start: Callable[[TrainProgram, Path], None] = lambda program, folder: None,
    should_stop: Callable[[], bool] = lambda: False,
    trace: str | Path | None = None,
    watch: Watch | None = None,
) -> TrainResult:
    """Run a recipe, resuming from the newest valid checkpoint in `config.run.folder` if there is one.

    A step is a pure function of the seed and the step number: a run that was stopped and resumed computes the same
    losses, bit for bit, as one that was not. The run folder contains metrics.jsonl (one row per step), config.txt and
    checkpoints/.

    With several processes, all of them call `train` with the same arguments. `hooks` and `on_start` run in every
    process; only process 0 calls `say` and writes files. All processes stop after the same step once `should_stop` is
    true in one.

    Args:
        config: The config of the run, from `load_recipe` and `apply_overrides` or constructed directly.
        recipe: Name of the recipe, stored in the metadata of the checkpoints.
        restart: Start a new run in a new folder beside `run.folder`.
        allow_changes: Resume, or start from `checkpoint.start_from`, although settings that change the result differ
            from the settings of the checkpoint.
        say: Called with every line of output. By default the run prints nothing.
        hooks: Called with every row of metrics, a dict with step, loss, grad_norm, tokens_per_s and others.
        on_start: Called with the program and the run folder once the settings are checked, before the step compiles.
        should_stop: Polled after every step. Once true, the step is saved and the run ends.
        trace: Write the times of all actions of the third step of a pipeline to this JSON file (Chrome trace format),
            and a picture of them beside it.
        watch: A watchdog that reports the transfer that a pipeline waits for.

    Returns:
        A `TrainResult`: status, step, run folder, last row of metrics and sampled text.

    Raises:
        ConfigError: A setting is invalid, or one that changes the result differs from the checkpoint's. All mistakes
            are reported in one error, before anything compiles. Or a memory-mapped file of `data.source` was rewritten
            or shortened under the run; this is compared before every save and every read. Or a batch of `make_batches`
            differs from the first one in its tree, shapes or dtypes.
        CheckpointCorruptedError: The run folder has checkpoints, but none of them is valid.
        SaveError: A checkpoint cannot be written, and `checkpoint.on_failure` is "stop" or it is the final one.

    Example:
        >>> import tempfile
        >>> from flax_mesh.train import apply_overrides, load_recipe, train
        >>> settings = ["run.steps=2", "model.num_layers=1", "run.eval_every=0", "run.sample_tokens=0"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = apply_overrides(load_recipe("recipes/tiny.py"), [*settings, f"run.folder={folder}"])
        ...     result = train(config)
        >>> result.status, result.step
        ('finished', 2)
    """
    say = say if is_first() else lambda text: None
    should_stop = stop_together(should_stop)
    program = build_program(config, say)
    trace = None if trace is None else Path(trace)
    if trace is not None and (problems := check_trace(trace, config.mesh.shape, program.pipeline)):
        raise ConfigError(problems)
    factories = find_hooks(config.run.hooks, config.hooks)
    data = _load_data(program)
    _watch_pipeline(watch, program)
    with folder_of_run(Path(config.run.folder).expanduser(), restart) as folder:
        record = run_record(recipe, program, data)
        check_agreement(record)
        program = _with_search(program, folder, say)
        evaluate = _evaluation(program, data)
        run = Run(program, data, evaluate, record, folder, say, hooks, factories, should_stop, trace)
        describe(run)
        on_start(program, folder)
        with _checkpointer(config.checkpoint, folder / CHECKPOINTS, program.rules.layers) as checkpointer:
            step = latest_step(checkpointer)
            for damaged, problems in checkpointer.damaged.items():
                others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
                say(
                    f"warning: the checkpoint of step {damaged} is damaged and was skipped ({problems[0]}{others}); "
                    f"the next save renames it to {damaged}.damaged"
                )
            _check_recording(run, step or 0)
            if step is None:
                start = find_start(config.checkpoint.start_from) if config.checkpoint.start_from else None
                if start is not None:
                    for change in check_start_settings(start, config, data.kind, allow_changes=allow_changes):
                        say(f"changed since the checkpoint: {change}")
                    check_text(data.kind, config.data.source, start.files)
                    if start.step is None and data.kind == TEXT:
                        say(f"note: {start.folder} has no tokenizer, so data.source is read as bytes, one token each")
                say(f"run: new run in {folder}, {config.run.steps} steps")
                if not config.data.resumable:
                    say("note: this run cannot be resumed (data.resumable=false)")
                _check_stages(run, is_new=True)
                return _steps(run, checkpointer, _initial(run, start, checkpointer), 0, {})
            saved = run_metadata(checkpointer.folder / str(step))
            if step < config.run.steps and not config.data.resumable:
                raise ConfigError(not_resumable(folder, step))
            for change in _changes(run, checkpointer, saved, allow_changes=allow_changes):
                say(f"changed since the checkpoint: {change}")
            if step >= config.run.steps:
                say(f"run: {folder} is finished: step {step} of {config.run.steps}. Nothing to do.")
                return TrainResult("already finished", step, folder)
            check_text(data.kind, config.data.source, folder / CHECKPOINTS / KEPT)
            say(f"run: found {folder} at step {step}; resuming, {config.run.steps - step} steps to go")
            if changed := layout_changes(saved, record):
                others = f"; {len(changed) - 1} more changes" * (len(changed) > 1)
                say(f"layout: changed since the checkpoint: {changed[0]}{others}")
            if not has_finite_numbers(saved):
                known = _newest_finite(checkpointer)
                say(f"warning: the numbers of the checkpoint of step {step} are not finite; {known}")
            _check_stages(run, is_new=False)
            if problem := data.resume(step, saved["data"]):
                if not allow_changes:
                    raise ConfigError(
                        problem, repair="Repair it, start a new run (--restart), or pass --allow-changes."
                    )
                say(f"changed since the checkpoint: {problem}")
            state = checkpointer.restore(program.layout, step, verify=False)  # latest_step has verified it
            return _steps(run, checkpointer, state, step, saved)


def not_resumable(folder: Path, step: int) -> str:
    return (
        f"{folder} has a checkpoint of step {step}, from which a run with data.resumable=false cannot resume: its "
        "iterator has no set_state, and would repeat the batches from the first one. Start a new run (--restart, or "
        f"another run.folder); checkpoint.start_from={folder} starts it from these parameters."
    )


def _with_search(program: TrainProgram, folder: Path, say: Say) -> TrainProgram:
    """The program of `pipeline.schedule=search`, whose first steps are measured."""
    config, pipeline = program.recipe.pipeline, program.pipeline
    if pipeline is None or config.schedule != SEARCH:
        return program
    setting = f"{mesh_text(program.mesh.shape)}, {count_text(config.num_microbatches, 'microbatch')}"
    return replace(program, step=ScheduleSearch(pipeline, program.recipe.schedule_memory, folder, setting, say).step)


def _check_stages(run: Run, *, is_new: bool) -> None:
    """`pipeline.check`: process 0 compares the stages with the model before the split, on its data."""
    pipeline, setting = run.program.pipeline, run.recipe.pipeline.check
    if pipeline is None or setting == "never" or (setting == "auto" and not is_new):
        return

    def check() -> str:
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


def _check_recording(run: Run, start: int) -> None:
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


def _changes(run: Run, checkpointer: Checkpointer, saved: Mapping[str, Any], *, allow_changes: bool) -> list[Change]:
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


def _steps(
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
        run.say(f"stopped: {check.stopped}; {_newest_finite(checkpointer)} (run.on_nonfinite)")
        step = rows.last["step"]
    return TrainResult(status, step, run.folder, rows.last, sample)


def _wait_for(state: TrainState, metrics: Any) -> None:
    """Wait until the devices of this process have finished a step."""
    jax.block_until_ready([x for x in jax.tree.leaves((state, metrics)) if x.addressable_shards])


def _initial(run: Run, start: Start | None, checkpointer: Checkpointer) -> TrainState:
    state = run.program.init()
    if start is not None:
        base = checkpointer if run.recipe.has_adapters else None
        state, text = start_from(start, state, run.program.rules.layers, base)
        if is_first():
            keep_other_files(start, run.folder / CHECKPOINTS)
        run.say(f"start: {start.folder}: {text}")
    return state


def _say_base(run: Run, base: Base | None) -> None:
    if base is not None:
        what = f"leave out {count_text(len(base.arrays), 'frozen array')}; keep {base.folder}, where they are read"
    else:
        what = "contain the frozen weights too, since no checkpoint.start_from is their base"
    if run.recipe.has_adapters:
        run.say(f"checkpoints: they {what}")


def _checkpointer(config: CheckpointConfig, folder: Path, layers: Sequence[str]) -> Checkpointer:
    keep = RetentionPolicy(config.keep, best=config.keep_best, every=config.keep_every or None)
    return Checkpointer(
        folder, keep=keep, layers=layers or None, best_metric=config.best_metric, compress=config.compress
    )


def _newest_finite(checkpointer: Checkpointer) -> str:
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


def _load_data(program: TrainProgram) -> RunData:
    """The batches of the recipe, or the tokens of `data.source`."""
    recipe, axes = program.recipe, program.rules.axes
    if recipe.user_batches is not None:
        return user_data(recipe.user_batches, program.mesh, axes)
    corpus, vocab = load_corpus(recipe.data), getattr(recipe.model, "vocab_size", None)
    if problems := vocabulary_problems(vocab, corpus, recipe.data.source):
        raise ConfigError(problems)
    seed = data_seed(recipe.data, recipe.run)
    sharding = batch_sharding(program.mesh, axes)
    return token_data(corpus, recipe.data, seed, sharding, vocab, evaluates=recipe.run.eval_every > 0)


def _evaluation(program: TrainProgram, data: RunData) -> Callable[[TrainState], Row] | None:
    """The metrics of the held-out tokens and of `eval_fns`; None if there are neither or run.eval_every=0."""
    recipe, held_out = program.recipe, data.held_out
    if not recipe.run.eval_every or (held_out is None and not recipe.eval_fns):
        return None

    def evaluate(state: TrainState) -> Row:
        sums = partial(program.evaluate, recipe.optimizer.evaluated(state))
        on_host = host_evaluate(sums, program.mesh, program.rules.axes, program.num_parts)
        tokens = {} if held_out is None else held_out(sums)
        return {**tokens, **run_eval_fns(recipe.eval_fns, on_host)}

    return evaluate


def _watch_pipeline(watch: Watch | None, program: TrainProgram) -> None:
    channel = program.pipeline and program.pipeline.channel
    if watch is not None and channel:
        channel.watched = True
        watch.waiting = channel.waiting


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


def check_trace(path: Path, shape: str, pipeline: Pipeline | None) -> list[str]:
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


def vocabulary_problems(ids: Any, corpus: Corpus, source: str) -> list[str]:
    """One line if the vocabulary is smaller than the vocabulary of the text, or larger than the dtype of the files."""
    size = corpus.vocab_size
    if isinstance(ids, int) and size is not None and ids < size:
        return [f"model.vocab_size={ids} is too small for data.source={source}: text needs {size}"]
    if isinstance(ids, int) and corpus.bin_dtype == "uint16" and ids > UINT16_IDS:
        return [
            f"model.vocab_size={ids} is more than the {UINT16_IDS} ids of uint16, which data.source={source} is read "
            "as. Set data.bin_dtype=uint32 if its tokens are uint32; save tokens of another type as .npy"
        ]
    return []
