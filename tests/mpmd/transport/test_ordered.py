"""The ordered transport: all processes make the same calls in the same order, and no schedule deadlocks."""

from collections import defaultdict, deque

import jax
import pytest

from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, Action, dependencies, forward_schedule, make_schedule
from flax_mesh.mpmd.transport.ordered import OrderedPass, OrderedTransfer, order_transfers

AVAL = jax.ShapeDtypeStruct((2,), "float32")
NEEDS = {"dualpipe-v": lambda groups: 2 * groups, "interleaved-1f1b": lambda groups: groups}
SIZES = [
    (name, groups, count)
    for name in SCHEDULE_NAMES
    for groups in (2, 4)
    for count in (1, 4, 8)
    if count % NEEDS.get(name, lambda groups: 1)(groups) == 0
]


def schedule_of(name, groups, count):
    return make_schedule(name, num_groups=groups, num_microbatches=count)


def sends_of(schedule, owner):
    """The transfers of an action between processes: a value to the next stage, one from the first stage to the last,
    and the gradients of both. `owner[group]` is the process of a group."""
    last, group_of = schedule.num_stages - 1, schedule.stage_to_group
    edges = {(stage, stage + 1) for stage in range(last)} | ({(0, last)} if last > 1 else set())

    def sends(action):
        kind, stage, microbatch = action
        ends = [(a, b) if kind == "F" else (b, a) for a, b in sorted(edges) if kind in "FB"]
        return [
            OrderedTransfer((kind, microbatch, a, b), (kind, a, b), AVAL, group_of[a], group_of[b])
            for a, b in ends
            if a == stage and owner[group_of[a]] != owner[group_of[b]]
        ]

    return sends


def run_all(schedule, owner):
    """{process: its events in order}: ("call", key, sending group, receiving group) or ("do", action)."""
    sends = sends_of(schedule, owner)
    plan = order_transfers(schedule, sends)
    done = {}
    for process in sorted(set(owner)):
        events = done[process] = []

        def call(one, value, process=process, events=events):
            assert (value == one.key) == (owner[one.sender] == process)  # offered in time, by the sender only
            events.append(("call", one.key, one.sender, one.receiver))
            return one.key if owner[one.receiver] == process else None

        ordered_pass = OrderedPass(plan, call)
        inputs = defaultdict(list)  # action -> keys of its inputs
        for one in (one for action in schedule.order() for one in sends(action)):
            kind, microbatch, _, stage = one.key
            inputs[Action(kind, stage, microbatch)].append(one.key)
        for action in schedule.order():
            if owner[schedule.stage_to_group[action.stage]] == process:
                ordered_pass.before(action)
                for key in inputs[action]:
                    assert ordered_pass.take(key) == key  # a KeyError if it is received too late
                events.append(("do", action))
                for one in sends(action):
                    ordered_pass.offer(one.key, one.key)
        ordered_pass.end()
    return done


def rendezvous(schedule, done, owner):
    """Simulate one device per group: computations and transfers run in order, and calls are matched by number.

    Returns the keys of the values that arrived, and the groups that are blocked.
    """
    computing, moving = defaultdict(deque), defaultdict(deque)
    for process, events in done.items():
        for number, (_, key, *ends) in enumerate(event for event in events if event[0] == "call"):
            for group in (group for group in ends if owner[group] == process):
                moving[group].append((number, key, *ends))
        for action in (rest[0] for what, *rest in events if what == "do"):
            computing[schedule.stage_to_group[action.stage]].append(action)
    sends, computed, arrived = sends_of(schedule, owner), set(), []
    made = {one.key: action for action in schedule.order() for one in sends(action)}
    takes = defaultdict(list)
    for kind, microbatch, source, stage in made:
        takes[Action(kind, stage, microbatch)].append((kind, microbatch, source, stage))
    moves = True
    while moves:
        moves = False
        for queue in computing.values():
            action = queue[0] if queue else None
            near = dependencies(action, schedule.num_stages) if action else []
            if action and set(near) <= computed and set(takes[action]) <= set(arrived):
                computed.add(queue.popleft())
                moves = True
        for group, queue in moving.items():
            if queue and group == queue[0][2] and made[queue[0][1]] in computed:
                other = moving[queue[0][3]]
                if other and other[0] == queue[0]:
                    arrived.append(queue.popleft()[1])
                    other.popleft()
                    moves = True
    stuck = sorted(group for group in {*computing, *moving} if computing[group] or moving[group])
    return arrived, stuck


@pytest.mark.parametrize(("name", "groups", "count"), SIZES)
@pytest.mark.parametrize("groups_of_a_process", [1, 2])
def test_all_processes_make_the_same_calls_and_all_transfers_complete(name, groups, count, groups_of_a_process):
    owner = [group // groups_of_a_process for group in range(groups)]
    backward = schedule_of(name, groups, count)
    for schedule in (backward, forward_schedule(groups, count, backward.stage_to_group)):
        done = run_all(schedule, owner)
        calls = [[event for event in events if event[0] == "call"] for events in done.values()]
        transfers = [one for action in schedule.order() for one in sends_of(schedule, owner)(action)]
        assert all(made == calls[0] for made in calls)
        assert sorted(key for _, key, *_ in calls[0]) == sorted(one.key for one in transfers)
        assert bool(transfers) == (len(set(owner)) > 1)
        arrived, stuck = rendezvous(schedule, done, owner)
        assert stuck == [] and sorted(arrived) == sorted(one.key for one in transfers)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_missing_call_deadlocks(name):
    schedule, owner = schedule_of(name, 4, 8), list(range(4))
    done = run_all(schedule, owner)
    calls = [event for event in done[3] if event[0] == "call"]
    done[3].remove(next(event for event in calls[5:] if 3 not in event[2:]))  # process 3 neither sends nor receives it
    assert 3 in rendezvous(schedule, done, owner)[1]


def test_a_transfer_follows_only_actions_that_start_before_its_value_is_computed():
    """Group 1 starts a backward, which takes 2, before group 0 starts its last forward: both end at the same time."""
    schedule = schedule_of("1f1b", 2, 4)
    plan = order_transfers(schedule, sends_of(schedule, [0, 1]))
    times = schedule.unit_times()
    ends = [times[Action(one.key[0], one.key[2], one.key[1])][1] for _, one in plan.transfers]
    assert ends == sorted(ends)
    for due, one in plan.transfers:
        before = list(times)[:due]
        assert all(times[action][0] < times[Action(one.key[0], one.key[2], one.key[1])][1] for action in before)
