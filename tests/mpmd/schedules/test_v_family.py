"""V schedules at every memory limit: the makespans, periods and memory that were published."""

import re

import pytest

from flax_mesh.mpmd.schedules import Schedule, check_schedule, simulate
from flax_mesh.mpmd.schedules.v_family import idle_time
from tests.mpmd.schedules.examples import MAKESPANS, make

# Qi et al. (NeurIPS 2024): idle time of a group by groups and memory limit, from two microbatches per group on.
IDLE = {
    2: {4: 0},
    3: {4: 5, 5: 3, 6: 0},
    4: {4: 11, 5: 8, 6: 5, 7: 3, 8: 0},
    5: {6: 11, 7: 8, 8: 5, 9: 3, 10: 0},
    6: {6: 17, 7: 14, 8: 11, 9: 8, 10: 5, 11: 3, 12: 0},
    8: {8: 23, 9: 20, 10: 17, 11: 14, 12: 11, 13: 8, 14: 5, 15: 3, 16: 0},
}

FIRST_PASSES = {(4, 7), (5, 8), (5, 9), (6, 10), (6, 11), (8, 11), (8, 13), (8, 14), (8, 15)}  # 4 s each


ALL = [(groups, limit) for groups, row in IDLE.items() for limit in row]


@pytest.mark.parametrize(
    ("groups", "limit"), [pytest.param(*one, marks=pytest.mark.slow if one in FIRST_PASSES else ()) for one in ALL]
)
def test_the_period_of_a_v_schedule_is_the_published_one(groups, limit):
    assert idle_time(groups, limit) == IDLE[groups][limit]
    for microbatches in (2 * groups, 3 * groups + 1):
        schedule = make(f"v-{limit}", groups, microbatches)
        check_schedule(schedule, limit)
        assert schedule.stage_to_group == (*range(groups), *reversed(range(groups)))
        assert Schedule.parse(str(schedule)) == schedule
        assert simulate(schedule).period == 6 * microbatches + IDLE[groups][limit]


@pytest.mark.parametrize(("sizes", "limit"), [(sizes, k) for sizes, row in MAKESPANS.items() for k in row])
def test_the_makespan_of_a_v_schedule_is_the_published_one(sizes, limit):
    assert simulate(make(f"v-{limit}", *sizes)).makespan <= MAKESPANS[sizes][limit]


@pytest.mark.parametrize("groups", [2, 4, 7])
def test_v_min_and_v_half_store_a_third_and_a_half(groups):
    for name, stored in (("v-min", (groups + 4) // 3), ("v-half", (groups + 2) // 2)):
        schedule = make(name, groups, 3 * groups)
        check_schedule(schedule, 2 * stored)
        assert schedule.rows == make(f"v-{2 * stored}", groups, 3 * groups).rows


@pytest.mark.parametrize(("name", "needed"), [("v-3", "v-4"), ("v-9", "v-8")])
def test_a_memory_limit_outside_the_family_is_refused_with_the_nearest(name, needed):
    message = f"{name} on 4 groups requires v-4 to v-8: the number of activations per group; the nearest is {needed}"
    with pytest.raises(ValueError, match=re.escape(message)):
        make(name, 4, 8)


@pytest.mark.parametrize(("name", "idle"), [("1f1b", 9), ("zb-h1", 3), ("zb-v", 0)])
def test_the_period_is_the_longest_time_that_a_group_works(name, idle):
    """4 groups; 1F1B on group 0 starts first and ends last, and every group of ZB-V works without a pause."""
    per_microbatch = 6 if name == "zb-v" else 3
    assert simulate(make(name, 4, 8)).period == 8 * per_microbatch + idle
