"""Traces the forward pass of a model and its loss function as one program on the leaves of the model."""

import contextlib
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.extend.core.primitives import copy_p
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, Layout, PartitionAxis, axes_of_spec
from flax_mesh.jax_compat import JIT, REMAT
from flax_mesh.modes import set_eval_mode, user_modes
from flax_mesh.mpmd.chunks import Chunks, rows_of, whole
from flax_mesh.mpmd.split.assign import StageProgram, mark_p
from flax_mesh.mpmd.split.interpret import interpret
from flax_mesh.program.follow import Flow, follow
from flax_mesh.program.program import (
    Eqn,
    Program,
    Var,
    bodies,
    has_explicit_axes,
    is_var,
    needed,
    shape_of,
    trace,
)
from flax_mesh.program.rewrite import inline
from flax_mesh.sharding.abstract import Split
from flax_mesh.step.batch import microbatch_spec
from flax_mesh.step.divided import warn_mean_of_means
from flax_mesh.step.loss import Batch, LossFn, check_trainable, check_trains, check_weight, run_loss, sums_of
from flax_mesh.step.options import AttentionOption
from flax_mesh.text import shown
from flax_mesh.tree import PyTree, Shaped, is_single_layer, module_at, named_leaves, path_of

Layer = tuple[str, int]  # path of the list or stack, and the index of the layer in it; (path, 0) of a single layer
Places = Mapping[str, tuple[str, int | None]]  # path in the state -> layer; (path, None) for a stack


class ModelLeaf(NamedTuple):
    """A leaf of the model, or a range of layers of a leaf in a scanned stack."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    trained: bool
    source: int  # index of the leaf of the model
    rows: tuple[int, int] | None  # layers of the stack, [first, stop); None: the entire leaf
    layer: Layer | None = None  # None outside the layers; in a stack, the first layer of `rows`


class Forward(NamedTuple):
    """A traced loss function: (leaves, arrays of the batch, step, microbatch) -> (sums, new values of variables).

    After `open_forward`, it has no jit, no remat over several layers, and one scan per range of layers.
    """

    program: Program
    leaves: tuple[ModelLeaf, ...]  # the first inputs; initially `jax.tree.leaves(nnx.state(model))`
    names: tuple[str, ...]  # of the first outputs, which are sums: "loss", "weight" and the metrics
    updates: Mapping[int, int]  # position of any other output -> index of the leaf whose new value it is
    opened_remat: bool = False  # a remat over several layers was inlined
    stages: tuple[StageProgram, ...] = ()  # after the split
    lines: tuple[str, ...] = ()  # about its attention
    forms: tuple[str, ...] = ()  # of its attentions

    @property
    def sums(self) -> dict[str, Shaped]:
        """Name -> type of the first outputs."""
        return {name: out.aval for name, out in zip(self.names, self.program.outputs, strict=False)}


def trace_forward(
    loss_fn: LossFn,
    split: Split,
    wrt: Filter,
    layers: Sequence[str],
    mesh: AbstractMesh | None,
    batch: Batch,
    *,
    specs: Sequence[PartitionSpec] = (),
    axes: PartitionAxis = DEFAULT_AXES,
    seed: int = 0,
    train: bool = True,
    attention: str | tuple[str, ...] = "as_written",
    placed: Callable[[], Sequence[PartitionSpec]] = tuple,
) -> Forward:
    """Trace `loss_fn(model, batch)`, both abstract. `split` is the graph definition and the state of the model.

    On a `mesh` with Explicit axes, `specs`, one per leaf of the model, and `axes` are the layout of model and batch.
    `train=False` is `eval()` mode without new values of variables. `attention` is the option of StepOptions, and
    `placed` returns the specs of the leaves on Auto axes.
    """
    leaves = jax.tree.leaves(split[1])
    if mesh is not None and has_explicit_axes(mesh):
        leaves = [_typed(x, mesh, spec) for x, spec in zip(leaves, specs, strict=True)]
        batch = jax.tree.map(lambda x: _typed(x, mesh, microbatch_spec(x.shape, mesh, axes)), batch)
    params, trained, others = _kinds(split[1], wrt)
    around = jax.sharding.use_abstract_mesh(mesh) if mesh is not None else contextlib.nullcontext()
    with around, user_modes():
        program, names = _trace_loss(loss_fn, split, wrt, layers, leaves, batch, seed, train)
        option = AttentionOption(attention, mesh, axes)
        program = _with_attention(program, option, leaves, batch, placed)
    model_leaves = [
        ModelLeaf(path, leaf.shape, leaf.dtype, path in trained, at, None)
        for at, (path, leaf) in enumerate(named_leaves(split[1]))
    ]
    flows = _checked_flows(program, model_leaves, names, batch, params if train else None)
    # Trained parameters and variables other than random streams may change: the last outputs are their new values.
    changing = (trained, others) if train else ()
    sources = [leaf.source for kind in changing for leaf in model_leaves if leaf.path in kind]
    num_sums = len(names)
    new = zip(sources, program.outputs[num_sums:], flows[num_sums:], strict=True)
    changed = [(source, atom) for source, atom, name in new if name != source]
    program = program._replace(outputs=(*program.outputs[:num_sums], *(atom for _, atom in changed)))
    updates = dict(enumerate((source for source, _ in changed), start=num_sums))
    return Forward(program, tuple(model_leaves), names, updates, lines=option.lines, forms=option.forms)


def _kinds(state: nnx.State, wrt: Filter) -> tuple[nnx.State, set[str], set[str]]:
    """(the trained variables, their paths, the paths of variables that are neither trained nor random streams)."""
    try:
        params, _, others = nnx.split_state(state, wrt, nnx.RngState, ...)
    except (TypeError, ValueError) as error:  # some versions of Flax fail to format their own message
        raise TypeError(f"wrt must be a filter of NNX, such as nnx.Param, got {shown(wrt)}") from error
    check_trainable(named_leaves(params))
    trained, changing = ({path for path, _ in named_leaves(part)} for part in (params, others))
    return params, trained, changing


def _trace_loss(
    loss_fn: LossFn,
    split: Split,
    wrt: Filter,
    layers: Sequence[str],
    leaves: Sequence[Shaped],
    batch: Batch,
    seed: int,
    train: bool,
) -> tuple[Program, tuple[str, ...]]:
    """(the program of the loss: (leaves, batch, step, microbatch) -> (sums, new values), the names of the sums)."""
    graphdef, state = split
    treedef = jax.tree.structure(state)
    names: list[str] = []

    def forward(leaves: list[jax.Array], batch: Batch, step: jax.Array, microbatch: jax.Array):
        called = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        after: PyTree = ()
        if train:
            params, _, others = nnx.state(called, wrt, nnx.RngState, ..., graph=True)
            seeds = (seed, step, microbatch)
            loss_sum, (weight, metrics, after) = run_loss(loss_fn, called, wrt, (params, others), batch, seeds, layers)
        else:
            set_eval_mode(called)
            loss_sum, weight, metrics = sums_of(loss_fn(called, batch))
        names[:] = ["loss", "weight", *metrics]
        sums = [loss_sum, weight, *metrics.values()]
        # Only equations have a stage. Adding zero creates an equation for each sum, even for a constant or an input.
        return [x + jnp.zeros_like(x) for x in sums], jax.tree.leaves(after)

    counts = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    program, _ = trace(forward, leaves, batch, *counts)
    return program, tuple(names)


def _checked_flows(
    program: Program, leaves: Sequence[ModelLeaf], names: Sequence[str], batch: Batch, params: nnx.State | None
) -> Sequence[Hashable]:
    """The `flow` of every output. The loss must depend on `params`, if they are given, and the weight must not."""
    trained = [leaf.source if leaf.trained else None for leaf in leaves]
    given = [*trained, *[None] * (len(program.inputs) - len(leaves))]
    flows = follow(program, given, Flow()).outputs
    check_weight(flows[1])
    if params is not None:
        check_trains(flows[0], params)
    named = dict(zip(names, program.outputs, strict=False))
    rows = [*[False] * len(leaves), *(bool(x.shape) for x in jax.tree.leaves(batch)), False, False]
    flags = ([*[False] * len(program.consts), *each] for each in (rows, [name is not None for name in given]))
    warn_mean_of_means(program, named, named.pop("weight"), *flags)
    return flows


def _with_attention(
    program: Program,
    option: AttentionOption,
    leaves: Sequence[Shaped],
    batch: Batch,
    placed: Callable[[], Sequence[PartitionSpec]],
) -> Program:
    """The program with its attention as `option` asks for."""
    unknown = [None] * len(program.inputs)
    if option.rewrite(unknown, {})(program) is None:
        return program
    layouts: list[Layout | None] = [axes_of_spec(spec, len(x.shape)) for spec, x in zip(placed(), leaves, strict=False)]
    layouts += [None] * (len(leaves) - len(layouts))
    layouts += [option.of_batch(x).get(id(x)) for x in jax.tree.leaves(batch)]
    call = option.rewrite([*layouts, *unknown[len(layouts) :]], {})(program)
    if call is None:
        return program
    return trace(call, *(shape_of(v.aval) for v in program.inputs))[0]


def _typed(x: Shaped, mesh: AbstractMesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def places_of(model: PyTree, layers: Sequence[str]) -> Places:
    """Where the state has the layers of each list, stack and single layer of `layers`.

    A module that the model has under several paths is in the state under the first of them only.
    """
    first = {
        id(node): path_of(path) for path, node in nnx.iter_graph(model, graph=True) if isinstance(node, nnx.Pytree)
    }
    named = tuple(f"{path}/" for path in layers)
    places: dict[str, tuple[str, int | None]] = {}
    for path in layers:
        stack = module_at(model, path)
        if isinstance(stack, (nnx.List, list, tuple)):
            each = [(f"{path}/{i}", item, i) for i, item in enumerate(stack)]
        else:
            each = [(path, stack, 0 if is_single_layer(stack) else None)]
        for place, module, index in each:
            home = first.get(id(module), place)
            places.setdefault(place if home.startswith(named) else home, (path, index))
    return places


def split_leaves(
    forward: Forward, places: Places, stage_of: Mapping[Layer, int] | None = None
) -> tuple[ModelLeaf, ...]:
    """Every leaf with its layer. Leaves of stacks are split into ranges of layers: one per stage, or one per layer."""
    parts = []
    for leaf in forward.leaves:
        stack, index = _place(leaf.path, places)
        if stack is None or index is not None or not leaf.shape:
            parts.append(leaf._replace(layer=None if stack is None or index is None else (stack, index)))
            continue
        depth = leaf.shape[0]
        stages = [i if stage_of is None else stage_of[stack, i] for i in range(depth)]
        starts = [i for i in range(depth) if i == 0 or stages[i] != stages[i - 1]]
        for first, stop in zip(starts, [*starts[1:], depth], strict=True):
            parts.append(leaf._replace(shape=(stop - first, *leaf.shape[1:]), rows=(first, stop), layer=(stack, first)))
    return tuple(parts)


def frozen_copies(leaves: Sequence[ModelLeaf]) -> dict[str, Layer]:
    """The layer that each leaf of a frozen copy copies, such as the reference model of DPO or the teacher of BYOL.

    A frozen copy is a list outside the layers whose variables are not trained, with as many entries as a list of
    layers, and whose variables have the names and shapes of the variables of the layers with the same indices.
    """
    layers: dict[str, dict[tuple[int, str], tuple[int, ...]]] = {}
    others: dict[str, dict[tuple[int, str], tuple[int, ...]]] = {}
    for leaf in leaves:
        for match in re.finditer(r"/(\d+)/", leaf.path):
            path, key = leaf.path[: match.start()], (int(match[1]), leaf.path[match.end() :])
            if leaf.layer == (path, key[0]) and leaf.rows is None:
                layers.setdefault(path, {})[key] = leaf.shape
            elif leaf.layer is None and not leaf.trained:
                others.setdefault(path, {})[key] = leaf.shape
    return {
        f"{copy}/{index}/{name}": (path, index)
        for copy, have in others.items()
        for path, want in layers.items()
        if have.items() <= want.items() and {index for index, _ in have} == {index for index, _ in want}
        for index, name in have
    }


def open_forward(forward: Forward, leaves: tuple[ModelLeaf, ...]) -> Forward:
    """Trace `forward` again with one input per item of `leaves`, without jits and remats over several layers."""
    spanning = _spanning_remats(forward, leaves)
    parts: dict[int, list[int]] = {}
    for at, leaf in enumerate(leaves):
        parts.setdefault(leaf.source, []).append(at)
    num_sums = len(forward.names)
    updates: dict[int, int] = {}

    def retraced(values: list[jax.Array], data: list[jax.Array]) -> list[jax.Array]:
        args = [
            Chunks((values[at] for at in ats), (rows[0] for at in ats if (rows := leaves[at].rows)))
            if leaves[ats[0]].rows
            else values[ats[0]]
            for ats in parts.values()
        ]
        outs = interpret(forward.program, [*args, *data], lambda eqn: id(eqn) in spanning)
        flat = [whole(out) for out in outs[:num_sums]]
        for source, out in zip(forward.updates.values(), outs[num_sums:], strict=True):
            updates.update(enumerate(parts[source], start=len(flat)))
            flat += rows_of(out, [leaves[at].rows for at in parts[source]])
        return flat

    data = [shape_of(v.aval) for v in forward.program.inputs[len(forward.leaves) :]]
    arrays = [shape_of(forward.program.inputs[leaf.source].aval, leaf.shape) for leaf in leaves]
    program = _with_copies(inline(trace(retraced, arrays, data)[0]), updates)
    kept, _ = needed(program.eqns, program.outputs)  # unused equations would be assigned to the last stage
    program = program._replace(eqns=tuple(program.eqns[at] for at in kept))
    return forward._replace(program=program, leaves=leaves, updates=updates, opened_remat=bool(spanning))


def _with_copies(program: Program, updates: Mapping[int, int]) -> Program:
    """`program` with an equation for every new value of a variable: a copy of an input, a literal or a constant.

    Only equations have a stage. And without a copy, two leaves of the state would be one array, which is donated twice.
    The new value of a variable that does not change is the variable itself, and has no equation.
    """
    computed = {v for eqn in program.eqns for v in eqn.outvars}
    assigned = {
        at
        for at, leaf in updates.items()
        if not is_var(atom := program.outputs[at]) or (atom not in computed and atom is not program.inputs[leaf])
    }
    if not assigned:
        return program

    def copied(*args: jax.Array) -> list[jax.Array]:
        return [copy_p.bind(x) if at in assigned else x for at, x in enumerate(program.call(*args))]

    return trace(copied, *(shape_of(v.aval) for v in program.inputs))[0]


def with_marked_calls(loss_fn: LossFn, path: str) -> LossFn:
    """`loss_fn`, in which every call of a layer of the list marks its outputs with the number of the call.

    For a list that contains one layer object several times: its variables do not determine the call of an equation.
    """

    def marked(model: PyTree, batch: Batch) -> PyTree:
        numbers = itertools.count()
        before: dict[int, tuple[object, type]] = {}

        def mark(outputs: PyTree) -> PyTree:
            leaves, tree = jax.tree.flatten(outputs)
            return jax.tree.unflatten(tree, mark_p.bind(*leaves, call=next(numbers)))

        # object.__setattr__, because the __setattr__ of nnx would store the class as a new attribute.
        for layer in module_at(model, path):
            if isinstance(layer, nnx.Pytree) and id(layer) not in before:
                cls = type(layer)
                before[id(layer)] = (layer, cls)
                call = lambda self, *args, cls=cls, **kwargs: mark(cls.__call__(self, *args, **kwargs))  # noqa: E731
                object.__setattr__(layer, "__class__", type(cls.__name__, (cls,), {"__call__": call}))
        try:
            return loss_fn(model, batch)
        finally:
            for layer, cls in before.values():
                object.__setattr__(layer, "__class__", cls)

    return marked


def _place(path: str, places: Places) -> tuple[str | None, int | None]:
    """The innermost of `places` that contains the leaf at `path`, or (None, None)."""
    for end in (len(path), *(at.start() for at in reversed([*re.finditer("/", path)]))):
        if (place := places.get(path[:end])) is not None:
            index = path[end + 1 :].split("/")[0]  # children with numbers as names count as a list
            return (place[0], int(index)) if place[1] is None and index.isdigit() else place
    return None, None


def _spanning_remats(forward: Forward, leaves: Sequence[ModelLeaf]) -> set[int]:
    """The ids of the remat equations of `forward`, including those in jits, that use variables of several layers."""
    inputs, remats = forward.program.inputs, set()
    layers_of: dict[Var, set[Layer]] = {}
    for leaf in leaves:
        if (layer := leaf.layer) is not None:
            among = {layer, (layer[0], leaf.rows[1])} if leaf.rows else {layer}
            layers_of.setdefault(inputs[leaf.source], set()).update(among)

    def walk(eqns: Iterable[Eqn], layers_of: dict[Var, set[Layer]]) -> None:
        for eqn in eqns:
            sources = [layers_of.get(atom, set()) if is_var(atom) else set() for atom in eqn.invars]
            name = eqn.primitive.name
            if name in REMAT and len(set().union(*sources)) > 1:
                remats.add(id(eqn))
            if name in (*REMAT, *JIT):
                (body,) = bodies(eqn)
                walk(body.eqns, dict(zip(body.invars, sources, strict=True)))
            elif len(eqn.invars) == 1:  # a cast of a parameter still belongs to its layer
                layers_of |= dict.fromkeys(eqn.outvars, sources[0])

    walk(forward.program.eqns, layers_of)
    return remats
