"""StagedModel: a model that is split into the stages of a pipeline, and traced once per set of shapes.

`stages/` makes it from any NNX model or from modules that are stages.
"""

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import jax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import AbstractMesh, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.mesh.context import without_mesh
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.split import assign as cut
from flax_mesh.mpmd.split.assign import DATA, VARIABLES
from flax_mesh.mpmd.split.check import PlainModel, check_stages, full_precision, is_cheap, one_device_mesh
from flax_mesh.mpmd.split.problems import imbalance
from flax_mesh.mpmd.split.trace import Forward, Layer, ModelLeaf, open_forward, trace_forward, with_marked_calls
from flax_mesh.mpmd.split.update import SHARED
from flax_mesh.program.program import Program, Var, flops, has_explicit_axes, variables
from flax_mesh.sharding.abstract import Make, Split, abstract_state
from flax_mesh.sharding.annotations import annotations_of
from flax_mesh.sharding.explicit import axis_types_explained
from flax_mesh.step.batch import shapes_of
from flax_mesh.step.loss import Batch, LossFn
from flax_mesh.text import array_text, bytes_text, listed
from flax_mesh.tree import MODEL, PyTree, Shaped, is_single_layer, module_at, num_bytes, owners_of


@dataclass(frozen=True, eq=False, repr=False)
class StagedModel:
    """A model split into stages by `split_stages` or `chain_stages`. Print it to see the stages."""

    loss_fn: LossFn
    make: Make  # returns the model with its initial values
    split_model: Split  # graph definition and abstract state
    wrt: Filter
    layers: tuple[str, ...]
    mesh: AbstractMesh | None  # of one group
    num_stages: int
    example: Batch  # shapes of the microbatch that was traced
    groups: MpmdMesh | None = None  # as passed to split_stages, for the Pipeline
    schedule: Schedule | None = None  # likewise
    specs: tuple[PartitionSpec, ...] = ()  # of the leaves of the model; () if `mesh` has no Explicit axes
    axes: PartitionAxis = DEFAULT_AXES  # of the batch, on Explicit axes
    make_state: Make | None = None  # returns (model, optimizer), if split_stages was given such a function
    attention: str | tuple[str, ...] = "as_written"  # as in StepOptions
    # The following fields are results of the split.
    ranks: Mapping[Layer, int] = field(default_factory=dict)  # position of every layer in the order of the calls
    bounds: tuple[int, ...] = ()  # stage k has the ranks [bounds[k], bounds[k + 1])
    costs: tuple[int, ...] = ()  # FLOPs of the forward pass of one microbatch, by rank
    leaves: tuple[ModelLeaf, ...] = ()
    copies: Mapping[str, Layer] = field(default_factory=dict)  # leaf of a frozen copy -> the layer that it is beside
    needs_full_remat: bool = False  # a remat spans several layers: a Pipeline uses remat="full", whatever is set
    remark: str = ""  # why the stages do not have equal FLOPs
    _cuts: dict[Hashable, Forward] = field(default_factory=dict, init=False)  # results of `cut`

    def stage_of(self, layer: Layer) -> int:
        """The stage of a layer, ("layers", 3)."""
        return stage_of_rank(self.bounds, self.ranks[layer])

    def with_layout(self, mesh: AbstractMesh, specs: Sequence[PartitionSpec], axes: PartitionAxis) -> "StagedModel":
        """The same stages, traced with the types of this layout if `mesh` has Explicit axes."""
        if not has_explicit_axes(mesh) or (self.mesh, self.specs, self.axes) == (mesh, tuple(specs), axes):
            return self
        return replace(self, mesh=mesh, specs=tuple(specs), axes=axes)

    @without_mesh()
    def cut(self, microbatch: Batch, *, seed: int = 0, train: bool = True) -> Forward:
        """The forward pass for microbatches of these shapes, split into stages; traced once per set of shapes.

        With `train=False` the model is in `eval()` mode, and its variables keep their values.
        """
        shapes = shapes_of(microbatch)
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        key = (tuple(jax.tree.leaves(shapes)), jax.tree.structure(shapes), seed if train else 0, train, precision)
        if key not in self._cuts:
            opened = open_forward(self.traced(shapes, seed, train), self.leaves)
            self._cuts[key] = _cut(opened, self)
        return self._cuts[key]

    def traced(self, shapes: Batch, seed: int = 0, train: bool = True) -> Forward:
        """The forward pass for microbatches of these shapes before it is split, with the arguments of `cut`."""
        shared = ("", 0) in self.ranks  # the list has one layer several times: each call has a rank
        with axis_types_explained():
            return trace_forward(
                with_marked_calls(self.loss_fn, self.layers[0]) if shared else self.loss_fn,
                self.split_model,
                self.wrt,
                self.layers,
                self.mesh,
                shapes,
                specs=self.specs,
                axes=self.axes,
                seed=seed,
                train=train,
                attention=self.attention if train or isinstance(self.attention, str) else "auto",
                placed=functools.partial(specs_of, self.make, self.model, self.mesh),
            )

    @without_mesh()
    def check(
        self,
        batch: Batch = None,
        *,
        seed: int = 0,
        remat: Literal["none", "cheap", "full"] = "none",
        split_backward: bool | None = None,
    ) -> None:
        """Compare the stages with the model before the split, on two microbatches and one device of this process.

        The stages run one after another, forward and backward, from the initial values of the model; zeros of trained
        variables are replaced by small random values, because a product with zero hides mistakes in the other factor.
        The second microbatch reads the variables that the first one changed. Half-precision and 8-bit floats are
        computed in float32. The loss, its weight and metrics, the new values of all variables, and all gradients must
        equal the results of the model, up to 1e-5 of the largest value of each, or 3e-2 for results of a kernel that
        takes no float32. A larger difference is accepted where rounding the parameters differently changes the result
        of the model as much.

        Args:
            batch: A batch, of which the first two microbatches are used, or the first one twice if there is only one.
                By default, and for ShapeDtypeStructs, random values: normal floats, and the integers 0 and 1.
            seed: Seed of the random streams.
            remat: As in `Pipeline`.
            split_backward: Whether W is separate from B. By default as in the schedule.

        Raises:
            CutError: Names the first result that differs.
        """
        if split_backward is None:
            split_backward = self.schedule is not None and self.schedule.splits_backward

        def rows(
            x: jax.Array | jax.ShapeDtypeStruct, shape: jax.ShapeDtypeStruct, number: int
        ) -> jax.Array | jax.ShapeDtypeStruct:
            if isinstance(x, jax.ShapeDtypeStruct):
                return shape
            if not shape.shape:
                return x
            size = shape.shape[0]
            start = number * size if len(x) >= (number + 1) * size else 0
            return x[start : start + size]

        batch = self.example if batch is None else batch
        batches = [jax.tree.map(functools.partial(rows, number=at), batch, self.example) for at in range(2)]
        mesh = one_device_mesh(self.mesh)
        alone = self if mesh is None or mesh.abstract_mesh == self.mesh else replace(self, mesh=mesh.abstract_mesh)
        with full_precision():
            forward = alone.cut(self.example, seed=seed)
        check_stages(
            forward,
            PlainModel(self.loss_fn, self.split_model, self.wrt, self.layers, self.make),
            mesh,
            self.specs,
            batches,
            seed=seed,
            remat="full" if self.needs_full_remat else remat,
            split=split_backward,
        )

    @cached_property
    def model(self) -> PyTree:
        """The abstract module."""
        return nnx.merge(*self.split_model)

    @property
    def is_cheap_to_check(self) -> bool:
        """Whether one microbatch of the model takes less than 1e10 FLOPs and 1 GiB, with its backward pass."""
        return is_cheap(self.cut(self.example).program)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The stages that read or change each leaf; the first one is its owner.

        A leaf that no stage uses belongs to the stage of its layer, or to stage 0.
        """
        forward = self.cut(self.example)
        uses = [{*stage.inputs, *(forward.updates.get(at) for at in stage.outputs)} for stage in forward.stages]
        users = []
        for at, leaf in enumerate(self.leaves):
            owner = self.stage_of(leaf.layer) if leaf.layer is not None and leaf.layer in self.ranks else 0
            users.append(tuple(k for k, used in enumerate(uses) if at in used) or (owner,))
        return tuple(users)

    @cached_property
    def imbalance(self) -> str:
        """Why a stage has more than 1.5 times the FLOPs of a mean stage, and how to repair it; or ""."""
        if ("", 0) in self.ranks:  # every call has a rank
            return ""
        forward = self.cut(self.example)
        ranks = input_ranks(forward.program, self.leaves, self.ranks, self.copies)
        stages = {v: stage_of_rank(self.bounds, rank) for v, rank in ranks.items() if rank >= 0}
        return imbalance(forward, self.model, self.layers, stages)

    def __repr__(self) -> str:
        return f"StagedModel({self.num_stages} stages of {listed(self.layers)}; print it to see them)"

    def __str__(self) -> str:
        single = [path for path in self.layers if is_single_layer(module_at(self.model, path))]
        lines, stages = [], self.cut(self.example).stages
        lines += self.cut(self.example).lines
        total = sum(flops(eqn) for stage in stages for eqn in stage.forward.eqns)
        for k, stage in enumerate(stages):
            ranks = range(self.bounds[k], self.bounds[k + 1])
            layers = [layer for layer, rank in self.ranks.items() if rank in ranks]
            names = [path if path in single else f"{path}/{i}" for path, i in layers]
            owned = [leaf for leaf, users in zip(self.leaves, self.users, strict=True) if users[0] == k]
            share = sum(map(flops, stage.forward.eqns)) / max(total, 1)
            what = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" if names else f"calls {ranks}"
            lines.append(
                f"stage {k}: {what}; {bytes_text(sum(map(num_bytes, owned)))} of state; {share:.0%} of the FLOPs"
            )
            lines += [f"  receives {array_text(v.aval)}, {bytes_text(num_bytes(v.aval))}" for v in stage.received]
        for path in self.layers:
            called = sum(stack == path for stack, _ in self.ranks) if ("", 0) not in self.ranks else None
            module = module_at(self.model, path)
            stacked = [leaf.rows[1] for leaf in self.leaves if leaf.rows and leaf.layer and leaf.layer[0] == path]
            entries = len(module) if isinstance(module, nnx.List) else max(stacked, default=1)
            what = "one layer" if path in single else f"{'a stack' if stacked else 'a list'} of {entries}"
            calls = "" if called in (entries, None) else f", of which the loss calls {called}"
            lines.append(f"{path}: {what}{calls}")
        copies = {(path.split(f"/{i}/")[0], copied) for path, (copied, i) in self.copies.items()}
        lines += [f"{path}: a frozen copy of {copied}, beside it" for path, copied in sorted(copies)]
        return "\n".join([*lines, *(text for text in (self.remark, self.imbalance) if text)])


def _cut(opened: Forward, staged: StagedModel) -> Forward:
    num_leaves, num_ranks = len(staged.leaves), len(staged.costs)
    ranks = input_ranks(opened.program, staged.leaves, staged.ranks, staged.copies)
    labels = cut.label(opened.program, ranks, num_ranks)
    program, labels = cut.drop_marks(opened.program, labels)
    stages = [stage_of_rank(staged.bounds, rank) if rank >= 0 else rank for rank in labels]
    is_data = [at >= num_leaves for at in range(len(program.inputs))]
    programs = cut.cut_stages(program, stages, staged.num_stages, opened.updates, is_data)
    learned = {v for leaf, v in zip(opened.leaves, program.inputs, strict=False) if leaf.trained}
    for eqn in program.eqns:
        if not learned.isdisjoint(variables(eqn.invars)):
            learned |= set(eqn.outvars)
    frozen = [frozenset(v for v in (*stage.received, *stage.sent) if v not in learned) for stage in programs]
    programs = tuple(stage._replace(frozen=values) for stage, values in zip(programs, frozen, strict=True))
    return opened._replace(program=program, stages=programs)


def stage_of_rank(bounds: Sequence[int], rank: int) -> int:
    """The stage k with bounds[k] <= rank < bounds[k + 1]."""
    return next(k for k in range(len(bounds) - 1) if rank < bounds[k + 1])


def input_ranks(
    program: Program, leaves: Sequence[ModelLeaf], ranks: Mapping[Layer, int], copies: Mapping[str, Layer]
) -> dict[Var, int]:
    """Rank of every input; a layer that is never called, or appears several times in the list, has none."""
    input_ranks = dict.fromkeys(program.inputs, DATA)
    for leaf, v in zip(leaves, program.inputs, strict=False):
        layer = leaf.layer or copies.get(leaf.path)
        input_ranks[v] = ranks.get(layer, VARIABLES) if layer else VARIABLES
    return input_ranks


def specs_of(make: Make, model: PyTree, mesh: AbstractMesh | None) -> tuple[PartitionSpec, ...]:
    """The specs of the leaves of the model by its table or its annotations; () without a mesh."""
    if mesh is None:
        return ()
    has_rules = hasattr(model, "partition_rules") or annotations_of(nnx.state(model, graph=True))
    abstract = abstract_state(make, mesh, None if has_rules else [(".*", ())], on_mismatch="drop")
    return tuple(leaf.sharding.spec for leaf in jax.tree.leaves(abstract))


def bytes_of_groups(
    staged: StagedModel, stage_to_group: Sequence[int], leaves: Iterable[tuple[str, Shaped, int]]
) -> list[int]:
    """Bytes per device of each group, from (path, leaf, bytes per device) of all leaves of the plain state."""
    leaves = list(leaves)
    sizes = [0] * (max(stage_to_group) + 1)
    parts = parts_of([(path, leaf) for path, leaf, _ in leaves], staged, stage_to_group)
    for (_, leaf, size), each in zip(leaves, parts, strict=True):
        for rows, group, _ in each:
            share = size if rows is None else size * (rows[1] - rows[0]) // leaf.shape[0]
            for owner in range(len(sizes)) if group == SHARED else (group,):
                sizes[owner] += share
    return sizes


def parts_of(
    named: Sequence[tuple[str, Shaped]], staged: StagedModel, stage_to_group: Sequence[int]
) -> Iterator[list[tuple[tuple[int, int] | None, int, int | None]]]:
    """(rows, group, index into staged.leaves) for each part of every (path, leaf) of the plain state."""
    model_paths = [path.removeprefix(MODEL) for path, _ in named if path.startswith(MODEL)]
    owned = owners_of([path for path, _ in named if not path.startswith(MODEL)], model_paths)
    model_parts: dict[int, list[tuple[int, int, ModelLeaf]]] = {}  # index, group and leaf, by source
    for at, leaf in enumerate(staged.leaves):
        model_parts.setdefault(leaf.source, []).append((at, stage_to_group[staged.users[at][0]], leaf))
    for path, leaf in named:
        in_model = path.startswith(MODEL)
        owner = path.removeprefix(MODEL) if in_model else owned.get(path)
        parts = [] if owner is None else model_parts[model_paths.index(owner)]
        depth = parts[-1][2].rows[1] if parts and parts[-1][2].rows else 0
        if in_model:
            yield [(part.rows, group, at) for at, group, part in parts]
        elif depth and leaf.shape[:1] == (depth,):  # has a layer dim, as its parameter
            yield [(part.rows, group, None) for _, group, part in parts]
        else:
            yield [(None, parts[0][1] if parts else SHARED, None)]
