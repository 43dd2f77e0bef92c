"""split_stages: any NNX model and its loss function, unmodified, as the stages of a pipeline. chain_stages: the same of
modules that are stages already."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.jax_compat import short_tracer_errors
from flax_mesh.mpmd.split import assign as cut
from flax_mesh.mpmd.split.assign import DATA, VARIABLES, CutError
from flax_mesh.mpmd.split.jaxpr import Program, Var, num_bytes
from flax_mesh.mpmd.split.trace import (
    Forward,
    Layer,
    ModelLeaf,
    layer_list,
    marked_calls,
    open_forward,
    split_leaves,
    trace_forward,
)
from flax_mesh.sharding.abstract import model_layers
from flax_mesh.step.loss import Batch, LossFn
from flax_mesh.text import array_text, bytes_text


@dataclass(frozen=True, eq=False)
class StagedModel:
    """A model cut into stages; print it to see them. Made by `split_stages`."""

    loss_fn: LossFn
    make: Callable[[], Any]  # gives the model with its initial values
    model: Any  # abstract
    wrt: Any
    layers: tuple[str, ...]
    mesh: AbstractMesh | None
    num_stages: int
    ranks: Mapping[Layer, int]  # place of every layer in the order of the calls
    bounds: tuple[int, ...]  # stage k has the ranks [bounds[k], bounds[k + 1])
    costs: tuple[int, ...]  # FLOPs of the forward pass of one microbatch, by rank
    leaves: tuple[ModelLeaf, ...]
    needs_full_remat: bool  # a remat spans several layers, so that a Pipeline takes remat="full", whatever it is told
    example: Batch  # shapes of the microbatch that it was cut for

    def stage_of(self, layer: Layer) -> int:
        """The stage of a layer, ("layers", 3)."""
        return _stage(self.bounds, self.ranks[layer])

    def cut(self, microbatch: Batch, *, seed: int = 0, train: bool = True) -> Forward:
        """The forward pass for microbatches of these shapes with its stages, traced once.

        `train=False`: in `eval()` mode, and without new values of variables.
        """
        shapes = shapes_of(microbatch)
        key = (tuple(jax.tree.leaves(shapes)), jax.tree.structure(shapes), seed if train else 0, train)
        if key not in self._cuts:
            forward = trace_forward(
                self.loss_fn, self.model, self.wrt, self.layers, self.mesh, shapes, seed=seed, train=train
            )
            opened = open_forward(forward, self.leaves, self.layers)
            self._cuts[key] = _cut(opened, self)
        return self._cuts[key]

    @cached_property
    def _cuts(self) -> dict[Any, Forward]:
        return {}

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The stages that use each leaf; its owner is the first. A leaf that no stage uses belongs to stage 0, or to
        the stage of its layer."""
        stages = self.cut(self.example).stages
        found = []
        for at, leaf in enumerate(self.leaves):
            layer = leaf.layer(self.layers)
            home = self.stage_of(layer) if layer is not None and layer in self.ranks else 0
            found.append(tuple(k for k, stage in enumerate(stages) if at in stage.inputs) or (home,))
        return tuple(found)

    def __str__(self) -> str:
        lines = []
        for k, stage in enumerate(self.cut(self.example).stages):
            ranks = range(self.bounds[k], self.bounds[k + 1])
            names = [f"{path}/{i}" for (path, i), rank in self.ranks.items() if rank in ranks]
            held = [leaf for leaf, users in zip(self.leaves, self.users, strict=True) if users[0] == k]
            share = sum(self.costs[r] for r in ranks) / max(sum(self.costs), 1)
            what = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" if names else f"calls {ranks}"
            lines.append(
                f"stage {k}: {what}; {bytes_text(sum(map(num_bytes, held)))} of state; {share:.0%} of the FLOPs"
            )
            lines += [f"  receives {array_text(v.aval)}, {bytes_text(num_bytes(v.aval))}" for v in stage.received]
        return "\n".join(lines)


def split_stages(
    loss_fn: LossFn,
    model: Any,
    batch: Batch,
    *,
    layers: str | Iterable[str] | None = None,
    num_stages: int,
    cuts: Sequence[int] | None = None,
    balance: Literal["flops", "count"] = "flops",
    wrt: Any = nnx.Param,
    mesh: Mesh | AbstractMesh | None = None,
) -> StagedModel:
    """Cut the forward pass of `loss_fn(model, batch)` into `num_stages` stages, by its layers.

    `model` is an nnx.Module, also an abstract one, or a function that makes one; `batch` is one microbatch, as arrays
    or ShapeDtypeStructs. `layers` is the path of the `nnx.List` or of the scanned stack to cut, "layers" or
    "encoder/layers", or several such paths; by default those of the table that the model carries by `@partitioned`, or
    else "layers", where that is a list. The order of the layers is that in which the model calls them. `cuts` holds the
    place of the first layer of every stage but the first; without it the heaviest stage is made as light as can be by
    `balance`: "flops", embedding and head included, or the "count" of layers. `mesh` is the mesh of a group, for the
    constraints in the model. `wrt` filters the variables that are trained.

    Raises CutError where the model has no such layers, fewer than stages, or cannot be cut there.
    """
    make, abstract = _abstract(model)
    layers = _layers_of(abstract) if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)
    if not layers:
        raise CutError("layers is empty; name the list or the stack to cut, such as layers='layers'.")
    num_calls = _calls_of_shared(abstract, layers)
    if num_calls:
        loss_fn = _marked(loss_fn, layers[0])
    around = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    shapes = shapes_of(batch)
    forward = trace_forward(loss_fn, abstract, wrt, layers, around, shapes)
    single = split_leaves(forward, layers)
    opened = open_forward(forward, single, layers)
    _check_effects(opened.program)
    _check_trained(single, wrt)
    order = _calls_in_order(opened.program, single, layers) if not num_calls else [("", i) for i in range(num_calls)]
    _check_layers(single, layers, order, num_stages)
    ranks = {layer: at for at, layer in enumerate(order)}
    labels = cut.label(opened.program, _input_ranks(opened.program, single, layers, ranks), len(order))
    costs = cut.costs(opened.program, labels, len(order))
    bounds = _bounds(costs, num_stages, cuts, balance)
    leaves = split_leaves(forward, layers, {layer: _stage(bounds, at) for layer, at in ranks.items()})
    staged = StagedModel(
        loss_fn=loss_fn,
        make=make,
        model=abstract,
        wrt=wrt,
        layers=layers,
        mesh=around,
        num_stages=num_stages,
        ranks=ranks,
        bounds=bounds,
        costs=tuple(costs),
        leaves=leaves,
        needs_full_remat=opened.opened_remat,
        example=shapes,
    )
    _check_states(staged)
    return staged


class _Chain(nnx.Module):
    """Modules called one after the other: the first on the batch, each of the others on what the one before returns."""

    def __init__(self, stages: Sequence[nnx.Module]):
        self.stages = nnx.List(stages)


def chain_stages(
    loss_fn: Callable[[Any, Batch], Any],
    stages: Callable[[], Sequence[nnx.Module]] | Sequence[nnx.Module],
    batch: Batch,
    *,
    wrt: Any = nnx.Param,
    mesh: Mesh | AbstractMesh | None = None,
) -> StagedModel:
    """A StagedModel of modules, one a stage: `loss_fn(outputs of the last, batch)` gives what a LossFn gives.

    `stages` may be a function that makes them. Every stage takes one argument, any pytree, and must have variables.
    Raises CutError that names the stage which cannot take what it is given.
    """
    make = stages if callable(stages) else lambda: stages

    def loss_of(model: _Chain, batch: Batch) -> Any:
        value = batch
        for k, stage in enumerate(model.stages):
            try:
                value = stage(value)
            except (TypeError, ValueError) as error:
                given = jax.tree.map(array_text, value)
                reason = str(error).strip().splitlines()[0]
                raise CutError(f"stage {k}, {type(stage).__name__}, cannot take {given}: {reason}") from error
        return loss_fn(value, batch)

    found = make()
    if not found:
        raise CutError("stages is empty; give one module a stage.")
    return split_stages(
        loss_of,
        lambda: _Chain(make()),
        batch,
        layers="stages",
        num_stages=len(found),
        cuts=range(1, len(found)),
        wrt=wrt,
        mesh=mesh,
    )


def shapes_of(batch: Batch) -> Batch:
    """ShapeDtypeStructs without shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def _cut(opened: Forward, staged: StagedModel) -> Forward:
    num_leaves, num_ranks = len(staged.leaves), len(staged.costs)
    ranks = _input_ranks(opened.program, staged.leaves, staged.layers, staged.ranks)
    labels = cut.label(opened.program, ranks, num_ranks)
    program, labels = cut.drop_marks(opened.program, labels)
    stages = [_stage(staged.bounds, rank) if rank >= 0 else rank for rank in labels]
    stages, makers = cut.settle(program, stages, staged.num_stages, opened.updates)
    is_data = [at >= num_leaves for at in range(len(program.inputs))]
    found = cut.stage_programs(program, stages, makers, staged.num_stages, is_data)
    return opened._replace(program=program, stages=found)


def _stage(bounds: Sequence[int], rank: int) -> int:
    return next(k for k in range(len(bounds) - 1) if rank < bounds[k + 1])


def _input_ranks(
    program: Program, leaves: Sequence[ModelLeaf], layers: Sequence[str], ranks: Mapping[Layer, int]
) -> dict[Var, int]:
    """Rank of every input; a layer that is never called, or stands in the list several times, has none."""
    found = dict.fromkeys(program.inputs, DATA)
    for leaf, v in zip(leaves, program.inputs, strict=False):
        layer = leaf.layer(layers)
        found[v] = ranks.get(layer, VARIABLES) if layer else VARIABLES
    return found


def _calls_in_order(program: Program, leaves: Sequence[ModelLeaf], layers: Sequence[str]) -> list[Layer]:
    owners = zip(program.inputs, (leaf.layer(layers) for leaf in leaves), strict=False)
    layer_of = {v: layer for v, layer in owners if layer is not None}
    return cut.layer_order(program, layer_of, program.inputs[len(leaves) :])


def _abstract(model: Any) -> tuple[Callable[[], Any], Any]:
    """What makes the module, and the abstract module, of a module or of a function that makes one."""
    if not isinstance(model, nnx.Module):
        with nnx.use_eager_sharding(False), short_tracer_errors():
            return model, nnx.eval_shape(model)
    graphdef, state = nnx.split(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return lambda: nnx.merge(graphdef, state, copy=True), nnx.merge(graphdef, shapes)


def _calls_of_shared(model: Any, layers: Sequence[str]) -> int:
    """Number of places in the list, where one layer object stands in several of them; else 0."""
    for path in layers:
        try:
            found = layer_list(model, path)
        except (AttributeError, IndexError, TypeError):
            raise CutError(f"layers={path!r}: {type(model).__name__} has nothing there. {_lists_text(model)}") from None
        modules = [id(item) for item in found if isinstance(item, nnx.Module)] if isinstance(found, nnx.List) else []
        if len(set(modules)) < len(modules):
            if len(layers) > 1:
                raise CutError(f"layers={path!r} holds one layer several times; cut it as the only list, not {layers}.")
            return len(modules)
    return 0


def _layers_of(model: Any) -> tuple[str, ...]:
    """The layers of a model that `split_stages` is not told: those of its table, or else the list `layers`."""
    if found := model_layers(model):
        return found
    own = getattr(model, "layers", None)
    if isinstance(own, nnx.List) and any(isinstance(item, nnx.Module) for item in own):
        return ("layers",)
    # A module `layers` may be a scanned stack or anything else: nothing in it says which dim is of the layers.
    what = "its `layers` is no list" if own is not None else "it has no list `layers`"
    modules = sorted(
        name for name, value in vars(model).items() if isinstance(value, nnx.Module) and not isinstance(value, nnx.List)
    )
    raise CutError(
        f"the layers of {type(model).__name__} must be named: it carries no table that names them, and {what}. Name "
        "the list or the scanned stack to cut, by split_stages(..., layers=...) or @partitioned(..., layers=...) on "
        f"the class. {_lists_text(model)} It has modules at {', '.join(map(repr, modules)) or 'no path'}."
    )


def _lists_text(model: Any) -> str:
    paths = sorted(
        "/".join(map(str, path)) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.List) and len(node)
    )
    return f"It has lists at {', '.join(map(repr, paths)) or 'no path'}."


def _marked(loss_fn: LossFn, path: str) -> LossFn:
    def marked(model: Any, batch: Batch) -> Any:
        with marked_calls(model, path):
            return loss_fn(model, batch)

    return marked


def _bounds(costs: Sequence[int], num_stages: int, cuts: Sequence[int] | None, balance: str) -> tuple[int, ...]:
    if cuts is None:
        if balance not in ("flops", "count"):
            raise CutError(f"balance must be 'flops' or 'count', got {balance!r}.")
        return tuple(cut.balance(costs if balance == "flops" else [1] * len(costs), num_stages))
    bounds = (0, *cuts, len(costs))
    if len(cuts) != num_stages - 1 or any(a >= b for a, b in pairwise(bounds)):
        raise CutError(
            f"cuts={list(cuts)} must be {num_stages - 1} rising numbers between 1 and {len(costs) - 1}: the first "
            f"layer of every stage but the first, of {len(costs)} layers."
        )
    return bounds


def _check_effects(program: Program) -> None:
    """CutError for what must happen in one order over all stages: nothing keeps programs of several groups in step."""
    ordered = sorted({eqn.primitive.name for eqn in program.eqns if any("Ordered" in str(e) for e in eqn.effects)})
    if ordered:
        raise CutError(
            f"the model has ordered effects ({', '.join(ordered)}), and the stages of a pipeline run at the same time. "
            "Use ordered=False, or take the callback out of the model."
        )


def _check_trained(leaves: Sequence[ModelLeaf], wrt: Any) -> None:
    if not any(leaf.trained for leaf in leaves):
        raise CutError(
            f"wrt={getattr(wrt, '__name__', wrt)} matches no variable of the model: nothing would be trained."
        )


def _check_layers(leaves: Sequence[ModelLeaf], layers: Sequence[str], order: Sequence[Layer], num_stages: int) -> None:
    if num_stages < 1:
        raise CutError(f"num_stages must be at least 1, got {num_stages}.")
    if len(order) < num_stages:
        have = sorted({layer for leaf in leaves if (layer := leaf.layer(layers))})
        raise CutError(
            f"layers={', '.join(layers)} has {len(have)} layers, of which the loss calls {len(order)}: too few for "
            f"{num_stages} stages. Use at most {len(order)} stages, or name another list of layers."
        )


def _check_states(staged: StagedModel) -> None:
    """Something to do in every stage, and every variable that changes used only where it changes."""
    forward = staged.cut(staged.example)
    stages, updates = forward.stages, forward.updates
    makers = {updates[at]: k for k, stage in enumerate(stages) for at in stage.outputs if at in updates}
    problems = []
    for at, (leaf, users) in enumerate(zip(staged.leaves, staged.users, strict=True)):
        if at in makers and any(k != makers[at] for k in users if at in stages[k].inputs):
            problems.append(
                f"{leaf.path} changes in stage {makers[at]} and is read in stages {', '.join(map(str, users))}: the "
                "microbatches there would not see its value of the microbatch before. Read and change it in one layer, "
                "or move the cut (cuts=)."
            )
    for k in range(staged.num_stages):
        if not stages[k].forward.eqns:
            problems.append(
                f"stage {k} has nothing to do: no result depends on its layers. Name a list of layers that the model "
                "calls, or a stack that it scans (layers=)."
            )
    if problems:
        raise CutError("\n".join(problems))
