"""Pipeline: a schedule executed on the groups of a mesh, with the step of a program without a pipeline."""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, cached_property
from typing import Literal, Unpack

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.mesh.context import without_mesh
from flax_mesh.mpmd.chunks import whole
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.runtime.batch import place_array
from flax_mesh.mpmd.runtime.compile import CompiledPipeline, compile_stages, zeros_of_groups
from flax_mesh.mpmd.runtime.executor import Saved, ScheduleRun, announce_layouts, sums_everywhere
from flax_mesh.mpmd.runtime.optimizer import Update
from flax_mesh.mpmd.runtime.placement import LeafOwner, chunked, init_leaves, make_of, place
from flax_mesh.mpmd.runtime.transfers import GroupTransfers
from flax_mesh.mpmd.schedules.schedule import Action, Schedule, forward_schedule
from flax_mesh.mpmd.schedules.validate import check_schedule
from flax_mesh.mpmd.split.split import StagedModel
from flax_mesh.mpmd.split.trace import Forward
from flax_mesh.mpmd.split.update import SHARED
from flax_mesh.mpmd.transport.layout import on_all_groups, on_group, put_host, sharding_on
from flax_mesh.mpmd.transport.ordered import ordered_transport_of
from flax_mesh.sharding.abstract import model_axes
from flax_mesh.step.batch import microbatch_shapes, on_device_dtypes
from flax_mesh.step.callbacks import CallbackErrors
from flax_mesh.step.loss import NO_LIMITS, Batch, Limits, Metrics
from flax_mesh.step.options import PipelineKeywords, StateLayout, StepOptions, with_keywords
from flax_mesh.step.state import TrainState, check_not_donated
from flax_mesh.text import lines_of, shown
from flax_mesh.tree import MODEL, PyTree

TRANSPORTS = ("auto", "server", "ordered")
REMAT_MODES = ("none", "cheap", "full")


class Pipeline:
    """Trains a `StagedModel` on groups of devices, in the order of a schedule.

    A step has the arguments of `make_train_step` with the same number of microbatches, and its results up to the order
    of sums. Every leaf of the state is placed on the group of the first stage that uses it. Other groups that use it
    receive its value in every step. The optimizer runs on these groups, one part per group; its parts may exchange
    scalars, as the clip of the global norm does. Gradients are summed in float32 at least.

    In a run of several processes every process makes the same pipeline and makes the same calls. Each process compiles
    and runs the stages of its groups. Leaves of the state on other groups are arrays without a shard; metrics are
    returned in every process.

    Args:
        staged: The stages, from `split_stages` or `chain_stages`.
        optimizer: An optax transformation, or an nnx.Optimizer, whose transformation is used. None if the function that
            `split_stages` was given returns (model, optimizer).
        mesh: The groups. By default the groups that `staged` was split for.
        schedule: The order of the actions. By default the schedule that `staged` was split for.
        layout: Layout of the leaves within a group: rules, axes, and where the optimizer's arrays are. By default the
            model's own table or annotations; nothing is split on groups of one device.
        options: Seed, reported learning rate, XLA options, and whether steps that are not finite are skipped, as in
            `make_train_step`.
        remat: Residuals that a stage stores for its backward pass. "none": all, except results that cost about one
            instruction per element to recompute; "cheap": results of matrix products, loops and random bits only;
            "full": the inputs of the stage only.
        transport: How activations and gradients are transferred between processes. "server": JAX's transfer server;
            "ordered": `jax.device_put`, with all calls in one order; "auto": ordered where the backend supports it.
        keywords: The fields of `layout` and `options` one by one: `rules`, `axes`, `shard_optimizer_over`,
            `optimizer_memory`, `seed`, `learning_rate`, `compiler_options`, `skip_nonfinite`.

    Raises:
        ConfigError: Mesh, model and schedule do not fit each other, the schedule does not pass `check_schedule` or has
            no backward pass, or the transport is not supported.

    Example:
        >>> from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        ...     def __call__(self, x):
        ...         for layer in self.layers:
        ...             x = nnx.relu(layer(x))
        ...         return x
        >>> loss_fn = lambda model, x: ((model(x) ** 2).sum(), x.size)
        >>> batch = np.ones((16, 8), np.float32)
        >>> mesh = MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp")
        >>> net = Net(nnx.Rngs(0))
        >>> staged = split_stages(loss_fn, net, batch, mesh=mesh, schedule="1f1b", num_microbatches=4)
        >>> pipeline = Pipeline(staged, optax.adamw(1e-3), rules="fsdp")
        >>> state, metrics = pipeline.step(pipeline.init_state(), batch)
        >>> sorted(metrics)
        ['grad_norm', 'loss', 'weight']
    """

    @check_types
    @without_mesh()
    def __init__(
        self,
        staged: StagedModel,
        optimizer: optax.GradientTransformation | nnx.Optimizer | None = None,
        *,
        mesh: MpmdMesh | None = None,
        schedule: Schedule | None = None,
        layout: StateLayout = StateLayout(),  # noqa: B008 (a frozen value)
        options: StepOptions = StepOptions(),  # noqa: B008
        remat: Literal["none", "cheap", "full"] = "none",
        transport: Literal["auto", "server", "ordered"] = "auto",
        **keywords: Unpack[PipelineKeywords],
    ):
        layout, options = with_keywords(layout, options, keywords)
        mesh, schedule = mesh or staged.groups, schedule or staged.schedule
        if mesh is None or schedule is None:
            lacking = [name for name, value in (("mesh", mesh), ("schedule", schedule)) if value is None]
            raise ConfigError(
                f"the pipeline needs {' and '.join(lacking)}: pass mesh=MpmdMesh(...) and schedule= to split_stages or "
                "to Pipeline"
            )
        _check(staged, mesh, schedule, remat, transport)
        self.transfers = GroupTransfers(mesh)
        self.groups, self.channel = self.transfers.meshes, self.transfers.channel
        self.ordered = ordered_transport_of(self.channel, mesh, transport)  # None: by the transfer server
        self.staged, self.mesh, self.schedule, self.optimizer = staged, mesh, schedule, optimizer
        self._make = make_of(staged, optimizer)
        self.seed, self.learning_rate, self.skip_nonfinite = options.seed, options.learning_rate, options.skip_nonfinite
        self.options = dict(options.compiler_options) if options.compiler_options else None
        self.remat = "full" if staged.needs_full_remat else remat
        self.group_of = schedule.stage_to_group
        if layout.rules is None and math.prod(mesh.jax_mesh.devices.shape) == mesh.mpmd_dim:
            layout = replace(layout, rules=[(".*", ())])  # groups of one device: nothing can be split
        self.axes = layout.axes or getattr(layout.rules, "axes", None) or model_axes(staged.model)
        self.placement = place(self._make, staged, mesh, self.group_of, layout)
        self.staged = staged.with_layout(self.groups[0].abstract_mesh, self.placement.model_specs, self.axes)
        self.num_transfers = 0  # transfers of activations and gradients between groups in the last step
        self.on_action: Callable[[Action, Saved], None] | None = None  # for tests and tools
        self.fuses = True  # F and B of the last stage, where they run back to back; this may round differently
        self.errors = CallbackErrors()  # the next call raises them
        self._by_batch: dict[Hashable, CompiledPipeline] = {}  # by the tree and the shapes of a batch
        self.compiled: dict[int, CompiledPipeline] = {}  # by the id of a traced Forward, which the staged model keeps
        self._updates: dict[Hashable, Update] = {}
        self._numbers: dict[tuple[int, int], list[jax.Array]] = {}  # (group, how many) -> numbers of microbatches
        self._shared: dict[int, tuple[object, dict[int, jax.Array]]] = {}  # leaf -> its last value, and copies of it

    @property
    def abstract(self) -> TrainState:
        """The state as ShapeDtypeStructs with their shardings, on the meshes of several groups."""
        return self.placement.abstract

    @without_mesh()
    def init_state(self) -> TrainState:
        """The initial state, every leaf initialized on its group; on CPUs with the bits that `init_state` returns."""
        return TrainState(
            init_leaves(self._make, self.placement, self.transfers.local_meshes), self.abstract.definition
        )

    @without_mesh()
    def step(self, state: TrainState, batch: Batch, limits: Limits = NO_LIMITS) -> tuple[TrainState, Metrics]:
        """One optimizer step over a batch of `schedule.num_microbatches` equal parts; donates `state`.

        `limits` are the largest loss and gradient norm whose update is applied; only `skip_nonfinite` reads them.
        """
        run = self.start(state, batch, self.schedule.num_microbatches, train=True)
        self.dispatch(run)
        return self.update(state, run, limits)

    def dispatch(self, run: ScheduleRun, *, fuse: bool = True) -> None:
        """Dispatch all local actions of the schedule."""
        fused = self._fused if fuse and self.fuses else frozenset()
        run.follow(self.schedule, self._order, self.ordered, self.on_action, fused)
        self.num_transfers = run.num_transfers

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the same actions in another order from the next step on. Raises a ConfigError if the actions differ."""
        _check(self.staged, self.mesh, schedule, self.remat, "auto")
        names = ("stage_to_group", "num_microbatches", "splits_backward")
        both = [(name, getattr(schedule, name), getattr(self.schedule, name)) for name in names]
        if problems := [f"{name} of the new schedule is {a}, of the old one {b}" for name, a, b in both if a != b]:
            raise ConfigError(problems)
        self.schedule = schedule
        for name in ("_order", "_fused"):
            self.__dict__.pop(name, None)

    @without_mesh()
    def evaluate(self, state: TrainState, batch: Batch, num_microbatches: int | None = None) -> Metrics:
        """The sums "loss", "weight" and the loss's own metrics over a batch, with the model in `eval()` mode."""
        count = self.schedule.num_microbatches if num_microbatches is None else num_microbatches
        run = self.start(state, batch, count, train=False)
        schedule = forward_schedule(len(self.groups), count, self.group_of)
        run.follow(schedule, self._local_actions(schedule), self.ordered)
        return sums_everywhere(run) if self.channel else {name: value for name, (_, value) in run.named_sums().items()}

    @without_mesh()
    def model(self, state: TrainState) -> nnx.Pytree:
        """The model as one module on the whole mesh: every leaf has the layout of its group, replicated over groups."""
        placed = zip(self.placement.owners, state.leaves, strict=True)
        owners, leaves = zip(*((owner, leaf) for owner, leaf in placed if owner.path.startswith(MODEL)), strict=True)
        number, transfer = self.transfers.next_number(), self.transfers.transfer
        arrays = []
        for at, (owner, value) in enumerate(zip(owners, leaves, strict=True)):
            parts = [
                transfer(("model", number, at), value, sharding_on(owner.sharding, mesh), owner.group, group)
                for group, mesh in enumerate(self.groups)
            ]
            everywhere = NamedSharding(self.mesh.jax_mesh, owner.sharding.spec)
            arrays.append(on_all_groups([part for part in parts if part is not None], everywhere))
        values = [whole(array) for array in chunked(owners, arrays)]
        graphdef, abstract = self.staged.split_model
        return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(abstract), values))

    @cached_property
    def _order(self) -> list[Action]:
        return self._local_actions(self.schedule)

    @cached_property
    def _fused(self) -> frozenset[int]:
        """The last stage, if B follows directly after every F of it."""
        last = self.schedule.num_stages - 1
        row = self.schedule.rows[self.group_of[last]]
        forwards = [(at, action) for at, action in enumerate(row) if action.stage == last and action.kind == "F"]
        together = all(row[at + 1] == action._replace(kind="B") for at, action in forwards)
        return frozenset([last] if together else [])

    def _local_actions(self, schedule: Schedule) -> list[Action]:
        """The actions on the groups of this process, in an order in which they can be dispatched."""
        return [action for action in schedule.order() if self.group_of[action.stage] in self.transfers.local_groups]

    @without_mesh()
    def start(self, state: TrainState, batch: Batch, count: int, *, train: bool) -> ScheduleRun:
        """A run over `count` microbatches before its first action, with state and batch on the groups that use them.

        Every process must call it for the same run.
        """
        self.errors.check()
        check_not_donated(state)
        number, batch = self.transfers.next_number(), on_device_dtypes(batch, "batch")
        compiled = self._compiled(batch, count, train)
        leaves = self._leaves_on_groups(state, compiled, number)
        steps = self._copies(self._step_at, state.leaves[self._step_at])
        slots = {group: [(step, index) for index in self._indices(group, count)] for group, step in steps.items()}
        return ScheduleRun(compiled, number, leaves, self._batch_on_groups(batch, count, compiled), slots)

    @without_mesh()
    def update(self, state: TrainState, run: ScheduleRun, limits: Limits = NO_LIMITS) -> tuple[TrainState, Metrics]:
        """The optimizer step from the sums of a run over the entire schedule; donates `state`."""
        sums = run.named_sums()
        groups = {name: group for name, (group, _) in sums.items()}
        trained = sorted({(stage.group, at) for stage in run.stages for at in stage.trained})
        changed = sorted({self._leaf_at[leaf] for stage in run.stages for leaf in stage.changed})
        key = tuple(trained), tuple(groups.items()), tuple(changed)
        if key not in self._updates:
            rate, old_at = self.learning_rate, changed if self.skip_nonfinite else None
            self._updates[key] = Update(
                self.staged, self.mesh, self.placement, trained, groups, rate, self.options, old_at
            )
        leaves, old = list(state.leaves), {at: state.leaves[at] for at in changed}
        for leaf, value in run.changed.items():
            leaves[self._leaf_at[leaf]] = value
        values = {name: value for name, (_, value) in sums.items()}
        shared_at = (at for at, owner in enumerate(self.placement.owners) if owner.group == SHARED)
        shared = {at: self._copies(at, state.leaves[at]) for at in shared_at}

        def transfer(kind: str, detail: tuple[Hashable, ...], *arguments: PyTree) -> PyTree:
            return self.transfers.transfer((kind, run.number, *detail), *arguments)

        new, metrics, copies = self._updates[key](leaves, run.grads, values, shared, old, limits, transfer)
        self._shared |= copies
        return TrainState(new, self.abstract.definition), metrics

    def _compiled(self, batch: Batch, count: int, train: bool) -> CompiledPipeline:
        """The pipeline for `count` microbatches of `batch`, compiled once for each shape of a microbatch."""
        arrays, tree = jax.tree.flatten(batch)
        key = (train, count, tree, *((np.shape(x), getattr(x, "dtype", None)) for x in arrays))
        if key not in self._by_batch:
            shapes = microbatch_shapes(batch, count, self.groups[0], self.axes)
            forward = self.staged.cut(shapes, seed=self.seed, train=train)
            if id(forward) not in self.compiled:
                self.compiled[id(forward)] = self._compile(forward, train)
            self._by_batch[key] = self.compiled[id(forward)]
        return self._by_batch[key]

    def _compile(self, forward: Forward, train: bool) -> CompiledPipeline:
        shardings = [self._owner(at).sharding for at in range(len(self.staged.leaves))]
        stages = compile_stages(
            forward,
            self.group_of,
            shardings,
            self.groups,
            train=train,
            remat=self.remat,
            split=self.schedule.splits_backward,
            errors=self.errors,
            options=self.options,
        )
        zeros = zeros_of_groups(stages, forward.leaves, shardings, self.transfers.local_meshes)
        compiled = CompiledPipeline(len(self.compiled), train, self.transfers, stages, forward.names, zeros)
        announce_layouts(compiled)
        return compiled

    def _leaves_on_groups(
        self, state: TrainState, compiled: CompiledPipeline, number: int
    ) -> dict[int, dict[int, jax.Array]]:
        """Every leaf on every group of this process that uses it."""
        local_groups, leaves = self.transfers.local_groups, {group: {} for group in self.transfers.local_groups}
        for group, at in compiled.used:
            owner, there = self._owner(at), state.leaves[self._leaf_at[at]]
            if group != owner.group and {group, owner.group} & local_groups:
                sharding = sharding_on(owner.sharding, self.groups[group])
                key = ("leaf", number, owner.path, at)
                there = self.transfers.transfer(key, there, sharding, owner.group, group, donated=True)
            if group in local_groups:
                leaves[group][at] = there
        return leaves

    def _batch_on_groups(self, batch: Batch, count: int, compiled: CompiledPipeline) -> list[list[jax.Array]]:
        """The arrays of the batch that each stage of this process reads, as (microbatch, row, ...) on its group."""
        arrays, local_groups = jax.tree.leaves(batch), self.transfers.local_groups

        @cache
        def placed(group: int, at: int) -> jax.Array:
            return place_array(arrays[at], count, self.mesh, group, self.axes)

        stages = compiled.stages
        return [[placed(s.group, at) for at in s.data] if s.group in local_groups else [] for s in stages]

    def _indices(self, group: int, count: int) -> list[jax.Array]:
        if (group, count) not in self._numbers:
            there = NamedSharding(self.groups[group], PartitionSpec())
            self._numbers[group, count] = [put_host(np.int32(number), there) for number in range(count)]
        return self._numbers[group, count]

    def _copies(self, at: int, value: jax.Array) -> dict[int, jax.Array]:
        """The copies of a SHARED leaf of the state, by group of this process."""
        seen, copies = self._shared.get(at, (None, {}))
        if seen is not value:
            copies = {group: on_group(value, mesh) for group, mesh in self.transfers.local_meshes.items()}
            self._shared[at] = value, copies
        return copies

    @cached_property
    def _leaf_at(self) -> dict[int, int]:
        """Leaf of the staged model -> its place in the state."""
        return {owner.leaf: at for at, owner in enumerate(self.placement.owners) if owner.leaf is not None}

    @cached_property
    def _step_at(self) -> int:
        return next(at for at, owner in enumerate(self.placement.owners) if owner.path == "optimizer/step")

    def _owner(self, leaf: int) -> LeafOwner:
        return self.placement.owners[self._leaf_at[leaf]]


def _check(staged: StagedModel, mesh: MpmdMesh, schedule: Schedule, remat: str, transport: str) -> None:
    problems = [*_schedule_problems(schedule), *schedule.group_problems(mesh.mpmd_dim, mesh.mpmd_axis_name)]
    if schedule.num_stages != staged.num_stages:
        problems.append(
            f"schedule {schedule.name} has {schedule.num_stages} stages, but the model is split into "
            f"{staged.num_stages}; pass this schedule to split_stages"
        )
    for name, value, values in (("remat", remat, REMAT_MODES), ("transport", transport, TRANSPORTS)):
        if value not in values:
            problems.append(f"{name} must be one of {', '.join(map(repr, values))}, got {shown(value)}")
    if problems:
        raise ConfigError(problems)


def _schedule_problems(schedule: Schedule) -> list[str]:
    """One line per reason why a pipeline cannot train with this schedule."""
    kinds = {action.kind for row in schedule.rows for action in row}
    if "B" not in kinds:  # `check_schedule` accepts it: evaluation runs forward only
        return [
            f"schedule {schedule.name} has no backward actions, so it cannot train; use make_schedule(...), and "
            "Pipeline.evaluate for a forward pass"
        ]
    try:
        check_schedule(schedule)
    except ValueError as error:
        return lines_of(error)
    return []
