"""Timelines: every action once and in order, the same step, files that parse, and costs for the search."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import jax
import numpy as np
import optax
import pytest

from flax_mesh.mpmd.runtime import search
from flax_mesh.mpmd.runtime.profile import (
    Timeline,
    chrome_trace,
    costs_of,
    measure_costs,
    trace_step,
    with_split_backward,
)
from flax_mesh.mpmd.schedules import Action, make_schedule
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, dependencies
from flax_mesh.mpmd.schedules.search import search_schedule
from flax_mesh.mpmd.schedules.simulate import StageCost, simulate
from flax_mesh.mpmd.schedules.validate import check_schedule
from flax_mesh.step.state import TrainState
from tests.benchmarks.overlap import load_nap, sleepy_pipeline
from tests.mpmd.runtime.pipelines import build, groups, make_net, make_small, net_batch, net_loss

pytestmark = pytest.mark.usefixtures("quick_unless_slow")

SVG = "{http://www.w3.org/2000/svg}"
BATCH = net_batch(8)
OPTIMIZER = optax.sgd(0.1)


def fresh(state: TrainState) -> TrainState:
    """A copy, for a step that donates it."""
    return TrainState(tuple(jax.device_put(np.asarray(x), x.sharding) for x in state.leaves), state.definition)


@pytest.fixture(scope="module")
def interleaved():
    pipeline = build(make_net, net_loss, BATCH, 4, OPTIMIZER, name="interleaved-1f1b")
    return pipeline, pipeline.init_state()


@pytest.fixture(scope="module")
def split():
    """A split backward without residuals, so that all results of W are donated."""
    pipeline = build(make_small, net_loss, BATCH, 4, OPTIMIZER, name="zb-h1", remat="full")
    return pipeline, pipeline.init_state()


@pytest.fixture(scope="module")
def wide():
    """Two devices per group."""
    mesh = groups(pp=2, dp=2)
    pipeline = build(make_small, net_loss, BATCH, 2, OPTIMIZER, mesh=mesh, rules=[(".*", ())], remat="full")
    return pipeline, pipeline.init_state()


def by_hand() -> Timeline:
    """Two groups, one microbatch: 0F 2 ms, 1F 2 ms, 1B 4 ms, 0B 4 ms, in sequence, with a gap of 4 ms."""
    schedule = make_schedule("gpipe", num_groups=2, num_microbatches=1)
    spans = {"0F0": (0.0, 2.0), "1F0": (2.0, 4.0), "1B0": (4.0, 8.0), "0B0": (12.0, 16.0)}
    return Timeline(
        schedule,
        tuple((action.stage, action, *span) for text, span in spans.items() for action in [Action.parse(text)]),
    )


@pytest.mark.slow
def test_every_stage_of_a_group_has_its_own_costs(interleaved):
    pipeline, state = interleaved
    costs = measure_costs(pipeline, state, BATCH, repeats=1)
    assert len(costs) == 4 and all(cost.forward > 0 and cost.backward > 0 and cost.weights == 0 for cost in costs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["split", "interleaved", "wide"])
def test_every_action_runs_once_in_the_order_of_its_group_and_the_step_is_the_same(name, request):
    pipeline, initial = request.getfixturevalue(name)
    plain, plain_metrics = pipeline.step(fresh(initial), BATCH)
    state, metrics, timeline = trace_step(pipeline, fresh(initial), BATCH)
    for group, row in enumerate(pipeline.schedule.rows):
        own = [event for event in timeline.events if event[0] == group]
        assert tuple(action for _, action, _, _ in own) == row
        assert all(start <= end for _, _, start, end in own)
        assert all(end <= start for (*_, end), (_, _, start, _) in pairwise(own))
    assert len(timeline.events) == sum(map(len, pipeline.schedule.rows))
    assert timeline.events[0][2] == 0 < timeline.span
    for actual, expected in zip(state.leaves, plain.leaves, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in plain_metrics.items()}


def test_the_trace_and_the_picture_contain_every_action_measured_and_simulated(split, tmp_path):
    pipeline, initial = split
    _, _, timeline = trace_step(pipeline, fresh(initial), BATCH)
    trace, picture = timeline.write(tmp_path / "step.json")
    loaded = json.loads(trace.read_text())
    spans = [entry for entry in loaded["traceEvents"] if entry["ph"] == "X"]
    for process in (0, 1):
        names = {(e["tid"], e["name"]) for e in spans if e["pid"] == process}
        assert names == {(g, str(action)) for g, row in enumerate(pipeline.schedule.rows) for action in row}
    assert loaded["otherData"]["schedule"] == "zb-h1"
    assert loaded["otherData"]["bubble"] == timeline.bubble
    root = ElementTree.fromstring(picture.read_text())
    text = " | ".join(part.text or "" for part in root.iter(f"{SVG}text"))
    assert "measured: " in text and f"bubble {timeline.bubble:.1%}" in text and "makespan" in text
    boxes = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class")]
    assert len(boxes) - 3 == 2 * len(timeline.events)  # three are in the legend


def test_the_trace_has_the_times_of_the_events_in_microseconds():
    timeline = by_hand()
    assert (timeline.span, timeline.overlap, timeline.bubble) == (16.0, 12 / 16, 1 - 12 / 32)
    assert costs_of(timeline) == (StageCost(2, 4, 0), StageCost(2, 4, 0))
    trace = chrome_trace(timeline)
    last = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "0B0" and e["pid"] == 0)
    assert (last["ts"], last["dur"], last["tid"], last["args"]) == (12e3, 4e3, 0, {"stage": 0, "microbatch": 0})
    assert trace["otherData"]["simulated_ms"] == 12


def test_the_path_of_the_picture_is_refused_for_the_trace(tmp_path):
    with pytest.raises(ValueError, match=r"use another suffix for the trace, such as .*step\.json"):
        by_hand().write(tmp_path / "step.svg")


def test_measuring_costs_keeps_the_state_and_the_search_accepts_them(split):
    pipeline, state = split
    before = [np.asarray(x) for x in state.leaves]
    costs = measure_costs(pipeline, state, BATCH, repeats=1)
    for old, new in zip(before, state.leaves, strict=True):
        np.testing.assert_array_equal(old, new)
    assert all(cost.forward > 0 and cost.weights > 0 and cost.transfer > 0 for cost in costs)
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        measure_costs(pipeline, state, BATCH, repeats=0)
    found = search_schedule(costs, None, num_microbatches=4, num_groups=2, seconds=0.2)
    assert simulate(found.schedule, costs).makespan <= simulate(pipeline.schedule, costs).makespan * (1 + 1e-9)


def test_the_search_measures_steps_or_uses_a_file_with_the_same_settings(split, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "SECONDS", 0.05)
    pipeline, initial = split
    monkeypatch.setattr(pipeline, "fuses", pipeline.fuses)
    said, file, before = [], tmp_path / search.FILE, pipeline.schedule

    def losses(steps):
        state, found = fresh(initial), []
        for _ in range(4):
            state, metrics = steps.step(state, BATCH)
            found.append(float(metrics["loss"]))
        return found

    plain = losses(pipeline)
    searched = r"searched for the measured stages: makespan [\d.]+ ms, [\d.]+% of the makespan of the f"
    for setting, damaged, text in (
        ("pp:2", "", searched),
        ("pp:2", "", re.escape(str(file))),
        ("pp:2", "0F0", searched),
        ("pp:4", "", searched),
    ):
        if damaged:
            file.write_text(file.read_text().replace(damaged, "0F9"))
        if setting == "pp:4":  # without W, a schedule that does not split its backward pass is as fast as any other
            monkeypatch.setattr(search, "costs_of_processes", lambda *_: [StageCost(1, 1, 0)] * 2)
        pipeline.use_schedule(before)
        steps = search.ScheduleSearch(pipeline, 8, tmp_path, setting, said.append)
        assert losses(steps) == plain and pipeline.schedule.name == search.SEARCHED
        assert pipeline.schedule.splits_backward
        assert re.match(f"schedule: {text}", said[-1]) and file.read_text().startswith(f"# {setting}\n")
    assert len(said) == 4
    pipeline.use_schedule(before)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_splitting_the_backward_only_adds_weight_actions(name):
    schedule = make_schedule(name, num_groups=3, num_microbatches=6)
    split = with_split_backward(schedule)
    check_schedule(split)
    done = {action for row in split.rows for action in row}
    assert done == {a for row in schedule.rows for a in row} | {
        Action("W", a.stage, a.microbatch) for row in schedule.rows for a in row
    }
    assert simulate(split).makespan <= simulate(schedule).makespan
    assert with_split_backward(split) is split


@pytest.mark.slow
def test_all_groups_are_busy_at_the_same_time():
    if reason := load_nap():
        pytest.skip(reason)
    pipeline, batch = sleepy_pipeline("1f1b", 50.0, 8)
    state = pipeline.init_state()
    for _ in range(2):
        state, _ = pipeline.step(state, batch)
    state, _, timeline = trace_step(pipeline, state, batch)
    jax.block_until_ready(state.leaves)
    moments = [(start + end) / 2 for _, _, start, end in timeline.events]
    busy = [{group for group, _, start, end in timeline.events if start < moment < end} for moment in moments]
    assert {0, 1, 2, 3} in busy
    middle = {action: (start + end) / 2 for _, action, start, end in timeline.events}
    for group, action, start, end in timeline.events:
        assert all(middle[other] < start for other in dependencies(action, 4)), action
        assert end - start >= 0.5 * (50.0 if action.kind == "F" else 100.0), (group, action)
