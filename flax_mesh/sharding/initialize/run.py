"""Arrays that a function makes, initialized directly with their shardings, by one program per kind of array."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from flax_mesh.jax_compat import reproducible_cpu_options, short_tracer_errors
from flax_mesh.mesh.context import without_mesh
from flax_mesh.program.program import Program, Var, program_of
from flax_mesh.sharding.initialize.kinds import Kinds, work
from flax_mesh.sharding.initialize.slices import Slice, cut
from flax_mesh.tree import is_key

# Work that is not worth less compilation, in equations, of which each takes about 4 ms of CPU time.
PROGRAM, EARLY = 15, 100  # another program; the early values, since most of their operations compile as well


def initialized(leaves: Callable[[], list[jax.Array]], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """The arrays of `leaves()`, computed directly with `shardings`, in one trace.

    Layers have equal arrays, and XLA would compile them again for each: one program computes all kinds of arrays of
    which there are equally many, and is called for each of them with other random keys. One program computes all arrays
    if this costs less, or if `leaves` must not be cut (`cut`). The bits are the same.

    On CPUs every element is computed and rounded alike on every mesh, whatever the shape of a shard is: see
    `reproducible_cpu_options`. The programs compile slightly faster, and compute random numbers about seven times
    slower. Sums over a dim that is split between devices, such as the norm of a row or a product of matrices, may still
    differ by rounding, since every mesh adds other partial sums; so may a few elements of jax.random.beta, and on other
    backends all functions of draws. JAX's random bits, and uniform values, are the same everywhere.
    """
    on_cpu = any(device.platform == "cpu" for sharding in shardings[:1] for device in sharding.device_set)
    options = reproducible_cpu_options() if on_cpu else None
    whole = jax.jit(leaves, out_shardings=list(shardings), compiler_options=options)
    with short_tracer_errors():
        traced = whole.trace()
    parts = None if _is_traced() else cut(program_of(traced.jaxpr))
    programs = None if parts is None else bundles(parts.slices, shardings)
    if parts is None or programs is None:
        return whole()  # which is not traced again
    with without_mesh(), jax.transfer_guard("allow"):
        given, arrays = _values(parts.early, shardings), dict[int, jax.Array]()
        for calls in programs.values():
            function = _compiled(calls[0], given, shardings, options)
            for slices in calls:
                outs = function([[given[v].data for v in each.program.inputs] for each in slices])
                arrays |= zip((at for each in slices for at in each.positions), outs, strict=True)
    return [arrays[at] for at in range(len(shardings))]


def bundles(slices: Sequence[Slice], shardings: Sequence[NamedSharding]) -> dict[int, list[list[Slice]]] | None:
    """Number of calls of a program -> the slices of every call, of the same kinds. None: one program costs less.

    A program of `n` calls computes kinds of which there are `n` slices, and kinds of little work of which there are
    more: several of each in a call, and the remainder in the program of one call.
    """
    numbers, by_kind = Kinds(), defaultdict[Hashable, list[Slice]](list)
    by_count = defaultdict[int, list[list[Slice]]](list)
    for each in slices:
        by_kind[numbers.of(each.program), tuple(shardings[at] for at in each.positions)].append(each)
    for kind in by_kind.values():
        by_count[len(kind)].append(kind)
    works = {count: sum(work(kind[0].program) for kind in kinds) for count, kinds in by_count.items()}
    saved = {count: (count - 1) * size for count, size in works.items()}
    programs: dict[int, list[list[Slice]]] = {1: [[]]}
    for count in sorted(by_count, key=lambda count: -saved[count]):
        repeated = {n: (count // n - 1 + count % n) * works[count] for n in programs if n <= count}
        n = min(repeated, key=lambda n: repeated[n])
        if repeated[n] > PROGRAM:
            programs[n := count] = [[] for _ in range(count)]
            repeated[n] = PROGRAM
        saved[count] -= repeated[n]
        for kind in by_count[count]:
            each = count // n
            for at, call in enumerate(programs[n]):
                call += kind[at * each : (at + 1) * each]
            programs[1][0] += kind[n * each :]
    return {n: calls for n, calls in programs.items() if calls[0]} if sum(saved.values()) > EARLY else None


def _is_traced() -> bool:
    """Whether the caller is traced, or runs without `jax.jit`: then no value is known, or nothing compiles."""
    with jax.transfer_guard("allow"):
        return isinstance(jnp.zeros(()), Tracer) or jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


class _Given(NamedTuple):
    """A value as an argument: `data` on the host, of keys of the kind `impl`."""

    data: np.ndarray
    impl: Hashable


def _values(early: Program, shardings: Sequence[NamedSharding]) -> dict[Var, _Given]:
    """The values of the early equations, computed on a device of the mesh: the keys of some kinds depend on it."""
    devices = shardings[0].addressable_devices or jax.local_devices()
    with jax.default_device(min(devices, key=lambda device: device.id)):
        values = early.call()
    impls = [jax.random.key_impl(x) if is_key(x) else None for x in values]
    raw = [x if impl is None else jax.random.key_data(x) for x, impl in zip(values, impls, strict=True)]
    data = map(np.asarray, jax.device_get(raw))
    return dict(zip(early.outputs, map(_Given, data, impls), strict=True))


def _compiled(
    slices: Sequence[Slice],
    given: Mapping[Var, _Given],
    shardings: Sequence[NamedSharding],
    options: dict[str, object] | None,
) -> Callable[[list[list[np.ndarray]]], list[jax.Array]]:
    def initialize(data: list[list[jax.Array]]) -> list[jax.Array]:
        outs = list[jax.Array]()
        for (program, _), arrays in zip(slices, data, strict=True):
            impls = (given[v].impl for v in program.inputs)
            outs += program.call(*(_with_impl(x, impl) for x, impl in zip(arrays, impls, strict=True)))
        return outs

    there = [shardings[at] for each in slices for at in each.positions]
    return jax.jit(initialize, out_shardings=there, compiler_options=options)


def _with_impl(x: jax.Array, impl: Hashable) -> jax.Array:
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)
