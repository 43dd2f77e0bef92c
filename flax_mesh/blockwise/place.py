"""Where an attention is computed: the mesh axes that split the dims of its scores.

On Explicit axes the types of the values state them. On Auto axes the layout of the inputs is followed through the
program. A wrong guess costs time only: the operands are moved to the layout that is chosen here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from flax_mesh.blockwise.dims import Labels, dim_map, labels_before
from flax_mesh.blockwise.region import Region
from flax_mesh.jax_compat import scan_sizes
from flax_mesh.program.graph import Level, Op, Value, source

Axes: TypeAlias = tuple[str, ...]
Layout: TypeAlias = tuple[Axes, ...]  # the axes of every dim


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


def axes_of_spec(spec: Any, rank: int) -> Layout:
    given = [() if x in (None, PartitionSpec.UNCONSTRAINED) else (x,) if isinstance(x, str) else tuple(x) for x in spec]
    return (*given, *[()] * (rank - len(given)))


def mesh_of(x: Value, mesh: AbstractMesh) -> AbstractMesh:
    """The mesh in context with the types of axes that it has where `x` is computed: `jax.sharding.auto_axes`."""
    of_value = x.aval.sharding.mesh
    return mesh if of_value.empty or of_value.axis_names != mesh.axis_names else of_value


def place(region: Region, layouts: Mapping[int, Layout], mesh: Any) -> Placement | None:
    """The placement of an attention, None to compute it without regard to devices."""
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return None
    scores = region.softmax.exp.outputs[0]
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
    level: Level, given: Sequence[Layout | None], of_const: Callable[[Any], Layout | None], mesh: Any
) -> dict[int, Layout]:
    """The axes of every dim of every value, by id, from the axes of inputs and of arrays that are closed over."""
    known: dict[int, Layout] = {}
    consts = [(x, of_const(x.const)) for x in level.consts]
    for x, layout in [*zip(level.inputs, given, strict=True), *consts]:
        if layout is not None:
            known[id(x)] = layout
    spread(level, known, lambda op, out, known: _layout_of(op, out, known, mesh))
    return known


def spread(
    level: Level, known: dict[int, Layout], result: Callable[[Op, Value, Mapping[int, Layout]], Layout | None]
) -> None:
    """Adds `result` of every operation to `known`, through loops and branches."""
    for op in level.ops:
        if op.bodies and not op.is_closed:
            for body in op.bodies:
                _enter(op, body, known)
                spread(body, known, result)
            _leave(op, known)
            continue
        for out in op.outputs:
            if (layout := result(op, out, known)) is not None:
                known[id(out)] = layout


def _layout_of(op: Op, out: Value, known: Mapping[int, Layout], mesh: Any) -> Layout | None:
    """The layout of a result: each dim has the axes of the first operand that has some for it."""
    sharding = op.params.get("sharding") if op.name == "sharding_constraint" else None
    if isinstance(sharding, NamedSharding):
        wanted = axes_of_spec(sharding.spec, len(out.shape))
        free = [x is PartitionSpec.UNCONSTRAINED for x in sharding.spec]
        old = known.get(id(source(op.inputs[0])), ((),) * len(wanted))
        free += [False] * (len(wanted) - len(free))
        return tuple(o if f else w for o, w, f in zip(old, wanted, free, strict=True))
    combined: list[Axes] = [()] * len(out.shape)
    for i, x in enumerate(op.inputs):
        if (layout := known.get(id(source(x)))) is None:
            continue
        to = dim_map(op, i, major=True) if len(op.outputs) == 1 else None
        to = aligned(x.shape, out.shape) if to is None else to  # not known, such as a function with its own derivative
        for names, o in zip(layout, to, strict=True):
            used = {name for each in combined for name in each}
            if o is None or not names or combined[o] or used & {*names}:
                continue
            if out.shape[o] % math.prod(mesh.shape[name] for name in names) == 0:
                combined[o] = names
    return tuple(combined) if any(combined) else None


def aligned(before: Sequence[int], after: Sequence[int]) -> list[int | None]:
    """Dims of the same size at the same place, counted from the last one if the numbers of dims differ."""
    shift = len(after) - len(before)
    return [d + shift if d + shift >= 0 and size == after[d + shift] else None for d, size in enumerate(before)]


def _enter(op: Op, body: Level, known: dict[int, Layout]) -> None:
    passed = op.inputs[len(op.inputs) - len(body.inputs) :] if op.name in ("cond", "while") else op.inputs
    if op.name == "while":
        first = op.params["cond_nconsts"]
        passed = op.inputs[first:]
    sizes = scan_sizes(op.eqn) if op.name == "scan" else None
    for n, (x, inner) in enumerate(zip(passed, body.inputs, strict=True)):
        if (layout := known.get(id(source(x)))) is not None:
            known[id(inner)] = layout[1:] if sizes and n >= sum(sizes) else layout


def _leave(op: Op, known: dict[int, Layout]) -> None:
    stacked = scan_sizes(op.eqn)[1] if op.name == "scan" else len(op.outputs)
    for n, out in enumerate(op.outputs):
        layout = known.get(id(source(op.bodies[0].outputs[n])))
        if layout is not None:
            known[id(out)] = ((), *layout) if n >= stacked else layout
