"""Residuals that F stores for B and W: fewer bytes, and nothing expensive twice; the products of B and of W."""

import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.models import make_decoder, next_token_loss
from flax_mesh.mpmd import split_stages
from flax_mesh.mpmd.split import remat
from flax_mesh.mpmd.split.backward import differentiate
from flax_mesh.program.program import bodies, flops, trace, variables
from flax_mesh.program.rewrite import inline
from flax_mesh.tree import num_bytes
from tests.mpmd.runtime.pipelines import CONFIG, PLAIN_SGD, build, decoder_batch, make_net, net_batch, net_loss

MLP, SEQUENCE = 56, 16  # differ from all other sizes


def stages(make, loss_fn, batch, **kinds):
    """Both stages with F, B and W."""
    staged = split_stages(loss_fn, make, batch, num_stages=2)
    trained = [at for at, leaf in enumerate(staged.leaves) if leaf.trained]
    return [differentiate(stage, trained, **kinds) for stage in staged.cut(batch).stages]


def decoder(dtype="bfloat16", change=None, **kinds):
    """`change`: of the config."""
    config = replace(CONFIG, mlp_size=MLP, dtype=dtype, **(change or {}))
    batch = dict.fromkeys(("inputs", "targets"), np.zeros((2, SEQUENCE), np.int32))
    return stages(lambda: make_decoder(config, nnx.Rngs(0)), next_token_loss, batch, **kinds)


def residuals(stage):
    return [v.aval for v in stage.forward.outputs[len(stage.sent) + len(stage.outputs) :]]


def matmul_flops(part):
    """FLOPs of the matrix products of a slice. Scans count once per iteration."""

    def count(eqns):
        own = sum(flops(e) for e in eqns if e.primitive.name == "dot_general")
        return own + sum(e.params.get("length", 1) * count(body.eqns) for e in eqns for body in bodies(e))

    return count(part.eqns)


@pytest.mark.sampled
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_b_and_w_sum_to_the_unsplit_backward_pass(scan, policy):
    """Together they have its matrix products, each a part of them."""
    one, two = (
        decoder("float32", {"num_layers": 2, "scan": scan, "remat": policy}, split=split) for split in (False, True)
    )
    for number, (whole, split) in enumerate(zip(one, two, strict=True)):
        assert matmul_flops(split.forward) == matmul_flops(whole.forward)
        b, w = matmul_flops(split.backward), matmul_flops(split.weights)
        assert b + w == matmul_flops(whole.backward)
        assert (b > 0) == (number > 0)  # the first stage has no inputs to differentiate
        assert w >= 0.9 * matmul_flops(whole.forward)  # W has one product for every product of F with a weight


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_stores_the_results_of_its_matrix_products(dtype):
    for stage in decoder(dtype, remat="cheap"):
        rows = [aval.shape for aval in residuals(stage)]
        # Gate and up of two layers; no values computed from them.
        assert sum(shape[-1] == MLP for shape in rows) == 2 * 2
        # The stream after attention and after each mlp but the last. The input of the first layer is received or looked
        # up. The last stage stores the input of the head instead of the values that it is computed from.
        assert sum(shape[-1] == CONFIG.hidden_size for shape in rows) <= 2 * 2
        scores = [aval for aval in residuals(stage) if aval.shape[-1] == SEQUENCE]
        assert len(scores) == 2 and all(aval.dtype == jnp.float32 for aval in scores)
        widths = (MLP, CONFIG.hidden_size, CONFIG.head_dim)
        others = [aval for aval in residuals(stage) if aval.shape[-1] in widths]
        assert {str(aval.dtype) for aval in others} == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("dtype", "how", "share"),
    [("float32", "none", 0.8), ("bfloat16", "none", 0.7), ("float32", "cheap", 0.6), ("bfloat16", "cheap", 0.6)],
)
def test_fewer_bytes_are_stored(dtype, how, share, split, monkeypatch):
    lean = decoder(dtype, split=split, remat=how)
    monkeypatch.setattr(remat, "is_expensive", lambda *_: True)  # nothing is recomputed
    full = decoder(dtype, split=split)
    size = [[sum(map(num_bytes, residuals(stage))) for stage in some] for some in (lean, full)]
    assert all(0 < a < share * b for a, b in zip(*size, strict=True)), size


def test_weights_are_not_residuals_and_full_remat_stores_none():
    shapes = {
        how: [x.shape for s in stages(make_net, net_loss, net_batch(2), remat=how) for x in residuals(s)]
        for how in ("none", "full")
    }
    assert shapes["none"] and not {(8, 8), (16, 8)} & set(shapes["none"])
    assert not shapes["full"]


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(self.dropout(x)))
        return x


def primitives(part) -> set[str]:
    return {eqn.primitive.name for eqn in part.eqns}


def test_random_bits_are_generated_once():
    batch = {"x": np.zeros((4, 8), np.float32)}
    for stage in stages(lambda: Dropped(nnx.Rngs(0)), lambda m, b: jnp.mean(m(b["x"]) ** 2), batch):
        assert "random_bits" in primitives(stage.forward)
        assert "random_bits" not in primitives(stage.backward)


def test_an_exchange_between_devices_is_not_repeated():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    split, replicated = (NamedSharding(mesh, spec) for spec in (PartitionSpec("tp"), PartitionSpec(None)))
    constrain = jax.lax.with_sharding_constraint

    def chain(weight, x):
        x = constrain(x, split)
        same = constrain(jnp.tanh(x), split)  # already has this layout
        gathered = constrain(jnp.sin(same), replicated)
        return gathered, constrain(weight * 2, replicated), jnp.cos(gathered)

    shapes = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    program, _ = trace(chain, *shapes)
    names = [eqn.primitive.name for eqn in program.eqns]
    constraints = [i for i, name in enumerate(names) if name == "sharding_constraint"]
    first, same, gathered, of_weight = constraints
    assert set(range(len(names))) - remat.find_repeatable(program, 1, cheap=True) == {gathered}
    free = remat.find_repeatable(program, 1, cheap=False)
    assert [i in free for i in (first, same, gathered, of_weight)] == [True, True, False, True]
    assert {names[i] for i in set(range(len(names))) - free} == {"sharding_constraint", "tanh", "sin", "cos"}


@pytest.mark.parametrize("cheap", [False, True])
def test_a_constraint_on_a_constant_changes_no_layout(cheap):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("tp",)), PartitionSpec())
    program, _ = trace(lambda x: jax.lax.with_sharding_constraint(2.0, sharding) * x, jax.ShapeDtypeStruct((4,), "f4"))
    (at,) = (i for i, eqn in enumerate(program.eqns) if eqn.primitive.name == "sharding_constraint")
    assert not variables(program.eqns[at].invars)
    assert at in remat.find_repeatable(program, 0, cheap=cheap)


def test_factorizations_and_checkpointed_functions_are_computed_once():
    def factors(x):
        return jnp.linalg.qr(x)[0], jax.checkpoint(jnp.sin)(x), jax.random.gamma(jax.random.key(0), x)

    program = inline(trace(factors, jax.ShapeDtypeStruct((4, 4), "f4"))[0])
    repeated = {program.eqns[i].primitive.name for i in remat.find_repeatable(program, 1, cheap=True)}
    assert {"qr", "remat2", "random_gamma"} <= {eqn.primitive.name for eqn in program.eqns} - repeated


@pytest.mark.slow
def test_residuals_that_w_does_not_need_are_freed_after_b():
    batch = decoder_batch(4)
    make = lambda: make_decoder(CONFIG, nnx.Rngs(0))  # noqa: E731
    pipeline = build(make, next_token_loss, batch, 2, PLAIN_SGD, name="zb-h1", rules=[(".*", ())])
    alive: dict[Any, list[Any]] = {}
    freed: list[int] = []

    def watch(action, saved) -> None:
        key = action.stage, action.microbatch
        if action.kind == "F":
            alive[key] = [weakref.ref(x) for x in saved[key][1]]
        elif action.kind == "B":
            freed.append(sum(ref() is None for ref in alive[key]))

    pipeline.on_action = watch
    pipeline.step(pipeline.init_state(), batch)
    (compiled,) = pipeline.compiled.values()
    lasting = [len(stage.lasting) for stage in compiled.stages]
    total = [len(refs) for (stage, _), refs in sorted(alive.items()) if stage in (0, 1)][::2]
    assert sorted(freed) == sorted(2 * [a - b for a, b in zip(total, lasting, strict=True)])
    assert max(freed) > 0
