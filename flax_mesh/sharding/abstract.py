"""From a model and a rule table to the sharded abstract state, and to arrays initialized directly sharded."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.extend import core as jex
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.fields import check_types
from flax_mesh.jax_compat import short_tracer_errors
from flax_mesh.modes import check_variables, user_modes
from flax_mesh.sharding.annotations import annotations_of, followers, match_annotations, with_followers
from flax_mesh.sharding.explicit import made_on_auto_axes, normalize
from flax_mesh.sharding.initialize.run import initialized as initialized
from flax_mesh.sharding.memory import optimizer_memory_kinds, placed
from flax_mesh.sharding.optimizer import match_optimizer
from flax_mesh.sharding.rules import (
    Finding,
    PartitionRules,
    Policy,
    RuleMatch,
    Rules,
    apply_policy,
    as_rules,
    idle_axes,
    match_leaves,
)
from flax_mesh.text import array_text, path_lines
from flax_mesh.tree import PyTree, model_state, named_leaves
from flax_mesh.user_code import check_arguments

Model = TypeVar("Model", bound=type[nnx.Pytree])
Split: TypeAlias = tuple[nnx.GraphDef, nnx.State]
ATTRIBUTE = "partition_rules"  # attribute of a class that has a rule table
Make = Callable[[], PyTree]  # returns a model, (model, nnx.Optimizer), or a dict or list of modules


@check_types
def partitioned(
    rules: str | Iterable[tuple[str, object]],
    layers: str | Iterable[str] = (),
    axes: PartitionAxis = DEFAULT_AXES,
) -> Callable[[Model], Model]:
    """Class decorator: defines the rule table of a model, and the paths of its layer lists.

    `rules`, `axes` and `layers` are the arguments of PartitionRules. If an instance has an attribute `axes` that is a
    PartitionAxis, its table is resolved through that PartitionAxis.

    Example:
        >>> @fm.partitioned([("kernel", ("embed", "mlp")), (".*", ())])
        ... class Layer(nnx.Linear): ...
        >>> make = lambda: Layer(8, 8, rngs=nnx.Rngs(0))
        >>> fm.abstract_state(make, fm.create_mesh((2, 4), ("fsdp", "tp")))["kernel"].sharding.spec
        P('fsdp', 'tp')
    """
    table = PartitionRules(rules, axes, layers if isinstance(layers, str) else tuple(layers))

    def decorate(cls: Model) -> Model:
        setattr(cls, ATTRIBUTE, table)
        return cls

    return decorate


def partition_rules(model: object) -> PartitionRules:
    """The rule table of a model whose class is `@partitioned`, resolved through the model's own `axes`.

    Raises a ShardingError if the class has no table.

    Example:
        >>> @fm.partitioned([("kernel", ("embed", "mlp")), (".*", ())])
        ... class Layer(nnx.Linear): ...
        >>> fm.match_partition_rules(fm.partition_rules(Layer(8, 8, rngs=nnx.Rngs(0))), {"kernel": np.ones((8, 8))})
        {'kernel': P('fsdp', 'tp')}
    """
    rules = getattr(model, ATTRIBUTE, None)
    if rules is None:
        raise ShardingError(
            f'{type(model).__name__} has neither a rule table nor annotations. Pass rules="fsdp" to split every '
            "array on its largest dim, pass rules=PartitionRules([...]), or decorate the class with "
            "@partitioned(rules=[...])."
        )
    axes = getattr(model, "axes", None)
    rules = as_rules(rules, axes if isinstance(axes, PartitionAxis) else None)
    layers = model_layers(model)
    return rules if layers == rules.layers else PartitionRules(rules.table, rules.axes, layers)


def model_layers(model: object) -> tuple[str, ...]:
    """Paths of the layer lists and scanned stacks in the model's own table, without empty lists; () without a table."""
    rules = getattr(model, ATTRIBUTE, None)
    layers = () if rules is None else as_rules(rules).layers
    return tuple(path for path in layers if not isinstance(part := getattr(model, path, None), nnx.List) or len(part))


def model_axes(model: object) -> PartitionAxis:
    """The mesh axes of the logical axes: the attribute `axes` of the model, or else the axes of its table."""
    axes, rules = getattr(model, "axes", None), getattr(model, ATTRIBUTE, None)
    if isinstance(axes, PartitionAxis):
        return axes
    return DEFAULT_AXES if rules is None else as_rules(rules).axes


@check_types
def abstract_state(
    make: Make,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
    *,
    axes: PartitionAxis | None = None,
    on_mismatch: Policy = "error",
    min_size: int = 0,
    shard_optimizer_over: str | tuple[str, ...] = (),
    optimizer_memory: str = "device",
    dropped: list[Finding] | None = None,
) -> nnx.State:
    """The state of a model, or of a model and its optimizer, as ShapeDtypeStructs with shardings.

    `make` is only traced; nothing is allocated. The result is the layout of a state: initialization (`init_state`,
    `init_model`), steps (`init_train_state`, `make_train_step`) and `Checkpointer.restore` take it as an argument.

    Args:
        make: Returns an nnx.Module or another nnx.Pytree, or (model, nnx.Optimizer): the state then has the parts
            "model" and "optimizer". It may also return a dict or a list of modules. `mesh` is in context while it is
            traced.
        mesh: The mesh of the shardings. It may be an AbstractMesh, with which nothing can be initialized.
        rules: A rule table, a PartitionRules, or mesh axes such as "fsdp" (see PartitionRules), for the parameters. By
            default the model's own table (`@partitioned`), or else Flax's annotations on its Variables, whose names are
            mesh axes or logical axes. Rules without `layers` use the `layers` of the model's own table.
        axes: The mesh axes of each logical axis; by default the axes of the table.
        on_mismatch, min_size, dropped: As in `match_partition_rules`.
        shard_optimizer_over: Mesh axes such as "dp", over which parameters are replicated, that split the optimizer's
            arrays as well: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054).
        optimizer_memory: Where the optimizer's arrays that belong to a parameter are stored between steps: "device", or
            "pinned_host", the memory of the host. A step copies them to the devices and back. Scalars are on the
            devices.

    An optimizer array whose path ends in the path of a parameter follows this parameter, dim by dim if their shapes
    differ. Other optimizer arrays follow the table. So do arrays that are attributes of a module without a Variable
    around them: as in `nnx.state`, they are part of the state, and an optimizer with `wrt=nnx.Param` does not train
    them.

    Returns:
        An nnx.State with the structure of `nnx.state(make())`; leaves are ShapeDtypeStruct(shape, dtype, sharding=...).

    Raises:
        ShardingError: The model has no rules, leaves match no rule, or specs do not fit. Lists all leaves.
        TypeError: `make` is not a function, or returns something else.

    Example:
        >>> make = lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0))
        >>> abstract = fm.abstract_state(make, fm.create_mesh(), rules="fsdp")
        >>> abstract["kernel"].get_value().sharding.spec
        P(None, 'fsdp')
    """
    graphdef, state = abstract_split(make, mesh)
    match = _match(nnx.merge(graphdef, state), state, mesh, rules, axes, min_size, as_tuple(shard_optimizer_over))
    apply_policy(match.findings, on_mismatch, dropped)
    if isinstance(rules, str) and (idle := idle_axes(as_rules(rules, axes), mesh)):
        warnings.warn(f"rules={rules!r}: {idle}", stacklevel=3)
    if dropped is not None:
        dropped += match.replicated
    return lay_out(state, match.specs, mesh, optimizer_memory_kinds(state, mesh, optimizer_memory))


def lay_out(
    state: nnx.State,
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh,
    memory_kinds: Sequence[str | None] | None = None,
) -> nnx.State:
    """`state` as ShapeDtypeStructs; `specs` and `memory_kinds` in the order of `jax.tree.leaves`."""
    leaves, treedef = jax.tree.flatten(state)
    kinds = memory_kinds or [None] * len(leaves)
    shaped = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed(mesh, spec, kind))
        for leaf, spec, kind in zip(leaves, specs, kinds, strict=True)
    ]
    return jax.tree.unflatten(treedef, shaped)


def _match(
    modules: PyTree,
    state: nnx.State,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None,
    axes: PartitionAxis | None,
    min_size: int,
    over: tuple[str, ...],
) -> RuleMatch:
    """Specs of all leaves of `state`, the state of `modules`: one module, or {"model", "optimizer"}."""
    both, annotated = has_optimizer(modules), None
    model, parameters = (modules["model"], model_state(state)) if both else (modules, state)
    following = followers(parameters)
    leaves = [(path, leaf) for path, leaf in named_leaves(parameters) if path not in following]
    if rules is None and not hasattr(model, ATTRIBUTE) and annotations_of(parameters):
        table = PartitionRules([])
        match = match_annotations(parameters, mesh, axes or DEFAULT_AXES)
        if both:
            annotated = match_annotations(state["optimizer"], mesh, axes or DEFAULT_AXES)
    else:
        table = as_rules(rules if rules is not None else partition_rules(model), axes, model_layers(model))
        table = table.without_single_layers(leaves, model)
        match = match_leaves(table, leaves, mesh=mesh, min_size=min_size)
    match = match._replace(specs=with_followers(parameters, following, match.specs))
    if not both:
        return match
    optimizer = modules["optimizer"]
    of_optimizer = match_optimizer(
        optimizer, parameters, match.specs, table, mesh, min_size=min_size, over=over, annotated=annotated
    )
    return match._replace(
        specs=match.specs + of_optimizer.specs,
        findings=match.findings + of_optimizer.findings,
        replicated=match.replicated + of_optimizer.replicated,
    )


def abstract_split(make: Make, mesh: Mesh | AbstractMesh | None = None) -> Split:
    """Graph definition and abstract state of the result of `make()`; (model, optimizer) as {"model", "optimizer"}.

    Both belong to one call of `make`: metadata may differ between calls. Nothing is allocated. `nnx.state` of the
    merged module is not a substitute: Flax treats a ShapeDtypeStruct inside a list or a dict as a static value.
    """
    return trace_split(make, mesh)[1]


def trace_split(make: Make, mesh: Mesh | AbstractMesh | None = None) -> tuple[jex.ClosedJaxpr, Split]:
    """The closed jaxpr of `make()`, which computes the leaves, and the result of `abstract_split`."""
    graphdefs = []

    def split() -> nnx.State:
        graphdef, state = nnx.split(_made(make, mesh), graph=True)
        graphdefs.append(graphdef)
        return state

    with short_tracer_errors():
        jaxpr, state = jax.make_jaxpr(split, return_shape=True)()
    return jaxpr, (graphdefs[0], state)


def is_with_optimizer(result: object) -> bool:
    """Whether `make()` has returned (model, nnx.Optimizer)."""
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], nnx.Optimizer)


def has_optimizer(modules: object) -> bool:
    """Whether `modules` is {"model": ..., "optimizer": ...}: `make()` then returned (model, nnx.Optimizer)."""
    return isinstance(modules, dict) and isinstance(modules.get("optimizer"), nnx.Optimizer) and len(modules) == 2


def made_leaves(make: Make, mesh: Mesh | AbstractMesh | None = None) -> list[jax.Array]:
    """The leaves of the state of `make()`, in a trace."""
    return jax.tree.leaves(nnx.state(_made(make, mesh), graph=True))


@check_types
def init_state(make: Make, abstract: nnx.State) -> nnx.State:
    """The state of `make()` as arrays, initialized directly with the shardings of `abstract`.

    Arrays of layers that are alike are compiled once. No device stores more than its shards and the temporaries that
    initialize them. On CPUs an initializer returns the same bits on every mesh, except for sums over a split dim;
    other backends round as they do in any other program. See `initialized`.

    Raises:
        ShardingError: `abstract` is not the state of `make()`, or was made for an AbstractMesh.

    Example:
        >>> make = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        >>> abstract = fm.abstract_state(make, fm.create_mesh((8,), ("fsdp",)), rules="fsdp")
        >>> fm.init_state(make, abstract)["kernel"].sharding.shard_shape((8, 16))
        (8, 2)
    """
    return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(init_split(make, abstract)[1]))


@check_types
def init_model(make: Make, abstract: nnx.State) -> PyTree:
    """The model, or (model, optimizer), initialized directly with the shardings of `abstract`.

    Args:
        make: Returns an nnx.Module or (model, nnx.Optimizer); the function that `abstract` was made from.
        abstract: The layout, from `abstract_state(make, mesh, ...)`.

    Returns:
        The result of `make()`, with arrays that are placed on the mesh. See `init_state`, which returns the state.

    Raises:
        ShardingError: `abstract` is not the state of `make()`, or was made for an AbstractMesh.

    Example:
        >>> make = lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0))
        >>> model = fm.init_model(make, fm.abstract_state(make, fm.create_mesh(), rules="fsdp"))
        >>> model.kernel.sharding.spec, model.kernel.addressable_shards[0].data.shape
        (P(None, 'fsdp'), (64, 32))
    """
    modules = nnx.merge(*init_split(make, abstract))
    return (modules["model"], modules["optimizer"]) if has_optimizer(modules) else modules


def init_split(make: Make, abstract: nnx.State, check: Callable[[PyTree], None] = lambda modules: None) -> Split:
    """Graph definition and state of `make()`, as arrays with the shardings of `abstract`, in one trace.

    `check` may raise an error about the modules, with an optimizer as {"model", "optimizer"}, before anything compiles.
    """
    leaves = jax.tree.leaves(abstract)
    mesh, splits = mesh_of_leaves(leaves), []

    def split() -> list[jax.Array]:
        modules = _made(make, mesh)
        check(modules)
        graphdef, state = nnx.split(modules, graph=True)
        check_same_arrays(abstract, state)
        splits.append((graphdef, jax.tree.structure(state)))
        return jax.tree.leaves(state)

    if isinstance(mesh, AbstractMesh) or not all(isinstance(leaf.sharding, NamedSharding) for leaf in leaves):
        with short_tracer_errors():
            jax.eval_shape(split)
        raise ShardingError(
            "init_state needs a mesh of devices, but the abstract state was made for an AbstractMesh. Make it with a "
            "mesh from create_mesh(...)."
        )
    arrays = initialized(split, [leaf.sharding for leaf in leaves])
    return splits[0][0], jax.tree.unflatten(splits[0][1], arrays)


def mesh_of_leaves(leaves: Iterable[object]) -> Mesh | AbstractMesh | None:
    """The mesh of the first leaf that is on one; None for leaves without a mesh."""
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    return next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None)


def _made(make: Make, mesh: Mesh | AbstractMesh | None) -> PyTree:
    """The result of `make()`, in a trace; (model, optimizer) as a dict."""
    if not callable(make) or isinstance(make, nnx.Pytree):
        raise TypeError(
            f"make must be a function without arguments that returns a model, got {_type_text(make)}. Pass a function "
            "that creates it: its arrays are then initialized directly with their shardings."
        )
    check_arguments("make", make)
    eager_sharding = nnx.using_eager_sharding()
    with user_modes():
        modules = made_on_auto_axes(make, mesh)
    if is_with_optimizer(modules):
        modules = {"model": modules[0], "optimizer": modules[1]}
    if not isinstance(modules, nnx.Pytree | nnx.State | dict | list | tuple):
        raise TypeError(
            "make() must return an nnx.Module, (model, nnx.Optimizer), or a dict or list of modules, got "
            f"{_type_text(modules)}."
        )
    check_variables(modules)
    try:
        normalize(modules, eager_sharding)
    except TraceContextError:  # make() returned a module that exists already, which no trace may change
        modules = nnx.merge(*nnx.split(modules, graph=True), copy=True)
        normalize(modules, eager_sharding)
    return modules


def check_same_arrays(abstract: nnx.State, state: nnx.State) -> None:
    """Raises a ShardingError that names the arrays in which the abstract state and the state of `make()` differ."""
    want, have = dict(named_leaves(abstract)), dict(named_leaves(state))
    problems = [(path, "only in the abstract state") for path in want if path not in have]
    problems += [(path, "only in the state of make()") for path in have if path not in want]
    for path in want.keys() & have.keys():
        a, b = want[path], have[path]
        if not isinstance(getattr(a, "sharding", None), NamedSharding):
            problems.append((path, "no sharding on a mesh; make the abstract state with abstract_state(make, mesh)"))
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append((path, f"abstract {array_text(a)}, make() returns {array_text(b)}"))
    if problems:
        raise ShardingError(
            "make() and the abstract state must have the same arrays; these differ:\n"
            + "\n".join(path_lines(f"{path}: {problem}" for path, problem in sorted(problems)))
        )


def _type_text(value: object) -> str:
    if value is None or isinstance(value, jax.Array):
        return "None" if value is None else "an array"
    return f"an object of type {type(value).__name__}"
