"""Splitting a model into the stages of a pipeline: split_stages for any NNX model, chain_stages for ready stages."""

import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import jax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.extend import core as jex
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types, is_sized
from flax_mesh.mesh.context import current_mesh, without_mesh
from flax_mesh.modes import optimizer_of
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.schedules.schedule import Schedule, make_schedule
from flax_mesh.mpmd.split import assign as cut
from flax_mesh.mpmd.split.assign import DATA, OUTSIDE, VARIABLES, CutError
from flax_mesh.mpmd.split.check import PlainModel, check_stages, full_precision, is_cheap, one_device_mesh
from flax_mesh.mpmd.split.jaxpr import Program, Var, flops, has_explicit_axes, variables
from flax_mesh.mpmd.split.problems import (
    check_effects,
    check_layers,
    check_meshes,
    check_references,
    check_states,
    check_trained,
    filter_text,
    imbalance,
    modules_text,
)
from flax_mesh.mpmd.split.trace import (
    Forward,
    Layer,
    ModelLeaf,
    frozen_copies,
    marked_calls,
    open_forward,
    places_of,
    split_leaves,
    trace_forward,
)
from flax_mesh.sharding.abstract import Make, Split, abstract_state, is_with_optimizer, model_layers, trace_split
from flax_mesh.sharding.annotations import annotations_of
from flax_mesh.sharding.explicit import axis_types_explained
from flax_mesh.stacks import is_single_layer, module_at
from flax_mesh.step.batch import microbatch_shapes, shapes_of
from flax_mesh.step.loss import Batch, LossFn
from flax_mesh.text import array_text, bytes_text, first_line, listed, shown
from flax_mesh.tree import PyTree, num_bytes
from flax_mesh.user_code import check_arguments


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
    ranks: Mapping[Layer, int]  # position of every layer in the order of the calls
    bounds: tuple[int, ...]  # stage k has the ranks [bounds[k], bounds[k + 1])
    costs: tuple[int, ...]  # FLOPs of the forward pass of one microbatch, by rank
    leaves: tuple[ModelLeaf, ...]
    copies: Mapping[str, Layer]  # path of a leaf of a frozen copy of the layers -> the layer that it is placed beside
    needs_full_remat: bool  # a remat spans several layers: a Pipeline uses remat="full", whatever its argument is
    example: Batch  # shapes of the microbatch that was traced
    groups: MpmdMesh | None = None  # as passed to split_stages, for the Pipeline
    schedule: Schedule | None = None  # likewise
    remark: str = ""  # why the stages do not have equal FLOPs
    specs: tuple[PartitionSpec, ...] = ()  # of the leaves of the model; () if `mesh` has no Explicit axes
    axes: PartitionAxis = DEFAULT_AXES  # of the batch, on Explicit axes
    make_state: Make | None = None  # returns (model, optimizer), if split_stages was given such a function
    attention: str = "as_written"  # as in StepOptions

    def stage_of(self, layer: Layer) -> int:
        """The stage of a layer, ("layers", 3)."""
        return _stage(self.bounds, self.ranks[layer])

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
            shared = ("", 0) in self.ranks  # the list has one layer several times: each call has a rank
            loss_fn = _marked(self.loss_fn, self.layers[0]) if shared else self.loss_fn
            with axis_types_explained():
                forward = trace_forward(
                    loss_fn,
                    self.split_model,
                    self.wrt,
                    self.layers,
                    self.mesh,
                    shapes,
                    specs=self.specs,
                    axes=self.axes,
                    seed=seed,
                    train=train,
                    attention=self.attention,
                    placed=functools.partial(_specs_of, self.make, self.model, self.mesh),
                )
            opened = open_forward(forward, self.leaves)
            self._cuts[key] = _cut(opened, self)
        return self._cuts[key]

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

        def rows(x: Any, shape: jax.ShapeDtypeStruct, number: int) -> Any:
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
    def _cuts(self) -> dict[Hashable, Forward]:
        return {}

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
        ranks = _input_ranks(forward.program, self.leaves, self.ranks, self.copies)
        stages = {v: _stage(self.bounds, rank) for v, rank in ranks.items() if rank >= 0}
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


@check_types
def split_stages(
    loss_fn: LossFn,
    model: PyTree,
    batch: Batch,
    *,
    mesh: MpmdMesh | Mesh | AbstractMesh | None = None,
    schedule: Schedule | str | None = None,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    layers: str | Iterable[str] | None = None,
    cuts: Sequence[int] | None = None,
    balance: Literal["flops", "count"] = "flops",
    wrt: Filter | None = None,
    attention: Literal["auto", "blockwise", "as_written"] = "auto",
    check: bool = False,
) -> StagedModel:
    """Split the forward pass of `loss_fn(model, batch)` into the stages of a pipeline, by the layers of the model.

    The loss function is traced once, and its trace is split; the model itself is not changed. Layers are ordered as
    the model calls them, and a stage is a range of them.

    Args:
        loss_fn: A LossFn: `loss_fn(model, batch)` returns (loss_sum, weight), or another of its forms.
        model: An nnx.Module or another nnx.Pytree, abstract or not, or a function that makes one. A function may
            return (model, optimizer), as for `abstract_state`; `Pipeline` then needs no optimizer.
        batch: A batch of `num_microbatches` equal microbatches, as arrays or ShapeDtypeStructs.
        mesh: The groups of the pipeline as an MpmdMesh; or, if a Pipeline is not wanted, the mesh of one group, by
            default the mesh in context. Constraints in the model see the mesh of a group.
        schedule: A name of `schedules.SCHEDULE_NAMES` for the groups of `mesh`, or a Schedule. It determines the number
            of stages.
        num_microbatches: Microbatches of a batch. Default: the number of `schedule`, and 1 without a schedule.
        num_stages: The number of stages, if no schedule is given.
        layers: Path of the `nnx.List` or scanned stack to split, "layers" or "encoder/layers", or several paths. Any
            other module is one layer, as in ("inc", "down", "up", "out"). By default the paths of the model's own table
            (`@partitioned`), or else "layers" if that is a list.
        cuts: Position of the first layer of every stage but the first. By default the most expensive stage is made as
            cheap as possible.
        balance: The measure of a stage's cost: its "flops", embedding and head included, or the "count" of its layers.
            With "flops", each byte that it receives beyond twice the smallest possible boundary counts as 1000 FLOPs.
        wrt: Filter of the variables that are trained. Default: the filter of the optimizer, or nnx.Param without
            one.
        attention: Whether the attention of the loss function is computed in blocks, as in `make_train_step`.
        check: Run the stages on two microbatches and compare all results with the model's, on one device; see
            `StagedModel.check`.

    Returns:
        A StagedModel, for `Pipeline`. Its text lists stages, bytes of state, share of FLOPs, and boundary activations.

    Raises:
        CutError: The model has no such layers, has fewer layers than stages, or cannot be split there; or `check` has
            found a result that differs.
        ConfigError: Mesh, schedule, batch and numbers do not fit each other.

    Example:
        >>> from flax_mesh.mpmd import MpmdMesh, split_stages
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        ...     def __call__(self, x):
        ...         for layer in self.layers:
        ...             x = nnx.relu(layer(x))
        ...         return x
        >>> loss_fn = lambda model, x: ((model(x) ** 2).sum(), x.size)
        >>> mesh = MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp")
        >>> batch = np.ones((8, 8), np.float32)
        >>> split_stages(loss_fn, Net(nnx.Rngs(0)), batch, mesh=mesh, schedule="1f1b", num_microbatches=4).num_stages
        2
    """
    groups = mesh if isinstance(mesh, MpmdMesh) else None
    schedule, num_microbatches, num_stages = _plan(groups, schedule, num_microbatches, num_stages)
    _check_order(loss_fn, model)
    around = mesh.unstack[0] if isinstance(mesh, MpmdMesh) else mesh or current_mesh()
    around = around.abstract_mesh if isinstance(around, Mesh) else around
    with without_mesh():
        make, jaxpr, split_model, filters = _abstract(model, around)
        wrt = _wrt(wrt, filters)
        check_meshes(jaxpr.eqns)
        abstract = nnx.merge(*split_model)
        layers = _layers_of(abstract) if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)
        if not layers:
            raise CutError("layers is empty; name the list or the stack to cut, such as layers='layers'.")
        num_calls = _calls_of_shared(abstract, layers)
        shapes = microbatch_shapes(batch, num_microbatches) if num_microbatches is not None else shapes_of(batch)
        traced_fn = _marked(loss_fn, layers[0]) if num_calls else loss_fn
        specs, axes = _layout_of(make, abstract, around)
        with axis_types_explained():
            forward = trace_forward(
                traced_fn,
                split_model,
                wrt,
                layers,
                around,
                shapes,
                specs=specs,
                axes=axes,
                attention=attention,
                placed=functools.partial(_specs_of, make, abstract, around),
            )
        places = places_of(abstract, layers)
        single = split_leaves(forward, places)
        opened = open_forward(forward, single)
        check_effects(opened.program)
        check_references(opened.program)
        check_meshes(opened.program.eqns)
        check_trained(single, wrt)
        order = _calls_in_order(opened.program, single) if not num_calls else [("", i) for i in range(num_calls)]
        check_layers(abstract, single, layers, order, num_stages)
        ranks = {layer: at for at, layer in enumerate(order)}

        def staged_with(copies: Mapping[str, Layer]) -> StagedModel:
            labels = cut.label(opened.program, _input_ranks(opened.program, single, ranks, copies), len(order))
            costs = cut.costs(opened.program, labels, len(order))
            sizes = functools.partial(_boundary_bytes, opened, labels, len(order))
            bounds, remark = _bounds(costs, num_stages, cuts, balance, sizes)
            staged = StagedModel(
                loss_fn=loss_fn,
                make=make,
                split_model=split_model,
                wrt=wrt,
                layers=layers,
                mesh=around,
                num_stages=num_stages,
                ranks=ranks,
                bounds=bounds,
                costs=tuple(costs),
                leaves=split_leaves(forward, places, {layer: _stage(bounds, at) for layer, at in ranks.items()}),
                copies=copies,
                needs_full_remat=opened.opened_remat,
                example=shapes,
                groups=groups,
                schedule=schedule,
                remark=remark,
                specs=specs,
                axes=axes,
                make_state=model if filters else None,
                attention=attention,
            )
            check_states(staged.cut(shapes), abstract, layers, ranks, bounds)
            return staged

        copies = _copies_beside(opened.program, single, ranks)
        try:
            staged = staged_with(copies)
        except CutError:  # a later stage computes a new value of a copy, for example
            if not copies:
                raise
            staged = staged_with({})
        if staged.imbalance:
            warnings.warn(staged.imbalance, stacklevel=3)
        if check:
            staged.check(batch)
        return staged


def _plan(
    groups: MpmdMesh | None, schedule: Schedule | str | None, num_microbatches: int | None, num_stages: int | None
) -> tuple[Schedule | None, int | None, int]:
    """Schedule, number of microbatches (None: the batch is one microbatch of any structure) and number of stages."""
    if isinstance(schedule, str):
        if groups is None or num_microbatches is None:
            raise ConfigError(
                f"schedule={schedule!r} needs the number of groups and of microbatches: pass mesh=MpmdMesh(...) and "
                "num_microbatches=, or a schedule from make_schedule(...)"
            )
        schedule = make_schedule(schedule, num_groups=groups.mpmd_dim, num_microbatches=num_microbatches)
    if schedule is None:
        if num_stages is None:
            raise ConfigError("the number of stages is unknown: pass schedule= with mesh=, or num_stages=")
        return None, num_microbatches, num_stages
    problems = [] if groups is None else schedule.group_problems(groups.mpmd_dim, groups.mpmd_axis_name)
    if num_microbatches not in (None, schedule.num_microbatches):
        problems.append(
            f"num_microbatches={num_microbatches} differs from the {schedule.num_microbatches} of schedule "
            f"{schedule.name}; leave one of them out"
        )
    if num_stages not in (None, schedule.num_stages):
        problems.append(
            f"num_stages={num_stages} differs from the {schedule.num_stages} of schedule {schedule.name}; leave one of "
            "them out"
        )
    if problems:
        raise ConfigError(problems)
    return schedule, schedule.num_microbatches, schedule.num_stages


class _Chain(nnx.Module):
    """Modules called in order: the first one with the batch, each of the others with the result of the previous one."""

    def __init__(self, stages: Sequence[nnx.Module]):
        self.stages = nnx.List(stages)


@check_types
def chain_stages(
    loss_fn: Callable[[Any, Batch], Any],
    stages: Callable[[], Sequence[nnx.Module] | tuple[Sequence[nnx.Module], nnx.Optimizer]] | Sequence[nnx.Module],
    batch: Batch,
    *,
    mesh: MpmdMesh | Mesh | AbstractMesh | None = None,
    schedule: Schedule | str | None = None,
    num_microbatches: int | None = None,
    wrt: Filter | None = None,
    check: bool = False,
) -> StagedModel:
    """A StagedModel from modules that are stages already, called in order; the low-level API beside `split_stages`.

    Args:
        loss_fn: `loss_fn(outputs, batch)`, with the outputs of the last stage, returns the same as a LossFn.
        stages: One module per stage, or a function that makes them. The first one is called with the batch, each of
            the others with the result of the previous one, any pytree. Every stage must have variables. A function may
            return (modules, optimizer), as in `split_stages`.
        batch, mesh, schedule, num_microbatches, wrt, check: As in `split_stages`.

    Raises:
        CutError: Names the stage that cannot be called with the result of the previous one.
        ConfigError: As in `split_stages`; also if the schedule has another number of stages.

    Example:
        >>> from flax_mesh.mpmd import MpmdMesh, chain_stages
        >>> mesh = MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp")
        >>> stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2)]
        >>> loss_fn = lambda outputs, batch: ((outputs - batch) ** 2).sum()
        >>> chain_stages(loss_fn, stages, np.ones((8, 8), np.float32), mesh=mesh, schedule="gpipe", num_microbatches=4)
        StagedModel(2 stages of stages; print it to see them)
    """
    make = stages if callable(stages) else lambda: stages

    def make_chain() -> Any:
        modules, optimizer = _with_optimizer(make())
        chain = _Chain(modules)
        return chain if optimizer is None else (chain, optimizer_of(chain, optimizer, optimizer.wrt))

    def loss_of(model: _Chain, batch: Batch) -> Any:
        value = batch
        for k, stage in enumerate(model.stages):
            try:
                value = stage(value)
            except (TypeError, ValueError, AttributeError) as error:
                given = jax.tree.map(array_text, value)
                reason = first_line(error)
                raise CutError(f"stage {k}, {type(stage).__name__}, cannot take {given}: {reason}") from error
        return loss_fn(value, batch)

    check_arguments("stages", make)
    modules, _ = _with_optimizer(make())
    if not is_sized(modules):
        raise CutError(f"stages must be modules, or a function that returns them, got {shown(modules)}.")
    if not modules:
        raise CutError("stages is empty; it must have one module per stage.")
    return split_stages(
        loss_of,
        make_chain,
        batch,
        layers="stages",
        mesh=mesh,
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_stages=len(modules),
        cuts=range(1, len(modules)),
        wrt=wrt,
        check=check,
    )


def _cut(opened: Forward, staged: StagedModel) -> Forward:
    num_leaves, num_ranks = len(staged.leaves), len(staged.costs)
    ranks = _input_ranks(opened.program, staged.leaves, staged.ranks, staged.copies)
    labels = cut.label(opened.program, ranks, num_ranks)
    program, labels = cut.drop_marks(opened.program, labels)
    stages = [_stage(staged.bounds, rank) if rank >= 0 else rank for rank in labels]
    is_data = [at >= num_leaves for at in range(len(program.inputs))]
    programs = cut.cut_stages(program, stages, staged.num_stages, opened.updates, is_data)
    learned = {v for leaf, v in zip(opened.leaves, program.inputs, strict=False) if leaf.trained}
    for eqn in program.eqns:
        if not learned.isdisjoint(variables(eqn.invars)):
            learned |= set(eqn.outvars)
    frozen = [frozenset(v for v in (*stage.received, *stage.sent) if v not in learned) for stage in programs]
    programs = tuple(stage._replace(frozen=values) for stage, values in zip(programs, frozen, strict=True))
    return opened._replace(program=program, stages=programs)


def _stage(bounds: Sequence[int], rank: int) -> int:
    return next(k for k in range(len(bounds) - 1) if rank < bounds[k + 1])


def _input_ranks(
    program: Program, leaves: Sequence[ModelLeaf], ranks: Mapping[Layer, int], copies: Mapping[str, Layer]
) -> dict[Var, int]:
    """Rank of every input; a layer that is never called, or appears several times in the list, has none."""
    input_ranks = dict.fromkeys(program.inputs, DATA)
    for leaf, v in zip(leaves, program.inputs, strict=False):
        layer = leaf.layer or copies.get(leaf.path)
        input_ranks[v] = ranks.get(layer, VARIABLES) if layer else VARIABLES
    return input_ranks


def _copies_beside(program: Program, leaves: Sequence[ModelLeaf], ranks: Mapping[Layer, int]) -> dict[str, Layer]:
    """The `frozen_copies`, if they can be computed beside their layers: no equation of a layer waits for a later one.

    A layer that uses the results of a copy on the same batch would otherwise be in the last stage.
    """
    copies = {path: layer for path, layer in frozen_copies(leaves).items() if layer in ranks}
    if not copies:
        return {}
    alone, beside = (
        cut.label(program, _input_ranks(program, leaves, ranks, known), len(ranks)) for known in ({}, copies)
    )
    return copies if all(a in (b, OUTSIDE, VARIABLES) for a, b in zip(alone, beside, strict=True)) else {}


def _calls_in_order(program: Program, leaves: Sequence[ModelLeaf]) -> list[Layer]:
    layer_of = {v: leaf.layer for v, leaf in zip(program.inputs, leaves, strict=False) if leaf.layer is not None}
    return cut.layer_order(program, layer_of, program.inputs[len(leaves) :])


def _check_order(loss_fn: object, model: object) -> None:
    """ConfigError for arguments in another order than split_stages(loss_fn, model, batch)."""
    given = f"got {_kind_text(loss_fn)} and {_kind_text(model)}"
    if isinstance(loss_fn, nnx.Pytree) or not callable(loss_fn):
        raise ConfigError(f"split_stages takes loss_fn, a function, before the model: {given}. Exchange them.")
    if isinstance(model, nnx.Pytree):
        return
    if not callable(model):
        raise ConfigError(f"model must be an nnx.Module, or a function without arguments that makes one: {given}.")
    try:
        inspect.signature(model).bind()
    except TypeError:
        raise ConfigError(
            f"split_stages takes loss_fn before the model, which must be an nnx.Module, or a function without "
            f"arguments that makes one: {given}, which requires arguments. Exchange them, or pass a lambda."
        ) from None
    except ValueError:  # a callable without a signature
        return


def _kind_text(x: object) -> str:
    return f"the function {x.__name__}" if inspect.isroutine(x) else f"an object of type {type(x).__name__}"


def _abstract(model: PyTree, mesh: AbstractMesh | None) -> tuple[Make, jex.ClosedJaxpr, Split, list[Filter]]:
    """From a module or a function that makes one: (such a function, its jaxpr, graph definition and abstract state).

    The last result contains the filters of the optimizers that the function has returned with the model.
    """
    filters: list[Filter] = []
    if isinstance(model, nnx.Pytree):
        graphdef, state = nnx.split(model, graph=True)

        def copied() -> nnx.Pytree:
            return nnx.merge(graphdef, state, copy=True)

        return copied, *trace_split(copied, mesh), filters

    def make() -> nnx.Pytree:
        module, optimizer = _with_optimizer(model())
        filters.extend([] if optimizer is None else [optimizer.wrt])
        if not isinstance(module, nnx.Pytree):
            raise ConfigError(f"the function that makes the model must return an nnx.Module, got {_kind_text(module)}.")
        return module

    return make, *trace_split(make, mesh), filters


def _with_optimizer(result: Any) -> tuple[Any, nnx.Optimizer | None]:
    """(model, optimizer) from the result of a function; the optimizer is None if it returned a model only."""
    return result if is_with_optimizer(result) else (result, None)


def _wrt(wrt: Filter | None, filters: Sequence[Filter]) -> Filter:
    """The filter of the variables that are trained. ConfigError if it is given twice, and the two differ."""
    if not filters:
        return nnx.Param if wrt is None else wrt
    if wrt not in (None, filters[0]):
        raise ConfigError(
            f"wrt={filter_text(wrt)} must be that of the optimizer, wrt={filter_text(filters[0])}; leave it out"
        )
    return filters[0]


def _layout_of(make: Make, model: PyTree, mesh: AbstractMesh | None) -> tuple[tuple[PartitionSpec, ...], PartitionAxis]:
    """The layout with which the model is traced on Explicit axes: (specs of its leaves, mesh axes of the batch).

    It follows the model's table or annotations. A Pipeline with other rules traces again, and reports names and
    dims that do not fit. A model without rules is replicated.
    """
    axes = getattr(model, "axes", DEFAULT_AXES)
    axes = axes if isinstance(axes, PartitionAxis) else DEFAULT_AXES
    return (_specs_of(make, model, mesh) if mesh is not None and has_explicit_axes(mesh) else ()), axes


def _specs_of(make: Make, model: PyTree, mesh: AbstractMesh | None) -> tuple[PartitionSpec, ...]:
    if mesh is None:
        return ()
    has_rules = hasattr(model, "partition_rules") or annotations_of(nnx.state(model, graph=True))
    abstract = abstract_state(make, mesh, None if has_rules else [(".*", ())], on_mismatch="drop")
    return tuple(leaf.sharding.spec for leaf in jax.tree.leaves(abstract))


def _calls_of_shared(model: PyTree, layers: Sequence[str]) -> int:
    """Length of the list if one layer object appears in it several times; else 0."""
    for path in layers:
        try:
            stack = module_at(model, path)
        except (AttributeError, IndexError, TypeError):
            raise CutError(
                f"layers={path!r}: {type(model).__name__} has nothing there. {modules_text(model)}"
            ) from None
        modules = [id(item) for item in stack if isinstance(item, nnx.Pytree)] if isinstance(stack, nnx.List) else []
        if len(set(modules)) < len(modules):
            if len(layers) > 1:
                raise CutError(
                    f"layers={path!r} has one layer several times; it must be the only list, not one of {layers}."
                )
            return len(modules)
    return 0


def _layers_of(model: PyTree) -> tuple[str, ...]:
    """Default of `layers=`: the layers of the model's table, or else the list `layers`."""
    if named := model_layers(model):
        return named
    attribute = getattr(model, "layers", None)
    if isinstance(attribute, nnx.List) and any(isinstance(item, nnx.Pytree) for item in attribute):
        return ("layers",)
    # A module `layers` may be a scanned stack or anything else: it does not show which dim counts the layers.
    what = "its `layers` is not a list" if attribute is not None else "it has no list `layers`"
    raise CutError(
        f"the layers of {type(model).__name__} must be named: it has no table that names them, and {what}. Name "
        "the list or the scanned stack to split, by split_stages(..., layers=...) or @partitioned(..., layers=...) on "
        f"the class. {modules_text(model)}"
    )


def _marked(loss_fn: LossFn, path: str) -> LossFn:
    def marked(model: Any, batch: Batch) -> Any:
        with marked_calls(model, path):
            return loss_fn(model, batch)

    return marked


def _boundary_bytes(opened: Forward, labels: Sequence[int], num_ranks: int) -> list[int]:
    program, labels = cut.drop_marks(opened.program, labels)
    program = program._replace(outputs=program.outputs[: len(opened.names)])  # without new values of variables
    is_data = [at >= len(opened.leaves) for at in range(len(program.inputs))]
    return cut.boundary_bytes(program, labels, num_ranks, is_data)


def _bounds(
    costs: Sequence[int],
    num_stages: int,
    cuts: Sequence[int] | None,
    balance: str,
    boundary_bytes: Callable[[], list[int]],
) -> tuple[tuple[int, ...], str]:
    """(boundaries of the stages, why the stages do not have equal FLOPs)."""
    if cuts is not None:
        bounds = (0, *cuts, len(costs))
        if len(cuts) != num_stages - 1 or any(a >= b for a, b in pairwise(bounds)):
            raise CutError(
                f"cuts={list(cuts)} (in a recipe pipeline.cut) must be {num_stages - 1} increasing numbers between 1 "
                f"and {len(costs) - 1}: the first layer of every stage but the first, of {len(costs)} layers."
            )
        return bounds, ""
    if balance not in ("flops", "count"):
        raise CutError(f"balance must be 'flops' or 'count', got {balance!r}.")
    if balance == "count" or num_stages in (1, len(costs)):
        return tuple(cut.balance([1] * len(costs), num_stages)), ""
    sizes = boundary_bytes()
    equal, by_bytes = (tuple(cut.balance(costs, num_stages, x)) for x in ((), cut.entry_costs(sizes)))
    if by_bytes == equal:
        return by_bytes, ""
    before, after = (bytes_text(sum(sizes[at] for at in bounds[1:-1])) for bounds in (equal, by_bytes))
    return by_bytes, (
        f"cuts={list(by_bytes[1:-1])}: activations of {after} at the boundaries; for equal FLOPs alone, "
        f"cuts={list(equal[1:-1])}: {before}"
    )
