"""The order in which each group runs its actions, of every named schedule. Pure Python.

A pattern returns the words of one group, such as F1: forward of its second stage. The n-th F1 is microbatch n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from re import fullmatch

from flax_mesh.mpmd.schedules.v_family import least_memory, v_rows
from flax_mesh.text import shown


def _after_warmup(warmup: int, num_microbatches: int) -> list[str]:
    warmup = min(warmup, num_microbatches)
    return ["F0"] * warmup + ["B0", "F0"] * (num_microbatches - warmup) + ["B0"] * warmup


def _interleaved(groups: int, group: int, microbatches: int, virtual: int) -> list[str]:
    """A group runs `groups` microbatches through one of its stages, then the next; backward in reverse order."""
    turns = [chunk for _ in range(microbatches // groups) for chunk in range(virtual) for _ in range(groups)]
    forward = [f"F{chunk}" for chunk in turns]
    backward = [f"B{virtual - 1 - chunk}" for chunk in turns]
    warmup = min(2 * (groups - group - 1) + (virtual - 1) * groups, len(turns))
    steady = [word for pair in zip(forward[warmup:], backward, strict=False) for word in pair]
    return forward[:warmup] + steady + backward[len(turns) - warmup :]


def _delayed_weights(warmup: int, delay: int, num_microbatches: int) -> list[str]:
    """`_after_warmup` in which every W comes `delay` microbatches after its B."""
    warmup = min(warmup, num_microbatches)
    words = ["F0"] * warmup
    for microbatch in range(num_microbatches):
        words.append("B0")
        words += ["W0"] * (microbatch >= delay) + ["F0"] * (microbatch + warmup < num_microbatches)
    return words + ["W0"] * min(delay, num_microbatches)


def _zb_v(groups: int, group: int, microbatches: int, virtual: int) -> list[str]:
    after = groups - group  # groups from this one to the last, both included
    rounds = max(microbatches, 2 * groups - 1)  # with fewer, `make_schedule` drops the words of missing microbatches
    ahead = after - 1  # forwards of the first stage minus forwards of the second during warmup
    return [
        *["F0"] * (2 * after - 1),  # until the first microbatch returns from the last group
        *["F1", "F0"] * group,
        *["F1", "B1", "W1"] * after,
        *["F0", "B0", "W0", "F1", "B1", "W1"] * (rounds - groups - ahead),
        *["B0", "W0", "F1", "B1", "W1"] * ahead,
        *["B0", "B1"] * group,
        *["B0", "W0"] * after,
        *["W1"] * group,
        *["W0"] * group,
    ]


def _dualpipe_v(groups: int, group: int, microbatches: int, virtual: int) -> list[str]:
    after = groups - group - 1  # groups after this one
    last = ["B1", "B0"] * (group + 1)
    done, late = last[: group + 1], last[group + 1 :]  # W of the `late` ones fills the gaps at the end
    delayed = [word.replace("B", "W") for word in late] + ["W0"] * after
    return [
        *["F0"] * (2 * after),
        *["F0", "F1"] * (group + 1),
        *["B1", "W1", "F1"] * after,
        *["F0", "B1", "W1", "F1", "B0", "W0"] * (microbatches - groups - after),
        *["B1", "W1", "F1", "B0", "W0"] * after,
        *(word for backward in done for word in (backward, backward.replace("B", "W"))),
        *late,
        *(word for weights in delayed[:after] for word in (weights, "B0")),
        *delayed[after:],
    ]


@dataclass(frozen=True)
class Kind:
    """A family of schedules, and the numbers for which it is defined."""

    pattern: Callable[[int, int, int, int], Sequence[str]]  # (groups, group, microbatches, stages per group) -> words
    virtual: int = 1
    fixed: bool = True  # `virtual` is the only valid number of stages per group
    folded: bool = False  # the second half of the stages is placed in reverse order
    needs: str = ""
    nearest: Callable[[int, int], int] = lambda groups, microbatches: microbatches
    memory: int = 0  # K of v-K


def _v_kind(limit: Callable[[int], int]) -> Kind:
    """A V schedule; `limit` is its memory limit as a function of the number of groups."""
    return Kind(lambda groups, group, count, virtual: v_rows(groups, count, limit(groups))[group], 2, folded=True)


def _multiple(groups: int, microbatches: int) -> int:
    return max(1, (microbatches + groups // 2) // groups) * groups


KINDS = {
    "gpipe": Kind(lambda groups, group, count, virtual: _after_warmup(count, count)),
    "1f1b": Kind(lambda groups, group, count, virtual: _after_warmup(groups - group, count)),
    # One more forward per transfer on the way to the last group.
    "eager-1f1b": Kind(lambda groups, group, count, virtual: _after_warmup(2 * (groups - group) - 1, count)),
    "interleaved-1f1b": Kind(_interleaved, 2, fixed=False, needs="a multiple of {}", nearest=_multiple),
    # Group g of 1F1B has memory for g activations to spare; with the warmup of eager-1f1b all groups have as much.
    "zb-h1": Kind(lambda groups, group, count, virtual: _delayed_weights(groups - group, group, count)),
    "zb-h2": Kind(lambda groups, group, count, virtual: _delayed_weights(2 * (groups - group) - 1, 2 * group, count)),
    "v-min": _v_kind(least_memory),
    "v-half": _v_kind(lambda groups: 2 * ((groups + 2) // 2)),
    "zb-v": Kind(_zb_v, 2, folded=True),
    "dualpipe-v": Kind(
        _dualpipe_v,
        2,
        folded=True,
        needs="at least 2 * {}",
        nearest=lambda groups, microbatches: max(microbatches, 2 * groups),
    ),
}


def kind_of(name: str) -> Kind:
    """The kind of a schedule. ValueError with the known names if there is none."""
    if name in KINDS:
        return KINDS[name]
    if match := fullmatch("v-([1-9][0-9]{0,5})", name):
        number = int(match[1])
        return replace(_v_kind(lambda groups: number), memory=number)
    close = get_close_matches(name, [*KINDS, "v-7"], n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"unknown schedule {shown(name)}{hint} (available: {', '.join(KINDS)} and v-K, K a number)")
