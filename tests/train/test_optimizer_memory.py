"""Optimizer state in the memory of the host: where every array is stored, and results that do not change."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_mesh as fm
from flax_mesh.errors import ConfigError
from flax_mesh.plan import plan
from flax_mesh.recipe.program import TrainProgram, build_program
from flax_mesh.sharding.memory import is_on_host, memory_problem
from flax_mesh.step.step import make_eval_step
from flax_mesh.train import init_train_state, make_train_step
from flax_mesh.tree import named_leaves
from tests.train.support.decoder import batch_of, config_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
HOST = "optimizer.memory=pinned_host"
LAYOUTS = {
    "fsdp and tp": ("mesh.shape=fsdp:2,tp:2",),
    "ZeRO-1": ("mesh.shape=dp:4", "optimizer.shard_over=dp"),
    "scan, skip": ("mesh.shape=fsdp:4", "model.scan=true", "run.on_nonfinite=skip"),
    "pipeline": ("mesh.shape=pp:2,fsdp:2",),
    "pipeline, ZeRO-1, skip": ("mesh.shape=pp:2,dp:2", "optimizer.shard_over=dp", "run.on_nonfinite=skip"),
    "pipeline, scan": ("mesh.shape=pp:2,fsdp:2", "model.scan=true"),
}
OTHERS = {
    "muon": ("mesh.shape=pp:2,fsdp:2", "optimizer.name=muon", "optimizer.moment_dtype=bfloat16", "optimizer.ema=0.9"),
    "adafactor": ("mesh.shape=fsdp:4", "optimizer.name=adafactor", "optimizer.momentum=0.9"),
    "frozen": ("mesh.shape=pp:2,fsdp:2", "optimizer.name=sgd", "optimizer.groups=embed frozen"),
}


def own_config(tmp_path, *settings):
    return config_of(tmp_path, tmp_path, "run.eval_every=0", "run.platform=auto", *settings)


def program_of(tmp_path, *settings) -> TrainProgram:
    return build_program(own_config(tmp_path, *settings))


def kinds_of(state) -> dict[str, str]:
    """The memory kind of the shards of every array."""
    named = [(path, x.addressable_shards) for path, x in named_leaves(state.to_nnx())]
    return {path: {shard.data.sharding.memory_kind for shard in shards}.pop() for path, shards in named}


def run_steps(program: TrainProgram, steps: int = 3):
    """The state after some steps, their metrics, and the loss of an evaluation."""
    state, found = program.init(), []
    for index in range(steps):
        state, metrics = program.step(state, batch_of(program, index))
        found.append(jax.device_get(metrics))
    return state, found, jax.device_get(program.evaluate(state, batch_of(program)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *OTHERS])
def test_moments_are_in_the_memory_of_the_host_between_steps_and_results_do_not_change(name, tmp_path):
    settings = (LAYOUTS | OTHERS)[name]
    hosted = program_of(tmp_path, *settings, HOST)
    state, found, evaluated = run_steps(hosted)
    expected_state, expected, expected_evaluated = run_steps(program_of(tmp_path, *settings))
    assert kinds_of(state) == kinds_of(hosted.init())
    assert set(kinds_of(expected_state).values()) == {"device"}
    for (path, x), (_, y) in zip(named_leaves(state.to_nnx()), named_leaves(expected_state.to_nnx()), strict=True):
        is_moment = re.match(r"optimizer/opt_state/.*/(kernel|scale|embedding)(/from \d+)?$", path)
        assert kinds_of(state)[path] == ("pinned_host" if is_moment and x.shape else "device"), path
        assert x.sharding.spec == y.sharding.spec
        if name in LAYOUTS and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # bit for bit
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), path)
    assert "pinned_host" in kinds_of(state).values()
    if name in LAYOUTS:
        assert found == expected and evaluated == expected_evaluated
    for one, other in zip(found, expected, strict=True):
        assert {k: float(v) for k, v in one.items()} == pytest.approx({k: float(v) for k, v in other.items()}, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["", "dp"])
@pytest.mark.parametrize("shape", ["fsdp:4", "pp:2,fsdp:2", "dp:4"])
def test_plan_and_explain_count_the_bytes_of_the_arrays(shape, zero, tmp_path):
    settings = f"mesh.shape={shape}", f"optimizer.shard_over={zero}"
    program = program_of(tmp_path, *settings, HOST)
    on_host, on_device = (dict.fromkeys(program.mesh.devices.flat, 0) for _ in range(2))
    for x in program.init().leaves:
        for shard in x.addressable_shards:
            size = math.prod(shard.data.shape) * (8 if x.dtype.name.startswith("key") else x.dtype.itemsize)
            (on_host if is_on_host(shard.data) else on_device)[shard.device] += size
    hosted, usual = (plan(own_config(tmp_path, *settings, *more)) for more in ((HOST,), ()))
    assert hosted.memory.host == max(on_host.values()) > 0
    assert usual.memory.host == 0
    assert usual.memory.arguments - hosted.memory.arguments in on_host.values()
    assert hosted.memory.at_peak.get("optimizer", 0) < 64  # counts
    if "pp" not in shape:
        rows = 2 * 16 * 16 * 4 // 4
        assert hosted.memory.arguments == max(on_device.values()) + rows
    assert usual.memory.peak - hosted.memory.peak > 0.9 * min(on_host.values())
    if zero and shape == "dp:4":
        copied = plan(own_config(tmp_path, f"mesh.shape={shape}", HOST))
        assert hosted.memory.host < 0.3 * copied.memory.host


@pytest.mark.slow
def test_the_plan_of_an_accelerator_counts_the_copies_during_the_update(tmp_path):
    settings = ("mesh.shape=fsdp:1",)  # without collectives, which would hide a part of the copies
    hosted, usual = (plan(own_config(tmp_path, *settings, *more), "v5e:1x1") for more in ((HOST,), ()))
    moved = 2 * hosted.memory.host / hosted.topology.chip.host_bandwidth
    times = [{part.name: part.seconds for part in each.time.parts} for each in (hosted, usual)]
    assert times[0]["update"] == pytest.approx(moved) and moved > times[1]["update"]  # which they hide
    assert times[0]["backward"] == times[1]["backward"]
    copies = [moment.bytes["optimizer"] for moment in hosted.memory.timeline]
    assert 0 < max(copies) - min(copies) < hosted.memory.host  # the copies of one parameter at a time


def make():
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss_fn(model, batch):
    return ((model(batch) - 1) ** 2).sum(), len(batch)


def test_a_custom_loop_has_the_same_argument():
    layouts = [
        fm.abstract_state(make, fm.create_mesh((8,), ("fsdp",)), "fsdp", optimizer_memory=memory)
        for memory in ("device", "pinned_host")
    ]
    batch, results = np.ones((16, 16), np.float32), []
    for abstract in layouts:
        state = init_train_state(make, abstract)
        step = make_train_step(loss_fn, state, num_microbatches=2)
        for _ in range(3):
            state, metrics = step(state, batch)
        results.append((float(metrics["loss"]), float(make_eval_step(loss_fn, state)(state, batch)["loss"])))
        hosted = [path for path, x in named_leaves(state.to_nnx()) if is_on_host(x)]
    assert results[0] == results[1]
    assert hosted == [f"optimizer/opt_state/0/{name}/{leaf}" for name in ("mu", "nu") for leaf in ("bias", "kernel")]


def test_a_memory_that_the_devices_lack_is_an_error_that_lists_theirs():
    mesh = fm.create_mesh((8,), ("fsdp",))
    line = "optimizer memory: hbm is not a memory of cpu devices, which have device, pinned_host, unpinned_host"
    with pytest.raises(ConfigError, match=line):
        fm.abstract_state(make, mesh, "fsdp", optimizer_memory="hbm")
    with pytest.raises(ConfigError, match="pinned_host needs an optimizer, but make"):
        fm.abstract_state(lambda: make()[0], mesh, "fsdp", optimizer_memory="pinned_host")
    assert memory_problem(mesh.abstract_mesh, "hbm") == "must be device or pinned_host, got 'hbm'"
