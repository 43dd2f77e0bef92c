"""Collectives of compiled programs whose traffic is known by construction, and of each notation of XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.hlo.collectives import read_collectives, sum_traffic
from flax_mesh.hlo.program import read_hlo

P = PartitionSpec
SIZES = {"a": 2, "b": 2, "c": 2}


def collectives_of(compiled, mesh):
    return read_collectives(read_hlo(compiled), mesh)


@pytest.fixture(scope="module")
def mesh():
    return fm.create_mesh((2, 2, 2), ("a", "b", "c"))


def compiled(mesh, fn, *shapes, specs):
    """`fn` compiled in a shard_map over the entire mesh, so that each collective of `fn` is one of the program."""
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(mapped).lower(*arrays).compile()


# The local shard is f32[4, 4] = 64 bytes. (operation, kind, payload and bytes that one device of n sends)
LOCAL = 64
CASES = [
    (jax.lax.psum, "all-reduce", lambda n: LOCAL, lambda n: 2 * LOCAL * (n - 1) // n),
    (partial(jax.lax.all_gather, tiled=True), "all-gather", lambda n: LOCAL * n, lambda n: LOCAL * (n - 1)),
    (partial(jax.lax.psum_scatter, tiled=True), "reduce-scatter", lambda n: LOCAL, lambda n: LOCAL * (n - 1) // n),
    (
        partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
        "all-to-all",
        lambda n: LOCAL,
        lambda n: LOCAL * (n - 1) // n,
    ),
]


@pytest.mark.parametrize("axes", [("b",), ("a", "c"), ("b", "c")], ids="+".join)
@pytest.mark.parametrize(("operation", "kind", "payload", "sent"), CASES, ids=[case[1] for case in CASES])
def test_kind_axes_and_bytes_of_a_collective(mesh, operation, kind, payload, sent, axes):
    program = compiled(mesh, lambda x: operation(x, axes), (32, 4), specs=(P(("a", "b", "c")),))
    (one,) = collectives_of(program, mesh)
    n = 2 ** len(axes)
    assert (one.kind, one.axes, one.group_size) == (kind, axes, n)
    assert (one.payload_bytes, one.sent_bytes) == (payload(n), sent(n))
    assert (one.times, one.times_known) == (1, True)
    assert "shard_map" in one.source
    assert collectives_of(program.as_text(), mesh) == collectives_of(program, mesh.abstract_mesh) == [one]


def test_the_axes_of_a_permute(mesh):
    shift = lambda x: jax.lax.ppermute(x, ("b", "c"), [(i, (i + 1) % 4) for i in range(4)])  # noqa: E731
    (one,) = collectives_of(compiled(mesh, shift, (32, 4), specs=(P(("a", "b", "c")),)), mesh)
    assert (one.kind, one.axes, one.sent_bytes) == ("collective-permute", ("b", "c"), LOCAL)


def test_collectives_in_a_loop_count_once_per_trip(mesh):
    def nested(x, w):
        def layer(x, w):
            inner = lambda i, x: jax.lax.psum(x @ w, "c") / 2  # noqa: E731
            return jax.lax.fori_loop(0, 3, inner, x), None

        return jax.lax.scan(layer, x, w)[0]

    program = compiled(mesh, nested, (4, 4), (5, 4, 4), specs=(P(), P()))
    (one,) = sum_traffic(collectives_of(program, mesh))
    assert (one.axes, one.kind, one.times, one.times_known) == (("c",), "all-reduce", 15, True)
    assert one.payload_bytes == 15 * LOCAL


def test_a_loop_of_unknown_trip_count_counts_once_and_is_marked(mesh):
    def until(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e3, lambda x: jax.lax.psum(x, "a"), x)

    (one,) = collectives_of(compiled(mesh, until, (4, 4), specs=(P(),)), mesh)
    assert (one.times, one.times_known) == (1, False)


def test_both_branches_of_a_conditional_are_counted(mesh):
    def either(x):
        add = lambda axis: partial(jax.lax.psum, axis_name=axis)  # noqa: E731
        return jax.lax.cond(jnp.sum(x) > 0, add("a"), add("b"), x)

    found = collectives_of(compiled(mesh, either, (4, 4), specs=(P(),)), mesh)
    assert {one.axes for one in found} == {("a",), ("b",)}


def test_a_report_has_the_traffic_of_a_program_by_axis(mesh):
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    both = lambda x: jax.lax.psum(jax.lax.psum(x, "c") + 1, "a")  # noqa: E731
    report = fm.analyze_sharding_strategy({"x": x}, compiled=compiled(mesh, both, (4, 4), specs=(P(),)))
    assert [(one.axes, one.payload_bytes) for one in report.traffic] == [(("a",), LOCAL), (("c",), LOCAL)]
    assert report.partition_stats["a"].traffic == report.traffic[:1] and report.partition_stats["b"].traffic == ()
    assert "all-reduce" in str(report)


HEAD = "HloModule m, num_partitions=8\n\nENTRY %main (p: f32[4]) -> f32[4] {\n"


def read_line(line: str, mesh=AbstractMesh((2, 2, 2), ("a", "b", "c"))):  # noqa: B008
    return collectives_of(f"{HEAD}  {line}\n}}\n", mesh)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("c",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("{}", ("a", "b", "c")),
        ("[4,2]<=[8]", ("c",)),
        ("[4,2]<=[2,4]T(1,0)", ("a",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("a", "c")),
        ("mesh['x'=4,'y'=2] {'y'}", ("c",)),
        ("mesh['x'=4,'y'=2] {'x'}", ("a", "b")),
        ("mesh['x'=2,'y'=2,'z'=2], device_ids=([2,2,2]T(2,1,0)) {'x'}", ("c",)),
        ("mesh['x'=2,'y'=4], device_ids=(0,1,4,5,2,3,6,7) {'x'}", ("b",)),
        ("mesh['x'=8] {'x':(2)2}", ("b",)),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ("a", "c")),
    ],
)
def test_every_notation_of_device_groups(groups, axes):
    (one,) = read_line(f"%r = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add")
    assert one.axes == axes and one.group_size == 2 ** len(axes)


@pytest.mark.parametrize(
    ("shape", "operation", "payload"),
    [
        ("(f32[4]{0}, f32[8]{0})", "all-gather-start", 32),
        ("((f32[4], bf16[2]), (f32[8], bf16[4]))", "all-gather-start", 40),
        ("f32[4]{0}", "all-reduce-start", 16),
        ("(f32[4]{0}, f32[6]{0})", "all-reduce-start", 40),
        ("(f32[4]{0}, f32[4]{0}, u32[], u32[])", "collective-permute-start", 16),
        ("(f32[4]{0}, /*index=1*/s4[8]{0:E(4)})", "all-reduce", 20),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", "reduce-scatter", 4096),
        ("f8e4m3fn[16]{0}", "all-gather", 16),
    ],
)
@pytest.mark.parametrize("start", ["", "ROOT "])
def test_payloads_of_asynchronous_and_combined_collectives(start, shape, operation, payload):
    groups = "source_target_pairs={{0,1},{1,0}}" if "permute" in operation else "replica_groups=[4,2]<=[8]"
    (one,) = read_line(f"{start}%s = {shape} {operation}(%p, %q), {groups}")
    assert (one.kind, one.payload_bytes) == (operation.removesuffix("-start"), payload)


def test_done_operations_and_groups_of_one_device_are_not_counted():
    assert not read_line("%d = f32[8]{0} all-gather-done(%s)")
    assert not read_line("%d = f32[8]{0} all-reduce(%s), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}")
    assert not read_line("%d = f32[8]{0} collective-permute(%s), source_target_pairs={{0,0},{1,1}}")


def test_text_that_cannot_be_parsed_is_an_error():
    with pytest.raises(fm.ShardingError, match=r"replica_groups must be in a notation that .* knows, got: .*=@new"):
        read_line("%r = f32[4]{0} all-reduce(%p), replica_groups=@new<x>, to_apply=%add")
    with pytest.raises(fm.ShardingError, match="replica_groups must name axes of their mesh, got 'w'"):
        read_line("%r = f32[4]{0} all-reduce(%p), replica_groups=mesh['x'=8] {'w'}")
    with pytest.raises(fm.ShardingError, match=r"runs on 8 devices and the mesh \{'a': 4\} has 4"):
        read_line("%r = f32[4]{0} all-reduce(%p), replica_groups={}", AbstractMesh((4,), ("a",)))
    with pytest.raises(fm.ShardingError, match="has no ENTRY computation"):
        collectives_of("HloModule m\n", AbstractMesh((1,), ("a",)))


@given(st.permutations(["a", "b", "c"]), st.integers(1, 3), st.randoms())
def test_shuffled_lists_of_groups_have_the_axes_along_which_they_differ(order, count, random):
    """Devices are grouped along some axes and shuffled within a group: the result is these axes, in mesh order."""
    shape = (2, 3, 4)
    chosen = sorted(order[:count])
    inner = ["abc".index(axis) for axis in chosen]
    outer = [i for i in range(3) if i not in inner]
    ids = np.arange(24).reshape(shape).transpose(*outer, *inner).reshape(-1, np.prod([shape[i] for i in inner]))
    groups = [list(map(int, group)) for group in ids]
    for group in groups:
        random.shuffle(group)
    text = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    program = HEAD.replace("=8", "=24") + f"  %r = f32[4]{{0}} all-reduce(%p), replica_groups={{{text}}}\n}}\n"
    (one,) = collectives_of(program, AbstractMesh(shape, ("a", "b", "c")))
    assert one.axes == tuple(chosen) and one.group_size == ids.shape[1]


LOOP = """HloModule jit_step, num_partitions=8

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %b = (s32[]{{:T(128)}}, f32[4]{{0:T(128)}}) parameter(0)
  %x = f32[4]{{0:T(128)}} get-tuple-element(%b), index=1
  %sum = f32[4]{{0:T(128)}} all-reduce(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add
  ROOT %next = (s32[]{{:T(128)}}, f32[4]{{0:T(128)}}) tuple(%i, %sum)
}}

%condition (c: (s32[], f32[4])) -> pred[] {{
  %c = (s32[]{{:T(128)}}, f32[4]{{0:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  {limit}
  ROOT %less = pred[]{{:T(512)}} compare(%i, %limit), direction={direction}
}}

ENTRY %main (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[]{{:T(128)}}, f32[4]{{0:T(128)}}) parameter(0)
  ROOT %loop = (s32[]{{:T(128)}}, f32[4]{{0:T(128)}}) while(%p), condition=%condition, body=%body
}}
"""


@pytest.mark.parametrize(
    ("limit", "direction", "times", "known"),
    [
        ("%limit = s32[]{:T(128)} constant(12)", "LT", 12, True),
        ("%limit = s32[] constant(12)", "LT", 12, True),
        ("%limit = s32[]{:T(128)} constant(12)", "NE", 1, False),
        ("%limit = s32[]{:T(128)} get-tuple-element(%c), index=0", "LT", 1, False),
    ],
)
def test_the_trip_count_on_tpus_is_the_limit_in_the_condition(limit, direction, times, known):
    mesh = AbstractMesh((8,), ("fsdp",))
    (one,) = collectives_of(LOOP.format(limit=limit, direction=direction), mesh)
    assert (one.times, one.times_known, one.payload_bytes, one.axes) == (times, known, 16, ("fsdp",))
