"""Pipeline: a schedule carried out on the groups of a mesh, with the same step as without a pipeline."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.runtime.compile import Pass, compile_stages
from flax_mesh.mpmd.runtime.executor import Run, check_batch, sums_everywhere
from flax_mesh.mpmd.runtime.optimizer import Update
from flax_mesh.mpmd.runtime.placement import (
    MODEL,
    Home,
    chunked,
    init_leaves,
    moved,
    on_all_groups,
    on_group,
    place,
    put_host,
)
from flax_mesh.mpmd.schedules.schedule import Action, Schedule, forward_schedule
from flax_mesh.mpmd.split.jaxpr import whole
from flax_mesh.mpmd.split.remat import REMAT_MODES
from flax_mesh.mpmd.split.split import StageCut, StagedModel
from flax_mesh.mpmd.transport.device_put import copy_to
from flax_mesh.mpmd.transport.keyed import Channel
from flax_mesh.mpmd.transport.local_copy import move
from flax_mesh.mpmd.transport.ordered import TRANSPORTS, ordered_transport_of
from flax_mesh.sharding import PartitionRules
from flax_mesh.sharding.rules import fit_spec
from flax_mesh.step.loss import Batch, Metrics
from flax_mesh.step.state import TrainState


class Pipeline:
    """Trains a `StagedModel` on the groups of `mesh` in the order of `schedule`.

        pipeline = Pipeline(split_stages(...), mesh, make_schedule("1f1b", ...), optax.adamw(1e-3))
        state = pipeline.init_state()
        state, metrics = pipeline.step(state, batch)

    The numbers are those of `make_train_step` with as many microbatches. Every leaf of the state lies on the group of
    the first stage that uses it, laid out there as `rules` say (by default the table that the model carries, or its
    annotations); other groups that use it are sent its value in every step. The optimizer runs on these groups, one
    part each; it may look at other leaves through scalars, as the clip of the global norm does.

    `remat`: what a stage stores for its backward pass. "none": all that it needs, less what costs about one instruction
    per element to recompute; "cheap": only results of matrix products, loops and random bits; "full": nothing but the
    inputs of the stage. Gradients are summed in float32 at least. `shard_optimizer_over` as in `abstract_state`;
    `compiler_options` go to XLA, as in `jax.jit`.

    In a run of several processes every process makes the same pipeline and calls it alike; each compiles and runs the
    stages of its own groups. Leaves of the state that lie on other groups are arrays without a shard here; metrics
    arrive in every process. `transport`: how activations and gradients go from process to process; "server" JAX's
    transfer server, "native" `jax.device_put`, a ConfigError where the backend cannot, "auto" native where it can.
    """

    def __init__(
        self,
        staged: StagedModel,
        mesh: MpmdMesh,
        schedule: Schedule,
        optimizer: optax.GradientTransformation,
        *,
        rules: PartitionRules | Iterable[tuple[str, Any]] | None = None,
        axes: PartitionAxis | None = None,
        seed: int = 0,
        learning_rate: optax.Schedule | None = None,
        remat: Literal["none", "cheap", "full"] = "none",
        shard_optimizer_over: str | tuple[str, ...] = (),
        compiler_options: Mapping[str, Any] | None = None,
        transport: Literal["auto", "server", "native"] = "auto",
    ):
        _check(staged, mesh, schedule, remat, transport)
        self.mine = frozenset(mesh.my_mpmd_axis_indices)  # groups of this process
        self.channel = Channel(mesh) if mesh.jax_mesh.is_multi_process else None
        self.native = ordered_transport_of(self.channel, mesh, transport)  # None: by the transfer server
        self.staged, self.mesh, self.schedule, self.optimizer = staged, mesh, schedule, optimizer
        self.seed, self.learning_rate = seed, learning_rate
        self.options = dict(compiler_options) if compiler_options else None
        self.remat = "full" if staged.recompute else remat
        self.groups = mesh.unstack
        self.group_of = schedule.stage_to_group
        if rules is None and math.prod(mesh.jax_mesh.devices.shape) == mesh.mpmd_dim:
            rules = [(".*", ())]  # groups of one device: nothing is to be split
        self.axes = axes or getattr(rules, "axes", None) or getattr(staged.model, "axes", DEFAULT_AXES)
        self.placement = place(self._make, staged, mesh, self.group_of, rules, axes, shard_optimizer_over)
        self.num_transfers = 0  # of activations and gradients between groups, in the last step
        self.on_action: Callable[[Action, dict[Any, Any]], None] | None = None  # for tests and tools
        self.layouts: dict[Any, NamedSharding] = {}
        self._built: dict[Any, Any] = {}
        self._passes: dict[int, Pass] = {}  # by the id of their StageCut, which the staged model keeps
        self._shared: dict[int, tuple[Any, dict[int, jax.Array]]] = {}  # a leaf as it was last seen, and its copies

    @property
    def abstract(self) -> TrainState:
        """The state as ShapeDtypeStructs with their shardings, on the meshes of several groups."""
        return self.placement.abstract

    def init_state(self) -> TrainState:
        """The initial state, every leaf born on its group; the same bits as without a pipeline."""
        return TrainState(init_leaves(self._make, self.placement, self.my_groups), self.abstract.definition)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step over a batch of `schedule.num_microbatches` equal parts; donates `state`."""
        run = Run(self, state, batch, self.schedule.num_microbatches, train=True)
        run.follow(self.schedule, self._order, self.on_action)
        self.num_transfers = run.num_transfers
        return self.update(state, run)

    def evaluate(self, state: TrainState, batch: Batch, num_microbatches: int | None = None) -> Metrics:
        """The sums "loss", "weight" and the loss's own metrics over a batch, with the model in `eval()` mode."""
        count = num_microbatches or self.schedule.num_microbatches
        run = Run(self, state, batch, count, train=False)
        schedule = forward_schedule(len(self.groups), count, self.group_of)
        run.follow(schedule, self._own(schedule))
        return sums_everywhere(run) if self.channel else {name: value for name, (_, value) in run.named_sums().items()}

    def model(self, state: TrainState) -> Any:
        """The model as one module, every leaf on all devices: laid out as on its group, and the same on every group."""
        homes = [home for home in self.placement.homes if home.path.startswith(MODEL)]
        leaves = [state.leaves[at] for at, home in enumerate(self.placement.homes) if home.path.startswith(MODEL)]
        number = self.channel.next_run() if self.channel else 0
        arrays = []
        for at, (home, value) in enumerate(zip(homes, leaves, strict=True)):
            parts = [
                self.carry(("model", number, at), value, moved(home.sharding, mesh), home.group, group)
                for group, mesh in enumerate(self.groups)
            ]
            everywhere = NamedSharding(self.mesh.jax_mesh, home.sharding.spec)
            arrays.append(on_all_groups([part for part in parts if part is not None], everywhere))
        values = [whole(array) for array in chunked(homes, arrays)]
        graphdef, abstract = nnx.split(self.staged.model)
        return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(abstract), values))

    def _make(self) -> tuple[Any, nnx.Optimizer]:
        model = self.staged.make()
        return model, nnx.Optimizer(model, self.optimizer, wrt=self.staged.wrt)

    @cached_property
    def _order(self) -> list[Action]:
        return self._own(self.schedule)

    def _own(self, schedule: Schedule) -> list[Action]:
        """The actions of the groups of this process, in an order in which they can be dispatched."""
        return [action for action in schedule.order() if self.group_of[action.stage] in self.mine]

    @property
    def speakers(self) -> tuple[int, ...]:
        """The first group of every process."""
        return self.mesh.speakers

    @property
    def my_groups(self) -> dict[int, Mesh]:
        """The groups of this process."""
        return {group: self.groups[group] for group in sorted(self.mine)}

    @cached_property
    def leaf_homes(self) -> dict[int, int]:
        """Leaf of the staged model -> its place in the state."""
        return {home.leaf: at for at, home in enumerate(self.placement.homes) if home.leaf is not None}

    def prepare(self, batch: Batch, count: int, train: bool) -> tuple[Pass, bool]:
        """What passes over `count` microbatches of `batch` have in common, and whether it was made just now."""
        arrays, tree = jax.tree.flatten(batch)
        key = (train, count, tree, *((np.shape(x), getattr(x, "dtype", None)) for x in arrays))
        if key in self._built:
            return self._built[key], False
        microbatch = check_batch(batch, count)
        cut = self.staged.cut(microbatch, seed=self.seed, train=train)
        is_new = id(cut) not in self._passes
        if is_new:
            self._passes[id(cut)] = self._pass(cut, train)
        self._built[key] = self._passes[id(cut)]
        return self._built[key], is_new

    def _pass(self, cut: StageCut, train: bool) -> Pass:
        shardings = [self.leaf_home(at).sharding for at in range(len(self.staged.leaves))]
        stages = compile_stages(
            cut,
            [self.groups[g] for g in self.group_of],
            shardings,
            [leaf.trained for leaf in self.staged.leaves],
            train=train,
            remat=self.remat,
            split=self.schedule.splits_backward,
            options=self.options,
        )
        sender = {v: (s.stage, i) for s in stages for i, v in enumerate(s.sent)}
        return Pass(
            number=len(self._passes),
            stages=stages,
            names=cut.names,
            sender=sender,
            receivers={v: [s.stage for s in stages if v in s.received] for v in sender},
            # Of these stages, not of those in training: in `eval()` mode a model may read a variable elsewhere.
            used=sorted({(self.group_of[s.stage], at) for s in stages for at in s.leaves}),
        )

    def parts_of(self, at: int, value: jax.Array) -> dict[int, jax.Array]:
        """The copies of a SHARED leaf of the state, by group of this process."""
        whole, parts = self._shared.get(at, (None, {}))
        if whole is not value:
            parts = {group: on_group(value, mesh) for group, mesh in self.my_groups.items()}
            self._shared[at] = value, parts
        return parts

    def zeros(self, group: int, trained: tuple[int, ...], num_sums: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        """Sums to start from: of the gradients of leaves, as they lie, and of scalars; lists of scalars."""
        key = ("zeros", group, trained, num_sums)
        if key not in self._built:
            leaves = [self.staged.leaves[at] for at in trained]
            there = [moved(self.leaf_home(at).sharding, self.groups[group]) for at in trained]
            scalar = NamedSharding(self.groups[group], PartitionSpec())

            def zeros() -> Any:
                wide = [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
                return wide, [[jnp.zeros((), jnp.float32)] * count for count in num_sums]

            self._built[key] = jax.jit(zeros, out_shardings=(there, [[scalar] * count for count in num_sums]))
        return self._built[key]()

    def microbatch_index(self, group: int, microbatch: int) -> jax.Array:
        """The number of a microbatch as an array on a group, made once."""
        key = ("index", group, microbatch)
        if key not in self._built:
            there = NamedSharding(self.groups[group], PartitionSpec())
            self._built[key] = put_host(np.int32(microbatch), there)
        return self._built[key]

    def place_array(self, x: Any, count: int, group: int) -> jax.Array:
        """An array of the batch as (microbatch, row, ...) on a group. What lies on the whole mesh, the same on every
        group, is there already; anything else goes through the host."""
        shape = (count, x.shape[0] // count, *x.shape[1:])
        there = self.batch_sharding(shape, group)
        if not isinstance(getattr(x, "sharding", None), NamedSharding) or x.sharding.mesh != self.mesh.jax_mesh:
            return put_host(np.asarray(x).reshape(shape), there)
        key = ("cut", shape, x.dtype, group)
        if key not in self._built:
            self._built[key] = jax.jit(lambda x: x.reshape(shape), out_shardings=there)
        return self._built[key](on_group(x, self.groups[group]))

    def carry(
        self,
        key: tuple[Any, ...],
        value: Any,
        sharding: NamedSharding,
        sender: int,
        receiver: int,
        *,
        donated: bool = False,
    ) -> jax.Array | None:
        """`value` of group `sender` by `sharding` on group `receiver`; None where another process holds that.

        Where another process holds the sender, of `value` only shape and dtype count. `donated`: the value may be
        overwritten at once. The key is as in `Channel`.
        """
        if {sender, receiver} <= self.mine:
            return value if sender == receiver else move(value, sharding)
        if self.channel is None or not {sender, receiver} & self.mine:
            return None
        if receiver in self.mine:
            return self.channel.receive(key, value.shape, value.dtype, sharding, sender, receiver)
        at_home = moved(sharding, self.groups[sender])
        if donated or not value.sharding.is_equivalent_to(at_home, value.ndim):
            value = copy_to(at_home)(value)
        return self.channel.send(key, value, sender, receiver)

    def batch_sharding(self, shape: Sequence[int], group: int) -> NamedSharding:
        """Layout of an array (microbatch, row, ...) on a group; of two dims a row the second is the sequence."""
        key = ("batch", tuple(shape), group)
        if key not in self._built:
            logical = (None, "batch", "sequence") if len(shape) == 3 else (None, "batch")
            # A hint where the rows should lie: what does not divide is left out.
            spec, _ = fit_spec("batch", shape, self.axes.resolve(logical), self.groups[group])
            self._built[key] = NamedSharding(self.groups[group], spec)
        return self._built[key]

    def leaf_home(self, leaf: int) -> Home:
        """Where a leaf of the staged model lies."""
        return self.placement.homes[self.leaf_homes[leaf]]

    def update(self, state: TrainState, run: Run) -> tuple[TrainState, Metrics]:
        """The optimizer step from what a run over the whole schedule has summed up; donates `state`."""
        sums = run.named_sums()
        groups = {name: group for name, (group, _) in sums.items()}
        trained = sorted({(self.group_of[stage.stage], at) for stage in run.stages for at in stage.trained})
        key = ("update", tuple(trained), tuple(groups.items()))
        if key not in self._built:
            rate = self.learning_rate
            self._built[key] = Update(self.staged, self.mesh, self.placement, trained, groups, rate, self.options)
        leaves = list(state.leaves)
        for leaf, value in run.changed.items():
            leaves[self.leaf_homes[leaf]] = value
        values = {name: value for name, (_, value) in sums.items()}

        def carry(kind: str, detail: tuple[Any, ...], *what: Any) -> Any:
            return self.carry((kind, run.number, *detail), *what)

        new, metrics, shared = self._built[key](leaves, run.grads, values, run.shared, carry)
        self._shared |= shared
        return TrainState(new, self.abstract.definition), metrics


def _check(staged: StagedModel, mesh: MpmdMesh, schedule: Schedule, remat: str, transport: str) -> None:
    problems = []
    if schedule.num_groups != mesh.mpmd_dim:
        problems.append(
            f"schedule {schedule.name} has {schedule.num_groups} groups, the mesh has {mesh.mpmd_dim} along "
            f"{mesh.mpmd_axis_name!r}; make both the same"
        )
    if schedule.num_stages != staged.num_stages:
        problems.append(
            f"schedule {schedule.name} has {schedule.num_stages} stages, the model is cut into {staged.num_stages}; "
            f"use split_stages(num_stages={schedule.num_stages})"
        )
    if remat not in REMAT_MODES:
        problems.append(f"remat must be one of {', '.join(map(repr, REMAT_MODES))}, got {remat!r}")
    if transport not in TRANSPORTS:
        problems.append(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    if problems:
        raise ConfigError(problems)
