"""A pipeline computes the same numbers as the plain step on one device, for all schedules, stages and microbatches."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import abstract_state, create_mesh
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.mpmd import CutError, MpmdMesh, Pipeline, chain_stages, split_stages
from flax_mesh.mpmd.runtime.placement import chunked
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from flax_mesh.train import init_train_state, make_train_step
from flax_mesh.tree import named_leaves

pytestmark = pytest.mark.usefixtures("quick_unless_slow")

AXES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
CONFIG = DecoderConfig(**SIZES, mlp_size=64)
PLAIN_SGD = optax.sgd(1.0)  # the step is then the gradient itself
FAST = {"xla_backend_optimization_level": 0}  # faster compilation, on both sides of a comparison


class Net(nnx.Module):
    """An embedding, residual blocks, and the embedding again as the head."""

    def __init__(self, rngs: nnx.Rngs, depth: int = 4):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.embed.attend(x)


def net_loss(model, batch):
    """Cross-entropy over the targets that are not negative, so the weights of microbatches differ."""
    scores = jax.nn.log_softmax(model(batch["x"]))
    live = batch["y"] >= 0
    picked = jnp.take_along_axis(scores, jnp.maximum(batch["y"], 0)[..., None], -1)[..., 0]
    return -jnp.sum(picked, where=live), jnp.sum(live, dtype=jnp.float32), {"seen": jnp.sum(live)}


def make_net():
    return Net(nnx.Rngs(0))


def net_batch(rows, seed=0, length=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(-1, 16, (rows, length)).astype(np.int32)
    y[-1] = -1  # a row of padding
    return {"x": rng.integers(0, 16, (rows, length)).astype(np.int32), "y": y}


def decoder_batch(rows, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 64, (rows, 16)).astype(np.int32)
    return {"inputs": inputs, "targets": rng.integers(-1, 64, (rows, 16)).astype(np.int32)}


def groups(**sizes):
    shape = [sizes.get(name, 1) for name in AXES]
    return MpmdMesh(create_mesh(tuple(shape), AXES, devices=jax.devices()[: math.prod(shape)]), "pp")


def build(make, loss_fn, batch, count, optimizer, *, name="1f1b", mesh=None, split=None, **kinds):
    mesh = mesh or groups(pp=2)
    schedule = make_schedule(name, num_groups=mesh.mpmd_dim, num_microbatches=count)
    rows = jax.tree.leaves(batch)[0].shape[0] // count
    micro = jax.tree.map(lambda x: x[:rows], batch)
    staged = split_stages(
        loss_fn, make, micro, num_stages=schedule.num_stages, mesh=mesh.unstack[0], **(split or {})
    )  # fmt: skip
    return Pipeline(staged, optimizer, mesh=mesh, schedule=schedule, compiler_options=FAST, **kinds)


def plain(make, loss_fn, optimizer, count, layers=("layers",), **kinds):
    """(state, step) on one device."""
    mesh = create_mesh((1,) * 5, AXES[1:], devices=jax.devices()[:1])

    def both():
        model = make()
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    state = init_train_state(both, abstract_state(both, mesh, [(".*", ())]))
    return state, make_train_step(loss_fn, state, num_microbatches=count, layers=layers, **kinds)


def whole(pipeline, state):
    """{path: numpy array}, with chunks concatenated."""
    host = [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in state.leaves
    ]
    values = [np.concatenate(x.parts) if hasattr(x, "parts") else x for x in chunked(pipeline.placement.owners, host)]
    paths = [path for path, _ in named_leaves(pipeline.placement.plain.to_nnx())]
    return dict(zip(paths, values, strict=True))


def assert_same(pipeline, state, metrics, plain_state, plain_metrics, rtol=1e-5):
    have = whole(pipeline, state)
    for path, want in named_leaves(plain_state.to_nnx()):
        want = np.asarray(jax.random.key_data(want) if jnp.issubdtype(want.dtype, jax.dtypes.prng_key) else want)
        np.testing.assert_allclose(have[path], want, rtol=rtol, atol=rtol * np.abs(want).max(initial=0), err_msg=path)
    assert metrics.keys() == plain_metrics.keys()
    for name, value in plain_metrics.items():
        np.testing.assert_allclose(float(metrics[name]), float(value), rtol=rtol, err_msg=name)


def compare(make, loss_fn, batches, count, optimizer, rtol=1e-5, layers=("layers",), **kinds):
    pipeline = build(make, loss_fn, batches[0], count, optimizer, **kinds)
    state = pipeline.init_state()
    want, step = plain(make, loss_fn, optimizer, count, layers, compiler_options=FAST)
    for batch in batches:
        state, metrics = pipeline.step(state, batch)
        want, wanted = step(want, batch)
        assert_same(pipeline, state, metrics, want, wanted, rtol)
    return pipeline, state


def net_case(stages, count, name, depth=4):
    batches = [net_batch(2 * count, seed) for seed in range(2)]
    return compare(
        lambda: Net(nnx.Rngs(0), depth), net_loss, batches, count, PLAIN_SGD, name=name, mesh=groups(pp=stages)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "count", "name"),
    [
        (2, 3, "zb-h1"),
        (2, 4, "interleaved-1f1b"),
        (2, 4, "v-min"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 2, "1f1b"), (2, 1, "gpipe"), (4, 4, "1f1b")]),
    ],
)
def test_loss_gradients_and_parameters_equal_those_of_one_device(stages, count, name):
    pipeline, _ = net_case(stages, count, name)
    assert len(pipeline.staged.cut(pipeline.staged.example).stages) == pipeline.schedule.num_stages


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCHEDULE_NAMES, "v-5"])
@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_at_all_numbers_of_stages_and_microbatches(stages, name):
    ran = 0
    for count in sorted({1, 2, stages, 2 * stages, 3 * stages + 1}):
        try:
            schedule = make_schedule(name, num_groups=stages, num_microbatches=count)
        except ValueError:
            continue  # the schedule is not defined for these sizes
        net_case(stages, count, name, depth=max(4, schedule.num_stages))
        ran += 1
    assert ran or name == "v-5"  # for 3 groups or more


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-min", "gpipe"])
def test_forward_and_backward_of_the_last_stage_are_one_program_where_they_run_back_to_back(name):
    """Separate programs give the same results, and GPipe, which runs other actions between them, has only those."""
    batch, count = net_batch(8), 4
    pipelines = [build(make_net, net_loss, batch, count, PLAIN_SGD, name=name) for _ in range(2)]
    ran, results = [], []
    for pipeline, single in zip(pipelines, (False, True), strict=True):
        if single:
            pipeline.on_action = lambda action, saved: None
        state, calls = pipeline.init_state(), {"forward": 0, "both": 0}
        pipeline.step(pipeline.init_state(), batch)  # compiles
        (compiled,) = pipeline.compiled.values()
        last = compiled.stages[-1]

        def counted(kind, call, calls=calls):
            def run(*args):
                calls[kind] += 1
                return call(*args)

            return run

        watched = last._replace(forward=counted("forward", last.forward), both=counted("both", last.both))
        object.__setattr__(compiled, "stages", (*compiled.stages[:-1], watched))
        state, metrics = pipeline.step(state, batch)
        ran.append(calls)
        results.append((whole(pipeline, state), metrics))
    one = {"forward": 0, "both": count} if name != "gpipe" else {"forward": count, "both": 0}
    assert ran == [one, {"forward": count, "both": 0}]
    for path, value in results[1][0].items():
        np.testing.assert_allclose(results[0][0][path], value, rtol=1e-6, atol=1e-7, err_msg=path)
    np.testing.assert_allclose(float(results[0][1]["loss"]), float(results[1][1]["loss"]), rtol=1e-6)


RULES = [("kernel", ("embed", "mlp")), ("embedding", ("vocab", "embed")), ("bias", ("mlp",))]


@pytest.mark.slow
def test_groups_of_several_devices_equal_one_device():
    mesh = groups(pp=2, fsdp=2, tp=2)
    pipeline, state = compare(make_net, net_loss, [net_batch(8)], 2, PLAIN_SGD, mesh=mesh, rules=RULES)
    kernels = [x for owner, x in zip(pipeline.placement.owners, state.leaves, strict=True) if "kernel" in owner.path]
    assert kernels and all(x.addressable_shards[0].data.shape == (4, 4) for x in kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"pp": 2, "fsdp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "sp": 2}, {"pp": 2, "fsdp": 2, "tp": 2}]
)
def test_groups_of_every_mesh_axis_equal_one_device(sizes):
    compare(lambda: make_decoder(CONFIG, nnx.Rngs(0)), next_token_loss, [decoder_batch(8)], 4, PLAIN_SGD,
            mesh=groups(**sizes))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    "kinds", [{"scan": True}, {"remat": "full"}, {"num_experts": 4, "scan": True}, {"tied": False}]
)
def test_decoders_with_every_option_equal_one_device(kinds, name):
    config = DecoderConfig(**SIZES, mlp_size=64, **kinds)
    compare(lambda: make_decoder(config, nnx.Rngs(0)), next_token_loss, [decoder_batch(8)], 4, PLAIN_SGD, name=name)


class Stack(Net):
    """The blocks as one scanned stack."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.layers = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(jax.random.split(rngs.params(), 4))

    def __call__(self, x):
        x, _ = jax.lax.scan(lambda x, layer: (x + jnp.tanh(layer(x)), None), self.embed(x), self.layers)
        return self.embed.attend(x)


def test_a_scanned_stack_is_stored_as_one_chunk_per_group():
    pipeline, state = compare(
        lambda: Stack(nnx.Rngs(0)),
        net_loss,
        [net_batch(4)],
        2,
        optax.adam(1e-2, eps=1.0),
        split={"layers": "layers", "cuts": [1]},
    )
    chunks = {owner.path: [] for owner in pipeline.placement.owners if owner.path.endswith("layers/kernel")}
    for owner, leaf in zip(pipeline.placement.owners, state.leaves, strict=True):
        if owner.path in chunks:
            chunks[owner.path].append((owner.rows, owner.group, leaf.shape[0]))
    assert len(chunks) == 3  # the parameter and its two moments
    assert all(found == [((0, 1), 0, 1), ((1, 4), 1, 3)] for found in chunks.values())


@pytest.mark.slow
def test_twenty_steps_of_adamw_equal_one_device():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    pipeline = build(make_net, net_loss, net_batch(8), 4, optimizer, name="1f1b")
    state = pipeline.init_state()
    want, step = plain(make_net, net_loss, optimizer, 4)
    for seed in range(20):
        state, metrics = pipeline.step(state, net_batch(8, seed))
        want, wanted = step(want, net_batch(8, seed))
        np.testing.assert_allclose(float(metrics["loss"]), float(wanted["loss"]), rtol=1e-5)
    assert int(state.leaves[[h.path for h in pipeline.placement.owners].index("optimizer/step")]) == 20


@pytest.mark.slow
@pytest.mark.parametrize("norm", [0.1, 1e3])
def test_the_global_norm_includes_every_group_once(norm):
    optimizer = optax.chain(optax.clip_by_global_norm(norm), PLAIN_SGD)
    compare(make_net, net_loss, [net_batch(4)], 2, optimizer, rtol=1e-6)


def test_a_step_that_is_not_finite_is_skipped_on_every_group():
    optimizer = optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), max_consecutive_errors=5)
    pipeline = build(make_net, scaled_loss, net_batch(4) | {"scale": np.ones(4, np.float32)}, 2, optimizer)
    state = pipeline.init_state()
    before = whole(pipeline, state)
    broken = net_batch(4) | {"scale": np.array([1, 1, 1, np.inf], np.float32)}
    state, metrics = pipeline.step(state, broken)
    after = whole(pipeline, state)
    assert not np.isfinite(float(metrics["loss"]))
    for path in before:
        if path.startswith("model/"):
            np.testing.assert_array_equal(after[path], before[path])
    assert int(after["optimizer/opt_state/total_notfinite"]) == 1
    state, metrics = pipeline.step(state, net_batch(4) | {"scale": np.ones(4, np.float32)})
    assert any((whole(pipeline, state)[path] != before[path]).any() for path in before if path.startswith("model/"))


class Counted(Net):
    """A running mean in every block, and the blocks in a list or as one scanned stack."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.means = nnx.List([nnx.BatchStat(jnp.zeros(8)) for _ in range(4)])

    def __call__(self, x):
        x = self.embed(x)
        for layer, mean in zip(self.layers, self.means, strict=True):
            mean[...] = 0.9 * mean[...] + 0.1 * jax.lax.stop_gradient(x.mean((0, 1)))
            x = x + jnp.tanh(layer(x) - mean[...])
        return self.embed.attend(x)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Counted(nnx.Rngs(0)), lambda: Stack(nnx.Rngs(0))], ids=["list", "stack"])
@pytest.mark.parametrize(
    "optimizer", [optax.adam(1e-2, eps=1e-3), optax.chain(optax.clip_by_global_norm(1.0), PLAIN_SGD)]
)
def test_a_skipped_step_changes_no_leaf_on_any_group(make, optimizer, compilations):
    good, broken = (net_batch(4) | {"scale": np.array([1, 1, 1, last], np.float32)} for last in (1, np.inf))
    split = {"layers": "layers", "cuts": [2]}
    pipeline = build(make, scaled_loss, good, 2, optimizer, split=split, skip_nonfinite=True)
    state = pipeline.init_state()
    before = {path: x.tobytes() for path, x in whole(pipeline, state).items()}
    state, metrics = pipeline.step(state, broken)
    assert float(metrics["skipped"]) == 1 and not np.isfinite(float(metrics["loss"]))
    assert {path: x.tobytes() for path, x in whole(pipeline, state).items()} == before
    state, _ = pipeline.step(state, broken)  # the first two steps compile
    compilations.clear()
    state, metrics = pipeline.step(state, good, (1e9, 0.0))
    assert float(metrics["skipped"]) == 1 and np.isfinite(float(metrics["loss"])) and not compilations
    assert {path: x.tobytes() for path, x in whole(pipeline, state).items()} == before
    state, metrics = pipeline.step(state, good)
    want, step = plain(make, scaled_loss, optimizer, 2, compiler_options=FAST, skip_nonfinite=True)
    want, wanted = step(want, good)
    assert float(metrics["skipped"]) == 0 and "model/embed/embedding" in before
    assert_same(pipeline, state, metrics, want, wanted)


def scaled_loss(model, batch):
    loss, weight, _ = net_loss(model, batch)
    return loss * jnp.mean(batch["scale"]), weight


@pytest.mark.slow
def test_adafactor_and_muon_run_on_groups():
    for optimizer in (optax.adafactor(1e-2, min_dim_size_to_factor=4), optax.contrib.muon(1e-2)):
        compare(make_net, net_loss, [net_batch(4)], 2, optimizer, rtol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("count", [1, 2, 4])
def test_evaluate_returns_the_sums_of_one_device(count):
    pipeline = build(make_net, net_loss, net_batch(4), 2, PLAIN_SGD)
    state = pipeline.init_state()
    batch = net_batch(8, 3)
    sums = pipeline.evaluate(state, batch, count)
    loss, weight, more = net_loss(make_net(), batch)
    np.testing.assert_allclose(
        [float(sums["loss"]), float(sums["weight"]), float(sums["seen"])], [loss, weight, more["seen"]], rtol=1e-5
    )


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


def test_explicit_stages_run_in_the_same_pipeline():
    def stages():
        rngs = nnx.Rngs(0)
        return [Front(rngs), Back(rngs)]

    def loss_of(scores, batch):
        return net_loss(lambda x: scores, batch)

    mesh, batch = groups(pp=2), net_batch(4)
    staged = chain_stages(loss_of, stages, net_batch(2))
    pipeline = Pipeline(staged, PLAIN_SGD, mesh=mesh, schedule=make_schedule("1f1b", num_groups=2, num_microbatches=2))
    state, metrics = pipeline.step(pipeline.init_state(), batch)
    want, step = plain(staged.make, staged.loss_fn, PLAIN_SGD, 2, ("stages",))
    assert_same(pipeline, state, metrics, *step(want, batch))
    with pytest.raises(CutError, match=r"stage 1, Back, cannot take .*f32\[2,3,8\].*dot_general"):
        chain_stages(loss_of, lambda: [Front(nnx.Rngs(0)), Back(nnx.Rngs(0), width=5)], net_batch(2))
    with pytest.raises(CutError, match="stages is empty"):
        chain_stages(loss_of, list, net_batch(2))


class WithKeys(nnx.Module):
    """Layers with a parameter without elements; the batch has a random key for every row."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.empty = nnx.List([nnx.Param(jnp.zeros((0, 8))) for _ in range(2)])

    def __call__(self, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(batch["key"])
        for layer in self.layers:
            noise = jnp.tanh(layer(batch["x"] + noise))
        return noise


@pytest.mark.slow
def test_parameters_of_size_zero_and_random_keys_in_a_batch():
    def make():
        model = WithKeys()
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    def loss_fn(model, batch):
        return (model(batch) ** 2).sum(), len(batch["x"])

    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    batch = {"x": np.ones((4, 8), np.float32), "key": jax.random.split(jax.random.key(1), 4)}
    mesh = MpmdMesh(create_mesh((2, 1), ("pp", "fsdp"), devices=jax.devices()[:2]), "pp")
    staged = split_stages(loss_fn, lambda: make()[0], batch, mesh=mesh, schedule="1f1b", num_microbatches=2)
    pipeline = Pipeline(staged, optimizer)
    have, metrics = pipeline.step(pipeline.init_state(), batch)
    plain = init_train_state(
        make, abstract_state(make, create_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), [(".*", ())])
    )
    want, expected = make_train_step(loss_fn, plain, num_microbatches=2)(plain, batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    for (path, a), (_, b) in zip(named_leaves(want.to_nnx()), named_leaves(have.to_nnx()), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, err_msg=path)
