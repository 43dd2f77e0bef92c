"""Arrays that are initialized by kind have the bits of one program, which grows with the number of layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mesh as fm
from flax_mesh.program.program import trace
from flax_mesh.sharding.initialize.kinds import Kinds
from flax_mesh.sharding.initialize.slices import cut
from tests.multiprocess.processes import assert_all_done, run_workers
from tests.sharding.initialize.models import Cheap, Dear, Net, Ways, differences, draw, trained

FLAT = ((8,), ("fsdp",), "auto", "fsdp")
MESHES = {
    "fsdp": FLAT,
    "dp": ((8,), ("dp",), "auto", [(".*", ())]),
    "dp, tp": ((2, 4), ("dp", "tp"), "auto", "tp"),
    "Explicit": ((2, 4), ("dp", "fsdp"), "explicit", "fsdp"),
}
CASES = [(Cheap, "Explicit"), *((Dear, name) for name in MESHES), (Cheap, "dp, tp"), (Cheap, "dp")]


@pytest.fixture
def ways(monkeypatch):
    return Ways(monkeypatch)


@pytest.mark.sampled
@pytest.mark.parametrize(("block", "name"), CASES)
def test_the_bits_types_and_shardings_are_those_of_one_program(ways, block, name):
    shape, axes, types, rules = MESHES[name]
    mesh, calls = fm.create_mesh(shape, axes, axis_types=types), []
    make = functools.partial(trained, lambda: calls.append(1) or Net(block))
    abstract = fm.abstract_state(make, mesh, rules, on_mismatch="drop")
    calls.clear()
    whole = ways.whole(lambda: fm.init_state(make, abstract))
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"):  # the caller's settings
        by_kind = ways.by_kind(lambda: fm.init_state(make, abstract))
    assert len(calls) == 2  # each way traces the model once
    assert differences(whole, by_kind) == []


def fills():
    return [jnp.zeros((64, 64)), jnp.ones(8)]


def key(number):
    return jax.random.key(number)


def shared():
    x = draw(key(0), (64, 64))
    return [x, 2 * x, draw(key(1), (64, 64)), x.sum(0)]


def filled_once():
    zeros = jnp.zeros((64, 64))
    return [zeros, zeros, zeros + 1]


def draws_twice():
    return [draw(key(0), (64, 64)), draw(key(0), (64, 64))]


def constant():
    table = jnp.asarray(np.arange(4096.0))
    return [table, jnp.zeros(3), table + 1]


def called():
    host = jax.ShapeDtypeStruct((2,), np.float32)
    return [jax.pure_callback(lambda: np.ones(2, np.float32), host), draw(key(0), (64, 64))]


def printed():
    jax.debug.print("made")
    return [draw(key(0), (64, 64))]


def on_explicit_axes():
    mesh = fm.create_mesh((8,), ("fsdp",), axis_types="explicit").abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        return [draw(key(0), (64, 64), out_sharding=jax.P("fsdp"))]


def mapped():
    mesh = fm.create_mesh((8,), ("fsdp",)).abstract_mesh
    return [jax.shard_map(jnp.cos, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))(jnp.ones(8))]


SLICES = {
    fills: [(0,), (1,)],
    shared: [(0, 1, 3), (2,)],
    filled_once: [(0,), (1,), (2,)],
    draws_twice: [(0,), (1,)],
    constant: [(0, 2), (1,)],
    called: None,
    printed: None,
    on_explicit_axes: None,
    mapped: None,
}


@pytest.mark.parametrize("leaves", SLICES, ids=lambda leaves: leaves.__name__)
def test_outputs_that_share_work_are_in_one_slice_and_effects_are_not_cut(leaves):
    parts = cut(trace(leaves)[0])
    assert (None if parts is None else [each.positions for each in parts.slices]) == SLICES[leaves]


def loop(x, step):
    return jax.lax.fori_loop(0, 3, lambda i, x: x + step, x)


EXPONENT = np.array([1.0, 2.0], np.float32)
ALIKE = [
    (lambda: draw(key(0), (8, 64)), lambda: draw(jax.random.fold_in(key(3), 5), (8, 64))),
    (lambda: loop(draw(key(0), (8, 64)), 1.0), lambda: loop(draw(key(1), (8, 64)), 1.0)),
    (lambda: jnp.zeros((8, 64)), lambda: jnp.zeros((8, 64))),
    (lambda: jax.nn.softplus(draw(key(0), (64, 64))), lambda: jax.nn.softplus(draw(key(1), (64, 64)))),
]
UNLIKE = [
    (lambda: jnp.full((8, 64), 0.0), lambda: jnp.full((8, 64), -0.0)),
    (lambda: jnp.full((8, 64), 1.0), lambda: jnp.full((8, 64), 2.0)),
    (lambda: jnp.full((8, 64), 1), lambda: jnp.full((8, 64), 1.0)),
    (lambda: jnp.full((8, 64), 1), lambda: jnp.full((8, 64), True)),
    (lambda: jnp.full((8, 64), 1), lambda: jnp.full((8, 64), 1, jnp.int32)),  # the type of the first is weak
    (lambda: jnp.zeros((8, 64)), lambda: jnp.zeros((64, 8))),
    (lambda: draw(key(0), (8, 64)), lambda: draw(jax.random.key(0, impl="rbg"), (8, 64))),
    (lambda: draw(key(0), (8, 64)), lambda: jax.random.uniform(key(0), (8, 64))),
    (lambda: loop(draw(key(0), (8, 64)), 1.0), lambda: loop(draw(key(1), (8, 64)), 1.5)),
    (lambda: jnp.exp(jnp.asarray(EXPONENT)), lambda: jnp.exp(jnp.asarray(-EXPONENT))),
    (lambda: draw(key(0), (8, 64)) - draw(key(1), (8, 64)), lambda: (x := draw(key(0), (8, 64))) - x),
]


def kinds_of(pair):
    kinds = Kinds()
    parts = [cut(trace(lambda each=each: [each()])[0]) for each in pair]
    assert None not in parts
    return [kinds.of(part.slices[0].program) for part in parts if part is not None]


@pytest.mark.parametrize("pair", ALIKE)
def test_slices_that_differ_only_in_their_keys_are_one_kind(pair):
    assert len(set(kinds_of(pair))) == 1


@pytest.mark.parametrize("pair", UNLIKE)
def test_slices_that_differ_in_anything_else_are_two_kinds(pair):
    assert len(set(kinds_of(pair))) == 2


class Scaled(nnx.Module):
    def __init__(self):
        self.drawn = nnx.List([nnx.Param(draw(key(0), (8, 8)) * scale) for scale in (1.5, 3.0)])


def test_two_kinds_that_are_taken_for_one_change_the_bits(ways, monkeypatch):
    """Literals are not compared: all bits would be right only if the comparison of states were blind."""
    abstract = fm.abstract_state(Scaled, fm.create_mesh((8,), ("fsdp",)), "fsdp")
    right = ways.by_kind(lambda: fm.init_state(Scaled, abstract))
    np.testing.assert_array_equal(2 * right["drawn"][0][...], right["drawn"][1][...])
    monkeypatch.setattr(Kinds, "_frozen", lambda self, x: type(x))
    assert differences(right, ways.by_kind(lambda: fm.init_state(Scaled, abstract))) == ["drawn/1"]


class Layers(nnx.Module):
    def __init__(self, depth):
        rngs = nnx.Rngs(0)
        layer = lambda: nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs))  # noqa: E731
        self.embed, self.layers = nnx.Embed(16, 8, rngs=rngs), nnx.List([layer() for _ in range(depth)])


def test_the_number_of_programs_does_not_depend_on_the_number_of_layers(compilations, monkeypatch):
    monkeypatch.setattr("flax_mesh.sharding.initialize.run.EARLY", 0)

    def programs(depth):
        make = functools.partial(trained, lambda: Layers(depth))
        abstract = fm.abstract_state(make, fm.create_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), "fsdp")
        compilations.clear()
        jax.block_until_ready(fm.init_state(make, abstract))
        return len(compilations)

    programs(3)  # also the operations of random keys
    assert programs(2) == programs(12) == 2


def test_an_initialization_can_be_traced(monkeypatch):
    monkeypatch.setattr("flax_mesh.sharding.initialize.run.reproducible_cpu_options", lambda: None)  # as on a GPU
    make = functools.partial(trained, lambda: Layers(12))
    abstract = fm.abstract_state(make, fm.create_mesh((8,), ("fsdp",)), "fsdp", on_mismatch="drop")
    shapes = jax.eval_shape(lambda: fm.init_state(make, abstract))
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, abstract)


@pytest.mark.slow
def test_two_processes_have_the_bits_of_one_program():
    ended = run_workers("initialization", 2, 2, module="tests.sharding.process_worker")
    assert_all_done(ended, "initialization is done")
