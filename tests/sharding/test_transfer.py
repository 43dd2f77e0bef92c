"""Transfers of trees between host and devices: results, compilations and memory."""

import re
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.sharding.gather import in_turn
from tests.multiprocess.processes import assert_all_done, run_workers

P = PartitionSpec


FSDP8, MIXED = fm.create_mesh(), fm.create_mesh((2, 2, 1, 2, 1))


def host_tree():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(8, 16)).astype(np.float32),
        "b": {"c": jnp.asarray(rng.normal(size=(16,)), jnp.bfloat16), "n": np.arange(8, dtype=np.int32)},
        "replicated": np.float32(3.0),
    }


SPECS = {"a": P("fsdp", "tp"), "b": {"c": P(("dp", "fsdp")), "n": P("tp")}, "replicated": P()}


def apply(functions, tree):
    return jax.tree.map(lambda function, x: function(x), functions, tree)


@pytest.mark.parametrize("classic", [False, True])
def test_gather_after_shard_returns_the_same_tree(classic):
    tree = host_tree()
    if classic:
        shard_fns, gather_fns = fm.make_shard_and_gather_fns(SPECS, MIXED)
        sharded = apply(shard_fns, tree)
        gathered = apply(gather_fns, sharded)
    else:
        sharded = fm.shard(tree, SPECS, MIXED)
        gathered = fm.gather(sharded)
    assert jax.tree.map(lambda x: x.sharding, sharded) == jax.tree.map(lambda spec: NamedSharding(MIXED, spec), SPECS)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(gathered), strict=True):
        assert isinstance(after, np.ndarray)
        assert after.dtype == before.dtype and np.array_equal(np.asarray(before), after)


@pytest.mark.parametrize(("dtype", "on_device"), [("int64", "int32"), ("float64", "float32")])
def test_numbers_of_64_bits_are_placed_without_a_warning(dtype, on_device):
    x = np.arange(8, dtype=dtype)
    placed = fm.shard(x, P("fsdp"), FSDP8)
    assert placed.dtype == on_device and np.array_equal(placed, x)


def test_shard_uses_the_mesh_in_context():
    with jax.set_mesh(FSDP8):
        sharded = fm.shard({"a": np.ones(8), "n": np.ones(8)}, {"a": P("fsdp"), "n": P()}, dtype="bfloat16")
    assert [x.sharding for x in sharded.values()] == [NamedSharding(FSDP8, spec) for spec in (P("fsdp"), P())]
    assert {x.dtype for x in sharded.values()} == {jnp.dtype("bfloat16")}
    with pytest.raises(AssertionError, match="No mesh is in context"):
        fm.make_shard_and_gather_fns({"a": P("fsdp")})


def test_nothing_is_compiled_for_numpy_and_sharded_leaves(compilations):
    tree = jax.tree.map(np.asarray, host_tree())
    sharded = fm.shard(tree, SPECS, MIXED)
    compilations.clear()
    for _ in range(2):
        shard_fns, gather_fns = fm.make_shard_and_gather_fns(SPECS, MIXED)
        for source in (tree, sharded):
            apply(gather_fns, apply(shard_fns, source))
    fm.gather(fm.shard(tree, SPECS, MIXED))
    assert not compilations
    jax.jit(lambda x: x * 17.25)(np.ones(3))
    assert compilations  # the fixture does count compilations


def test_inputs_on_one_device_compile_at_most_once_per_shape(compilations):
    arrays = [np.full(shape, i, np.float32) for i, shape in enumerate([(8, 16)] * 3 + [(16,)])]
    tree = jax.device_put(arrays, jax.devices()[2])
    specs = [P("fsdp", "tp")] * 3 + [P(("dp", "fsdp"))]
    compilations.clear()
    for _ in range(2):
        shard_fns, gather_fns = fm.make_shard_and_gather_fns(specs, MIXED)
        assert [x.max() for x in apply(gather_fns, apply(shard_fns, tree))] == [0, 1, 2, 3]
        fm.gather(fm.shard(tree, specs, MIXED))
    assert 0 < len(compilations) <= 2


def test_casts_are_on_the_host_and_compile_nothing(compilations):
    one = jax.device_put(np.full((8, 2), 1 / 3, np.float32), jax.devices()[3])
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(FSDP8, P("fsdp")))
    compilations.clear()
    tree = {"numpy": np.full((8, 2), 1 / 3), "one": one, "ints": np.arange(8), "flag": np.ones(8, bool), "keys": keys}
    placed = fm.shard(tree, P("fsdp"), FSDP8, dtype=jnp.bfloat16)
    assert [x.dtype for x in jax.tree.leaves(placed)] == [jnp.bool_, jnp.int32, keys.dtype, jnp.bfloat16, jnp.bfloat16]
    back = fm.gather(placed, dtype=np.float32)
    assert back["numpy"].dtype == np.float32 and back["ints"].dtype == np.int32 and back["flag"].dtype == np.bool_
    np.testing.assert_array_equal(back["one"], np.full((8, 2), 1 / 3, jnp.bfloat16).astype(np.float32))
    assert not compilations
    again = fm.shard(placed, P("fsdp"), FSDP8, dtype=np.float32)  # on several devices, a cast is compiled per array
    assert again["one"].dtype == np.float32 and again["one"].sharding == NamedSharding(FSDP8, P("fsdp"))


def test_specs_may_be_one_spec_shardings_arrays_or_an_abstract_state():
    make = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))  # noqa: E731
    abstract = fm.abstract_state(make, MIXED, [("kernel", P("fsdp", "tp")), ("bias", P("tp"))])
    state = nnx.state(make())
    expected = {"kernel": NamedSharding(MIXED, P("fsdp", "tp")), "bias": NamedSharding(MIXED, P("tp"))}
    layouts = {"abstract": abstract, "shardings": expected, "of arrays": fm.init_state(make, abstract)}
    for name, specs in layouts.items():
        placed = fm.shard(state, specs)
        assert {path: x.sharding for path, x in fm.named_leaves(placed)} == expected, name
        assert isinstance(placed, nnx.State)
    replicated = jax.tree.leaves(fm.shard(state, P(), MIXED))
    assert all(x.is_fully_replicated and len(x.sharding.device_set) == 8 for x in replicated)
    wrong: list[tuple[Any, Any, str]] = [
        ({"kernel": P(), "beta": P()}, MIXED, "structure:\nbias: missing in specs\nbeta: in specs, but"),
        ({"kernel": 3, "bias": P()}, MIXED, "arrays with a sharding, and these are not: kernel"),
        (P(), AbstractMesh((2,), ("a",)), "only on a mesh of devices, but the specs are for an AbstractMesh"),
    ]
    for specs, mesh, message in wrong:
        with pytest.raises(fm.ShardingError, match=message):
            fm.shard(state, specs, mesh)


# --- memory kinds, resharding, donation ---


def test_a_tree_is_offloaded_to_host_memory_and_back(compilations):
    tree = {"a": np.arange(128.0, dtype=np.float32).reshape(8, 16), "n": np.arange(8)}
    specs = {"a": P("fsdp", "tp"), "n": P("tp")}
    direct = fm.shard(tree, specs, MIXED, memory_kind="pinned_host")
    moved = fm.reshard(fm.shard(tree, specs, MIXED), memory_kind="pinned_host")
    back = fm.reshard(moved, {"a": P("tp"), "n": P()}, memory_kind="device")
    stays = fm.reshard(moved, {"a": P("tp"), "n": P()})
    for found, kind in ((direct, "pinned_host"), (moved, "pinned_host"), (back, "device"), (stays, "pinned_host")):
        assert {x.sharding.memory_kind for x in found.values()} == {kind}
        for name, x in fm.gather(found).items():
            np.testing.assert_array_equal(x, tree[name])
    assert direct["a"].sharding.spec == P("fsdp", "tp") and back["a"].sharding.spec == P("tp")
    assert not compilations


def test_reshard_changes_only_what_is_passed():
    half = fm.create_mesh((4,), ("fsdp",), devices=jax.devices()[4:])
    values = np.arange(128.0, dtype=np.float32).reshape(8, 16)
    x = fm.shard({"a": values, "b": values}, {"a": P("fsdp", "tp"), "b": P("tp")}, MIXED)
    cases = [
        (fm.reshard(x, {"a": P("tp"), "b": P("tp")}), NamedSharding(MIXED, P("tp"))),
        (fm.reshard(x, P("fsdp"), FSDP8), NamedSharding(FSDP8, P("fsdp"))),
        (fm.reshard(x, P("fsdp"), half), NamedSharding(half, P("fsdp"))),
        (fm.reshard(x, P("fsdp"), dtype=jnp.bfloat16), NamedSharding(MIXED, P("fsdp"))),
    ]
    for found, sharding in cases:
        assert {leaf.sharding for leaf in found.values()} == {sharding}
        np.testing.assert_array_equal(fm.gather(found)["a"].astype(np.float32), values)
    assert cases[-1][0]["a"].dtype == jnp.bfloat16
    assert fm.reshard(x)["a"] is x["a"]
    message = r"reshard requires arrays on a mesh, and these are not: n, one. Place them with shard\(tree"
    with pytest.raises(fm.ShardingError, match=message):
        fm.reshard({"a": x["a"], "n": np.ones(3), "one": jnp.ones(3)}, P())


class Counted(np.ndarray):
    """Records at every read how many arrays of this class are alive."""

    alive: "list[weakref.ref[Counted]]" = []  # noqa: RUF012
    seen: "list[int]" = []  # noqa: RUF012

    def __getitem__(self, index):
        Counted.seen.append(sum(one() is not None for one in Counted.alive))
        return np.asarray(self)[index]


def counted_tree():
    leaves = [np.full((8, 4), float(i), np.float32).view(Counted) for i in range(4)]
    Counted.alive, Counted.seen = [weakref.ref(x) for x in leaves], []
    return leaves


def test_donated_numpy_leaves_are_freed_one_by_one():
    placed = fm.shard(counted_tree(), P("fsdp"), FSDP8, donate=True)
    assert sorted(set(Counted.seen), reverse=True) == [4, 3, 2, 1] and Counted.seen[0] == 4
    np.testing.assert_array_equal(fm.gather(placed)[3], np.full((8, 4), 3.0))
    kept = counted_tree()
    fm.shard(kept, P("fsdp"), FSDP8, donate=True)
    assert set(Counted.seen) == {4}  # the caller still has references


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_donating_arrays_is_safe_on_cpu(dtype):
    x = fm.shard({"a": np.ones((8, 8), np.float32), "b": np.ones((8, 8), np.float32)}, P("fsdp"), MIXED)
    for specs in (P("fsdp"), P("tp", "fsdp"), P()):
        y = fm.reshard(x, specs, dtype=dtype, donate=True)
        assert y["a"].sharding.spec == specs and fm.gather(y)["b"].sum() == 64
        assert not x["a"].is_deleted() and fm.gather(x)["a"].sum() == 64


# --- streamed gather ---


def layouts():
    """Arrays with many different shardings."""
    values = np.random.default_rng(0).normal(size=(8, 16, 4)).astype(np.float32)
    specs = [P(), P("fsdp"), P(None, ("tp", "dp")), P("dp", "fsdp", "tp"), P(("dp", "fsdp", "tp"))]
    tree = {f"{spec}": fm.shard(values + i, spec, MIXED) for i, spec in enumerate(specs)}
    tree["bf16"] = fm.shard(values.astype(jnp.bfloat16), P("tp"), MIXED)
    tree["empty"] = fm.shard(np.zeros((0, 4)), P(None, "tp"), MIXED)
    tree["host"] = fm.shard(values, P("tp"), MIXED, memory_kind="pinned_host")
    return tree | {"one": jnp.arange(5), "scalar": jnp.float32(2), "numpy": values, "number": 3}


@pytest.mark.parametrize("limit", [1, 200, 10**9])
def test_a_streamed_gather_equals_gathering_at_once(limit, compilations):
    tree = layouts()
    at_once = fm.gather(tree)
    compilations.clear()
    streamed = fm.gather(tree, bytes_in_flight=limit)
    assert not compilations
    assert streamed.pop("number") == at_once.pop("number") == 3
    for name, x in streamed.items():
        assert isinstance(x, np.ndarray) and x.dtype == at_once[name].dtype, name
        np.testing.assert_array_equal(x, at_once[name])
    streamed["P()"][:] = 0  # separate memory, not the host copy that JAX caches
    assert fm.gather(tree["P()"]).any()
    assert fm.gather(tree["one"], bytes_in_flight=limit, dtype=np.float16).dtype == np.int32
    assert fm.gather(tree["bf16"], bytes_in_flight=limit, dtype=np.float32).dtype == np.float32


def peak_of(fn) -> int:
    """Peak increase of the resident memory of this process, in bytes, while `fn` runs."""

    def status(name) -> int:
        (kib,) = re.findall(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())
        return int(kib) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    fn()
    return status("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="requires the peak of memory, as on Linux")
def test_gathering_replicates_nothing_on_devices():
    size = 32 * 2**20  # smaller arrays may be in memory that this process has freed
    x, y, z = (fm.shard(np.ones((8, size // 32), np.float32), P("fsdp"), FSDP8) for _ in range(3))
    assert peak_of(lambda: fm.gather(x)) < 4 * size
    assert peak_of(lambda: fm.gather(y, bytes_in_flight=2**20)) < 4 * size
    # For comparison: replicating on 8 devices allocates 8 times the size.
    assert peak_of(lambda: jax.block_until_ready(fm.reshard(z, P()))) > 5 * size


class Piece:
    """A fake shard. The class counts the bytes of all transfers that have started and not finished."""

    in_flight = 0
    most = 0

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def copy_to_host_async(self):
        Piece.in_flight += self.nbytes
        Piece.most = max(Piece.most, Piece.in_flight)

    def __array__(self, dtype=None, copy=None):
        Piece.in_flight -= self.nbytes
        return np.array(self.nbytes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 120))
def test_bytes_in_flight_never_exceed_the_limit_and_use_it(sizes, limit):
    Piece.in_flight = Piece.most = 0
    pieces: Any = ((i, Piece(n)) for i, n in enumerate(sizes))
    finished = [(name, int(data)) for name, data in in_turn(pieces, limit)]
    assert finished == list(enumerate(sizes)) and Piece.in_flight == 0
    assert Piece.most <= max([limit, *sizes])
    if sum(sizes) <= limit:
        assert Piece.most == sum(sizes)  # all at once


def test_invalid_arguments_of_gather_are_errors():
    with pytest.raises(ValueError, match="bytes_in_flight must be at least 1, got 0"):
        fm.gather(jnp.ones(3), bytes_in_flight=0)
    with pytest.raises(ValueError, match="remote must be 'error', 'leave' or 'collect', got 'all'"):
        fm.gather(jnp.ones(3), remote="all")  # pyright: ignore[reportArgumentType]


COPIES: dict[str, Any] = {"shard": fm.shard, "reshard": fm.reshard}
COPIES["shard_fns"] = lambda x, target, **kinds: fm.make_shard_and_gather_fns(target, **kinds)[0](x)
ROWS, WHOLE = (NamedSharding(fm.create_mesh((8,), ("fsdp",)), spec) for spec in (P("fsdp"), P()))


@pytest.mark.parametrize(
    ("place", "source", "target"),
    [(place, source, ROWS) for place in COPIES for source in (ROWS, WHOLE)]
    + [(place, None, WHOLE) for place in ("shard", "shard_fns")],  # from one device
    ids=str,
)
def test_without_aliasing_the_result_may_be_donated(place, source, target):
    """By default a source that is in place already is returned itself, and donation deletes it under the caller."""
    values = np.arange(512 * 128, dtype=np.float32).reshape(512, 128)
    x = jax.device_put(values, source) if source else jnp.array(values)
    copied = COPIES[place](x, target, may_alias=False)
    assert copied.sharding == target
    jax.jit(lambda x: x + 1, donate_argnums=0)(copied)
    assert copied.is_deleted() and not x.is_deleted()
    np.testing.assert_array_equal(x, values)
    if source == target:
        assert all(COPIES[place](x, target, may_alias=may_alias) is x for may_alias in (None, True))


@pytest.mark.parametrize("place", ["shard", "shard_fns"])
def test_without_aliasing_the_result_does_not_follow_changes_of_its_numpy_source(place):
    values = np.zeros((512, 128), np.float32)
    copied = COPIES[place](values, ROWS, may_alias=False)
    values[0, 0] = -1.0
    assert copied[0, 0] == 0.0


@pytest.mark.slow
def test_two_processes_shard_and_gather_arrays_that_span_both():
    ended = run_workers("placement", 2, 4, module="tests.sharding.process_worker")
    assert_all_done(ended, "placement is done")
