"""An oracle for the search: whether any schedule at all ends by a deadline."""

import itertools


class Steps:
    """Whether a schedule of stages on groups can end by a deadline, for costs that are integers.

    Tries every choice of every group, idling included, at every step of time. A result that another group has produced
    can be used in the order in which it was produced, as `check_schedule` demands.
    """

    def __init__(self, costs, num_microbatches: int, memory: int, group_of: tuple[int, ...]):
        self.count, self.memory, self.group_of, self.stages = num_microbatches, memory, group_of, len(costs)
        self.lanes = [(kind, stage) for kind in "FBW" for stage in range(self.stages)]
        self.num_groups = 1 + max(group_of)
        self.of = [[i for i, (_, s) in enumerate(self.lanes) if group_of[s] == g] for g in range(self.num_groups)]
        self.length = [costs[s]["FBW".index(kind)] for kind, s in self.lanes]

    def finishes_by(self, deadline: int) -> bool:
        # Started per lane, (running lane, time left) per group, messages (group, kind, lane that receives it)
        states = {((0,) * len(self.lanes), ((-1, 0),) * self.num_groups, ())}
        for now in range(deadline):
            after = set()
            for state in states:
                options = [self.choices(state, group, deadline - now) for group in range(self.num_groups)]
                after.update(self.step(state, chosen) for chosen in itertools.product(*options))
            states = after
        done = (self.count,) * len(self.lanes)
        return any(started == done and not any(left for _, left in running) for started, running, _ in states)

    def done(self, state, lane: int) -> int:
        started, running, _ = state
        return started[lane] - any(now == lane and left for now, left in running)

    def sources(self, lane: int) -> list[int]:
        kind, stage = self.lanes[lane]
        if kind == "F":
            return [stage - 1] if stage else []
        return [lane - self.stages] if kind == "W" else [stage, *([lane + 1] if stage + 1 < self.stages else [])]

    def choices(self, state, group: int, time_left: int):
        """The lanes of which a group may start an action now; None: it starts nothing."""
        started, running, messages = state
        if running[group][1]:
            return [None]
        work = sum((self.count - started[lane]) * self.length[lane] for lane in self.of[group])
        found: list[int | None] = [None] if work < time_left else []
        if work > time_left:
            return found
        own = [s for s in range(self.stages) if self.group_of[s] == group]
        stored = sum(started[s] - self.done(state, 2 * self.stages + s) for s in own)
        for lane in self.of[group]:
            if started[lane] == self.count or (lane < self.stages and stored >= self.memory):
                continue
            sources = self.sources(lane)
            if any(self.done(state, source) <= started[lane] for source in sources):
                continue
            remote = any(self.group_of[self.lanes[source][1]] != group for source in sources)
            waiting = [to for receiver, kind, to in messages if (receiver, kind) == (group, self.lanes[lane][0])]
            if not (remote and waiting and waiting[0] != lane):
                found.append(lane)
        return found

    def step(self, state, chosen):
        started, running, messages = state
        started, messages, after = list(started), list(messages), []
        for lane in chosen:
            if lane is not None:
                started[lane] += 1
                received = next((message for message in messages if message[2] == lane), None)
                if received:
                    messages.remove(received)
        for (now, left), lane in zip(running, chosen, strict=True):
            now, left = (lane, self.length[lane]) if lane is not None else (now, left)
            after.append((now, left - 1) if left > 1 else (-1, 0))
            if left == 1 and now >= 0:
                kind, stage = self.lanes[now]
                to = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
                if 0 <= to < self.stages and self.group_of[to] != self.group_of[stage]:
                    messages.append((self.group_of[to], kind, to if kind == "F" else self.stages + to))
        return tuple(started), tuple(after), tuple(messages)
