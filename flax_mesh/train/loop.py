"""The loop: from a TrainConfig to a trained, saved state, or on from where an earlier run stopped."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.checkpoint import Checkpointer, Keep
from flax_mesh.checkpoint.find import CHECKPOINTS
from flax_mesh.errors import ConfigError, SaveError
from flax_mesh.mpmd.simulate import simulate
from flax_mesh.mpmd.timeline import costs_of, trace_step, write_timeline
from flax_mesh.processes import Watch, stop_together
from flax_mesh.sharding import PartitionRules, sharding_fingerprint
from flax_mesh.state import TrainState
from flax_mesh.train.batches import BatchFn, make_batch_fn, make_eval_fn, num_eval_batches, prefetch
from flax_mesh.train.config import Change, CheckpointConfig, TrainConfig
from flax_mesh.train.data import Corpus, decode, load_corpus
from flax_mesh.train.folder import METRICS, check_resume
from flax_mesh.train.metrics import MetricsFile, Row, step_row
from flax_mesh.train.program import TrainProgram, train_program
from flax_mesh.train.record import layout_changes, layout_of, record
from flax_mesh.train.setup import (
    batch_sharding,
    check_config,
    check_on_corpus,
    check_on_mesh,
    make_mesh,
    run_rules,
)
from flax_mesh.train.start import start_from
from flax_mesh.train.step import Step, in_mesh
from flax_mesh.train.together import (
    check_agreement,
    folder_of_run,
    is_first,
    latest_step,
    watch_pipeline,
    write_config_once,
)

Say = Callable[[str], None]
TRACED = 2  # steps before the one that --trace shows: they compile


@dataclass(frozen=True)
class Result:
    """How a run ended: after `step` steps, with its files in `folder`."""

    status: Literal["finished", "already finished", "stopped"]
    step: int
    folder: Path
    last_row: Row = field(default_factory=dict)
    sample: str = ""


def train(
    config: TrainConfig,
    *,
    recipe: str = "",
    restart: bool = False,
    allow_changes: bool = False,
    say: Say = lambda text: None,
    hooks: Sequence[Callable[[Row], None]] = (),
    should_stop: Callable[[], bool] = lambda: False,
    trace: str | Path | None = None,
    watch: Watch | None = None,
) -> Result:
    """Train as `config` says; if `run.folder` holds a checkpoint of this run, go on from there.

    `restart` starts over in a new folder beside it. `hooks` get every row of metrics, `say` every line for people.
    Once `should_stop()` is true the step at hand is finished and saved. `trace`: a file for the times of all actions of
    a pipeline's third step, with a picture beside it. Raises ConfigError, before anything compiles,
    for settings that are wrong or that differ from the checkpoint's in what changes the result (`allow_changes`).

    In a run of several processes each calls it alike; all have the hooks, process 0 alone says and writes, and all stop
    after the same step once one should. `watch` is told what a pipeline waits for.
    """
    if problems := check_config(config):
        raise ConfigError(problems)
    say = say if is_first() else lambda text: None
    should_stop = stop_together(should_stop)
    mesh = make_mesh(config, say)
    rules = run_rules(config)
    if problems := check_on_mesh(config, mesh, rules.axes):
        raise ConfigError(problems)
    program = train_program(config, mesh, rules)
    if trace is not None:
        _check_trace(config, Path(trace), program)
    corpus = load_corpus(config.data)
    if problems := check_on_corpus(config, corpus):
        raise ConfigError(problems)
    functions = _functions(config, mesh, program, rules, corpus)
    watch_pipeline(watch, program)
    with folder_of_run(Path(config.run.folder).expanduser(), restart) as folder:
        run = _Run(config, recipe, mesh, rules, program, corpus, functions, folder, say, hooks, should_stop, trace)
        check_agreement(run.record(0, {}))
        _describe(run)
        with _checkpointer(config.checkpoint, folder / CHECKPOINTS, rules.layers) as checkpointer:
            step = latest_step(checkpointer)
            for damaged, problems in checkpointer.damaged.items():
                more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
                say(
                    f"warning: the checkpoint of step {damaged} is damaged and passed over ({problems[0]}{more}); the "
                    f"next save keeps it as {damaged}.damaged"
                )
            if step is None:
                say(f"run: {folder} is new, {config.run.steps} steps")
                write_config_once(folder, config)
                return _steps(run, checkpointer, _initial(run), 0)
            for change in _changes(run, checkpointer, step, allow_changes):
                say(f"changed since the checkpoint: {change}")
            if step >= config.run.steps:
                say(f"run: {folder} is finished: step {step} of {config.run.steps}. Nothing to do.")
                return Result("already finished", step, folder)
            say(f"run: found {folder} at step {step}; resuming, {config.run.steps - step} steps to go")
            if moved := layout_changes(checkpointer.metadata(step), mesh, run.layout):
                say(f"layout: saved on another, {moved[0]}" + f"; {len(moved) - 1} more lines" * (len(moved) > 1))
            restored = checkpointer.restore(program.layout.to_nnx(), step, verify=False)  # latest_step has
            leaves = tuple(jax.tree.leaves(restored))
            write_config_once(folder, config)
            return _steps(run, checkpointer, TrainState(leaves, program.layout.definition), step)


@dataclass(frozen=True)
class _Run:
    """What stays the same from the first step to the last."""

    config: TrainConfig
    recipe: str
    mesh: Mesh
    rules: PartitionRules
    program: TrainProgram
    corpus: Corpus
    functions: "_Functions"
    folder: Path
    say: Say
    hooks: Sequence[Callable[[Row], None]]
    should_stop: Callable[[], bool]
    trace: str | Path | None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the layout of the whole state."""
        return sharding_fingerprint(self.program.layout.to_nnx())

    @functools.cached_property
    def layout(self) -> dict[str, str]:
        """path on disk -> how the array is split."""
        return layout_of(self.program.layout.to_nnx(), self.rules.layers)

    def record(self, step: int, row: Row) -> dict[str, Any]:
        """What is written beside the state of a step."""
        return record(
            step,
            recipe=self.recipe,
            config=self.config,
            mesh=self.mesh,
            rules=self.rules,
            layout=self.layout,
            fingerprint=self.fingerprint,
            corpus=self.corpus,
            row=row,
        )

    @property
    def parameters(self) -> list[Any]:
        """What is trained; statistics and random keys are state, but no parameters."""
        return jax.tree.leaves(nnx.filter_state(self.program.layout.to_nnx()["model"], nnx.Param))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(x.shape) for x in self.parameters)


class _Functions(NamedTuple):
    """Jitted for the mesh of the run; nothing is compiled before the first call."""

    step: Step
    batch: BatchFn
    evaluate: Callable[[TrainState], Row] | None  # None: run.eval_every=0


def _changes(run: _Run, checkpointer: Checkpointer, step: int, allow_changes: bool) -> list[Change]:
    """Settings that differ from those of the checkpoint. ConfigError where that is refused."""
    saved = checkpointer.metadata(step)
    try:
        return check_resume(saved, run.config, run.corpus.content_hash, allow_changes=allow_changes)
    except ConfigError:
        # Of another model no setting can be allowed: name the arrays instead.
        checkpointer.check(run.program.layout.to_nnx(), step)
        raise


def _steps(run: _Run, checkpointer: Checkpointer, state: TrainState, start: int) -> Result:
    """Train from `start` completed steps to `run.steps`; every step's row is written before its state is saved."""
    config = run.config
    if run.trace is not None and config.run.steps - start <= TRACED:
        raise ConfigError(
            f"--trace {run.trace} shows step {start + TRACED + 1}, the third from here, and "
            f"run.steps={config.run.steps} ends before it; raise run.steps"
        )
    step_fn, batch_fn, evaluate = run.functions
    rows = _Rows(run, start)
    step, status = start, "finished"
    with ExitStack() as stack:
        stack.callback(rows.close)
        batches = stack.enter_context(closing(prefetch(batch_fn, start, config.run.steps)))
        for index, batch, waited in batches:
            if run.trace is not None and index == start + TRACED:
                state, metrics = _traced_step(run, state, batch)
            else:
                state, metrics = step_fn(state, batch)
            step = index + 1
            rows.finish()  # of the step before: the device is busy with this one meanwhile
            rows.begin(step, metrics, waited)
            last = step == config.run.steps
            stop = run.should_stop()
            if evaluate and (last or step % config.run.eval_every == 0):
                rows.finish(partial(evaluate, state))
            if last or stop or step % config.checkpoint.every == 0:
                rows.finish()
                _save(run, checkpointer, step, state, rows.last, final=last or stop)
            if stop and not last:
                status = "stopped"
                break
        rows.finish()
        sample = _sample(run, state) if status == "finished" else ""
    checkpointer.wait()
    return Result(status, step, run.folder, rows.last, sample)


def _initial(run: _Run) -> TrainState:
    state, folder = run.program.init(), run.config.checkpoint.start_from
    if folder:
        state, text = start_from(folder, state, run.rules.layers)
        run.say(f"start: {folder}: {text}")
    return state


def _checkpointer(config: CheckpointConfig, folder: Path, layers: Sequence[str]) -> Checkpointer:
    keep = Keep(config.keep, best=config.keep_best, every=config.keep_every or None)
    return Checkpointer(folder, keep=keep, layers=layers, best_metric=config.best_metric, compress=config.compress)


def _save(run: _Run, checkpointer: Checkpointer, step: int, state: TrainState, row: Row, *, final: bool) -> None:
    """Start to save; a save that fails, this one or the one before, ends the run or is told, as the config says.

    The final one must not fail, whatever the config says: a run that is done has its state on disk.
    """
    save = partial(checkpointer.save, step, state.to_nnx(), run.record(step, row))
    for call in (checkpointer.wait, save):  # if the save before has failed, this one is begun all the same
        try:
            call()
        except SaveError as error:
            if final and call is save:
                raise
            _go_on_or_raise(run, error)


def _go_on_or_raise(run: _Run, error: SaveError) -> None:
    if run.config.checkpoint.on_failure == "stop":
        raise error
    run.say(f"warning: {error}; training goes on (checkpoint.on_failure)")


def _check_trace(config: TrainConfig, path: Path, program: TrainProgram) -> None:
    """Raise, before anything compiles, what would keep a trace from being written."""
    problems = []
    if program.pipeline is None:
        problems.append(
            f"--trace {path}: only a pipeline has actions to show; add pp to mesh.shape={config.mesh.shape}"
        )
    elif program.pipeline.channel is not None:
        problems.append(f"--trace {path}: it needs all groups in one process, and this run has {jax.process_count()}")
    if path.suffix == ".svg":
        problems.append(f"--trace {path}: the picture goes there; name the trace, such as {path.with_suffix('.json')}")
    if not path.parent.is_dir():
        problems.append(f"--trace {path}: there is no folder {path.parent}; make it first")
    if problems:
        raise ConfigError(problems)


def _traced_step(run: _Run, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    assert run.program.pipeline is not None and run.trace is not None
    state, metrics, timeline = trace_step(run.program.pipeline, state, batch)
    try:
        trace, picture = write_timeline(timeline, run.trace)
    except (OSError, ValueError) as error:
        run.say(f"trace: {run.trace} cannot be written: {error}")
        return state, metrics
    simulated = simulate(timeline.schedule, costs_of(timeline))
    run.say(
        f"trace: {trace} and {picture}; bubble {timeline.bubble:.0%} (simulated {simulated.bubble:.0%}), "
        f"{timeline.overlap:.1f} of {timeline.schedule.num_groups} groups at work on average"
    )
    return state, metrics


class _Rows:
    """Rows of metrics, read from the device one step late, so that the host never waits before it dispatches."""

    def __init__(self, run: _Run, start: int):
        self.run = run
        self.file = MetricsFile(run.folder / METRICS) if is_first() else None
        self.last: Row = {}
        self._lost = 0  # rows in a row that could not be written
        self._pending: tuple[int, Any, float] | None = None
        self._extra: Row = {"resumed_from": start} if start else {}
        self._since = time.perf_counter()
        config = run.config
        self._tokens = config.data.batch_size * config.data.sequence_length
        count = config.flops_per_token
        self._flops = count and count(config.model, run.num_parameters, config.data.sequence_length)

    def begin(self, step: int, metrics: Any, waited: float) -> None:
        self._pending = (step, metrics, waited)

    def finish(self, more: Callable[[], Row] = dict) -> None:
        """Write the row begun last, with what `more()` gives; the time that takes counts for no row."""
        if self._pending is None:
            return
        step, metrics, waited = self._pending
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        row = step_row(
            step,
            values,
            tokens=self._tokens,
            seconds=now - self._since,
            data_wait=waited,
            devices=list(self.run.mesh.devices.flat),
            flops_per_token=self._flops,
        )
        self.last = row | self._extra | more()
        self._pending, self._extra, self._since = None, {}, time.perf_counter()
        self._write()
        for hook in self.run.hooks:
            hook(self.last)

    def _write(self) -> None:
        if self.file is None:
            return
        try:
            self.file.write(self.last)
        except SaveError as error:
            if not self._lost:
                _go_on_or_raise(self.run, error)
            self._lost += 1
            return
        if self._lost:
            self.run.say(f"metrics are written again from step {self.last['step']} on; rows lost: {self._lost}")
            self._lost = 0

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _functions(
    config: TrainConfig, mesh: Mesh, program: TrainProgram, rules: PartitionRules, corpus: Corpus
) -> _Functions:
    sharding = batch_sharding(mesh, rules.axes)
    vocab = getattr(config.model, "vocab_size", None)
    seed = config.run.seed if config.data.seed is None else config.data.seed
    batch_fn = make_batch_fn(corpus.train, seed=seed, config=config.data, sharding=sharding, vocab_size=vocab)
    if not config.run.eval_every:
        return _Functions(program.step, batch_fn, None)
    eval_fn = make_eval_fn(corpus.held_out, config=config.data, sharding=sharding, vocab_size=vocab)
    batches = num_eval_batches(corpus.held_out, config.data)

    def evaluate(state: TrainState) -> Row:
        sums = [jax.device_get(program.evaluate(state, eval_fn(k))) for k in range(batches)]
        # The training loss of a mixture of experts has the router's losses in it; bits per byte must not.
        loss = float(sum(s.get("cross_entropy", s["loss"]) for s in sums) / sum(s["weight"] for s in sums))
        per_token = corpus.bytes_per_token
        return {"eval_loss": loss, "bits_per_byte": loss / math.log(2) / per_token if per_token else None}

    return _Functions(program.step, batch_fn, evaluate)


def _describe(run: _Run) -> None:
    devices = run.mesh.devices.flat
    sizes = ",".join(f"{name}:{size}" for name, size in run.mesh.shape.items() if size > 1) or "one device"
    leaves = run.program.layout.leaves
    shard = max(_bytes_by_device(leaves).values())
    whole = sum(math.prod(x.shape) * _itemsize(x) for x in leaves)
    run.say(f"mesh: {sizes} on {len(list(devices))} x {run.mesh.devices.flat[0].device_kind}")
    run.say(f"data: {run.corpus.description}")
    run.say(
        f"model: {run.num_parameters / 1e6:.2f}M parameters in {len(run.parameters)} arrays; "
        f"with the optimizer {whole / 2**20:.1f} MiB, {shard / 2**20:.1f} MiB a device"
    )
    if run.program.pipeline is not None:
        for line in str(run.program.pipeline.staged).splitlines():
            run.say(line)
    config = run.config
    if config.run.steps > config.optimizer.decay_steps:
        run.say(
            f"note: the learning rate stays at {config.optimizer.end_learning_rate} from step "
            f"{config.optimizer.decay_steps} on (optimizer.decay_steps); the run has {config.run.steps} steps"
        )


def _bytes_by_device(leaves: Sequence[Any]) -> dict[Any, int]:
    """Device -> bytes of the shards that it will hold."""
    found: dict[Any, int] = {}
    for leaf in leaves:
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * _itemsize(leaf)
        for device in leaf.sharding.device_set:
            found[device] = found.get(device, 0) + size
    return found


def _itemsize(x: Any) -> int:
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize


def _sample(run: _Run, state: TrainState) -> str:
    """Text that the model writes after the first words of the held-out part; "" where the tokens are no bytes."""
    num_tokens, sample = run.config.run.sample_tokens, run.config.sample
    if not num_tokens or sample is None or run.corpus.bytes_per_token != 1:
        return ""
    prompt = np.asarray(run.corpus.held_out[:64], np.int32)

    graphdef, leaves = nnx.split(run.program.model(state))

    def continue_text(leaves: nnx.State, prompt: jax.Array, key: jax.Array) -> jax.Array:
        with in_mesh(run.mesh):
            model = nnx.merge(graphdef, leaves)
            model.eval()
            return sample(model, prompt, num_tokens, key)

    whole = NamedSharding(run.mesh, PartitionSpec())  # so that every process can read them
    tokens = jax.jit(continue_text, out_shardings=whole)(leaves, prompt, jax.random.key(run.config.run.seed))
    return decode(np.asarray(tokens))
