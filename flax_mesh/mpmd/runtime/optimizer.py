"""The optimizer's update on a pipeline: traced as for one device, then split into one program per group and phase."""

from collections.abc import Callable, Mapping, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.chunks import rows_of, whole
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.runtime.compile import Jitted, Options, named_jit
from flax_mesh.mpmd.runtime.placement import Placement, chunked
from flax_mesh.mpmd.split.interpret import interpret
from flax_mesh.mpmd.split.split import StagedModel
from flax_mesh.mpmd.split.update import SHARED, GroupProgram, MixedGroups, cut_by_group, pack, unpack
from flax_mesh.mpmd.transport.layout import on_all_groups, put_host, sharding_on
from flax_mesh.program.program import Program, Var, is_var, shape_of, trace
from flax_mesh.program.rewrite import inline
from flax_mesh.sharding.memory import brought, is_on_host
from flax_mesh.step.loss import Limits, Metrics, apply_gradients, skip_update
from flax_mesh.step.state import TrainState
from flax_mesh.text import paths_text
from flax_mesh.tree import PyTree, Shaped

_Arrays = list[jax.Array]

# The work of one group in one phase: its program, its donated and its other input variables, and the jitted
# call(donated, kept, packs) -> (outputs, pack of scalars for other groups).
_GroupFunction = tuple[GroupProgram, list[Var], list[Var], Jitted]


class Update:
    """new leaves, metrics, copies = update(leaves, grads, sums, shared, old, limits, transfer).

    Leaves are placed as in `placement`. With `old_at`, an update whose loss or gradient norm is not finite, or above
    `limits`, is skipped: it returns the leaves from before the step. The forward passes change the leaves at the
    indices `old_at`; `old` has the values of these leaves from before the step.

    `grads` has the summed gradients by group and leaf of the staged model. `sums` has the sums of the loss function by
    name, each on its group of `sum_groups`. `shared` has the local copies of every SHARED leaf by group, `copies` every
    new SHARED leaf by index with its local copies. `transfer(kind, detail, value, sharding, sender, receiver)`
    transfers an array from one group to another.

    Scalars are sent between groups, arrays are not. The clip of the global norm with two groups has two phases:

        phase 0, each group    sum of squares of its gradients, sent to the other group
        phase 1, each group    global norm, clipped gradients, its new parameters
    """

    def __init__(
        self,
        staged: StagedModel,
        mesh: MpmdMesh,
        placement: Placement,
        grads: Sequence[tuple[int, int]],
        sum_groups: Mapping[str, int],
        learning_rate: optax.Schedule | None,
        options: Options,
        old_at: Sequence[int] | None = None,
    ):
        self.old_at = list(old_at or ())
        self.placement, self.meshes, self.grads, self.names = placement, mesh.unstack, list(grads), list(sum_groups)
        owners = placement.owners
        self.sum_groups = list(sum_groups.values())
        self.replicated = [NamedSharding(mesh, PartitionSpec()) for mesh in self.meshes]
        program, self.metrics = _trace(staged, placement, self.grads, self.names, learning_rate, old_at)
        self.wide = {leaf: _wide(staged.leaves[leaf]) for _, leaf in self.grads}
        self.owner_of_leaf = {owner.leaf: owner for owner in owners if owner.leaf is not None}
        every = tuple(range(len(self.meshes)))
        self.local_groups = frozenset(mesh.my_mpmd_axis_indices)
        # Every process returns the metrics, so each must receive them on one of its groups. In a run of one process any
        # group may compute them: ().
        readers = mesh.representative_groups if mesh.jax_mesh.is_multi_process else ()
        groups = [owner.group for owner in owners]
        groups += [self.owner_of_leaf[leaf].group for _, leaf in self.grads] + [sum_groups[name] for name in self.names]
        groups += [owners[at].group for at in self.old_at] + [SHARED] * (0 if old_at is None else 2)
        destinations = [every if owner.group == SHARED else (owner.group,) for owner in owners]
        destinations += [readers] * len(self.metrics)
        try:
            parts, self.groups_of_output = cut_by_group(program, groups, destinations)
        except MixedGroups as error:
            # Names of the first inputs of the program, in its order: the leaves and the gradients.
            named = [owner.path for owner in owners]
            named += [f"the gradient of {staged.leaves[leaf].path}" for _, leaf in self.grads]
            paths = dict.fromkeys(named[at] for at in error.inputs if at < len(named) and groups[at] != SHARED)
            raise ConfigError(
                f"the optimizer computes {error.primitive} over arrays of several pipeline groups: "
                f"{paths_text(paths)}. It may use other leaves only through scalars, such as norms. Use another "
                "optimizer, or pp:1."
            ) from error
        self.program = program
        # A SHARED leaf is computed on several groups, so no single sharding applies to it.
        shardings = {
            v: o.sharding for v, o in zip(program.outputs, owners, strict=False) if is_var(v) and o.group != SHARED
        }
        both = (*zip(program.inputs, owners, strict=False), *zip(program.outputs, owners, strict=False))
        hosted = {v for v, owner in both if is_var(v) and is_on_host(owner.sharding)}
        placed = {v: owner.sharding for v, owner in both if is_var(v) and owner.group != SHARED}
        packs = {(part.group, part.phase): part.packs for part in parts if part.packs}
        self.parts = [
            _compile(part, packs, shardings, placed, hosted, self.meshes[part.group], options)
            for part in parts
            if part.group in self.local_groups
        ]
        self.packs = {key: jax.eval_shape(pack, [shape_of(v.aval) for v in scalars]) for key, scalars in packs.items()}
        self.readers = {key: {p.group for p in parts if key in p.receives} for key in packs}

    def __call__(
        self,
        leaves: Sequence[jax.Array],
        grads: Mapping[int, Mapping[int, jax.Array]],
        sums: Mapping[str, jax.Array | None],
        shared: Mapping[int, Mapping[int, jax.Array]],
        old: Mapping[int, jax.Array],
        limits: Limits,
        transfer: Callable[..., PyTree],
    ) -> tuple[tuple[jax.Array, ...], Metrics, dict[int, tuple[jax.Array, dict[int, jax.Array]]]]:
        env = self._inputs(leaves, grads, sums, shared, old, limits, transfer)
        # (group and phase of the sender, reader) -> vectors of scalars
        packs: dict[tuple[int, int, int], list[jax.Array]] = {}

        def send(group: int, phase: int, packed: Sequence[jax.Array], reader: int) -> None:
            target = self.replicated[reader]
            packs[group, phase, reader] = [
                transfer("update", (phase, i), vector, target, group, reader) for i, vector in enumerate(packed)
            ]

        for part, donated, kept, call in self.parts:
            values = env[part.group]
            for group, phase in part.receives:
                if group not in self.local_groups and (group, phase, part.group) not in packs:
                    send(group, phase, self.packs[group, phase], part.group)
            received = [packs[(*key, part.group)] for key in part.receives]
            results, packed = call([values.pop(v) for v in donated], [values[v] for v in kept], received)
            values.update(zip(part.results, results, strict=True))
            for reader in self.readers.get((part.group, part.phase), ()):
                send(part.group, part.phase, packed, reader)
        owners = self.placement.owners
        new, copies = [], {}
        for at, (owner, v) in enumerate(zip(owners, self.program.outputs, strict=False)):
            if v is self.program.inputs[at] or owner.group not in (SHARED, *self.local_groups):
                new.append(leaves[at])  # unchanged, or remote
            elif not is_var(v):  # a constant, which no part computes
                new.append(put_host(np.asarray(v.val), owner.sharding))
            elif owner.group == SHARED:
                parts = {g: env[g][v] for g in self.groups_of_output[at] if g in self.local_groups}
                new.append(on_all_groups(parts.values(), owner.sharding))
                copies[at] = new[-1], parts
            else:
                new.append(env[owner.group][v])
        first = len(owners)
        stored = [next(g for g in groups if g in self.local_groups) for groups in self.groups_of_output[first:]]
        outputs = self.program.outputs[first:]
        metrics = {name: env[g][v] for name, g, v in zip(self.metrics, stored, outputs, strict=True)}
        return tuple(new), metrics, copies

    def _inputs(self, leaves, grads, sums, shared, old, limits, transfer) -> list[dict[Var, PyTree]]:
        """[group][variable]: its value, for the local groups."""
        env: list[dict[Var, PyTree]] = [{} for _ in self.meshes]
        names = iter(self.program.inputs)
        for at, owner in enumerate(self.placement.owners):
            v = next(names)
            if owner.group != SHARED:
                env[owner.group][v] = leaves[at]
                continue
            for group in self.local_groups:
                env[group][v] = shared[at][group]
        for group, leaf in self.grads:
            owner = self.owner_of_leaf[leaf]
            # For a remote gradient only shape and dtype are needed.
            value = grads[group][leaf] if group in grads else self.wide[leaf]
            key = (owner.path, leaf)
            env[owner.group][next(names)] = transfer("gradient", key, value, owner.sharding, group, owner.group)
        for name, group in zip(self.names, self.sum_groups, strict=True):
            env[group][next(names)] = sums[name]
        for at in self.old_at:
            env[self.placement.owners[at].group][next(names)] = old[at]
        for limit, v in zip(limits, names, strict=False):  # no variables are left if no update is skipped
            for group in self.local_groups:
                env[group][v] = put_host(np.float32(limit), self.replicated[group])
        return env


def _compile(
    part: GroupProgram,
    packs: Mapping[tuple[int, int], Sequence[Var]],
    shardings: Mapping[Var, Sharding],
    placed: Mapping[Var, Sharding],
    hosted: Set[Var],
    mesh: Mesh,
    options: Options,
) -> _GroupFunction:
    """Jit one part of the update; `shardings` has the shardings of the outputs that are leaves, `placed` of all leaves.

    Values in `hosted` are in the memory of the host.
    """
    donated = _donated(part, placed, hosted)
    kept = [v for v in part.arguments if v not in set(donated)]
    order = {v: i for i, v in enumerate([*donated, *kept])}
    is_hosted = [v in hosted for v in order]

    def update(donated, kept, received):
        values = [brought(x) if on_host else x for x, on_host in zip([*donated, *kept], is_hosted, strict=True)]
        scalars = [x for key, packed in zip(part.receives, received, strict=True) for x in unpack(packed, packs[key])]
        outs = part.program.call(*(values[order[v]] for v in part.arguments), *scalars)
        num = len(part.results)
        return outs[:num], pack([jnp.asarray(x) for x in outs[num:]])

    out = [shardings.get(v) for v in part.results]
    if not order and not part.receives:  # constants: without an argument, only the results have devices
        out = [x or sharding_on(shape_of(v.aval).sharding, mesh) for x, v in zip(out, part.results, strict=True)]
    call = named_jit(update, f"update{part.phase}", (0,), (out, None), options)
    return part, donated, kept, call


def _donated(part: GroupProgram, placed: Mapping[Var, Sharding], hosted: Set[Var]) -> list[Var]:
    """The inputs whose last use is in this part and whose memory a result with the same shape and dtype takes over.

    JAX assigns the first donated input to the first such result, the second to the second, and so on. Both must be in
    the same memory and have the same sharding, so inputs are donated up to the first result for which none is left.
    The sharding of a value that is not a leaf is unknown: such a value is used where no leaf fits.
    """
    free: dict[tuple[object, ...], list[Var]] = {}
    for v in part.last_used:
        free.setdefault((v.aval.shape, v.aval.dtype, v in hosted), []).append(v)
    donated, ended = [], set()
    for v in part.results:
        kind = v.aval.shape, v.aval.dtype
        if not v.aval.shape or kind in ended:
            continue
        inputs = free.get((*kind, v in hosted), [])
        equal = [x for x in inputs if v in placed and placed.get(x) == placed[v]]
        fitting = equal or [x for x in inputs if v not in placed or x not in placed]
        if fitting:
            donated.append(fitting[0])
            inputs.remove(fitting[0])
        else:
            ended.add(kind)
    return donated


def _trace(
    staged: StagedModel,
    placement: Placement,
    grads: Sequence[tuple[int, int]],
    names: Sequence[str],
    learning_rate: optax.Schedule | None,
    old_at: Sequence[int] | None,
) -> tuple[Program, list[str]]:
    """The program (leaves, grads, sums, old leaves, limits) -> (new leaves, metrics), and the names of the metrics.

    The program of the step without a pipeline is evaluated on the leaves of the placement, so that a stack stays one
    chunk per group, with separate equations for each chunk.
    """
    owners, num_leaves = placement.owners, len(placement.plain.leaves)
    old_sources = list(dict.fromkeys(owners[at].source for at in old_at or ()))
    trained = list(dict.fromkeys(leaf.source for leaf in staged.leaves if leaf.trained))
    scalars = [jax.ShapeDtypeStruct((), "float32") for _ in names]
    limits = [jax.ShapeDtypeStruct((), "float32")] * (0 if old_at is None else 2)
    plain, metric_names = _trace_plain(placement.plain, trained, names, learning_rate, old_sources, scalars, limits)

    def placed_update(leaves: _Arrays, parts: _Arrays, sums: _Arrays, old: _Arrays, limits: _Arrays) -> _Arrays:
        gradient_of: dict[int, jax.Array] = {}
        # A leaf that several groups use has one gradient per group.
        for (_, leaf), value in zip(grads, parts, strict=True):
            gradient_of[leaf] = gradient_of[leaf] + value if leaf in gradient_of else value
        for at, leaf in enumerate(staged.leaves):
            if leaf.trained and at not in gradient_of:  # the loss does not use it
                value = leaves[owner_at[at]]
                gradient_of[at] = jnp.zeros_like(value, _wide(value).dtype)
        model = [owner for owner in owners if owner.leaf is not None]
        # None: a leaf that is not trained, such as a random key.
        gradients = chunked(model, [None if owner.leaf is None else gradient_of.get(owner.leaf) for owner in model])
        replaced = dict(zip(old_at or (), old, strict=True))
        before = chunked(owners, [replaced.get(at, x) for at, x in enumerate(leaves)])
        args = [*chunked(owners, leaves), *(gradients[source] for source in trained), *sums]
        args += [*(before[source] for source in old_sources), *limits]
        # Every remat and cond is opened: as a single equation it could use arrays of several groups.
        outs = interpret(plain, args, lambda eqn: True)
        flat: _Arrays = []
        for source, out in enumerate(outs[:num_leaves]):
            flat += rows_of(out, [owner.rows for owner in owners if owner.source == source])
        return [*flat, *map(whole, outs[num_leaves:])]

    # Every type has the mesh of one group, even the types of leaves that are on all groups.
    sources = [placement.plain.leaves[owner.source] for owner in owners]
    leaves = [shape_of(like, x.shape) for like, x in zip(sources, placement.abstract.leaves, strict=True)]
    owner_at = {owner.leaf: at for at, owner in enumerate(owners) if owner.leaf is not None}
    parts = [_wide(leaves[owner_at[leaf]]) for _, leaf in grads]
    old = [leaves[at] for at in old_at or ()]
    return inline(trace(placed_update, leaves, parts, scalars, old, limits)[0]), metric_names


def _trace_plain(
    plain: TrainState,
    trained: Sequence[int],
    names: Sequence[str],
    learning_rate: optax.Schedule | None,
    old_sources: Sequence[int],
    scalars: Sequence[jax.ShapeDtypeStruct],
    limits: Sequence[jax.ShapeDtypeStruct],
) -> tuple[Program, list[str]]:
    """`_trace` for the state without groups, as in the step without a pipeline; leaves are given by their index."""
    metric_names: list[str] = []

    def update(leaves: _Arrays, trained: _Arrays, sums: _Arrays, old: _Arrays, limits: _Arrays) -> _Arrays:
        state = TrainState(tuple(leaves), plain.definition)
        model, optimizer = state.merge()
        params, _, others = nnx.state(model, optimizer.wrt, nnx.RngState, ..., graph=True)
        named = dict(zip(names, sums, strict=True))
        weight = named.pop("weight")
        tree = jax.tree.unflatten(jax.tree.structure(params), trained)
        after, metrics = apply_gradients(state, (params, others), tree, named, weight, learning_rate)
        if limits:
            replaced = dict(zip(old_sources, old, strict=True))
            before = TrainState(tuple(replaced.get(at, x) for at, x in enumerate(leaves)), plain.definition)
            after, metrics = skip_update(before, after, metrics, (limits[0], limits[1]))
        metric_names[:] = list(metrics)
        return [*after.leaves, *metrics.values()]

    shapes = [shape_of(x) for x in plain.leaves]
    wide = [_wide(plain.leaves[source]) for source in trained]
    old = [shapes[source] for source in old_sources]
    return trace(update, shapes, wide, scalars, old, limits)[0], metric_names


def _wide(leaf: Shaped) -> jax.ShapeDtypeStruct:
    return shape_of(leaf).update(dtype=jnp.promote_types(leaf.dtype, "float32"))
