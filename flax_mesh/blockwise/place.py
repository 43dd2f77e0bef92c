"""Where an attention is computed: the mesh axes that split the dims of its scores.

On Explicit axes the types of the values state them. On Auto axes the layout of the inputs is followed through the
program. A wrong guess costs time only: the operands are moved to the layout that is chosen here.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from flax_mesh.axes import Axes, Layout, axes_of_spec
from flax_mesh.blockwise.traced.dims import Labels, dim_map, labels_before
from flax_mesh.blockwise.traced.graph import Level, Op, Value, facts_of
from flax_mesh.blockwise.traced.region import Region
from flax_mesh.program.follow import Rules
from flax_mesh.program.program import SHARD_MAP, Eqn
from flax_mesh.tree import PyTree

R = TypeVar("R")


class Placement(NamedTuple):
    """`axes` splits each dim of the scores that several devices have a part of."""

    mesh: AbstractMesh
    axes: Mapping[int, Axes]

    @property
    def parts(self) -> dict[int, int]:
        return {d: self.size(names) for d, names in self.axes.items()}

    def size(self, names: Axes) -> int:
        return math.prod(self.mesh.shape[name] for name in names)

    def spec(self, labels: Labels, without: int | None = None) -> PartitionSpec:
        return PartitionSpec(*(self.axes.get(x, ()) if x is not None and x != without else None for x in labels))

    @property
    def is_explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def texts(self, of_queries: int, order: str = "") -> list[str]:
        """`order`: what to say about the order of the queries."""
        dims = {d: "+".join(names) for d, names in self.axes.items()}
        return [f"queries over {x}{order}" if d == of_queries else f"dim {d} over {x}" for d, x in dims.items()]


def on_devices(placement: Placement | None, fn: Callable[..., R], args: PyTree, ins: PyTree, outs: PyTree) -> R:
    """`fn(*args)` of the parts of each device, which have the specs `ins` and `outs`."""
    if placement is None:
        return fn(*args)
    mesh = placement.mesh
    if placement.is_explicit:
        args = jax.tree.map(lambda spec, x: _with_spec(x, mesh, spec), ins, args, is_leaf=_is_spec)
    return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(*args)


def with_type_of(placement: Placement | None, value: Value, x: jax.Array) -> jax.Array:
    if placement is None or not placement.is_explicit:
        return x
    return _with_spec(x, placement.mesh, value.aval.sharding.spec)


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def _with_spec(x: jax.Array, mesh: AbstractMesh, spec: PartitionSpec) -> jax.Array:
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def mesh_of(x: Value, mesh: AbstractMesh) -> AbstractMesh:
    """The mesh in context with the types of axes that it has where `x` is computed: `jax.sharding.auto_axes`."""
    of_value = x.aval.sharding.mesh
    return mesh if of_value.empty or of_value.axis_names != mesh.axis_names else of_value


def place(region: Region, layouts: Mapping[int, Layout], mesh: AbstractMesh) -> Placement | None:
    """The placement of an attention, None to compute it without regard to devices."""
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return None
    # Joined with further columns, the dim of the keys has lost its axes.
    scores = region.softmax.scores if region.extra else region.softmax.exp.outputs[0]
    is_explicit = AxisType.Explicit in mesh.axis_types
    if is_explicit:
        layout = axes_of_spec(scores.aval.sharding.spec, len(scores.shape))
    else:
        layout = layouts.get(id(scores), ((),) * len(scores.shape))
    axes = {d: tuple(a for a in names if mesh.shape[a] > 1) for d, names in enumerate(layout)}
    of_keys = axes.pop(region.k, ())
    axes[region.q] = axes.get(region.q) or of_keys  # every device has all keys
    placement = Placement(mesh, axes)
    fits = {d: names for d, names in axes.items() if names and _fits(region, d, placement.size(names))}
    return Placement(mesh, fits) if fits or is_explicit else None


def _fits(region: Region, label: int, parts: int) -> bool:
    """Whether every array that has the dim can be split, and every operation computed on a part of it."""
    arrays = [*((x.shape, labels) for x, labels in region.leaves.values()), (region.out.shape, region.out_labels)]
    arrays += [(op.outputs[0].shape, labels) for op, labels in (*region.steps_labels(), *region.layout)]
    arrays.append((region.shape, tuple(range(len(region.shape)))))
    sizes = [size for shape, labels in arrays for size, each in zip(shape, labels, strict=True) if each == label]
    whole = all(
        label not in labels or op.name in ("iota", "random_bits", "broadcast_in_dim") or _has(op, labels, label)
        for op, labels in region.steps_labels()
    )
    return label in region.out_labels and whole and all(size % parts == 0 for size in sizes)


def _has(op: Op, labels: Labels, label: int) -> bool:
    return any(label in (labels_before(op, i, labels) or ()) for i in range(len(op.inputs)))


def follow(
    level: Level, given: Sequence[Layout | None], of_const: Callable[[object], Layout | None], mesh: AbstractMesh
) -> dict[int, Layout]:
    """The axes of every dim of every value, by id, from the axes of inputs and of arrays that are closed over."""
    return facts_of(level, given, _Layouts(of_const, mesh))


class DimRules(Rules[Layout | None]):
    """Rules for facts about each dim: names, or () where nothing is known. A result has the names of its operands."""

    unknown = None

    def through(self, eqn: Eqn, facts: Sequence[Layout | None]) -> Sequence[Layout | None]:
        return [self.of_result(eqn, out.aval.shape, facts) for out in eqn.outvars]

    def of_result(self, eqn: Eqn, shape: tuple[int, ...], facts: Sequence[Layout | None]) -> Layout | None:
        """Each dim of a result has the names of the first operand in which that is known."""
        combined: list[Axes] = [()] * len(shape)
        for i, (x, layout) in enumerate(zip(eqn.invars, facts, strict=True)):
            for names, o in zip(layout, self.dims(eqn, i, x.aval.shape, shape), strict=True) if layout else ():
                if o is not None and names and not combined[o] and self.fits(names, shape[o], combined):
                    combined[o] = names
        return tuple(combined) if any(combined) else None

    def dims(self, eqn: Eqn, number: int, before: tuple[int, ...], after: tuple[int, ...]) -> Sequence[int | None]:
        """For every dim of an operand, the dim of the result that it becomes."""
        dims = dim_map(eqn, number, major=True) if len(eqn.outvars) == 1 else None
        # Not known, such as a function with its own derivative: dims of the same size at the same place.
        return _aligned(before, after) if dims is None else dims

    def fits(self, names: Axes, size: int, combined: Sequence[Axes]) -> bool:
        return True

    def join(self, a: Layout | None, b: Layout | None) -> Layout | None:
        return tuple(x or y for x, y in zip(a, b, strict=True)) if a and b else a or b

    def part(self, eqn: Eqn, fact: Layout | None) -> Layout | None:
        return fact and fact[1:]

    def whole(self, eqn: Eqn, fact: Layout | None) -> Layout | None:
        return fact and ((), *fact)

    def opens(self, eqn: Eqn, facts: Sequence[Layout | None]) -> bool:
        return eqn.primitive.name != SHARD_MAP


class _Layouts(DimRules):
    """The mesh axes that split each dim."""

    def __init__(self, of_const: Callable[[object], Layout | None], mesh: AbstractMesh):
        self.of_const, self.mesh = of_const, mesh

    def constant(self, value: object) -> Layout | None:
        return self.of_const(value)

    def of_result(self, eqn: Eqn, shape: tuple[int, ...], facts: Sequence[Layout | None]) -> Layout | None:
        sharding = eqn.params["sharding"] if eqn.primitive.name == "sharding_constraint" else None
        if not isinstance(sharding, NamedSharding):
            return super().of_result(eqn, shape, facts)
        wanted = axes_of_spec(sharding.spec, len(shape))
        free = [x is PartitionSpec.UNCONSTRAINED for x in sharding.spec]
        free += [False] * (len(wanted) - len(free))
        old = facts[0] or ((),) * len(wanted)
        return tuple(o if f else w for o, w, f in zip(old, wanted, free, strict=True))

    def fits(self, names: Axes, size: int, combined: Sequence[Axes]) -> bool:
        """An axis splits one dim of an array, into equal parts."""
        used = {name for each in combined for name in each}
        return not used & {*names} and size % math.prod(self.mesh.shape[name] for name in names) == 0


def _aligned(before: Sequence[int], after: Sequence[int]) -> list[int | None]:
    """Dims of the same size at the same place, counted from the last one if the numbers of dims differ."""
    shift = len(after) - len(before)
    return [d + shift if d + shift >= 0 and size == after[d + shift] else None for d, size in enumerate(before)]
