"""train: start or resume a run. Its steps are in `steps.py`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from flax_mesh.checkpoint import Checkpointer, RetentionPolicy
from flax_mesh.checkpoint.find import CHECKPOINTS, find_step
from flax_mesh.checkpoint.hf.decoders import has_images, read_config
from flax_mesh.checkpoint.hf.kept import KEPT, is_huggingface
from flax_mesh.checkpoint.retention import has_finite_numbers
from flax_mesh.data.run_data import TEXT
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types, user_path
from flax_mesh.mpmd.runtime.search import SEARCH, ScheduleSearch
from flax_mesh.processes import Watch, stop_together
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.program import TrainProgram, build_program
from flax_mesh.recipe.saved import run_metadata
from flax_mesh.step.state import TrainState
from flax_mesh.store import stored_path, working_copy
from flax_mesh.text import count_text, mesh_text
from flax_mesh.train.checks import changes_since, check_recording, check_stages, check_trace, not_resumable
from flax_mesh.train.hooks.load import find_hooks
from flax_mesh.train.inputs import evaluation_of, load_data
from flax_mesh.train.metadata import layout_changes, run_record
from flax_mesh.train.metrics import Row
from flax_mesh.train.report import Run, Say, describe
from flax_mesh.train.run_folder import check_agreement, folder_of_run, is_first, latest_step
from flax_mesh.train.steps import TrainResult, newest_finite_text, run_steps
from flax_mesh.train.warm_start import (
    Start,
    check_start_settings,
    check_text,
    find_start,
    keep_other_files,
    load_constants,
    start_from,
)


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
    losses, bit for bit, as one that was not. With several processes, all of them call `train` with the same arguments;
    only process 0 calls `say` and writes files, and all stop after the same step once `should_stop` is true in one.

    Args:
        config: The config of the run, from `load_recipe` and `apply_overrides` or constructed directly.
        recipe: Name of the recipe, stored in the metadata of the checkpoints.
        restart: Start a new run in a new folder beside `run.folder`.
        allow_changes: Resume, or start from `checkpoint.start_from`, although settings that change the result differ.
        say: Called with every line of output. By default the run prints nothing.
        hooks: Called in every process with every row of metrics, a dict with step, loss, grad_norm and others.
        on_start: Called in every process with the program and the run folder, before the step compiles.
        should_stop: Polled after every step. Once true, the step is saved and the run ends.
        trace: Write the times of all actions of the third step of a pipeline to this JSON file, and a picture of them.
        watch: A watchdog that reports the transfer that a pipeline waits for.

    Returns:
        A `TrainResult`: status, step, run folder, last row of metrics and sampled text.

    Raises:
        ConfigError: A setting is invalid, or one that changes the result differs from the checkpoint's: all mistakes
            in one error, before anything compiles. Or a file of `data.source` changed under the run, or a batch of
            `make_batches` differs from the first one in its tree, shapes or dtypes.
        CheckpointCorruptedError: The run folder has checkpoints, but none of them is valid.
        SaveError: A checkpoint cannot be written, and `checkpoint.on_failure` says so or it is the final one.

    Example:
        >>> import tempfile
        >>> from flax_mesh.train import apply_overrides, load_recipe, train
        >>> settings = ["run.steps=2", "model.num_layers=1", "run.eval_every=0", "run.sample_tokens=0"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = train(apply_overrides(load_recipe("recipes/tiny.py"), [*settings, f"run.folder={folder}"]))
        >>> result.status, result.step
        ('finished', 2)
    """
    say = say if is_first() else lambda text: None
    trace = None if trace is None else user_path(trace)
    program = build_program(config, say, restart=restart)
    if (start := config.checkpoint.start_from) and not is_huggingface(start):
        find_step(start)  # ConfigError for a config.json without parameters, which is enough for a plan
    if trace is not None and (problems := check_trace(trace, config.mesh.shape, program.pipeline)):
        raise ConfigError(problems)
    factories, data = find_hooks(config.run.hooks, config.hooks), load_data(program)
    _watch_pipeline(watch, program)
    with folder_of_run(stored_path(config.run.folder), restart, say) as (folder, publish, check):
        record = run_record(recipe, program, data)
        check_agreement(record)
        program = _with_search(program, working_copy(folder), say)
        evaluate = evaluation_of(program, data)
        should_stop = stop_together(should_stop)
        run = Run(program, data, evaluate, record, folder, publish, check, say, hooks, factories, should_stop, trace)
        describe(run)
        on_start(program, folder)
        return _begin_or_resume(run, allow_changes)


def _begin_or_resume(run: Run, allow_changes: bool) -> TrainResult:
    with _checkpointer(run) as checkpointer:
        step = latest_step(checkpointer)
        for damaged, problems in checkpointer.damaged.items():
            others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            run.say(
                f"warning: the checkpoint of step {damaged} is damaged and was skipped ({problems[0]}{others}); "
                f"the next save renames it to {damaged}.damaged"
            )
        check_recording(run, step or 0)
        if step is None:
            return _begin(run, checkpointer, allow_changes)
        return _resume(run, checkpointer, step, allow_changes)


def _begin(run: Run, checkpointer: Checkpointer, allow_changes: bool) -> TrainResult:
    """A new run, from initial values or from `checkpoint.start_from`."""
    recipe, data, say = run.recipe, run.data, run.say
    start = find_start(recipe.checkpoint.start_from) if recipe.checkpoint.start_from else None
    if start is not None:
        for change in check_start_settings(start, recipe.config, data.kind, allow_changes=allow_changes):
            say(f"changed since the checkpoint: {change}")
        check_text(data.kind, recipe.data.source, start.files)
        if start.step is None and data.kind == TEXT:
            say(f"note: {start.folder} has no tokenizer, so data.source is read as bytes, one token each")
        if start.step is None and has_images(read_config(start.folder)):
            say(f"note: {start.folder} also reads images; this run has its text decoder only, and so have its exports")
    say(f"run: new run in {run.folder}, {recipe.run.steps} steps")
    if not recipe.data.resumable:
        say("note: this run cannot be resumed (data.resumable=false)")
    check_stages(run, is_new=True)
    return run_steps(run, checkpointer, _initial(run, start, checkpointer), 0, {})


def _resume(run: Run, checkpointer: Checkpointer, step: int, allow_changes: bool) -> TrainResult:
    """Continue the run after its newest valid `step`."""
    recipe, folder, data, say = run.recipe, run.folder, run.data, run.say
    saved, last = run_metadata(checkpointer.folder / str(step)), recipe.run.steps
    if step < last and not recipe.data.resumable:
        raise ConfigError(not_resumable(folder, step))
    for change in changes_since(run, checkpointer, saved, allow_changes=allow_changes):
        say(f"changed since the checkpoint: {change}")
    if step >= last:
        say(f"run: {folder} is finished: step {step} of {last}. Nothing to do.")
        return TrainResult("already finished", step, folder)
    check_text(data.kind, recipe.data.source, folder / CHECKPOINTS / KEPT)
    say(f"run: found {folder} at step {step}; resuming, {last - step} steps to go")
    if changed := layout_changes(saved, run.record):
        others = f"; {len(changed) - 1} more changes" * (len(changed) > 1)
        say(f"layout: changed since the checkpoint: {changed[0]}{others}")
    if not has_finite_numbers(saved):
        say(f"warning: the numbers of the checkpoint of step {step} are not finite; {newest_finite_text(checkpointer)}")
    check_stages(run, is_new=False)
    if problem := data.resume(step, saved["data"]):
        if not allow_changes:
            raise ConfigError(problem, repair="Repair it, start a new run (--restart), or pass --allow-changes.")
        say(f"changed since the checkpoint: {problem}")
    state = checkpointer.restore(run.program.layout, step, verify=False)  # latest_step has verified it
    return run_steps(run, checkpointer, load_constants(recipe.constants, state), step, saved)


def _with_search(program: TrainProgram, folder: Path, say: Say) -> TrainProgram:
    """The program of `pipeline.schedule=search`, whose first steps are measured."""
    config, pipeline = program.recipe.pipeline, program.pipeline
    if pipeline is None or config.schedule != SEARCH:
        return program
    setting = f"{mesh_text(program.mesh.shape)}, {count_text(config.num_microbatches, 'microbatch')}"
    return replace(program, step=ScheduleSearch(pipeline, program.recipe.schedule_memory, folder, setting, say).step)


def _initial(run: Run, start: Start | None, checkpointer: Checkpointer) -> TrainState:
    state = run.program.init()
    if start is not None:
        base = checkpointer if run.recipe.has_adapters else None
        state, text = start_from(start, state, run.program.rules.layers, base)
        if is_first():
            keep_other_files(start, run.folder / CHECKPOINTS)
        run.say(f"start: {start.folder}: {text}")
    return load_constants(run.recipe.constants, state)


def _checkpointer(run: Run) -> Checkpointer:
    config, layers = run.recipe.checkpoint, run.program.rules.layers or None
    keep = RetentionPolicy(config.keep, best=config.keep_best, every=config.keep_every or None)
    return Checkpointer(
        run.folder / CHECKPOINTS,
        keep=keep,
        layers=layers,
        best_metric=config.best_metric,
        compress=config.compress,
        before_commit=run.check,
    )


def _watch_pipeline(watch: Watch | None, program: TrainProgram) -> None:
    channel = program.pipeline and program.pipeline.channel
    if watch is not None and channel:
        channel.watched = True
        watch.waiting = channel.waiting
