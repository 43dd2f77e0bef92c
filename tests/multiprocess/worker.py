"""One process of a test: `python -m tests.multiprocess.worker CASE PROCESS PROCESSES PORT DEVICES ARGUMENTS`."""

import itertools
import json
import os
import re
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mesh import named_leaves
from flax_mesh.checkpoint import DECODER_NAMES, Checkpointer, load_safetensors
from flax_mesh.checkpoint.layout import is_key
from flax_mesh.errors import ConfigError, SaveError, ShardingError
from flax_mesh.mpmd import Pipeline
from flax_mesh.mpmd.transport.ordered import OrderedTransport
from flax_mesh.processes import Watch
from flax_mesh.recipe.program import train_program
from flax_mesh.recipe.resolve import resolve
from flax_mesh.recipe.target import local_target
from flax_mesh.train import apply_overrides, load_recipe
from flax_mesh.train.warm_start import find_start, start_from
from tests.multiprocess import cases
from tests.multiprocess.cases import end_at_once, error_of, put_and_get_all
from tests.multiprocess.counted import CountedMoves
from tests.multiprocess.launches import stored
from tests.multiprocess.ordered_cases import ordered  # noqa: F401  a case
from tests.multiprocess.processes import ROOT, TIME_LIMIT_S, run_case
from tests.train.support.llama import LLAMA, config_of


def train(model: str, schedule: str, sizes: str, folder: str, steps: str) -> None:
    """Writes the metrics of every step, the sums of an evaluation, and every shard of the state in this process."""
    pipeline = cases.make_pipeline(model, schedule, cases.parse_sizes(sizes))
    rows, sums, shards = cases.results(pipeline, model, int(steps))
    here = jax.process_index()
    np.savez(Path(folder) / f"shards{here}.npz", **shards)
    report = {"rows": rows, "sums": sums, "compiled": compiled_stages(pipeline)}
    (Path(folder) / f"report{here}.json").write_text(json.dumps(report))


def watched(what: str) -> None:
    """Trains with a `Watch`. In the fifth step process 1 fails, blocks, or exits, or the last process omits a call in
    which it neither sends nor receives."""

    def report(error: BaseException) -> int:
        if what == "fails unheard":
            raise BrokenPipeError("standard error is closed")
        print(f"reported: {error}", flush=True)
        return 1

    last = jax.process_index() == jax.process_count() - 1
    pipeline = cases.make_pipeline("net", "1f1b", {"pp": jax.process_count()})
    channel = pipeline.channel
    assert channel is not None
    channel.watched = True
    moves, omitted = CountedMoves(), []

    def move(array: jax.Array, target: NamedSharding) -> jax.Array:
        if number == 4 and last and not (omitted or array.addressable_shards or target.addressable_devices):
            omitted.append(array)
            return array
        return moves(array, target)

    if what == "omits a call":
        pipeline.ordered = OrderedTransport(channel, move)
    with Watch(report, waiting=channel.waiting) as watch:
        state = pipeline.init_state()
        for number, batch in enumerate(cases.batches("net", 30)):
            if last and number == 4:
                if what.startswith("fails"):
                    pipeline.on_action = raise_in_stage
                if what == "stuck":
                    time.sleep(TIME_LIMIT_S)
                if what == "ends":
                    os._exit(7)
            state, metrics = pipeline.step(state, batch)
            print(f"step {number} loss {float(np.asarray(metrics['loss']))}", flush=True)
            watch.step_ended()
            if what in ("stuck", "omits a call") and number == 3:  # everything is compiled
                watch.step_timeout_s = 4


def mismatch() -> None:
    """Process 1 has a batch with more rows, so that the stage boundary activations differ in shape."""
    pipeline = cases.make_pipeline("net", "1f1b", {"pp": 2})
    batch = cases.batches("net", 1)[0]
    batch = jax.tree.map(lambda x: np.concatenate([x] * (1 + jax.process_index())), batch)
    state = pipeline.init_state()
    refused = error_of(lambda: pipeline.step(state, batch), ShardingError)
    assert "All processes must run the same code" in refused
    print("refused:", refused, flush=True)
    end_at_once("mismatch is done")


def page() -> None:
    """The code of docs/multiprocess.md."""
    text = (ROOT / "docs" / "multiprocess.md").read_text()
    namespace: dict[str, object] = {"__name__": "__page__"}
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(code, "multiprocess.md", "exec"), namespace)
    assert namespace["number"] == jax.process_count() and namespace["folder"] == "runs/1"


def saves(folder: str, what: str, who: str) -> None:
    """Saves three times; the second save fails only in process `who`. Prints the error in this process."""
    here = jax.process_index()
    own = Path(folder) / f"own{here}"  # each process has a separate link to the folder, which can be removed
    (Path(folder) / "checkpoints").mkdir(exist_ok=True)
    own.symlink_to("checkpoints")
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    state = nnx.State({"a": jax.device_put(np.arange(2.0**18, dtype=np.float32), NamedSharding(mesh, P("fsdp")))})
    with Checkpointer(own, compress=False) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        restore_limits = break_saving(what, own, Path(folder)) if here == int(who) else lambda: None
        put_and_get_all("broken", "yes")
        try:
            checkpointer.save(2, state, {})
            print("save has returned", flush=True)
            checkpointer.wait()
        except (SaveError, ConfigError) as error:
            print("reported:", error, flush=True)
        put_and_get_all("reported", "yes")
        restore_limits()
        put_and_get_all("repaired", "yes")
        checkpointer.save(3, state, {})
        checkpointer.wait()
        restored = checkpointer.restore(state, 3)
    pairs = zip(state["a"].addressable_shards, restored["a"].addressable_shards, strict=True)
    assert all(np.array_equal(saved.data, found.data) for saved, found in pairs)


def checksums(folder: str) -> None:
    """Saves 8 MiB per process, and prints how many bytes this process has read meanwhile."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    numbers = np.random.default_rng(0).random(2**21 * jax.device_count(), np.float32)
    state = nnx.State({"a": jax.device_put(numbers, NamedSharding(mesh, P("fsdp")))})
    with Checkpointer(folder, compress=False) as checkpointer:
        checkpointer.save(1, nnx.State({"a": np.ones(3)}), {})  # imports the modules for saving
        checkpointer.wait()
        before = bytes_read()
        checkpointer.save(2, state, {})
        checkpointer.wait()
        print(f"read {bytes_read() - before} bytes", flush=True)


def bytes_read() -> int:
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def starts(checkpoint: str) -> None:
    """Runs that start from a checkpoint, and from Hugging Face files with the same parameters, with and without pp."""
    whole = NamedSharding(jax.make_mesh((1,), ("fsdp",), devices=jax.local_devices()[:1]), P())
    for shape, folder in itertools.product(("pp:2,fsdp:2", "fsdp:4"), (checkpoint, LLAMA)):
        config = config_of(shape)
        program = train_program(resolve(config, local_target(config.mesh, config.run.platform)))
        rules, fresh = program.rules, program.init()
        state, text = start_from(find_start(str(folder)), fresh, rules.layers)
        before, after = (dict(named_leaves(one.to_nnx())) for one in (fresh, state))
        model = state.to_nnx()["model"]
        on_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), model)
        expected = dict(named_leaves({"model": load_safetensors(LLAMA, on_one, DECODER_NAMES["llama"])}))
        shards = 0
        for path, leaf in after.items():
            assert leaf.sharding.is_equivalent_to(before[path].sharding, leaf.ndim), path
            for old, new in zip(before[path].addressable_shards, leaf.addressable_shards, strict=True):
                wanted = np.asarray(expected[path])[new.index] if path in expected else np.asarray(old.data)
                assert np.array_equal(new.data, wanted), path
                shards += path in expected and not np.array_equal(old.data, wanted)
        assert shards > 0
        print(f"{shape}: {shards} shards are new;", text.splitlines()[0], flush=True)


def restores(folder: str, step: str, *settings: str) -> None:
    """Restores the step of a run in this layout: every shard has the bits that plain Orbax reads."""
    config = apply_overrides(load_recipe(settings[0]), settings[1:])
    program = train_program(resolve(config, local_target(config.mesh, config.run.platform)))
    layout, rules = program.layout.to_nnx(), program.rules
    with Checkpointer(Path(folder) / "checkpoints", layers=rules.layers) as checkpointer:
        restored = dict(named_leaves(checkpointer.restore(layout, int(step))))
    expected = stored(Path(folder), int(step))
    assert restored.keys() == expected.keys()
    for path, leaf in restored.items():
        for shard in (jax.random.key_data(leaf) if is_key(leaf) else leaf).addressable_shards:
            wanted = expected[path][shard.index]
            assert shard.data.dtype == wanted.dtype and np.array_equal(shard.data, wanted), path


def break_saving(what: str, own: Path, folder: Path) -> Callable[[], object]:
    """Makes saves fail in this process only. Returns a function that repairs it."""
    if what == "no way to the folder":
        own.unlink()
        return lambda: own.symlink_to("checkpoints")
    if what == "a step that is there":
        own.unlink()
        shutil.copytree(folder / "checkpoints" / "1", folder / "others" / "2")
        own.symlink_to("others")
        return lambda: (own.unlink(), own.symlink_to("checkpoints"))
    if what == "no room for files":  # detected in the background
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert what == "something in the way", what
    link = folder / "checkpoints" / "2.orbax-checkpoint-tmp"  # where process 0 creates a folder
    link.symlink_to("1")
    return lambda: link.unlink()


def raise_in_stage(action: Any, saved: Any) -> None:
    raise RuntimeError(f"something in {action}")


def compiled_stages(pipeline: Pipeline) -> list[int]:
    """Stages for which this process has compiled any function."""
    found = set()
    for stage in (stage for made in pipeline.compiled.values() for stage in made.stages):
        functions: list[Any] = [stage.forward, stage.backward, stage.weights, stage.both]
        if any(function is not None and function._cache_size() for function in functions):
            found.add(stage.stage)
    return sorted(found)


if __name__ == "__main__":
    run_case(globals())
