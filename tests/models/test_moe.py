"""The mixture of experts against a plain loop, on one device and with sharded experts; losses of a decoder with it."""

import dataclasses
import functools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import PartitionRules, ShardingError, abstract_state
from flax_mesh.models import make_decoder, moe, next_token_loss
from flax_mesh.models.moe import MoE
from flax_mesh.models.ops.router import Routing, balanced_capacity, route, router_losses
from flax_mesh.tree import named_leaves
from tests.models.reference import EXPERTS, NATURAL, REPLICATED, make_mesh, small, with_random_parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")

D, F, E, K = 16, 24, 8, 2


def make_moe(axes=NATURAL, experts=E, k=K):
    return with_random_parameters(lambda: MoE(D, F, experts, k, axes=axes, rngs=nnx.Rngs(0)))


def random_tokens(batch=8, seq=8):
    return np.random.default_rng(0).normal(size=(batch, seq, D)).astype(np.float32)


FIRST = np.eye(E, D, dtype=np.float32)
ROUTED = {  # tokens for a router whose logits are the first E hidden dims -> whether they fit the small buffers
    "token t of a row to the experts t and t + 1": (2 * FIRST + np.roll(FIRST, -1, axis=0), True),
    "all tokens to the experts 3 and 2": (2 * FIRST[3] + FIRST[2], False),
}


def plain_loop(kernels, x, k):
    """(y, summed losses, chosen): every expert runs on every token, with weight 0 where it is not chosen."""
    router, gate, up, down = kernels
    x = x.reshape(-1, D)
    logits = x @ router
    p = jnp.exp(logits) / jnp.sum(jnp.exp(logits), axis=1, keepdims=True)
    chosen = jnp.argsort(jnp.argsort(-p, axis=1, stable=True), axis=1) < k
    weight = jnp.where(chosen, p, 0) / jnp.sum(jnp.where(chosen, p, 0), axis=1, keepdims=True)

    def add_expert(y, expert):
        weight_of, gate, up, down = expert
        h = x @ gate
        return y + weight_of[:, None] * (((h / (1 + jnp.exp(-h))) * (x @ up)) @ down), None

    y, _ = jax.lax.scan(add_expert, jnp.zeros_like(x), (weight.T, gate, up, down))
    balance = gate.shape[0] * jnp.sum(jnp.mean(chosen, axis=0) / k * jnp.mean(p, axis=0))
    return y, balance + jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), axis=1)) ** 2), chosen


def kernels_of(layer):
    return tuple(part.kernel[...] for part in (layer.router, layer.gate, layer.up, layer.down))


def probe_of(x):
    return np.random.default_rng(1).normal(size=x.shape).astype(np.float32)


def expected(layer, x, k):
    (_, (y, chosen)), grads = plain_value_and_grad(kernels_of(layer), x, probe_of(x), k)
    return y, np.asarray(chosen), (*grads[0], grads[1])


@partial(jax.jit, static_argnums=3)
@partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
def plain_value_and_grad(kernels, x, probe, k):
    y, losses, chosen = plain_loop(kernels, x, k)
    return jnp.sum(y.reshape(x.shape) * probe) + losses, (y.reshape(x.shape), chosen)


@partial(jax.jit, static_argnums=0)
def run(graphdef, state: Any, x, probe):
    """(y, aux, gradients) of the layer, for the objective of `plain_value_and_grad`."""

    def objective(state, x):
        y, aux = nnx.merge(graphdef, state)(x)
        losses = router_losses(jax.tree.map(lambda leaf: leaf[None], aux))
        return jnp.sum(y * probe) + jnp.sum(losses["load_balance_loss"] + losses["router_z_loss"]), (y, aux)

    (_, (y, aux)), (grads, dx) = jax.value_and_grad(objective, (0, 1), has_aux=True)(state, x)
    return y, aux, (*kernels_of(nnx.merge(graphdef, grads)), dx)


def layout_of(layer, mesh):
    rules = [("router", ("embed", "expert_gate"))]
    rules += [("gate|up", ("experts", "embed", "mlp")), ("down", ("experts", "mlp", "embed"))]
    return abstract_state(lambda: layer, mesh, PartitionRules(rules, layer.axes))


@functools.cache
def compiled_on(mesh, axes, k, rows):
    """The shardings of the state of a layer on a mesh, and `run` for them."""
    layer, x = make_moe(axes, k=k), random_tokens(rows)
    graphdef, state = nnx.split(layer)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, layout_of(layer, mesh))
    split = NamedSharding(mesh, layer.axes.resolve(("batch", "sequence")))
    with jax.set_mesh(mesh):
        arguments = jax.device_put(state, shardings), jax.device_put(x, split), probe_of(x)
        return shardings, split, run.lower(graphdef, *arguments).compile()


def check(layer, x, *, mesh=None, k=K):
    """Compare result, choices, sums and gradients with the plain loop; returns the compiled text."""
    y, chosen, grads = expected(layer, jnp.asarray(x), k)
    graphdef, state = nnx.split(layer)
    probe, text = probe_of(x), ""
    if mesh is None:
        got = run(graphdef, state, x, probe)
    else:
        shardings, split, compiled = compiled_on(mesh, layer.axes, k, len(x))
        got = compiled(jax.device_put(state, shardings), jax.device_put(x, split), probe)
        text = compiled.as_text() or ""
    found = np.eye(len(grads[1]), dtype=bool)[np.asarray(got[1]["experts"]).reshape(-1, k)].any(1)
    assert (found == chosen).all(), "routing differs"
    assert (np.asarray(got[1]["expert_tokens"]) == chosen.sum(0)).all()
    np.testing.assert_allclose(got[0], y, atol=1e-5)
    for name, a, b in zip(("router", "gate", "up", "down", "x"), got[2], grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.max(np.abs(b))), err_msg=name)
    return text


@pytest.mark.sampled
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (4, 1), (3, 3)])
def test_the_layer_equals_the_plain_loop_over_experts(experts, k):
    check(make_moe(experts=experts, k=k), random_tokens(), k=k)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_experts_use_the_kernel_of_xla_on_tpus_alone(platform):
    """XLA expands it elsewhere, to the products of each row with all experts."""
    device = jax.sharding.AbstractDevice(platform, None, platform)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "ep"), axis_types=auto, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        program = str(jax.make_jaxpr(make_moe())(random_tokens()))
    assert ("ragged_dot" in program, "dynamic_update_slice" in program) == (platform == "tpu", platform != "tpu")


def test_the_router_of_bfloat16_experts_is_float32():
    x, low = random_tokens(), with_random_parameters(lambda: MoE(D, F, E, K, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    y, aux = jax.jit(lambda layer, x: layer(x))(low, x)
    exact, chosen, _ = expected(make_moe(), x, K)
    assert y.dtype == jnp.bfloat16
    assert (np.asarray(aux["expert_tokens"]) == chosen.sum(0)).all()
    assert 1e-4 < np.std(y.astype(jnp.float32) - exact) / np.std(exact) < 0.02


OVER_TP = dataclasses.replace(NATURAL, expert_axis=("ep", "tp"), mlp_intermediate_axis=None)
OVER_DP = dataclasses.replace(NATURAL, mlp_intermediate_axis=("tp", "dp"))
LAYOUTS = [  # sizes of the mesh, axes, experts per token, rows
    ({"fsdp": 2, "ep": 2, "tp": 2}, NATURAL, K, 8),
    ({"dp": 2, "fsdp": 2, "tp": 2}, NATURAL, K, 8),
    ({"ep": 4, "tp": 2}, REPLICATED, K, 8),
    ({"sp": 2, "ep": 2, "fsdp": 2}, NATURAL, K, 8),
    ({"ep": 8}, NATURAL, K, 8),
    ({"fsdp": 2, "ep": 2, "tp": 2}, OVER_TP, K, 8),
    ({"dp": 2, "ep": 2, "tp": 2}, OVER_DP, K, 8),  # F is split over an axis that splits tokens too
    ({"ep": 4, "dp": 2}, NATURAL, 3, 8),  # tokens choose more experts than a device has
    ({"dp": 2, "ep": 2}, REPLICATED, K, 2),  # the batch does not divide, and is split along the sequence
]


@pytest.mark.sampled
@pytest.mark.parametrize(("sizes", "axes", "k", "rows"), LAYOUTS)
def test_results_on_a_mesh_equal_the_plain_loop(sizes, axes, k, rows):
    text = check(make_moe(axes, k=k), random_tokens(rows), mesh=make_mesh(**sizes), k=k)
    if axes in (NATURAL, REPLICATED):
        assert (" all-to-all(" in text) == ("ep" in sizes)
        assert (" reduce-scatter(" in text) == ("fsdp" in sizes)


def test_tokens_are_split_over_the_axes_of_the_batch_or_along_the_sequence():
    with jax.set_mesh(make_mesh(dp=2, ep=4)):
        assert moe.find_layout(REPLICATED, (2, 8, D), E).sequence == ("ep",)
        assert moe.find_layout(REPLICATED, (8, 8, D), E).batch == ("dp", "ep")
        assert moe.find_layout(NATURAL, (1, 8, D), E, "decode").tokens == ("ep",)


@pytest.mark.parametrize(("tokens", "fits"), ROUTED.values(), ids=ROUTED)
def test_no_token_is_dropped_for_balanced_and_unbalanced_routers(tokens, fits):
    layer, x = make_moe(), 0.01 * random_tokens() + tokens
    layer.router.kernel[...] = 10 * np.eye(D, E)
    ep, per_device = 4, E // 4
    chosen = expected(layer, jnp.asarray(x), K)[1]
    sent = chosen.reshape(8, 8, ep, per_device).any(-1).sum(1)  # a device has one row of 8 tokens
    capacity = balanced_capacity(8, K, per_device, ep)
    assert capacity is not None and (sent.max() <= capacity) == fits  # so that both sizes of the exchange are tested
    text = check(layer, x, mesh=make_mesh(dp=2, ep=4))
    assert " conditional(" in text


def test_the_balanced_capacity_is_a_quarter_above_the_expectation():
    assert balanced_capacity(1000, 1, 1, 8) == math.ceil(1250 / 8)
    assert balanced_capacity(1000, 2, 2, 4) == math.ceil(1250 * (1 - 6 * 5 / (8 * 7)))
    assert balanced_capacity(1000, 8, 16, 2) is None  # nearly every token is sent to both devices


def test_decoding_works_with_one_sequence_on_a_mesh():
    layer, x = make_moe(), random_tokens()
    with jax.set_mesh(make_mesh(fsdp=2, ep=2, tp=2)):
        y, _ = jax.jit(lambda layer, x: layer(x, "decode"))(layer, x[:1])
    np.testing.assert_allclose(y, expected(layer, jnp.asarray(x), K)[0][:1], atol=1e-5)


def test_sizes_that_do_not_divide_and_an_outer_shard_map_over_the_experts_are_refused():
    layer = make_moe()
    for k in (0, 9):
        with pytest.raises(ValueError, match=f"experts_per_token={k} must be between 1 and num_experts=8"):
            make_moe(k=k)
    with jax.set_mesh(make_mesh(dp=2, ep=4)):
        message = r"all devices of dp=2, ep=4, but neither batch 2 nor sequence 7 .*multiple of 8, with Partition"
        with pytest.raises(ShardingError, match=message):
            make_moe(REPLICATED)(np.zeros((2, 7, D)))
        with pytest.raises(ShardingError, match="num_experts=6 is not divisible over ep=4"):
            make_moe(experts=6)(np.zeros((8, 8, D)))
    inside = jax.shard_map(lambda x: layer(x)[0], in_specs=PartitionSpec("ep"), out_specs=PartitionSpec("ep"))
    with jax.set_mesh(make_mesh(ep=2)), pytest.raises(ShardingError, match=r"inside a shard_map over ep.*outer axis_n"):
        jax.eval_shape(inside, jax.ShapeDtypeStruct((8, 8, D), jnp.float32))


def test_parameters_are_sharded_by_expert():
    mesh = make_mesh(fsdp=2, ep=2, tp=2)
    state = abstract_state(lambda: make_decoder(EXPERTS, nnx.Rngs(0)), mesh)
    specs = {path: leaf.sharding.spec for path, leaf in named_leaves(state) if "/moe/" in path}
    assert specs == {
        "layers/moe/router/kernel": PartitionSpec(None, "fsdp", None),
        "layers/moe/gate/kernel": PartitionSpec(None, "ep", "fsdp", "tp"),
        "layers/moe/up/kernel": PartitionSpec(None, "ep", "fsdp", "tp"),
        "layers/moe/down/kernel": PartitionSpec(None, "ep", "tp", "fsdp"),
    }


def test_each_expert_is_initialized_like_a_single_layer():
    kernel = moe.Kernel((4, 256, 64), "float32", rngs=nnx.Rngs(0)).kernel[...]
    np.testing.assert_allclose(np.std(kernel, axis=(1, 2)), 256**-0.5, rtol=0.05)


def test_router_losses_have_their_analytic_values():
    layer = make_moe()
    losses_of = jax.jit(router_losses)
    layer.router.kernel[...] = np.zeros((D, E))  # all experts are equally probable, so the first K get every token
    _, aux, _ = run(*nnx.split(layer), random_tokens(), probe_of(random_tokens()))
    found = losses_of(jax.tree.map(lambda leaf: np.asarray(leaf)[None], aux))
    np.testing.assert_allclose(found["load_balance_loss"], [1.0], rtol=1e-6)
    np.testing.assert_allclose(found["router_z_loss"], [math.log(E) ** 2], rtol=1e-6)
    np.testing.assert_allclose(found["expert_load_max"], [E / K])

    experts = np.zeros((2, 5, 20, 1), np.int32)  # layers, 100 tokens, one expert each
    tokens = np.array([[100, 0, 0, 0], [40, 30, 20, 10]])
    sums = {"router_probability": 1.0 * tokens, "router_z": np.array([9, 4])}
    found = losses_of({"experts": experts, "expert_tokens": tokens, **sums})
    np.testing.assert_allclose(found["load_balance_loss"], [4.0, 4 * (0.16 + 0.09 + 0.04 + 0.01)], rtol=1e-6)
    np.testing.assert_allclose(found["router_z_loss"], [0.09, 0.04], rtol=1e-6)
    np.testing.assert_allclose(found["expert_load_max"], [4.0, 1.6], rtol=1e-6)


def batch_of(rows=4, seq=8, seed=0) -> Any:
    ids = np.random.default_rng(seed).integers(0, 256, (rows, seq + 1)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def test_the_loss_is_the_sum_in_its_docstring():
    model, batch = small(EXPERTS, load_balance_loss=0.5, router_z_loss=0.25), batch_of()
    batch["targets"][0, :5] = -1

    @jax.jit
    def both(model, batch):
        logits, aux = model.forward(batch["inputs"])
        return next_token_loss(model, batch), logits, router_losses(aux)

    (loss, weight, metrics), logits, found = both(model, batch)
    p = np.asarray(logits) - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    entropy = -sum(p[i, j, t] for (i, j), t in np.ndenumerate(batch["targets"]) if t >= 0)
    assert weight == 27 and found["load_balance_loss"].shape == (2,)
    np.testing.assert_allclose(metrics["cross_entropy"], entropy, rtol=1e-5)
    added = 27 * (0.5 * sum(found["load_balance_loss"]) + 0.25 * sum(found["router_z_loss"]))
    np.testing.assert_allclose(loss, entropy + added, rtol=1e-5)
    for name in ("load_balance_loss", "router_z_loss"):
        np.testing.assert_allclose(metrics[name], 27 * np.mean(found[name]), rtol=1e-6)
    np.testing.assert_allclose(metrics["expert_load_max"], 27 * max(found["expert_load_max"]), rtol=1e-6)


def test_padding_counts_in_no_loss_of_the_router():
    """Rows of 4 tokens and 12 of padding, the experts on two devices; without a token the losses are 0."""
    model, batch = (
        small(EXPERTS, num_experts=4, num_layers=1, scan=False),
        batch_of(8, 4) | {"segment_ids": np.ones((8, 4), np.int32)},
    )
    _, weight, want = jax.jit(next_token_loss)(model, batch)
    padded = {name: np.pad(x, ((0, 0), (0, 12)), constant_values=-(name == "targets")) for name, x in batch.items()}
    with jax.set_mesh(make_mesh(fsdp=2, ep=2)):
        run = jax.jit(next_token_loss)
        for padding in (0, 7):
            padded["inputs"][:, 4:] = padding
            found = run(model, padded)
            assert found[1] == weight
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found[2], want)
        empty = run(model, padded | {"segment_ids": np.zeros((8, 16), np.int32)})[2]
        assert empty["load_balance_loss"] == 0 == empty["router_z_loss"]


@pytest.mark.parametrize(
    ("probabilities", "is_balanced", "group"),
    [
        ([0.6, 0.6, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5], True, 0),  # the sum of the two largest, not of all four
        ([0.7, 0.1, 0.1, 0.1, 0.5, 0.5, 0.1, 0.1], True, 1),  # not the largest one
        ([0.7, 0.1, 0.1, 0.1, 0.5, 0.5, 0.1, 0.1], False, 0),  # the largest one
    ],
)
def test_the_best_group_of_four_experts_has_the_largest_pair_or_without_a_balancing_bias_the_largest_score(
    probabilities, is_balanced, group
):
    logits = np.log(probabilities) - np.log1p(-np.array(probabilities))
    routing = Routing("sigmoid", normalize=False, groups=2, top_groups=1)
    bias = {"balance_E": np.zeros(8, np.float32)} if is_balanced else {}
    routed = jax.jit(route, static_argnames=("k", "routing"))
    _, experts, _ = routed(np.ones((1, 1)), logits[None].astype(np.float32), k=2, routing=routing, **bias)
    assert set((np.asarray(experts)[0] // 4).tolist()) == {group}
