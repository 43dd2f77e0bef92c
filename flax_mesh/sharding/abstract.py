"""From a model and a rule table to the sharded abstract state, and from there to arrays that are born sharded."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.jax_compat import short_tracer_errors
from flax_mesh.sharding.annotations import annotations_of, match_annotations
from flax_mesh.sharding.optimizer import match_optimizer
from flax_mesh.sharding.rules import (
    Finding,
    PartitionRules,
    Policy,
    RuleMatch,
    Rules,
    apply_policy,
    as_rules,
    match_leaves,
)
from flax_mesh.text import array_text
from flax_mesh.tree import named_leaves

Model = TypeVar("Model", bound=type[nnx.Module])
ATTRIBUTE = "partition_rules"  # where a class carries its table
Make = Callable[[], Any]  # returns a model, or (model, nnx.Optimizer)


def partitioned(
    rules: str | Iterable[tuple[str, Any]],
    layers: str | Iterable[str] = (),
    axes: PartitionAxis = DEFAULT_AXES,
) -> Callable[[Model], Model]:
    """Class decorator: the model carries its own rule table and the paths of its layer lists.

    The table is resolved through the attribute `axes` of an instance where that is a PartitionAxis.
    """
    table = PartitionRules(rules, axes, layers if isinstance(layers, str) else tuple(layers))

    def decorate(cls: Model) -> Model:
        setattr(cls, ATTRIBUTE, table)
        return cls

    return decorate


def partition_rules(model: Any) -> PartitionRules:
    """The table a model carries by `@partitioned`, through the model's own `axes`."""
    rules = getattr(model, ATTRIBUTE, None)
    if rules is None:
        raise ShardingError(
            f'{type(model).__name__} has neither a rule table nor annotations. Pass rules="fsdp" to split every '
            "array on its largest dim, pass rules=PartitionRules([...]), or decorate the class with "
            "@partitioned(rules=[...])."
        )
    axes = getattr(model, "axes", None)
    return as_rules(rules, axes if isinstance(axes, PartitionAxis) else None)


def model_layers(model: Any) -> tuple[str, ...]:
    """Paths of the layer lists and scanned stacks in the table that a model carries; () where it carries none."""
    rules = getattr(model, ATTRIBUTE, None)
    return () if rules is None else as_rules(rules).layers


def abstract_state(
    make: Make,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
    *,
    axes: PartitionAxis | None = None,
    on_mismatch: Policy = "error",
    min_size: int = 0,
    shard_optimizer_over: str | tuple[str, ...] = (),
    dropped: list[Finding] | None = None,
) -> nnx.State:
    """The state of what `make()` returns, as `ShapeDtypeStruct(shape, dtype, sharding)`; nothing is allocated.

    `make` may return (model, optimizer): the state then has the parts "model" and "optimizer". Parameters follow
    `rules`; by default the table the model carries, or else Flax's own annotations on its Variables, whose names are
    mesh axes or logical axes of `axes`. `rules` without `layers` take those of the model's own table. An optimizer
    leaf follows the parameter whose path ends its own, dim by dim where it has another shape (`match_optimizer`), or
    else the table. `shard_optimizer_over="dp"` splits the optimizer's arrays over that mesh axis as well, on which
    parameters are copies: ZeRO stage 1 (`split_over`). Whatever does not fit, of all leaves, follows `on_mismatch` and
    adds to `dropped`, as in `match_partition_rules`.
    """
    made = abstract_model(make)
    match = _match(made, mesh, rules, axes, min_size, as_tuple(shard_optimizer_over))
    apply_policy(match.findings, on_mismatch, dropped)
    if dropped is not None:
        dropped += match.replicated
    return lay_out(nnx.state(made), match.specs, mesh)


def lay_out(state: nnx.State, specs: Sequence[PartitionSpec], mesh: Mesh | AbstractMesh) -> nnx.State:
    """`state` as ShapeDtypeStructs; `specs` in the order of `jax.tree.leaves`."""
    leaves, treedef = jax.tree.flatten(state)
    shaped = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return jax.tree.unflatten(treedef, shaped)


def _match(
    made: Any,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None,
    axes: PartitionAxis | None,
    min_size: int,
    over: tuple[str, ...],
) -> RuleMatch:
    """Specs of all leaves of `nnx.state(made)`: the module's, or those of {"model", "optimizer"}."""
    model, own = made["model"] if isinstance(made, dict) else made, None
    if rules is None and not hasattr(model, ATTRIBUTE) and annotations_of(nnx.state(model)):
        table = PartitionRules([])
        match = match_annotations(nnx.state(model), mesh, axes or DEFAULT_AXES)
        if isinstance(made, dict):
            own = match_annotations(nnx.state(made["optimizer"]), mesh, axes or DEFAULT_AXES)
    else:
        table = as_rules(rules if rules is not None else partition_rules(model), axes, model_layers(model))
        match = match_leaves(table, named_leaves(nnx.state(model)), mesh=mesh, min_size=min_size)
    if not isinstance(made, dict):
        return match
    rest = match_optimizer(made["optimizer"], model, match.specs, table, mesh, min_size=min_size, over=over, own=own)
    return match._replace(
        specs=match.specs + rest.specs,
        findings=match.findings + rest.findings,
        replicated=match.replicated + rest.replicated,
    )


def abstract_model(make: Make) -> Any:
    """The module that `make()` returns, or {"model": ..., "optimizer": ...}, without allocating anything."""
    with short_tracer_errors():
        return nnx.eval_shape(lambda: _made(make))


def init_state(make: Make, abstract: nnx.State) -> nnx.State:
    """The state of `make()` as arrays, born with the shardings of `abstract`: one compilation, optimizer included.

    No device ever holds more than its own shards and what initialises them. Random initialisers give the same bits
    on every mesh (JAX's threefry is partitionable).
    """
    _check_same(abstract, nnx.state(abstract_model(make)))
    shardings = [leaf.sharding for leaf in jax.tree.leaves(abstract)]
    if any(isinstance(s.mesh, AbstractMesh) for s in shardings):
        raise ShardingError("init_state needs devices, and the abstract state was made for an AbstractMesh.")
    with short_tracer_errors():
        leaves = jax.jit(lambda: jax.tree.leaves(nnx.state(_made(make))), out_shardings=shardings)()
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def init_model(make: Make, abstract: nnx.State) -> Any:
    """As `init_state`, but merged: the model, or (model, optimizer)."""
    graphdef = nnx.graphdef(abstract_model(make))
    made = nnx.merge(graphdef, init_state(make, abstract))
    return (made["model"], made["optimizer"]) if isinstance(made, dict) else made


def _made(make: Make) -> Any:
    # Flax shards annotated variables as they are made, which needs a mesh and fails on names it does not map.
    with nnx.use_eager_sharding(False):
        made = make()
    return dict(zip(("model", "optimizer"), made, strict=True)) if isinstance(made, tuple) else made


def _check_same(abstract: nnx.State, made: nnx.State) -> None:
    want, have = dict(named_leaves(abstract)), dict(named_leaves(made))
    problems = [f"{p}: make() does not give it" for p in want if p not in have]
    problems += [f"{p}: the abstract state lacks it" for p in have if p not in want]
    for path in want.keys() & have.keys():
        a, b = want[path], have[path]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"{path}: abstract {array_text(a)}, make() gives {array_text(b)}")
    if problems:
        raise ShardingError("make() and the abstract state differ:\n" + "\n".join(sorted(problems)))
