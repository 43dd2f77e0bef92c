"""A plan as text and JSON, for plans that are written by hand."""

import dataclasses
import json
import re

import pytest

from flax_mesh.axes import PartitionAxis
from flax_mesh.models import DecoderConfig
from flax_mesh.mpmd.schedules import Schedule
from flax_mesh.plan.advice import Given, certainty, memory_findings, summary
from flax_mesh.plan.forecast import SLICES, waiting
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.report import MOST_ROWS, compiled_line, forecast_line, group_parts, measured_line, number, ranges
from flax_mesh.plan.results import Memory, Moment, Part, Time, Traffic
from flax_mesh.plan.topology import parse_topology
from flax_mesh.recipe.optimizers.config import OptimizerConfig
from flax_mesh.sharding.rules import Finding
from tests.plan.written import GIB, make_plan

PLANS = {
    "plain": make_plan(),
    "pipeline": make_plan("v5p:16x16x16*2", "pp:8,dp:2,fsdp:64,tp:8", num_moments=1000),
    "unknown capacity": make_plan("h100:2x8", "dp:2,fsdp:8", capacity=None),
    "does not fit": make_plan("v5e:16x16", "fsdp:32,tp:8", capacity=16 * 10**9),
    "cpu": make_plan("cpu:8", "fsdp:8"),
    "one device": make_plan("cpu:1", "dp:1"),
    "two cores": make_plan("v7x:4x4x4", "fsdp:16,tp:8"),
}
NOTHING = {"memory": Memory(None, 0, 0, 0, {}, (), (0,)), "time": Time(0.0, (), None, None, 0.0)}
PLANS["empty"] = dataclasses.replace(PLANS["plain"], **NOTHING, traffic=(), findings=())
all_plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)

# --- text ---


def check_lines(plan: Plan, *patterns: str) -> None:
    """The text has a line for each pattern, fits 80 columns, and ends with the summary."""
    text = plan.to_text()
    assert [pattern for pattern in patterns if not re.search(f"^{pattern}$", text, re.MULTILINE)] == []
    assert max(map(len, text.splitlines())) <= 80 and text.splitlines()[-1] == plan.summary


@all_plans
def test_the_text_fits_80_columns_and_ends_with_the_summary(plan):
    check_lines(plan)


def test_the_text_of_a_pipeline_has_all_numbers():
    check_lines(
        PLANS["pipeline"],
        r"v5p:16x16x16\*2: 8,192 devices, mesh pp:8,dp:2,fsdp:64,tp:8",
        r"fits: 75\.0 of 93\.0 GiB per device \(without a reserve of 2\.00 GiB\)",
        r"step 4\.35 s, 15,060 tok/s, 1\.84 tok/s per device, mfu 42\.1%, bubble 12\.0%",
        r"residuals +15\.00 +20\.0%",
        r"total +75\.00 +100\.0%",
        r"the peak is during layer 30 <dot>",
        r"group 0 of the pipeline is the fullest; .*",
        r"stages 0,7 F +32 +9\.00 +27\.9 +40\.0 +10\.0 +12\.0 +35\.0 +compute",
        r"stages 1-6 B +32 +18\.0 +55\.9 +60\.0 +20\.0 +24\.0 +70\.0 +compute",
        r"fsdp +all-gather +126 +12\.0 +11\.0 +0 +400",
        r"dp, fsdp +all-reduce +1 +3\.00 +1\.00 +6\.00 +150",
        r"1 finding:",
        r"- data\.batch_size=8: too small .*",
    )


@pytest.mark.parametrize(
    ("topology", "experts", "text"),
    [
        ("v5p:4x4x4", False, "dense models on one TPU slice, forecasts were off by -19% to +25%"),
        ("v5e:16x16*2", False, "12 measured steps of several TPU slices"),
        ("v5e:16x16*2", True, "4 measured steps of experts"),
        ("h200:1x1", False, "6 measured steps of dense models on one H100 or H200"),
        ("h100:1x1", False, "6 measured steps of dense models on one H100 or H200"),
        ("h200:1x1", True, "no measured step of experts on H200"),
        ("h200:1x8", False, "no measured step of 8 H200"),
        ("cpu:8", False, "no measured step of CPUs"),
    ],
)
def test_a_plan_states_how_far_forecasts_of_its_kind_were_off(topology, experts, text):
    time = Time(1.0, (), None, None, 0.0)
    assert text in certainty(parse_topology(topology), time, experts=experts)


def test_slices_wait_for_one_another_longer_the_more_they_are():
    waits = [waiting(parse_topology(text), 10.0) for text in ("v5e:16x16", "v5e:16x16*2", "v5e:16x16*32")]
    assert [part.seconds for parts in waits for part in parts] == pytest.approx([10 * SLICES, 50 * SLICES])


@pytest.mark.parametrize(("bubble", "limit"), [(0.4, "compute (60%)"), (0.6, "the idle time of the pipeline (60%)")])
def test_the_summary_names_what_takes_the_most_time(bubble, limit):
    part = Part("step", 1, 1e12, 1e9, 1.0, 0.1, 0.1, 1.0)
    time = Time(1.0, (part,), None, None, 0.0, bubble)
    plan = make_plan()
    text = summary(plan.topology, plan.memory, time, (), Given())
    assert text.startswith(f"The step is limited by {limit};"), text


OFFLOADED = OptimizerConfig(shard_over="dp", memory="pinned_host")


@pytest.mark.parametrize(
    ("largest", "given", "repair"),
    [
        ("optimizer", Given(None, OptimizerConfig(), {"dp": 2, "fsdp": 4}),
         "Raise fsdp in mesh.shape, or set optimizer.shard_over=dp, or set optimizer.memory=pinned_host"),
        ("optimizer", Given(None, OptimizerConfig(), {"fsdp": 8}),
         "Use more devices, or set optimizer.memory=pinned_host"),
        ("optimizer", Given(None, OFFLOADED, {"dp": 2, "fsdp": 4}), "Raise fsdp in mesh.shape"),
        ("parameters", Given(None, OFFLOADED, {"fsdp": 8, "tp": 1}), "Use more devices"),
        ("logits", Given(DecoderConfig()), "Set model.loss_chunk, so that the loss computes fewer logits at a time"),
        ("logits", Given(DecoderConfig(loss_chunk=64)), "Reduce model.loss_chunk=64, or split the vocabulary over tp"),
        ("activations", Given(DecoderConfig()), "Set model.remat=full, or reduce data.batch_size"),
        ("residuals", Given(DecoderConfig(remat="full"), None, {"fsdp": 4, "tp": 2}),
         "Set model.axes.hidden_state_axis=tp: activations between the layers are then split over tp; or reduce "
         "data.batch_size"),
        ("residuals", Given(DecoderConfig(remat="full", axes=PartitionAxis()), None, {"fsdp": 4, "tp": 2}),
         "Reduce data.batch_size, raise pipeline.num_microbatches, or split the sequence over sp"),
    ],
)  # fmt: skip
def test_a_repair_is_nothing_that_the_plan_follows_already(largest, given, repair):
    memory = Memory(1, 0, 0, 2, {largest: 2}, (), (2,))
    assert [finding.repair for finding in memory_findings(memory, given)] == [repair]


@pytest.mark.parametrize(
    ("remat", "help"), [("none", "more devices"), ("dots_saveable", "more devices or fewer recomputed layers")]
)
def test_without_remat_fewer_recomputed_layers_are_no_advice(remat, help):
    part = Part("step", 1, 1e12, 1e9, 1.0, 0.1, 0.1, 1.0)
    plan, given = make_plan(), Given(DecoderConfig(remat=remat))
    text = summary(plan.topology, plan.memory, Time(1.0, (part,), None, None, 0.0), (), given)
    assert text.endswith(f"; {help} would help.")


def test_the_verdict_names_what_is_missing():
    assert "does not fit: 75.0 of 14.9 GiB per device, 60.1 GiB too much" in PLANS["does not fit"].to_text()
    assert "unknown whether it fits: 75.0 GiB per device" in PLANS["unknown capacity"].to_text()
    assert [PLANS[name].fits for name in ("plain", "does not fit", "unknown capacity")] == [True, False, None]
    assert "no findings" in PLANS["empty"].to_text()


def test_long_tables_keep_the_rows_with_the_most_time():
    parts = [Part(f"part {chr(97 + i)}", 1, 1e12, 1e9, 1e-3 * i, 1e-3, 1e-3, 1e-3 * i) for i in range(20)]
    long = dataclasses.replace(PLANS["plain"], time=dataclasses.replace(PLANS["plain"].time, parts=tuple(parts)))
    check_lines(long, ".*and 9 more.*", "part t .*")
    assert "part i " not in long.to_text()
    traffic = tuple(Traffic("all-reduce", (f"a{i}",), 1, 1, 1, 1, 0.001) for i in range(20))
    check_lines(dataclasses.replace(PLANS["plain"], traffic=traffic), r"and 9 more +9\.00", f"a{MOST_ROWS - 2} .*")


def test_only_parts_with_equal_cells_are_one_row():
    parts = PLANS["pipeline"].time.parts
    names = [name for name, _ in group_parts(parts)]
    assert names == ["stages 0,7 F", "stages 0,7 B", "stages 1-6 F", "stages 1-6 B", "optimizer update"]
    changed = [part._replace(flops=1.0) if part.name == "stage 3 F" else part for part in parts]
    assert {"stages 1-2,4-6 F", "stage 3 F"} < {name for name, _ in group_parts(changed)}


def test_numbers_are_short():
    values = (0, 1234.4, 99.96, 12.34, 5, 0.0124, 1e-7)
    assert list(map(number, values)) == ["0", "1,234", "100", "12.3", "5.00", "0.012", "<0.001"]
    assert ranges([0, 2, 3, 4, 7, 8]) == "0,2-4,7-8" and ranges([5]) == "5"


def test_small_plans_are_printed_in_smaller_units():
    part = Part("step", 1, 2.5e9, 3 * 2**20, 1e-5, 2e-5, 0.0, 2.5e-5)
    traffic = Traffic("collective-permute", ("pp", "dp", "fsdp", "ep", "tp", "sp"), 123_456, 2**20, 2**19, 0, 3e-6)
    memory = Memory(None, 0, 2**20, 5 * 2**20, {"parameters": 5 * 2**20}, (), (5 * 2**20,))
    time = Time(2.5e-5, (part,), None, None, 2.5e9)
    plan = dataclasses.replace(PLANS["plain"], memory=memory, traffic=(traffic,), time=time)
    check_lines(
        plan,
        r"step 25\.0 µs",
        r"memory at the peak +MiB +share",
        r"total +5\.00 +100\.0%",
        r"part +times +GFLOP +HBM MiB +compute +memory +network +µs +limit",
        r"step +1 +2\.50 +3\.00 +10\.0 +20\.0 +0 +25\.0 +memory",
        r"pp, dp, .*collective-permute +123,456 +1\.00 +0\.500 +0 +3\.00",
    )


def test_a_peak_that_small_buffers_decide_has_no_number():
    memory = dataclasses.replace(PLANS["plain"].memory, peak=3 * 2**20)
    text = dataclasses.replace(PLANS["plain"], memory=memory).to_text()
    assert "fits: at most a few MiB of 93.0 GiB per device" in text and "memory at the peak" not in text
    assert forecast_line(memory, None) == "forecast: at most a few MiB per device"
    assert compiled_line(memory, 2**20, 2**21).endswith("2.00 MiB of temporaries per device, by XLA")
    full = dataclasses.replace(memory, capacity=2**20)
    assert forecast_line(full, None) == "forecast: 3.00 MiB per device"


def test_the_lines_of_a_run_have_what_is_known():
    memory, time = PLANS["plain"].memory, PLANS["plain"].time
    whole = "forecast: 75.0 of 93.0 GiB per device, 4.35 s per step, 15,060 tok/s, mfu 42.1%"
    assert forecast_line(memory, time) == whole
    assert forecast_line(memory, None) == "forecast: 75.0 GiB per device"
    unknown = dataclasses.replace(time, tokens_per_s=None, mfu=None)
    too_large = dataclasses.replace(memory, capacity=900 * 2**20)
    missing = "forecast: 75.0 GiB of 900 MiB per device, which does not fit, 4.35 s per step"
    assert forecast_line(too_large, unknown) == missing
    assert measured_line(memory, time, 60 * GIB, 5.0) == [
        "measured: 60.0 GiB per device (forecast 75.0 GiB, +25.0%), 5.00 s per step (forecast 4.35 s, -13.0%)"
    ]
    assert measured_line(memory, time, None, 0.5) == ["measured: 500 ms per step (forecast 4.35 s, +770.0%)"]
    assert measured_line(memory, time, None, None) == []


# --- JSON ---


@all_plans
def test_json_contains_every_number(plan):
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["memory"]["peak"] == plan.memory.peak and data["memory"]["capacity"] == plan.memory.capacity
    assert [Moment(**moment) for moment in data["memory"]["timeline"]] == list(plan.memory.timeline)
    parts = [{k: v for k, v in part.items() if k != "limit"} for part in data["time"]["parts"]]
    assert [Part(**part) for part in parts] == list(plan.time.parts)
    assert [Traffic(**{**item, "axes": tuple(item["axes"])}) for item in data["traffic"]] == list(plan.traffic)
    assert [Finding(**finding) for finding in data["findings"]] == list(plan.findings)
    assert data["mesh"] == plan.mesh and data["fits"] == plan.fits and data["summary"] == plan.summary
    text = data["time"]["schedule"]
    assert (None if text is None else Schedule.parse(text)) == plan.time.schedule
    assert parse_topology(data["topology"]["text"]).num_devices == data["topology"]["num_devices"]


def test_a_plan_has_at_most_some_moments():
    plan = PLANS["pipeline"]
    assert len(plan.memory.timeline) <= 240
    assert max(moment.total for moment in plan.memory.timeline) == plan.memory.peak
