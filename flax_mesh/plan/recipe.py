"""`plan`: the forecast of a recipe on a topology; `plan_step`: the forecast of any jitted step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_mesh.data.user_batches import abstract_batch
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.hardware import load_chip
from flax_mesh.jax_compat import kernels_without_devices
from flax_mesh.mpmd.runtime.search import SEARCH, SEARCHED
from flax_mesh.mpmd.schedules import Schedule, StageCost, search_schedule
from flax_mesh.mpmd.schedules.simulate import simulate
from flax_mesh.mpmd.split.split import StagedModel, bytes_of_groups
from flax_mesh.plan.advice import Given, certainty, memory_findings, summary, surprises
from flax_mesh.plan.forecast import (
    Estimate,
    Roles,
    Stated,
    estimate,
    memory_of,
    parts_of,
    time_of,
    timeline,
    traffic_of,
    waiting,
)
from flax_mesh.plan.pipeline import (
    StageEstimate,
    estimate_stages,
    pipeline_memory,
    stage_parts,
    stage_traffic,
    update_part,
)
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.results import Time
from flax_mesh.plan.stages import MakeProgram, Program, Stages, visit_stages
from flax_mesh.plan.topology import Topology, parse_topology, resolve_mesh, topology_of_devices
from flax_mesh.program.program import flops, trace
from flax_mesh.program.rewrite import inline
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.program import TrainProgram, split_model, train_program
from flax_mesh.recipe.resolve import Recipe, check, mesh_of, resolve_checked
from flax_mesh.recipe.target import axis_sizes, chip_target, local_target, without_groups
from flax_mesh.sharding.abstract import abstract_state
from flax_mesh.sharding.memory import is_on_host
from flax_mesh.step.state import TrainState, abstract_train_state
from flax_mesh.text import shown
from flax_mesh.tree import MODEL, OPTIMIZER, Constant, PyTree, named_leaves, shard_bytes
from flax_mesh.user_code import place_of, user_code


@check_types
def plan(config: TrainConfig, topology: Topology | str | None = None) -> Plan:
    """Forecast the memory, the time and the traffic of a recipe's training step, without compiling it.

    The step is traced and its shardings are propagated; nothing is allocated, and no device of the topology is needed.

    Args:
        config: A recipe's config.
        topology: A text such as "v5p:4x4x8", or a Topology. None: the devices that are here.

    Returns:
        A `Plan`.

    Raises:
        ConfigError: Settings are invalid, the topology is unknown, or the mesh does not fit it.

    Example:
        >>> from flax_mesh.plan import plan
        >>> from flax_mesh.train import load_recipe
        >>> found = plan(load_recipe("recipes/tiny.py"), "v5e:2x4")
        >>> found.fits
        True
    """
    check(config)
    return plan_for(config, *_hardware(config, topology))


def plan_for(
    config: TrainConfig, topology: Topology, sizes: Mapping[str, int], limit: int | None = None, batch: PyTree = None
) -> Plan:
    """`plan` of a checked config with these sizes of the mesh axes. `batch` as in `derive`."""
    return plan_recipe(resolve_checked(config, chip_target(sizes, topology.chip), batch), topology, limit)


def plan_recipe(recipe: Recipe, topology: Topology, limit: int | None = None) -> Plan:
    """`plan` of a recipe whose target is abstract; `limit` is the capacity of a device that the runtime reports."""
    with kernels_without_devices():
        if recipe.schedule is not None:
            return _pipelined(recipe, topology, limit)
        return plan_program(train_program(recipe), topology, limit)


def plan_program(program: TrainProgram, topology: Topology, limit: int | None = None) -> Plan:
    """`plan` of a program without groups. If its step was traced with its layout and batch, this trace is used."""
    recipe = program.recipe
    arguments, sizes = arguments_of(program), dict(recipe.mesh.shape)
    with kernels_without_devices(), user_code("loss_fn", place_of(recipe.loss_fn)):
        program.step.eval_shape(*arguments)  # `estimate` reuses the trace
    options = _options(recipe.step_options.compiler_options)
    estimated = estimate(program.step, arguments, sizes, topology.chip.platform, **options)
    roles = _roles(arguments, int(getattr(recipe.model, "vocab_size", 0) or 0))
    stated = _stated(recipe, program.num_parameters)
    given = Given(recipe.model, recipe.optimizer.settings, sizes)  # the sizes of a target may have -1
    forecast = _assemble(topology, sizes, estimated, roles, stated, given, limit)
    return replace(forecast, notes=_notes(recipe, topology, forecast.time))


def _options(compiler_options: Mapping[str, object] | None) -> dict[str, bool]:
    """The options of XLA that an estimate depends on, as keywords of `estimate`."""
    allows = (compiler_options or {}).get("xla_allow_excess_precision", True)
    return {"excess_precision": str(allows).lower() not in ("false", "0")}  # as XLA reads them


def arguments_of(program: TrainProgram) -> tuple[PyTree, ...]:
    """The abstract arguments of a step."""
    recipe = program.recipe
    return program.layout, abstract_batch(recipe.batch, recipe.mesh, recipe.rules.axes)


def plan_step(
    step: Callable[..., PyTree],
    arguments: Sequence[PyTree],
    hardware: Topology | str | None = None,
    *,
    tokens: int | None = None,
    flops: float | None = None,
    compiler_options: Mapping[str, object] | None = None,
) -> Plan:
    """Forecast a jitted function, such as the step of a custom training loop.

    Args:
        step: A function with `trace`, as `jax.jit` returns it.
        arguments: Its arguments as `jax.ShapeDtypeStruct`s whose shardings are NamedShardings on one mesh, which may be
            an AbstractMesh. A `TrainState` is accepted.
        hardware: A topology with as many devices as the mesh. None: the devices that are here.
        tokens: Tokens per step, for tokens per second.
        flops: FLOPs per step of all devices as the model states them, for the MFU.
        compiler_options: The options of XLA that were passed to `jax.jit`, of which JAX does not tell. The forecast
            counts `xla_allow_excess_precision`.

    Raises:
        ConfigError: The arguments have no mesh, several meshes, or another number of devices than the topology.
        TypeError: `step` has no `trace`.

    Example:
        >>> from flax_mesh.plan import plan_step
        >>> from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((8,), ("dp",), axis_types=(AxisType.Auto,))
        >>> split = NamedSharding(mesh, PartitionSpec("dp"))
        >>> x = jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=split)
        >>> plan_step(jax.jit(lambda x: x @ x.T), (x,), "v5e:2x4").memory.arguments
        524288
    """
    if not hasattr(step, "trace"):
        raise TypeError(f"step must be a function that jax.jit returned, got {shown(step)}.")
    devices = jax.devices() if hardware is None else []
    topology = topology_of_devices(devices) if hardware is None else named_topology(hardware)
    leaves = jax.tree.leaves(arguments)
    meshes = {x.sharding.mesh.abstract_mesh for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding)}
    if len(meshes) != 1:
        raise ConfigError(
            f"the arguments of the step must have NamedShardings on one mesh, but they have {len(meshes)} meshes; pass "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))"
        )
    (mesh,) = meshes
    sizes = resolve_mesh(topology, dict(mesh.shape))
    estimated = estimate(step, arguments, dict(mesh.shape), topology.chip.platform, **_options(compiler_options))
    limit = _limit(devices) if devices else None
    return _assemble(topology, sizes, estimated, _roles(arguments, 0), (tokens, flops), Given(), limit)


def named_topology(topology: Topology | str, hardware: str = "") -> Topology:
    """The topology of a text, which may name the chip of the file `hardware` too."""
    if isinstance(topology, Topology):
        return topology
    return parse_topology(topology, load_chip(hardware) if hardware else None)


def _hardware(config: TrainConfig, topology: Topology | str | None) -> tuple[Topology, dict[str, int], int | None]:
    """(topology, mesh, capacity that the runtime reports). Without a topology, for a run on the devices here."""
    if topology is not None:
        hardware = named_topology(topology, config.run.hardware)
        return hardware, resolve_mesh(hardware, without_groups(axis_sizes(config.mesh))), None
    target = local_target(config.mesh, config.run.platform)
    mesh = mesh_of(config, target)
    assert isinstance(mesh, Mesh)
    devices = list(mesh.devices.flat)
    hardware = topology_of_devices(devices, load_chip(config.run.hardware) if config.run.hardware else None)
    return hardware, dict(mesh.shape), _limit(devices)


def _limit(devices: Sequence[Any]) -> int | None:
    """Bytes that the runtime can allocate on a device; None if it does not report them, as on CPUs."""
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def _stated(recipe: Recipe, num_parameters: int) -> Stated:
    tokens, count = recipe.tokens_per_step, recipe.flops_per_token
    return tokens, None if tokens is None or count is None else tokens * count(num_parameters)


def _roles(arguments: Sequence[PyTree], vocabulary: int) -> Roles:
    """The category of every argument, in the order of the leaves."""
    kinds: list[str] = []
    shapes: set[tuple[int, ...]] = set()
    for argument in arguments:
        if not isinstance(argument, TrainState):
            kinds += ["batch"] * len(jax.tree.leaves(argument))
            continue
        for path, leaf in named_leaves(argument.to_nnx()):
            kind = _kind(path, leaf)
            kinds.append(kind)
            if kind == "parameters" and math.prod(leaf.shape) > 1:
                shapes |= {
                    tuple(sorted(leaf.shape)),
                    tuple(sorted(leaf.shape[1:])),
                    tuple(sorted((1, *leaf.shape[1:]))),
                }
    if not shapes:  # a custom loop: the shapes of parameters are not known
        state = [x for argument in arguments[:1] for x in jax.tree.leaves(argument)]
        kinds[: len(state)] = ["parameters"] * len(state)
        shapes = {tuple(sorted(x.shape)) for x in state}
    return Roles(tuple(kinds), frozenset(shapes), vocabulary)


def _kind(path: str, leaf: jax.ShapeDtypeStruct) -> str:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return "other state"
    if path.startswith(OPTIMIZER):
        return "optimizer"
    return "parameters" if path.startswith(MODEL) else "other state"


def _assemble(
    topology: Topology,
    shape: Mapping[str, int],
    estimated: Estimate,
    roles: Roles,
    stated: Stated,
    given: Given,
    limit: int | None,
) -> Plan:
    moments, arguments, host = timeline(estimated, roles), estimated.argument_bytes, estimated.host_bytes
    memory = memory_of(topology, moments, arguments, (arguments + estimated.profile.peak,), limit, host)
    parts = parts_of(estimated, topology)
    parts += waiting(topology, math.fsum(part.seconds for part in parts))
    time = time_of(topology, math.fsum(part.seconds for part in parts), parts, stated)
    traffic = tuple(traffic_of(estimated, topology))
    findings = (*memory_findings(memory, given), *surprises(estimated, topology))
    return Plan(topology, shape, memory, time, traffic, findings, summary(topology, memory, time, traffic, given))


def _notes(recipe: Recipe, topology: Topology, time: Time) -> tuple[str, ...]:
    experts = getattr(recipe.model, "num_experts", 0) > 0
    return (*recipe.notes, certainty(topology, time, experts=experts))


def _pipelined(recipe: Recipe, topology: Topology, limit: int | None) -> Plan:
    split, shape = split_recipe(recipe), recipe.target.sizes
    schedule, sizes = split.schedule, split.sizes
    stages = split.estimates(topology.chip.platform)
    parts, costs = stage_parts(topology, shape, schedule, stages)
    if recipe.pipeline.schedule == SEARCH:
        schedule = _searched(schedule, costs, recipe.schedule_memory)
    memory = pipeline_memory(topology, schedule, stages, sizes, limit, split.host)
    update = update_part(topology, schedule, stages, sizes, split.host, split.update_flops / topology.num_devices)
    simulated = simulate(schedule, costs)
    seconds = simulated.makespan + update.seconds
    wait = waiting(topology, seconds)
    computed = math.fsum(part.flops * part.times for part in parts) / recipe.num_groups + update.flops
    parts = [*parts, update, *wait]
    time = time_of(
        topology, seconds + math.fsum(part.seconds for part in wait), parts, _stated(recipe, split.num_parameters)
    )
    time = replace(time, flops=computed, bubble=simulated.bubble, schedule=schedule)
    traffic = stage_traffic(topology, shape, schedule, stages)
    given = Given(recipe.model, recipe.optimizer.settings, shape)
    findings = (*memory_findings(memory, given), *surprises(stages[0].backward, topology))
    text, notes = summary(topology, memory, time, traffic, given), _notes(recipe, topology, time)
    return Plan(topology, shape, memory, time, tuple(traffic), findings, text, notes)


class Split(NamedTuple):
    """The stages of a recipe, and the state of every group of its pipeline."""

    recipe: Recipe
    mesh: AbstractMesh  # of one group
    staged: StagedModel
    schedule: Schedule
    shardings: list[NamedSharding]  # of the leaves of the staged model
    sizes: Mapping[str, list[int]]  # category of the state -> bytes of every group, on its devices
    host: list[int]  # bytes of every group in the memory of the host
    update_flops: int  # of the products of the optimizer's update, over all groups
    num_parameters: int

    def visit(self, mesh: Mesh | AbstractMesh, make: MakeProgram[Program]) -> Stages[Program]:
        """`visit_stages` on the mesh of one group."""
        recipe = self.recipe
        return visit_stages(
            self.staged,
            self.schedule,
            recipe.batch,
            self.shardings,
            mesh,
            recipe.rules.axes,
            make,
            remat=recipe.pipeline.remat,
            seed=recipe.step_options.seed,
        )

    def estimates(self, platform: str) -> list[StageEstimate]:
        """F, B and W of every stage."""
        options, sizes = _options(self.recipe.step_options.compiler_options), self.recipe.target.sizes
        return estimate_stages(partial(self.visit, self.mesh), self.mesh, sizes, platform, **options)


def split_recipe(recipe: Recipe) -> Split:
    """The stages of a recipe, whose mesh is the abstract mesh of one group."""
    mesh, schedule = recipe.mesh, recipe.schedule
    assert isinstance(mesh, AbstractMesh) and schedule is not None
    staged = split_model(recipe, mesh)
    abstract = abstract_state(recipe.make, mesh, **vars(recipe.layout))
    state = abstract_train_state(recipe.make, abstract).to_nnx()
    named = named_leaves(state)
    model = [leaf for path, leaf in named if path.startswith(MODEL)]
    shardings = [model[leaf.source].sharding for leaf in staged.leaves]
    staged = staged.with_layout(mesh, [x.sharding.spec for x in model], recipe.rules.axes)
    sizes: dict[str, list[int]] = {}
    for kind in ("parameters", "optimizer", "other state"):
        leaves = [(path, x, shard_bytes(x) if _kind(path, x) == kind and not is_on_host(x) else 0) for path, x in named]
        sizes[kind] = bytes_of_groups(staged, schedule.stage_to_group, leaves)
    hosted = [(path, x, shard_bytes(x) if is_on_host(x) else 0) for path, x in named]
    host = bytes_of_groups(staged, schedule.stage_to_group, hosted)
    without_constants = named_leaves(nnx.filter_state(state, nnx.Not(Constant)))
    count = sum(math.prod(x.shape) for path, x in without_constants if _kind(path, x) == "parameters")
    products = _product_flops(recipe, staged.split_model[1])
    return Split(recipe, mesh, staged, schedule, shardings, sizes, host, products, count)


def _product_flops(recipe: Recipe, model: nnx.State) -> int:
    """FLOPs of the matrix products of the optimizer's update, such as Muon's, over the whole model."""
    trained = nnx.filter_state(model, recipe.optimizer.trained)
    parameters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trained)
    update = recipe.optimizer.transformation(model)
    program, _ = trace(update.update, parameters, jax.eval_shape(update.init, parameters), parameters)
    return sum(flops(eqn) for eqn in inline(program).eqns if eqn.primitive.name in ("dot_general", "scan"))


def _searched(first: Schedule, costs: Sequence[StageCost], memory_limit: int) -> Schedule:
    """The schedule that a run with `pipeline.schedule=search` would find, if its stages took the predicted times."""
    result = search_schedule(
        costs,
        memory_limit,
        num_microbatches=first.num_microbatches,
        num_groups=first.num_groups,
        stage_to_group=first.stage_to_group,
        seconds=1.0,
    )
    return replace(result.schedule, name=SEARCHED)
