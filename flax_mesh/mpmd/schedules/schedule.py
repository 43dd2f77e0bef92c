"""Pipeline schedules as data: which group runs which action, in which order. Pure Python.

A schedule has one row of actions per group. An action prints as `2F0`: stage 2, forward, microbatch 0. B is the
backward pass. If the schedule splits the backward pass, B computes the gradients of the stage's inputs and W the
gradients of its weights.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from re import fullmatch
from typing import NamedTuple

from flax_mesh.fields import check_types
from flax_mesh.mpmd.schedules.patterns import KINDS, Kind, kind_of
from flax_mesh.mpmd.schedules.v_family import least_memory
from flax_mesh.text import at_most, count_text, listed, shortened

SCHEDULE_NAMES = tuple(KINDS)

NUMBER = "[0-9]{1,9}"  # number of a stage, a group or a microbatch in the text of a schedule
_MOST_FORWARDS = 3_000_000  # actions in a schedule that is made: simulating it takes about 5 GB


class Action(NamedTuple):
    """F, B or W of one stage for one microbatch; prints as `2F0`."""

    kind: str  # "F", "B" or "W"
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> "Action":
        """The action that prints as `text`."""
        match = fullmatch(rf"({NUMBER})([FBW])({NUMBER})", text)
        if match is None:
            raise ValueError(
                f"{shortened(text)!r} is not an action; write stage, F, B or W, and microbatch, such as 2F0"
            )
        return Action(match[2], int(match[1]), int(match[3]))


class Deadlock(ValueError):
    """The schedule cannot finish. `stuck` has (group, next action, missing dependency) for every blocked group."""

    def __init__(self, name: str, stuck: list[tuple[int, Action, Action]]):
        self.stuck = stuck
        lines = [
            f"group {group} is blocked at {action}, which depends on {missing}" for group, action, missing in stuck
        ]
        super().__init__(f"{name}: deadlock: " + "; ".join(at_most(lines, 8)))


def dependencies(action: Action, num_stages: int) -> list[Action]:
    """The actions whose results `action` uses: first of the neighbouring stage, then of the same stage."""
    kind, stage, microbatch = action
    if kind == "W":
        return [Action("B", stage, microbatch)]
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    after = [Action("B", stage + 1, microbatch)] if stage + 1 < num_stages else []
    return [*after, Action("F", stage, microbatch)]


@dataclass(frozen=True)
class Schedule:
    """One row of actions per group. The checker, the simulator, the drawing and the executor use the same object.

    `stage_to_group[s]` is the group that runs stage s. The constructor validates nothing; use `check_schedule`.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    stage_to_group: tuple[int, ...]
    splits_backward: bool  # True: B computes input gradients only, W computes weight gradients

    @property
    def num_stages(self) -> int:
        return len(self.stage_to_group)

    @property
    def num_groups(self) -> int:
        return len(self.rows)

    @property
    def num_microbatches(self) -> int:
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    def group_problems(self, num_groups: int, axis: str) -> list[str]:
        """The reasons why the schedule cannot run on the groups along a mesh axis; [] if it can."""
        if self.num_groups == num_groups:
            return []
        text = f"schedule {self.name} has {self.num_groups} groups, the mesh has {num_groups} along {axis!r}"
        return [f"{text}; make both the same"]

    def needs(self, action: Action) -> list[Action]:
        """The `dependencies` of an action."""
        return dependencies(action, self.num_stages)

    def times(
        self, duration: Callable[[Action], float], delay: Callable[[int, int], float] = lambda sender, receiver: 0.0
    ) -> dict[Action, tuple[float, float]]:
        """{action: (start, end)}, sorted by start. Every action starts as early as its row and dependencies permit.

        `delay(sender, receiver)` is the transfer time between two stages; it is not called for stages of the same
        group. Raises Deadlock if the rows can never finish.
        """
        times: dict[Action, tuple[float, float]] = {}
        position, free = [0] * self.num_groups, [0.0] * self.num_groups
        waiting: dict[Action, list[int]] = {}
        queue = deque(range(self.num_groups))
        while queue:
            group = queue.popleft()
            row = self.rows[group]
            while position[group] < len(row):
                action = row[position[group]]
                needed = self.needs(action)
                missing = next((other for other in needed if other not in times), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(group)
                    break
                start = free[group]
                for other in needed:
                    remote = self.stage_to_group[other.stage] != group
                    start = max(start, times[other][1] + (delay(other.stage, action.stage) if remote else 0.0))
                times[action] = (start, start + duration(action))
                free[group] = times[action][1]
                position[group] += 1
                queue.extend(waiting.pop(action, ()))
        if waiting:
            stuck = [(g, self.rows[g][position[g]], missing) for missing, groups in waiting.items() for g in groups]
            raise Deadlock(self.name, sorted(stuck))
        return dict(sorted(times.items(), key=lambda item: item[1][0]))  # stable: dependencies stay first

    def order(self) -> list[Action]:
        """All actions by their start in `unit_times`: an order in which a single controller can dispatch them."""
        return list(self.unit_times())

    def unit_times(self) -> dict[Action, tuple[float, float]]:
        """`times` with durations of 1 for F, B and W, and of 2 for a B that is not split."""
        backward = 1.0 if self.splits_backward else 2.0
        return self.times(lambda action: backward if action.kind == "B" else 1.0)

    def __str__(self) -> str:
        """The name and the group of every stage on one line, then one row per line. `Schedule.parse` is the inverse."""
        head = f"{self.name} {','.join(map(str, self.stage_to_group))}"
        return "\n".join([head, *(" ".join(map(str, row)) for row in self.rows)])

    @staticmethod
    def parse(text: str) -> "Schedule":
        """The inverse of `str`. Empty lines and lines that start with # are skipped.

        A ValueError lists the words that are not actions, with the numbers of their lines.
        """
        lines = [(n, line.strip()) for n, line in enumerate(text.split("\n"), start=1)]
        lines = [(n, line) for n, line in lines if line and not line.startswith("#")] or [(1, "")]
        (number, head), *lines = lines
        match = fullmatch(rf"(\S+) ({NUMBER}(?:,{NUMBER})*)", head)
        if match is None:
            raise ValueError(
                f"line {number}: expected a name and the group of every stage, such as '1f1b 0,1,2,3', got "
                f"{shortened(head)!r}"
            )
        stage_to_group = tuple(int(group) for group in match[2].split(","))
        rows: list[list[Action]] = []
        problems: list[str] = []
        for number, line in lines:
            rows.append([])
            for word in line.split():
                try:
                    rows[-1].append(Action.parse(word))
                except ValueError as error:
                    problems.append(f"line {number}: {error}")
            if missing := {action.stage for action in rows[-1]} - set(range(len(stage_to_group))):
                listed_stages = shortened(listed(sorted(missing)))
                problems.append(
                    f"line {number}: stages are 0 to {len(stage_to_group) - 1}, the stages of the first line; "
                    f"found {listed_stages}"
                )
        if max(stage_to_group) >= len(rows):
            problems.append(f"stages are placed on groups up to {max(stage_to_group)}, but there are {len(rows)} rows")
        if problems:
            raise ValueError("\n".join(at_most(problems)))
        splits = any(action.kind == "W" for row in rows for action in row)
        return Schedule(match[1], tuple(map(tuple, rows)), stage_to_group, splits)


@check_types
def make_schedule(
    name: str, *, num_groups: int, num_microbatches: int, num_virtual_stages: int | None = None
) -> Schedule:
    """Makes a named pipeline schedule.

    Stage s runs on group s % num_groups. In the V schedules (v-min, v-half, v-K, zb-v) and dualpipe-v the second half
    of the stages is placed in reverse order, so that the last stage shares group 0 with the first. docs/schedules.md
    has the source, the makespan and the peak activations of every schedule.

    Args:
        name: One of SCHEDULE_NAMES: gpipe, 1f1b, eager-1f1b, interleaved-1f1b, zb-h1, zb-h2, v-min, v-half, zb-v or
            dualpipe-v. Or v-K, such as v-7: the V schedule whose groups store at most K activations, each of half the
            size.
        num_groups: Groups of devices (pipeline ranks).
        num_microbatches: Microbatches per step. interleaved-1f1b requires a multiple of `num_groups`, dualpipe-v at
            least twice `num_groups`.
        num_virtual_stages: Stages per group. None is 2 for interleaved-1f1b, the V schedules and dualpipe-v, else 1.
            Only interleaved-1f1b accepts other values.

    Returns:
        A `Schedule` with one row of actions per group.

    Raises:
        ValueError: If the name is unknown or the schedule is not defined for these sizes. The message contains the
            nearest valid number of microbatches.

    Example:
        >>> from flax_mesh.mpmd.schedules import make_schedule
        >>> print(make_schedule("1f1b", num_groups=2, num_microbatches=3))
        1f1b 0,1
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    kind = kind_of(name)
    num_groups, num_microbatches = operator.index(num_groups), operator.index(num_microbatches)  # integers of numpy too
    num_virtual_stages = kind.virtual if num_virtual_stages is None else operator.index(num_virtual_stages)
    if problems := _problems(name, kind, num_groups, num_microbatches, num_virtual_stages):
        raise ValueError("; ".join(problems))
    check_size(num_groups * num_virtual_stages, num_microbatches)
    stage_to_group = tuple(range(num_groups)) * num_virtual_stages
    if kind.folded:
        stage_to_group = (*range(num_groups), *reversed(range(num_groups)))
    rows: list[tuple[Action, ...]] = []
    for group in range(num_groups):
        stages = [stage for stage, owner in enumerate(stage_to_group) if owner == group]
        words = kind.pattern(num_groups, group, num_microbatches, num_virtual_stages)
        rows.append(_numbered(words, stages, num_microbatches))
    splits_backward = any(action.kind == "W" for action in rows[0])
    return Schedule(name, tuple(rows), stage_to_group, splits_backward)


def _problems(name: str, kind: Kind, num_groups: int, num_microbatches: int, num_virtual_stages: int) -> list[str]:
    """The reasons why the schedule is not defined for these numbers."""
    numbers = {"groups": num_groups, "microbatches": num_microbatches, "stages per group": num_virtual_stages}
    problems = [f"the number of {noun} must be at least 1, got {value}" for noun, value in numbers.items() if value < 1]
    if kind.fixed and num_virtual_stages != kind.virtual and num_virtual_stages >= 1:
        problems.append(
            f"{name} has {count_text(kind.virtual, 'stage')} per group, got {num_virtual_stages}; "
            "interleaved-1f1b supports other numbers"
        )
    if problems:
        return problems
    if (nearest := kind.nearest(num_groups, num_microbatches)) != num_microbatches:
        problems.append(
            f"{name} on {num_groups} groups requires a number of microbatches that is {kind.needs.format(num_groups)}, "
            f"got {num_microbatches}; the nearest is {nearest}"
        )
    if kind.memory and not (least := least_memory(num_groups)) <= kind.memory <= 2 * num_groups:
        problems.append(
            f"{name} on {count_text(num_groups, 'group')} requires v-{least} to v-{2 * num_groups}: the number of "
            f"activations per group; the nearest is v-{least if kind.memory < least else 2 * num_groups}"
        )
    return problems


def check_size(num_stages: int, num_microbatches: int) -> None:
    """Raises a ValueError if a schedule would have too many actions for the memory of this machine."""
    if (forwards := num_stages * num_microbatches) > _MOST_FORWARDS:
        raise ValueError(
            f"the schedule would have {forwards:,} forward actions, and at most {_MOST_FORWARDS:,} are supported; use "
            "fewer stages or microbatches"
        )


def forward_schedule(num_groups: int, num_microbatches: int, stage_to_group: Sequence[int]) -> Schedule:
    """Forward actions only, for evaluation: each group runs the last of its stages whose input is available."""
    rows: list[list[Action]] = [[] for _ in range(num_groups)]
    done = [0] * len(stage_to_group)  # microbatches that each stage has processed
    while done[-1] < num_microbatches:
        chosen: dict[int, int] = {}
        for stage, group in enumerate(stage_to_group):
            if done[stage] < (done[stage - 1] if stage else num_microbatches):
                chosen[group] = stage
        for group, stage in chosen.items():
            rows[group].append(Action("F", stage, done[stage]))
            done[stage] += 1
    return Schedule("forward", tuple(map(tuple, rows)), tuple(stage_to_group), splits_backward=False)


def _numbered(pattern: Iterable[str], stages: Sequence[int], num_microbatches: int) -> tuple[Action, ...]:
    """Actions of words such as F1 (forward of the group's second stage); words past the last microbatch are dropped."""
    counts: dict[str, int] = {}
    row: list[Action] = []
    for word in pattern:
        microbatch = counts.get(word, 0)
        counts[word] = microbatch + 1
        if microbatch < num_microbatches:
            row.append(Action(word[0], stages[int(word[1:])], microbatch))
    return tuple(row)
