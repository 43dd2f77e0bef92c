"""`search_layouts`: the settings with which a recipe is fastest on a number of chips, by its plans."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.fields import check_types
from flax_mesh.hardware import CHIPS, Chip, load_chip
from flax_mesh.mesh.torus.shapes import best_shape, nearest_counts
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.recipe import plan_for
from flax_mesh.plan.search.space import SEARCHED, Settings, Space, changes, make_space, overrides
from flax_mesh.plan.search.surrogate import Values, regress
from flax_mesh.plan.topology import EXAMPLES, Topology, parse_topology, resolve_mesh
from flax_mesh.recipe.checks import check_config, check_functions
from flax_mesh.recipe.config import TrainConfig, tokens_per_step
from flax_mesh.recipe.resolve import check
from flax_mesh.recipe.target import axis_sizes, without_groups
from flax_mesh.text import first_line, listed
from flax_mesh.tree import PyTree

Rows = NDArray[np.intp]
PLANS = 24
FIRST = 2.4  # one plan in so many is of a usual or a random layout
LAST = 6  # one plan in so many is of a change that is tried with the best layout only
SCORED, NEAR = 4096, 1024  # layouts that are judged for each plan: at random, and next to each of the two best
SAME = 0.01  # relative difference of times that is less than the error of a plan
OPTIMISM = 0.2  # standard deviations below the mean at which a layout is judged that is not planned yet
COUNT = re.compile(r"([\w.-]+):([0-9]{1,7})")
GPUS_PER_HOST = 8


class Planned(NamedTuple):
    """A layout and its plan."""

    settings: Settings
    plan: Plan
    tokens: int  # per step; rows, if the tokens of a batch are not known
    unit: str = "tok"

    @property
    def overrides(self) -> list[str]:
        """The settings as they are typed: `mesh.shape=fsdp:8`."""
        return overrides(self.settings)

    @property
    def seconds_per_token(self) -> float:
        return self.plan.time.seconds / self.tokens

    @property
    def fullness(self) -> float:
        """Bytes at the peak over the capacity; 0 if that is not known."""
        memory = self.plan.memory
        return memory.peak / memory.capacity if memory.capacity else 0.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Layouts that fit first, by time; then the others, by memory."""
        return self.plan.fits is False, self.fullness if self.plan.fits is False else self.seconds_per_token


@dataclass(frozen=True)
class LayoutSearch:
    """The result of `search_layouts`.

    Attributes:
        topology: The hardware.
        planned: The layouts that were planned, best first: those that fit by tokens/s, then the others by memory.
        num_layouts: Number of layouts of the space, planned or not.
        excluded: Reason that excluded further layouts without a plan -> their number.
        axes: The mesh axes that were searched.
    """

    topology: Topology
    planned: tuple[Planned, ...]
    num_layouts: int
    excluded: Counter[str] = field(default_factory=Counter)
    axes: tuple[str, ...] = ()

    @property
    def best(self) -> Planned | None:
        """The fastest layout that fits; None if none does."""
        return self.planned[0] if self.planned and self.planned[0].plan.fits is not False else None


@check_types
def search_layouts(
    config: TrainConfig,
    chips: Topology | str,
    *,
    fixed: Collection[str] = (),
    plans: int = PLANS,
    say: Callable[[str], None] = lambda text: None,
) -> LayoutSearch:
    """Search the mesh, batch size, microbatches, pipeline and remat with which a recipe has the most tokens/s.

    All layouts whose dims divide and whose state fits are candidates. A few are planned, then a regression of the time
    and the memory over the plans so far selects the next one, until `plans` are made. The same arguments have the same
    plans, except plans of `pipeline.schedule=search`.

    Args:
        config: A recipe's config.
        chips: A number of chips, "v5p:512", a topology, "v5p:8x8x8", or a Topology.
        fixed: Settings that stay as they are in `config`, such as "data.batch_size".
        plans: The most plans to make; each takes one or two seconds. As many layouts may fail to be planned.
        say: Called with a line of progress after each plan.

    Returns:
        A `LayoutSearch`.

    Raises:
        ConfigError: Settings are invalid, the chips are unknown, or no layout works.

    Example:
        >>> from flax_mesh.plan.search import search_layouts
        >>> from flax_mesh.train import load_recipe
        >>> found = search_layouts(load_recipe("recipes/tiny.py"), "v5e:8", fixed=["data.batch_size"], plans=3)
        >>> len(found.planned), found.best is not None
        (3, True)
    """
    if problems := [*check_config(config), *check_functions(config), *_fixed_problems(fixed, plans)]:
        raise ConfigError(problems)
    chip = load_chip(config.run.hardware) if config.run.hardware else None
    topology = chips if isinstance(chips, Topology) else parse_chips(chips, chip)
    space = make_space(config, topology, fixed)
    search = _Search(space, plans, say)
    search.start()
    search.refine(plans - plans // LAST)
    search.try_changes()
    search.refine(plans)
    if not search.planned:
        reasons = [f"{count:,}: {reason}" for reason, count in space.excluded.most_common()]
        head = f"no layout over {listed(space.axes) or 'no axes'} works on {topology.text}; number of layouts, and why:"
        raise ConfigError(
            reasons or ["the batch, the sequence and the model are split over none of the axes"], head=head
        )
    return LayoutSearch(topology, tuple(_ranked(search.planned)), len(space.layouts), space.excluded, space.axes)


def _ranked(planned: list[Planned]) -> list[Planned]:
    """Best first. Of layouts that are as fast as the best one, the one with the smallest batch and the least memory."""
    ranked = sorted(planned, key=lambda each: each.rank)
    if ranked[0].plan.fits is False:
        return ranked
    limit = ranked[0].seconds_per_token * (1 + SAME)
    equal = [each for each in ranked if each.plan.fits is not False and each.seconds_per_token <= limit]
    best = min(equal, key=lambda each: (each.tokens, each.plan.memory.peak))
    return [best, *(each for each in ranked if each is not best)]


def _fixed_problems(fixed: Collection[str], plans: int) -> list[str]:
    unknown = [name for name in fixed if name not in SEARCHED]
    problems = [f"{name} is not a setting that is searched; those are {', '.join(SEARCHED)}" for name in unknown]
    return [*problems, *([f"plans must be at least 1, got {plans}"] if plans < 1 else [])]


class _Search:
    def __init__(self, space: Space, plans: int, say: Callable[[str], None]):
        self.space, self.plans, self.say = space, plans, say
        self.planned: list[Planned] = []
        self.of_rows: dict[int, Planned] = {}  # layouts of `planned` that are in the space, by their rows
        self.failures = 0
        self.open = np.ones(len(space.layouts), bool)
        self.random = np.random.default_rng(0)

    def start(self) -> None:
        """Plan the recipe as it is, the usual layouts, and random ones, until there are enough for a regression."""
        if not (layouts := self.space.layouts):
            return
        usual = [self.space.nearest(layout) for layout in self.space.usual()]
        for row in dict.fromkeys([*self.space.own_rows, *usual, *self.random.permutation(len(layouts))]):
            if self._is_done(max(1, int(self.plans / FIRST))):
                return
            self._plan_row(int(row))

    def refine(self, most: int) -> None:
        """Plan the layout that is probably the best one, again and again, until there are `most` plans."""
        while not self._is_done(most) and self.open.any() and self.of_rows:
            rows = self._candidates()
            self._plan_row(int(rows[np.argmin(self._scores(rows))]))

    def try_changes(self) -> None:
        """Plan the best layout with one more setting changed, one setting after another."""
        best = min(self.planned, key=lambda each: each.rank, default=None)
        for settings in changes(self.space, best.settings) if best else ():
            if not self._is_done(self.plans):
                self._plan(settings)

    def _is_done(self, most: int) -> bool:
        return len(self.planned) >= most or self.failures >= self.plans

    def _candidates(self) -> Rows:
        """Rows to score: all that are open, or those next to the best plans and a random sample."""
        rows = np.flatnonzero(self.open)
        if len(rows) <= SCORED:
            return rows
        features, candidates = self.space.features, [self.random.choice(rows, SCORED, replace=False)]
        for row in sorted(self.of_rows, key=lambda row: self.of_rows[row].rank)[:2]:
            distances = (features**2).sum(1) - 2 * features @ features[row]
            distances[~self.open] = np.inf
            candidates.append(np.argpartition(distances, NEAR)[:NEAR])
        return np.unique(np.concatenate(candidates))

    def _scores(self, rows: Rows) -> Values:
        """Optimistic log seconds per token of layouts that probably fit, or the log memory as long as none does."""
        known, wanted = self.space.features[list(self.of_rows)], self.space.features[rows]
        planned = self.of_rows.values()
        seconds, spread = regress(known, np.log([each.seconds_per_token for each in planned]), wanted)
        score = seconds - OPTIMISM * spread
        if not all(each.fullness for each in planned):
            return score
        memory, spread = regress(known, np.log([each.fullness for each in planned]), wanted)
        memory = memory - OPTIMISM * spread
        fits = memory <= 0
        return np.where(fits, score, score.max() + memory + 1) if fits.any() else memory

    def _plan_row(self, row: int) -> None:
        self.open[row] = False
        if self._plan(self.space.settings(self.space.layouts[row])):
            self.of_rows[row] = self.planned[-1]

    def _plan(self, settings: Settings) -> bool:
        config = self.space.apply(settings)
        try:
            plan = plan_layout(config, self.space.topology, self.space.batch_of(config))
        except (ConfigError, ShardingError) as error:
            self.failures += 1
            self.space.excluded[first_line(error)] += 1
            return False
        tokens = tokens_per_step(config)
        count, unit = (config.data.batch_size, "examples") if tokens is None else (tokens, "tok")
        self.planned.append(Planned(settings, plan, count, unit))
        best = min(self.planned, key=lambda each: each.rank)
        self.say(f"{len(self.planned)} of {self.plans} plans; best: {tokens_text(best)}")
        return True


def plan_layout(config: TrainConfig, topology: Topology, batch: PyTree = None) -> Plan:
    check(config)
    return plan_for(config, topology, resolve_mesh(topology, without_groups(axis_sizes(config.mesh))), batch=batch)


def tokens_text(planned: Planned) -> str:
    if planned.plan.fits is False:
        return f"needs {planned.fullness:.1f} times the memory"
    rate = 1 / planned.seconds_per_token
    return f"{rate:,.0f} {planned.unit}/s" if rate else "none"


def parse_chips(text: str, chip: Chip | None = None) -> Topology:
    """The topology of a text: `v5p:512`, or any text that `parse_topology` accepts.

    The slice of TPU chips is the one with the shortest sides, and with rings if there is such a one; more chips than a
    pod are equal slices. GPUs are on hosts of 8. `chip` (of `run.hardware`) may be named too.

    Raises:
        ConfigError: The chip is unknown, or no slices have this number of chips.
    """
    match = COUNT.fullmatch(text.strip().lower())
    known = {other.name.lower(): other for other in (*CHIPS, *([chip] if chip else []))}
    if match is None or match[1] not in known or known[match[1]].platform == "cpu":
        return parse_topology(text, chip)
    kind, count = known[match[1]], int(match[2])
    if not kind.torus:
        per_host = min(count, GPUS_PER_HOST, kind.domain or GPUS_PER_HOST)
        if not count or count % per_host:
            raise ConfigError(f"{text} must be a multiple of {per_host or GPUS_PER_HOST}, the GPUs of a host")
        return parse_topology(f"{match[1]}:{count // per_host}x{per_host}", chip)
    for slices in range(-(-count // math.prod(kind.pod)) or 1, count + 1):
        if count % slices == 0 and (shape := best_shape(kind, count // slices)):
            sides = "x".join(map(str, shape))
            return parse_topology(f"{match[1]}:{sides}" + (f"*{slices}" if slices > 1 else ""), chip)
        if count <= math.prod(kind.pod):
            break
    nearest = [f"{match[1]}:{number}" for number in nearest_counts(kind, count)]
    raise ConfigError(
        f"no slice of {match[1]} has {count} chips; the nearest: {listed(nearest)}. "
        f"Or name a topology, such as {EXAMPLES}"
    )
