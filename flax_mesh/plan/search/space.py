"""The layouts that a search chooses from: settings of a recipe on N devices, and the reasons that exclude others."""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from flax_mesh.axes import num_parts
from flax_mesh.mpmd.runtime.pipeline import REMAT_MODES
from flax_mesh.plan.advice import HIDDEN
from flax_mesh.plan.search.surrogate import Values
from flax_mesh.plan.topology import Topology, resolve_mesh
from flax_mesh.recipe.checks import check_config, check_on_mesh
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.overrides import apply_overrides, to_texts
from flax_mesh.recipe.resolve import Recipe, derive, rules_of
from flax_mesh.recipe.target import AXIS_NAMES, axis_sizes, chip_target
from flax_mesh.sharding.abstract import abstract_split
from flax_mesh.sharding.memory import DEVICE
from flax_mesh.sharding.rules import PartitionRules
from flax_mesh.text import mesh_text
from flax_mesh.tree import PyTree, model_state

MESH, BATCH, MICROBATCHES = "mesh.shape", "data.batch_size", "pipeline.num_microbatches"
SCHEDULE, STAGES, STAGE_REMAT = "pipeline.schedule", "pipeline.num_virtual_stages", "pipeline.remat"
REMAT, SHARD_OVER, SCAN = "model.remat", "optimizer.shard_over", "model.scan"
SEARCHED = (MESH, BATCH, MICROBATCHES, SCHEDULE, STAGES, STAGE_REMAT, REMAT, SHARD_OVER, SCAN)

ROWS = tuple(2.0**k for k in range(-3, 4))  # of the batch, per device
PARTS = (1, 2, 4, 8)  # microbatches without a pipeline, if the batch size is fixed
MOST_PARTS = 8  # microbatches per group of a pipeline
REMATS = ("none", "dots_with_no_batch_dims_saveable", "full")
# The first schedules are part of the space, the others are tried with the best layout only.
SCHEDULES: tuple[tuple[str, int], ...] = (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1))
MORE_SCHEDULES: tuple[tuple[str, int], ...] = (
    ("interleaved-1f1b", 4),
    ("zb-h2", 1),
    ("v-half", 2),
    ("zb-v", 2),
    ("search", 1),
)
IDLE = 3.0  # weight of the idle time of a pipeline among the features
TOO_LARGE = "parameters and optimizer alone need more memory than a device has"
MOST_UNROLLED = 16  # layers that are planned without a scan: tracing takes time in proportion

Settings = Mapping[str, str]


class Layout(NamedTuple):
    """One choice of the settings that are searched; "" leaves a setting as it is."""

    sizes: tuple[int, ...]  # in the order of AXIS_NAMES
    batch: int
    parts: int  # microbatches
    remat: str
    schedule: str
    virtual: int  # stages per group
    shard_over: str
    shards: int  # of the batch


@dataclass(frozen=True, eq=False)
class Space:
    """The layouts of a recipe on a topology.

    Attributes:
        config: The recipe. Settings that are not searched, and the settings in `fixed`, stay as they are in it.
        batch: The shapes of a batch of the recipe as it is.
        layouts: The layouts that may work, without duplicates.
        excluded: Reason that excludes other layouts -> their number.
        axes: The mesh axes that are searched.
    """

    config: TrainConfig
    topology: Topology
    batch: PyTree
    fixed: frozenset[str]
    layouts: tuple[Layout, ...]
    excluded: Counter[str]
    axes: tuple[str, ...]

    def settings(self, layout: Layout) -> Settings:
        """The overrides of a layout: the settings that differ from the config."""
        shape: dict[str, int] = dict(zip(AXIS_NAMES, layout.sizes, strict=True))
        texts = {
            MESH: mesh_text(shape) if self.topology.num_devices > 1 else "fsdp:1",
            BATCH: str(layout.batch),
            MICROBATCHES: str(layout.parts),
            REMAT: layout.remat,
            SHARD_OVER: layout.shard_over,
        }
        if layout.schedule:
            texts |= schedule_settings(layout.schedule, layout.virtual)
        return self.changed({key: text for key, text in texts.items() if text})

    def changed(self, settings: Settings) -> Settings:
        """Those that are not fixed and differ from the config."""
        return {key: text for key, text in settings.items() if key not in self.fixed and text != self._own[key]}

    @cached_property
    def _own(self) -> Settings:
        return to_texts(self.config)

    @property
    def own_rows(self) -> list[int]:
        """The row of the recipe's layout; empty if the recipe is for another number of devices."""
        data, pipeline = self.config.data, self.config.pipeline
        mine = (data.batch_size, pipeline.num_microbatches)
        rows = [row for row, layout in enumerate(self.layouts) if (layout.batch, layout.parts) == mine]
        return [row for row in rows if not self.settings(self.layouts[row])]

    def apply(self, settings: Settings) -> TrainConfig:
        return apply_overrides(self.config, overrides(settings))

    def batch_of(self, config: TrainConfig) -> PyTree:
        """The shapes of a batch with other settings; None if they follow from these. `make_batches` is not called."""
        if config.make_batches is None:
            return None
        rows = config.data.batch_size
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), self.batch)

    @cached_property
    def features(self) -> Values:
        """One row of numbers for each layout, in which the logarithms of time and memory are nearly linear."""
        return self._features(self.layouts)

    def nearest(self, layout: Layout) -> int:
        """The row of the layout whose axis sizes, and then whose other features, are the most similar ones."""
        distances = (self.features - self._features([layout])) ** 2
        sizes, others = distances[:, : len(AXIS_NAMES)].sum(1), distances[:, len(AXIS_NAMES) :].sum(1)
        return int(np.lexsort((others, sizes))[0])

    def _features(self, layouts: Sequence[Layout]) -> Values:
        """0 or 1 for each choice, and logarithms: of the axis sizes, of the batch, of the rows of a microbatch on one
        shard, and of the time of a pipeline over that without idle time, (S - 1) / (v M) + 1."""
        sizes = np.array([layout.sizes for layout in layouts], float)
        batch, parts, virtual, shards = np.array([(x.batch, x.parts, x.virtual, x.shards) for x in layouts], float).T
        idle = (sizes[:, 0] - 1) / (virtual * parts) + 1
        count = self.topology.num_devices
        scale = min(1.0, 3 / np.log2(max(2, count)))  # the axes of pods vary as much as the axes of 8 devices
        columns = [*scale * np.log2(sizes.T), np.log2(batch / count), np.log2(batch / shards / parts)]
        columns += [
            IDLE * np.log2(idle),
            *(np.array([x.remat == name for x in layouts], float) for name in self._remats),
        ]
        columns += [np.array([x.schedule == "zb-h1" for x in layouts], float)]
        return np.stack([*columns, np.array([bool(x.shard_over) for x in layouts], float)], 1)

    @cached_property
    def _remats(self) -> list[str]:
        return sorted({layout.remat for layout in self.layouts})

    def usual(self) -> list[Layout]:
        """The layout that splits everything over fsdp (or dp), and layouts that differ from it in one choice.

        Not all of them need to be in the space; see `nearest`.
        """
        count, config = self.topology.num_devices, self.config
        main = next((axis for axis in ("fsdp", "dp") if axis in self.axes), self.axes[-1] if self.axes else "fsdp")
        batch = config.data.batch_size if BATCH in self.fixed else count
        remats = [name for name in REMATS[::-1] if name in self._remats] or [""]
        center = Layout(_sizes(main, count), batch, 1, remats[0], "", 1, "", count)
        layouts = [center]
        for axis in self.axes:
            part = min(2 if axis == "pp" else 4, count)
            if axis != main and count % part == 0:
                layout = center._replace(sizes=_sizes(main, count // part, axis, part), shards=count // part)
                rows = batch if BATCH in self.fixed else 8 * part * layout.shards
                pipelined = layout._replace(
                    batch=rows, parts=8 * part, schedule=SCHEDULES[1][0], virtual=SCHEDULES[1][1]
                )
                whole = center._replace(sizes=_sizes(axis, count), shard_over="dp")
                layouts.append({"pp": pipelined, "dp": whole}.get(axis, layout))
        layouts += [center._replace(remat=name) for name in remats[1:]]
        return layouts if BATCH in self.fixed else [*layouts, center._replace(batch=4 * count)]


def _sizes(main: str, count: int, other: str = "", part: int = 1) -> tuple[int, ...]:
    return tuple({main: count, other: part}.get(axis, 1) for axis in AXIS_NAMES)


def overrides(settings: Settings) -> list[str]:
    """As they are typed: `mesh.shape=fsdp:8`."""
    return [f"{key}={value}" for key, value in settings.items()]


def make_space(config: TrainConfig, topology: Topology, fixed: Collection[str] = ()) -> Space:
    """All layouts of a recipe on a topology. The settings of `fixed` stay as they are in `config`."""
    over_fsdp = dict.fromkeys(AXIS_NAMES, 1) | {"fsdp": topology.num_devices}
    recipe = derive(config, chip_target(over_fsdp, topology.chip))
    rules, axes = recipe.rules, _useful_axes(config, recipe)
    state = StateBytes(recipe, topology)
    excluded: Counter[str] = Counter()
    candidates: list[Layout] = []
    too_large: list[tuple[float, Layout]] = []
    shapes = _factorings(topology.num_devices, axes)
    if MESH in fixed:
        shape = resolve_mesh(topology, axis_sizes(config.mesh))
        shapes, target = iter([shape]), chip_target(shape, topology.chip)
        rules = rules_of(config, target.abstract_mesh(config.mesh.axis_types))
    remats, sharded = _remats(config, fixed), SHARD_OVER in fixed or bool(config.optimizer.shard_over)
    for shape in shapes:
        sizes = tuple(shape.get(name, 1) for name in AXIS_NAMES)
        mesh = chip_target(shape, topology.chip).abstract_mesh(config.mesh.axis_types)
        schedules = _schedules(config, shape, fixed)
        over = [""] if shape.get("dp", 1) == 1 or sharded else ["", "dp"]
        shards = num_parts(rules.axes, shape, "batch")
        for batch, parts in _batches(config, topology, shape.get("pp", 1), shards, fixed):
            layouts = [Layout(sizes, batch, parts, remat, *schedule, zero, shards)
                       for remat, schedule, zero in product(remats, schedules, over)]  # fmt: skip
            if problem := _problem(config, mesh, rules, batch, parts):
                excluded[problem] += len(layouts)
                continue
            for layout in layouts:
                if problem := _schedule_problem(config, layout):
                    excluded[problem] += 1
                elif (least := state.least(shape, layout.shard_over)) > topology.chip.memory:
                    too_large.append((least, layout))
                else:
                    candidates.append(layout)
    if too_large and not candidates:  # the plan of one of them shows how much is missing
        smallest = min(least for least, _ in too_large)
        candidates = [layout for least, layout in too_large if least == smallest]
        too_large = [each for each in too_large if each[0] != smallest]
    if too_large:
        excluded[TOO_LARGE] += len(too_large)
    return Space(config, topology, recipe.batch, frozenset(fixed), tuple(candidates), excluded, axes)


def changes(space: Space, settings: Settings) -> Iterator[Settings]:
    """Changes tried with the best layout only: activations over tp, more schedules, remat of stages, and scan."""
    config, fixed = space.apply(settings), space.fixed
    axes = getattr(config.model, "axes", None)
    if axis_sizes(config.mesh)["tp"] > 1 and getattr(axes, "hidden_state_axis", "tp") is None:
        yield {**settings, HIDDEN: "tp"}
    if axis_sizes(config.mesh)["pp"] > 1 and SCHEDULE not in fixed:
        schedules = [schedule_settings(*each) for each in MORE_SCHEDULES if STAGES not in fixed or each[1] == 1]
        yield from (space.changed({**settings, **each}) for each in schedules)
    if axis_sizes(config.mesh)["pp"] > 1 and STAGE_REMAT not in fixed:
        current = config.pipeline.remat
        yield from ({**settings, STAGE_REMAT: value} for value in REMAT_MODES if value != current)
    scan = getattr(config.model, "scan", None)
    if isinstance(scan, bool) and getattr(config.model, "num_layers", 0) <= MOST_UNROLLED and SCAN not in fixed:
        yield {**settings, SCAN: str(not scan).lower()}


def schedule_settings(schedule: str, virtual: int) -> dict[str, str]:
    """The other schedules have one number of stages per group, their default."""
    return {SCHEDULE: schedule, STAGES: str(virtual) if schedule == "interleaved-1f1b" else "none"}


def _useful_axes(config: TrainConfig, recipe: Recipe) -> tuple[str, ...]:
    """The axes over which something is split: the batch, the sequence, or a dim that the model names with `dims()`."""
    has_sequence = any(len(x.shape) == 2 for x in jax.tree.leaves(recipe.batch))
    logical = ["batch", "sequence"] if has_sequence else ["batch"]
    rules = recipe.rules
    if config.rules is None and not config.mesh.rules:
        logical += [name for _, name, _ in recipe.dims()]
    used = {axis for name in logical for axis in rules.axes.mesh_axes(name)}
    used |= {axis.strip() for axis in config.mesh.rules.split("+")} | ({"pp"} if rules.layers else set())
    return tuple(axis for axis in AXIS_NAMES if axis in used)


def _factorings(count: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """All axis sizes whose product is `count`."""
    if not axes:
        yield from [{}] if count == 1 else []
        return
    for size in (size for size in range(1, count + 1) if count % size == 0):
        yield from ({axes[0]: size, **rest} for rest in _factorings(count // size, axes[1:]))


def _batches(
    config: TrainConfig, topology: Topology, groups: int, shards: int, fixed: Collection[str]
) -> Iterator[tuple[int, int]]:
    """(batch size, number of microbatches): divisors of the rows of one shard of the batch, and the recipe's own."""
    default = config.pipeline.num_microbatches
    tried = range(groups, MOST_PARTS * groups + 1) if groups > 1 else PARTS if BATCH in fixed else (1,)
    sizes = {max(1, round(rows * topology.num_devices)) for rows in ROWS}
    for batch in [config.data.batch_size] if BATCH in fixed else sorted(sizes):
        parts = {default} if MICROBATCHES in fixed else {default, *(n for n in tried if batch // shards % n == 0)}
        yield from ((batch, count) for count in sorted(parts))


def _remats(config: TrainConfig, fixed: Collection[str]) -> list[str]:
    remat = getattr(config.model, "remat", None)
    if REMAT in fixed or not isinstance(remat, str):
        return [""]
    before = check_config(config)

    def is_accepted(value: str) -> bool:
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=value))
        return set(check_config(changed)) <= set(before)

    return [value for value in dict.fromkeys((*REMATS, remat)) if is_accepted(value)]


def _schedules(config: TrainConfig, shape: Mapping[str, int], fixed: Collection[str]) -> list[tuple[str, int]]:
    if shape.get("pp", 1) == 1 or SCHEDULE in fixed:
        return [("", config.pipeline.num_virtual_stages or 1)]
    return [each for each in SCHEDULES if STAGES not in fixed or each[1] == 1]


def _problem(config: TrainConfig, mesh: AbstractMesh, rules: PartitionRules, batch: int, parts: int) -> str:
    """The reason that excludes all layouts of a mesh, a batch size and a number of microbatches, or ""."""
    if batch % parts:
        return f"{BATCH} is not divisible by {MICROBATCHES}"
    data = dataclasses.replace(config.data, batch_size=batch)
    pipeline = dataclasses.replace(config.pipeline, num_microbatches=parts)
    problems = check_on_mesh(dataclasses.replace(config, data=data, pipeline=pipeline), mesh, rules.axes)
    return problems[0].general if problems else ""


def _schedule_problem(config: TrainConfig, layout: Layout) -> str:
    num_groups, num_layers = layout.sizes[0], getattr(config.model, "num_layers", None)
    if isinstance(num_layers, int) and num_groups > 1 and num_groups * layout.virtual > num_layers:
        return f"model.num_layers={num_layers} is less than the number of stages"
    if layout.schedule == "interleaved-1f1b" and layout.parts % num_groups:
        return f"interleaved-1f1b needs {MICROBATCHES} that is a multiple of pp"
    return ""


class StateBytes:
    """The least bytes of parameters and optimizer on a device: every array is split over all axes but dp."""

    def __init__(self, recipe: Recipe, topology: Topology):
        _, state = abstract_split(recipe.make)
        self.topology, self.model, self.optimizer = topology, _bytes(model_state(state)), _bytes(state["optimizer"])
        if recipe.layout.optimizer_memory != DEVICE:
            self.optimizer = 0  # all but its scalars are in the memory of the host

    def least(self, shape: Mapping[str, int], shard_over: str) -> float:
        count = self.topology.num_devices
        copies = shape.get("dp", 1)
        return (self.model * copies + self.optimizer * (1 if shard_over else copies)) / count


def _bytes(tree: PyTree) -> int:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.number)]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)
