"""Pipeline: programs, memory, transfers, skipped steps, evaluation. tests/mpmd/zoo compares with the plain step."""

import math
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd import CutError, Pipeline, chain_stages, split_stages
from flax_mesh.mpmd.schedules import Action, make_schedule
from flax_mesh.mpmd.schedules.simulate import peak_activations
from flax_mesh.mpmd.split.update import SHARED
from tests.mpmd.runtime.pipelines import (
    PLAIN_SGD,
    Stack,
    build,
    build_net,
    groups,
    make_net,
    make_small,
    net_batch,
    net_loss,
)
from tests.mpmd.zoo.base import Case, merged_leaves
from tests.mpmd.zoo.models import BY_NAME
from tests.step import changed

pytestmark = pytest.mark.usefixtures("quick_unless_slow")


# --- programs ---


@pytest.mark.slow
@pytest.mark.parametrize(("name", "together"), [("1f1b", True), ("zb-h1", True), ("v-min", True), ("gpipe", False)])
def test_adjacent_f_and_b_of_the_last_stage_are_one_program(name, together):
    """Separate programs give the same results, and GPipe, which runs other actions between them, has only those."""
    count, ran, results = 4, [], []
    for single in (False, True):
        pipeline = build_net(count, name=name, make=make_net)
        if single:
            pipeline.on_action = lambda action, saved: None
        pipeline.step(pipeline.init_state(), net_batch(8))  # compiles
        (compiled,) = pipeline.compiled.values()
        *others, last = compiled.stages
        calls = []

        def counted(kind, last=last, calls=calls):
            return lambda *args: calls.append(kind) or getattr(last, kind)(*args)

        last = last._replace(forward=counted("forward"), both=counted("both"))
        object.__setattr__(compiled, "stages", (*others, last))
        state, metrics = pipeline.step(pipeline.init_state(), net_batch(8))
        ran.append(calls)
        results.append(merged_leaves(state) | {"loss": metrics["loss"]})
    assert ran == [["both" if together else "forward"] * count, ["forward"] * count]
    for path, value in results[1].items():
        np.testing.assert_allclose(results[0][path], value, rtol=1e-6, atol=1e-7, err_msg=path)


@pytest.mark.sampled
@pytest.mark.parametrize("is_changed", [True, False])
def test_nothing_compiles_after_the_second_step(compilations, is_changed):
    make, loss_fn, batch_of = make_small, net_loss, net_batch
    if is_changed:  # parameters that the forward pass changes
        make, loss_fn, batch_of = lambda: changed.Net(nnx.Rngs(0)), changed.loss_fn, changed.make_batch
    pipeline = build(make, loss_fn, batch_of(4), 2, optax.adamw(1e-3))
    state = pipeline.init_state()
    for _ in range(2):
        state, _ = pipeline.step(state, batch_of(4))
    assert compilations
    batches = [batch_of(4, seed) for seed in range(3)]
    compilations.clear()
    for batch in batches:
        state, _ = pipeline.step(state, batch)
    assert not compilations


def test_evaluate_returns_the_sums_of_one_device_also_for_a_batch_in_64_bits():
    pipeline = build_net()
    state, batch = pipeline.init_state(), net_batch(8, 3)
    loss, weight, more = net_loss(make_small(), batch)
    for count in (None, 4):
        sums = pipeline.evaluate(state, batch, count)
        np.testing.assert_allclose(
            [sums["loss"], sums["weight"], sums["seen"]], [loss, weight, more["seen"]], rtol=1e-5
        )
    wide = {name: x.astype(np.int64) for name, x in batch.items()}
    programs = len(pipeline.compiled)
    assert pipeline.evaluate(state, wide, 4)["loss"] == sums["loss"] and len(pipeline.compiled) == programs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_next_call_raises_the_exception_of_a_callback_of_a_stage(name):
    """The groups have several devices, which wait for each other. A forward pass and a rule of a gradient raise it."""
    failing: set[str] = set()

    def check(kind, x):
        if kind in failing:
            raise ZeroDivisionError(kind)
        return x

    called = lambda kind, x: jax.pure_callback(partial(check, kind), jax.typeof(x), x)  # noqa: E731
    same = jax.custom_vjp(partial(called, "forward"))
    same.defvjp(lambda x: (same(x), None), lambda _, g: (called("backward", g),))

    def loss_fn(model, batch):
        model.layers[1].bias[...] = same(model.layers[1].bias[...])
        return net_loss(model, batch)

    mesh = groups(pp=2, fsdp=4)
    pipeline = build(make_small, loss_fn, net_batch(8), 2, PLAIN_SGD, name=name, mesh=mesh, rules="fsdp")
    expected = build_net().step(build_net().init_state(), net_batch(8))[1]["loss"]
    state, metrics = pipeline.step(pipeline.init_state(), net_batch(8))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    for kind, call in [("forward", pipeline.step), ("backward", pipeline.step), ("forward", pipeline.evaluate)]:
        failing.add(kind)
        jax.block_until_ready(call(pipeline.init_state(), net_batch(8)))
        failing.clear()
        line = check.__code__.co_firstlineno + 2
        with pytest.raises(ConfigError, match=f"^a callback of the step: .*, line {line}: ZeroDivisionError: {kind}$"):
            call(state, net_batch(8))


class _WithCallbacks(nnx.Module):
    """Layers whose results, also those between stages, are results of callbacks."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        twice = jax.custom_vjp(lambda x: jax.pure_callback(lambda x: 2 * np.asarray(x), jax.typeof(x), x))
        twice.defvjp(lambda x: (twice(x), None), lambda _, g: (2 * g,))
        for layer in self.layers:
            x = twice(jnp.tanh(layer(x)))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_results_of_callbacks_are_transferred_from_all_devices_of_a_group(remat):
    """JAX returns them on the first device of the mesh alone."""
    batch = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    loss_fn = lambda model, x: (jnp.sum(model(x) ** 2), x.size)  # noqa: E731
    model = _WithCallbacks(nnx.Rngs(0))
    loss, grads = nnx.value_and_grad(lambda model: loss_fn(model, batch)[0] / batch.size)(model)
    staged = split_stages(loss_fn, model, batch, mesh=groups(pp=2, fsdp=4), schedule="1f1b", num_microbatches=4)
    pipeline = Pipeline(staged, PLAIN_SGD, rules="fsdp", remat=remat)
    _, metrics = pipeline.step(pipeline.init_state(), batch)
    norm = optax.tree.norm(grads)
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], [loss, norm], rtol=1e-5)


# --- steps that are skipped ---


def scaled(case):
    """The loss function and a batch of a case, whose loss is not finite if an element of `scale` is not."""

    def loss_fn(model, batch):
        loss, weight, *_ = case.loss_fn(model, batch)
        return loss * jnp.mean(batch["scale"]), weight

    good, broken = (case.batch(4) | {"scale": np.array([1, 1, 1, last], np.float32)} for last in (1, np.inf))
    return loss_fn, good, broken


def test_a_step_that_is_not_finite_is_skipped_on_every_group():
    loss_fn, good, broken = scaled(Case("net", make_small, net_loss, net_batch))
    pipeline = build(make_small, loss_fn, good, 2, optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), 5))
    state = pipeline.init_state()
    before = merged_leaves(state)
    state, metrics = pipeline.step(state, broken)
    after = merged_leaves(state)
    assert not np.isfinite(float(metrics["loss"]))
    for path in before:
        if path.startswith("model/"):
            np.testing.assert_array_equal(after[path], before[path])
    assert int(after["optimizer/opt_state/total_notfinite"]) == 1
    state, metrics = pipeline.step(state, good)
    assert any((merged_leaves(state)[path] != before[path]).any() for path in before if path.startswith("model/"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["averages", "scanned_noisy"])
@pytest.mark.parametrize(
    "optimizer", [optax.adam(1e-2, eps=1e-3), optax.chain(optax.clip_by_global_norm(1.0), PLAIN_SGD)]
)
def test_a_skipped_step_changes_no_leaf_on_any_group(name, optimizer, compilations):
    case = BY_NAME[name]
    loss_fn, good, broken = scaled(case)
    pipeline = build(case.make, loss_fn, good, 2, optimizer, split={"layers": "layers"}, skip_nonfinite=True)

    def values(state):
        return {path: x.tobytes() for path, x in merged_leaves(state).items()}

    state = pipeline.init_state()
    before = values(state)
    state, metrics = pipeline.step(state, broken)
    assert float(metrics["skipped"]) == 1 and not np.isfinite(float(metrics["loss"]))
    assert values(state) == before
    state, _ = pipeline.step(state, broken)  # the first two steps compile
    compilations.clear()
    state, metrics = pipeline.step(state, good, (1e9, 0.0))
    assert float(metrics["skipped"]) == 1 and np.isfinite(float(metrics["loss"])) and not compilations
    assert values(state) == before
    state, metrics = pipeline.step(state, good)
    fresh, expected = pipeline.step(pipeline.init_state(), good)
    assert float(metrics["skipped"]) == 0 and metrics == expected
    assert values(state) == values(fresh) != before


# --- memory and transfers ---


def test_a_scanned_stack_is_stored_as_one_chunk_per_group():
    split = {"layers": "layers", "cuts": [1]}
    pipeline = build(lambda: Stack(nnx.Rngs(0)), net_loss, net_batch(4), 2, optax.adam(1e-2), split=split)
    chunks = {owner.path: [] for owner in pipeline.placement.owners if owner.path.endswith("layers/kernel")}
    for owner, leaf in zip(pipeline.placement.owners, pipeline.init_state().leaves, strict=True):
        if owner.path in chunks:
            chunks[owner.path].append((owner.rows, owner.group, leaf.shape[0]))
    assert len(chunks) == 3  # the parameter and its two moments
    assert all(found == [((0, 1), 0, 1), ((1, 4), 1, 3)] for found in chunks.values())


def test_optimizer_counts_are_shared_despite_model_variables_of_the_same_name():
    def make():
        model: Any = make_net()
        model.step, model.count = nnx.BatchStat(jnp.zeros((), int)), nnx.Param(jnp.ones(8))
        return model

    def loss_fn(model, batch):
        model.step[...] += 1
        loss, weight, metrics = net_loss(model, batch)
        return loss * model.count[...].sum(), weight, metrics

    pipeline = build(make, loss_fn, net_batch(4), 2, optax.adam(1e-2))
    found = {owner.path: owner.group for owner in pipeline.placement.owners}
    assert found["optimizer/step"] == found["optimizer/opt_state/0/count"] == SHARED
    assert found["optimizer/opt_state/0/mu/count"] == found["model/count"] != SHARED


@pytest.mark.slow
def test_parameters_and_moments_are_stored_only_on_their_group():
    pipeline = build_net(optimizer=optax.adam(1e-2), mesh=groups(pp=2, dp=2), rules=[(".*", ())])
    state, _ = pipeline.step(pipeline.init_state(), net_batch(4))
    staged, meshes = pipeline.staged, pipeline.groups
    stored = {device: 0 for mesh in meshes for device in mesh.devices.flat}
    for owner, leaf in zip(pipeline.placement.owners, state.leaves, strict=True):
        where = {shard.device for shard in leaf.addressable_shards}
        expected = pipeline.mesh.jax_mesh if owner.group == SHARED else meshes[owner.group]
        assert where == set(expected.devices.flat), owner.path
        if owner.group != SHARED:
            for shard in leaf.addressable_shards:
                stored[shard.device] += shard.data.nbytes
    for group, mesh in enumerate(meshes):
        own = [leaf for leaf, users in zip(staged.leaves, staged.users, strict=True) if users[0] == group]
        size = 3 * sum(math.prod(leaf.shape) * 4 for leaf in own)  # the leaf and its two moments
        assert all(stored[device] == size for device in mesh.devices.flat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    [("1f1b", lambda s, m: min(4 - s, m)), ("gpipe", lambda s, m: m), ("zb-h1", lambda s, m: min(4, m))],
)
def test_live_residuals_match_the_peak_activations(name, most):
    count = 6
    pipeline = build_net(count, name=name, mesh=groups(pp=4), make=make_net)
    alive = {stage: [] for stage in range(4)}
    peak = dict.fromkeys(alive, 0)

    def watch(action: Action, saved) -> None:
        if action.kind == "F":
            received, residuals, *_ = saved[action.stage, action.microbatch]
            buffers = [weakref.ref(x) for x in jax.tree.leaves((received, residuals))]
            assert buffers
            alive[action.stage].append((action.microbatch, buffers))
        for stage, entries in alive.items():
            live = {m for m, buffers in entries if any(ref() is not None for ref in buffers)}
            peak[stage] = max(peak[stage], len(live))

    pipeline.on_action = watch
    pipeline.step(pipeline.init_state(), net_batch(2 * count))
    assert tuple(peak.values()) == peak_activations(pipeline.schedule)
    assert all(peak[stage] <= most(stage, count) for stage in peak)
    assert name == "zb-h1" or peak == {stage: most(stage, count) for stage in peak}
    assert pipeline.num_transfers == 2 * (4 - 1) * count


def test_an_optimizer_over_arrays_of_several_groups_is_refused():
    def join(updates, state, params=None):
        largest = jnp.concatenate([x.ravel() for x in jax.tree.leaves(updates)]).max()
        return jax.tree.map(lambda u: u * largest, updates), state

    pipeline = build_net(optimizer=optax.GradientTransformation(lambda params: optax.EmptyState(), join))
    message = r"several pipeline groups: the gradient of embed/embedding, .*only through scalars"
    with pytest.raises(ConfigError, match=message):
        pipeline.step(pipeline.init_state(), net_batch(4))


# --- how stages, groups and microbatches are given ---


class Front(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)

    def __call__(self, batch):
        return {"h": self.embed(batch["x"]), "mask": None}


class Back(nnx.Module):
    def __init__(self, rngs, width=8):
        self.head = nnx.Linear(width, 16, rngs=rngs)

    def __call__(self, given):
        return self.head(jnp.tanh(given["h"]))


def test_explicit_stages_are_called_in_order():
    """tests/mpmd/zoo runs the pipelines of such splits."""

    def stages(width=8):
        rngs = nnx.Rngs(0)
        return [Front(rngs), Back(rngs, width)]

    def loss_of(scores, batch):
        return net_loss(lambda x: scores, batch)

    staged, batch, (front, back) = chain_stages(loss_of, stages, net_batch(2)), net_batch(4), stages()
    assert staged.loss_fn(staged.make(), batch) == loss_of(back(front(batch)), batch)
    users = {leaf.path: users for leaf, users in zip(staged.leaves, staged.users, strict=True)}
    assert users == {"stages/0/embed/embedding": (0,), "stages/1/head/bias": (1,), "stages/1/head/kernel": (1,)}
    with pytest.raises(CutError, match=r"stage 1, Back, cannot take .*f32\[2,3,8\].*dot_general"):
        chain_stages(loss_of, lambda: stages(width=5), net_batch(2))
    with pytest.raises(CutError, match="stages is empty"):
        chain_stages(loss_of, list, net_batch(2))


def test_groups_stages_and_microbatches_follow_from_mesh_schedule_and_batch():
    mesh, batch = groups(pp=2), net_batch(8)
    schedule = make_schedule("interleaved-1f1b", num_groups=2, num_microbatches=4)
    staged = split_stages(net_loss, make_net, batch, mesh=mesh, schedule="interleaved-1f1b", num_microbatches=4)
    assert staged.schedule == schedule and staged.groups is mesh
    explicit = split_stages(net_loss, make_net, net_batch(2), num_stages=schedule.num_stages, mesh=mesh.unstack[0])
    assert str(staged) == str(explicit) and staged.num_stages == 4
