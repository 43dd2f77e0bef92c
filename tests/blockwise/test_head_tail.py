"""Queries in head-tail order: the work of devices, exchanges of rows, and the same results as in order."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.blockwise import head_tail, loops, transform
from flax_mesh.blockwise.head_tail import work_of_band
from flax_mesh.blockwise.masks.visits import Blocks
from flax_mesh.hlo.collectives import read_collectives
from flax_mesh.hlo.program import read_hlo
from flax_mesh.kernels import EVERY, Band
from tests.blockwise.compare import apart, gradients
from tests.blockwise.programs import by_hand

LENGTH, BLOCK = 512, 32
SPEC = PartitionSpec(None, "sp")


@pytest.mark.parametrize("parts", [2, 3, 4, 8, 16])
def test_causal_work_is_the_same_on_every_device(parts):
    work = work_of_band(parts * 1024, (None, 0), 64, parts)
    assert work.in_order.sum() == work.exchanged.sum()
    assert work.exchanged.max() / work.exchanged.mean() == 1
    assert work.in_order.max() / work.in_order.mean() == pytest.approx(2 - 1 / parts, rel=0.04)


@pytest.mark.parametrize(
    ("length", "band", "parts", "saves"),
    [
        (4096, (None, 0), 4, True),
        (1024, (None, 0), 2, False),  # rows would move for longer than their scores take
        (2**16, (512, 0), 4, False),
        (2**16, (None, 2**14), 4, True),
        (2**16, EVERY, 4, False),
    ],
)
def test_rows_are_exchanged_where_that_saves_more_time_than_it_takes(length: int, band: Band, parts: int, saves: bool):
    work = work_of_band(length, band, 256, parts)
    assert work.saves(length // parts) == saves
    assert not saves or work.exchanged.max() / work.exchanged.mean() <= 1.1


def test_a_window_of_half_of_the_keys_is_not_the_same_work_on_every_device():
    work = work_of_band(2**16, (2**15, 0), 256, 4)
    most = [x.max() / x.mean() for x in work]
    assert work.saves(2**14) and most == pytest.approx([1.33, 1.25], abs=0.01)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_each_device_has_a_chunk_and_its_counterpart_and_each_half_of_the_rows_moves_by_a_permutation(parts):
    chunks = np.asarray(head_tail.head_tail(parts)).reshape(parts, 2)
    assert (chunks.sum(1) == 2 * parts - 1).all() and (chunks % 2 == [0, 1]).all()
    assert sorted(chunks.ravel()) == [*range(2 * parts)]
    blocks = Blocks(24, 24 * parts, 4, 24, parts, tuple(chunks.ravel()))
    rows = np.arange(24 * parts).reshape(2 * parts, 12)[chunks].reshape(parts, 24)
    assert [[int(blocks.first_row(d, i)) for i in range(6)] for d in range(parts)] == rows[:, ::4].tolist()


# On devices


def seen(s, see):
    return jnp.where(see(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)), s, -1e9)


def causal(q, k, v):
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), d) for d in (0, 1))
    return by_hand(q, k, v, lambda s: jnp.where(row >= column, s, -1e9))


def window(q, k, v):
    return by_hand(q, k, v, lambda s: seen(s, lambda d: (d >= 0) & (d < 300)))


def documents(q, k, v, ids):
    same = lambda s: jnp.where(ids[:, None, :, None] == ids[:, None, None, :], s, -1e9)  # noqa: E731
    return by_hand(q, k, v, lambda s: seen(same(s), lambda d: d >= 0))


def padded(q, k, v, ids):
    """The first queries see no key."""
    keep = ids > 0
    mask = keep[:, None, :, None] & keep[:, None, None, :]
    return by_hand(q, k, v, lambda s: jnp.where(mask, seen(s, lambda d: d >= 0), -1e9))


IDS = np.sort(np.random.default_rng(1).integers(0, 3, (2, LENGTH)), axis=1).astype(np.int32)
FORMS = {"causal": causal, "window": window, "documents": documents, "padding": padded}
WITH_IDS = ("documents", "padding")


def placed(name, sp):
    """(mesh, queries, keys and values, and ids of documents, split over sp)"""
    mesh = fm.create_mesh((sp,), ("sp",), devices=jax.devices()[:sp])
    random = np.random.default_rng(0)
    args = [random.normal(size=(2, LENGTH, 2, 8)).astype(np.float32) for _ in range(3)]
    args += [IDS] if name in WITH_IDS else []
    return mesh, args, [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in args]


def in_blocks(name, lines):
    specs = (SPEC,) * (4 if name in WITH_IDS else 3)
    return fm.blockwise_attention(FORMS[name], block=BLOCK, in_specs=specs, say=lines.append)


@pytest.fixture
def _always(monkeypatch):
    """Rows of short sequences are exchanged too."""
    monkeypatch.setattr(head_tail, "EXCHANGE", 1)


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(
    ("name", "sp"),
    [
        ("causal", 4),
        *[pytest.param(*x, marks=pytest.mark.slow) for x in [("causal", 2), ("window", 2), ("documents", 4)]],
    ],
)
def test_attention_in_head_tail_order_equals_the_attention_as_written(name, sp, monkeypatch):
    mesh, args, given = placed(name, sp)
    visited, forward, lines = [], loops.Loops.forward, []

    def observed(self, values, visits):
        out, saved = forward(self, values, visits)
        jax.debug.callback(lambda x: visited.append(int(x.sum())), saved.visited)
        return out, saved

    monkeypatch.setattr(loops.Loops, "forward", observed)
    with jax.set_mesh(mesh):
        found, _ = gradients(in_blocks(name, lines), given)
        jax.effects_barrier()
    assert apart(found, gradients(FORMS[name], args)[0]) < 1e-5
    assert " in head-tail order, at most " in lines[0]
    if name == "causal":
        assert [*visited] == [136 // sp] * sp and f"at most {136 // sp} blocks on a device" in lines[0]


@pytest.mark.usefixtures("_always")
def test_axes_in_another_order_than_the_mesh_have_the_same_result():
    mesh = fm.create_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    _, args, _ = placed("causal", 2)
    spec, lines = PartitionSpec(None, ("b", "a")), []
    attention = fm.blockwise_attention(causal, block=BLOCK, in_specs=(spec,) * 3, say=lines.append)
    with jax.set_mesh(mesh):
        found = jax.jit(attention)(*[jax.device_put(x, NamedSharding(mesh, spec)) for x in args])
    assert " in head-tail order" in lines[0] and apart([found], [np.asarray(causal(*args))]) < 1e-5


@pytest.mark.usefixtures("_always")
@pytest.mark.slow
def test_a_mistake_in_the_positions_of_exchanged_rows_is_found(monkeypatch):
    mesh, args, given = placed("causal", 2)
    monkeypatch.setattr(Blocks, "first_row", lambda self, part, i: part * self.queries + i * self.q_size)
    with jax.set_mesh(mesh):
        found, _ = gradients(in_blocks("causal", []), given)
    assert apart(found, gradients(causal, args)[0]) > 1e-2


@pytest.mark.usefixtures("_always")
@pytest.mark.slow
def test_queries_and_results_move_by_two_permutations_and_nothing_else_is_gathered():
    mesh, _, given = placed("causal", 4)
    loss = lambda *x: jnp.sum(jnp.sin(in_blocks("causal", [])(*x)))  # noqa: E731
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).compile()
    counts = Counter(x.kind for x in read_collectives(read_hlo(compiled), mesh))
    # Forward: queries and results. Backward: queries, their gradients, gradients of results and their row sums.
    assert counts.pop("collective-permute") in (2 * 2 + 2 * 4, 2 * 2 + 2 * 3)  # jax 0.10 shares two of them
    assert counts == {"all-gather": 2, "reduce-scatter": 2}


@pytest.mark.usefixtures("_always")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "sp"), [("causal", 2), ("documents", 2), ("padding", 2)])
def test_splash_attention_in_head_tail_order_equals_the_attention_as_written(name, sp, monkeypatch):
    mesh, args, given = placed(name, sp)
    layouts = [((), ("sp",), (), ())] * 3 + [((), ("sp",))] * (name in WITH_IDS)
    lines = []

    def fused(*args):
        program = transform.program_of(jax.make_jaxpr(FORMS[name])(*args))
        found = transform.rewrite(program, layouts, lambda _: None, block=64, kernel="splash", platform="cpu")
        lines.extend(found.lines)
        assert found.call is not None
        return found.call(*args)

    with jax.set_mesh(mesh):
        found, _ = gradients(fused, given)
    assert "splash attention" in lines[0] and "queries over sp in head-tail order, at most 5 blocks" in lines[0]
    assert apart(found, gradients(FORMS[name], args)[0]) < 1e-5
