"""`search_layouts`: its space, its regression, its result against all plans, and the command."""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_mesh.cli import main
from flax_mesh.cli.text.layouts import comparison, to_dict, to_text
from flax_mesh.errors import ConfigError
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.plan import plan
from flax_mesh.plan.search import search as module
from flax_mesh.plan.search import search_layouts
from flax_mesh.plan.search.search import Planned, parse_chips
from flax_mesh.plan.search.space import MESH, SEARCHED, TOO_LARGE, Space, StateBytes, changes, make_space, overrides
from flax_mesh.plan.search.surrogate import regress
from flax_mesh.plan.topology import Topology, parse_topology
from flax_mesh.recipe.checks import check_config, check_on_mesh
from flax_mesh.recipe.resolve import derive, rules_of
from flax_mesh.recipe.target import Target, axis_sizes
from flax_mesh.text import bytes_text
from flax_mesh.train import DataConfig, MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig, apply_overrides
from tests.plan.cases import PLANNED
from tests.plan.written import make_plan

MODEL = DecoderConfig(hidden_size=256, num_layers=4, num_heads=8, mlp_size=1024, scan=True, dtype="bfloat16")
CONFIG = TrainConfig(
    make_decoder,
    next_token_loss,
    dataclasses.replace(MODEL, attention="xla"),
    mesh=MeshConfig("fsdp:2,tp:2"),
    data=DataConfig(sequence_length=512, batch_size=16),
    pipeline=PipelineConfig(num_microbatches=4),
)
EXPERTS = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, num_experts=4, num_layers=2))
# What the small space holds, so that all of its plans can be made.
FIXED = ("data.batch_size", "pipeline.num_microbatches", "pipeline.schedule", "pipeline.remat", "optimizer.shard_over")
FIXED += ("model.scan",)
cached_plan = cache(plan)


@pytest.fixture(autouse=True)
def plans_are_made_once(monkeypatch):
    monkeypatch.setattr(module, "plan_layout", lambda config, topology, batch: cached_plan(config, topology))


def topology_with(memory: float) -> Topology:
    topology = parse_topology("v5e:2x2")
    return dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, memory=memory))


@cache
def all_plans(config: TrainConfig, text: str, fixed: tuple[str, ...]) -> list[Planned]:
    """The plans of a whole space."""
    topology = parse_topology(text)
    space = make_space(config, topology, fixed)
    tokens = config.data.batch_size * config.data.sequence_length
    found = []
    for layout in space.layouts:
        settings = space.settings(layout)
        try:
            found.append(Planned(settings, cached_plan(space.apply(settings), topology), tokens))
        except ConfigError as error:  # the search leaves such a layout out, too
            assert "stage" in str(error)
    return found


# --- chips ---

CHIPS = {
    "v5p:512": "v5p:8x8x8", "v5p:128": "v5p:4x4x8", "v5p:4x4x8": "v5p:4x4x8", "v5p:17920": "v5p:16x20x28*2",
    "v5e:8": "v5e:2x4", "V5E:512": "v5e:16x16*2", "v7x:64": "v7x:4x4x4", "h100:16": "h100:2x8", "h100:4": "h100:1x4",
    "cpu:8": "cpu:8", "v5p-128": "v5p:4x4x4", "v5litepod-16": "v5e:4x4",
}  # fmt: skip
WRONG_CHIPS = {
    "v5p:6": r"no slice of v5p has 6 chips; the nearest: v5p:4, v5p:8\. Or name a topology",
    "v5p:0": r"no slice of v5p has 0 chips; the nearest: v5p:1\.",
    "v5e-9": r"the nearest: v5e-8, v5e-16",
    "v5e:768:1": "must be a chip and its numbers",
    "h100:12": "h100:12 must be a multiple of 8, the GPUs of a host",
    "h100:0": "h100:0 must be a multiple of 8",
    "v9:8": "unknown chip 'v9'; known: v3, v4",
}


@pytest.mark.parametrize(("text", "topology"), CHIPS.items())
def test_a_number_of_chips_is_a_topology(text, topology):
    assert parse_chips(text) == parse_topology(topology)


@pytest.mark.parametrize(("text", "problem"), WRONG_CHIPS.items())
def test_wrong_numbers_of_chips_are_one_line(text, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_chips(text)
    assert "\n" not in str(caught.value)


# --- the space ---


def test_every_layout_passes_the_checks_none_is_there_twice_and_those_excluded_fail_them():
    space = make_space(CONFIG, parse_topology("v5e:2x4"), ["data.batch_size"])
    texts = [json.dumps(dict(space.settings(layout))) for layout in space.layouts]
    assert len(texts) == len(set(texts)) > 500
    rules = rules_of(CONFIG)
    for layout in space.layouts[::17]:
        shape = axis_sizes((config := space.apply(space.settings(layout))).mesh)
        assert math.prod(shape.values()) == 8
        assert check_config(config) == []
        assert check_on_mesh(config, Target(shape, platform="tpu").abstract_mesh("auto"), rules.axes) == []
    # The number of key-value heads excludes tp:8 and nothing else.
    assert max(layout.sizes[4] for layout in space.layouts) == MODEL.num_kv_heads
    assert space.excluded[f"model.num_kv_heads={MODEL.num_kv_heads} is not divisible by its mesh axes"] > 0
    with pytest.raises(ConfigError, match=r"model.num_heads=4 is not divisible by 8"):
        plan(apply_overrides(CONFIG, ["mesh.shape=tp:8", "model.num_heads=4"]), "v5e:2x4")
    (layout, *_) = make_space(apply_overrides(CONFIG, ["mesh.shape=tp:8"]), parse_topology("v5e:2x4"), [MESH]).layouts
    assert layout.sizes[4] == 8, "key-value heads are copied on a mesh that the recipe gives"
    layout = next(x for x in space.layouts if x.sizes[0] == 2 and x.schedule == "interleaved-1f1b")
    configs = [space.apply(settings) for settings in changes(space, space.settings(layout))]
    assert {config.pipeline.schedule for config in configs} > {"zb-v", "v-half", "search", "zb-h2"}
    assert {config.pipeline.remat for config in configs} == {"none", "cheap", "full"}
    assert {config.model.scan for config in configs} == {True, False}
    layout = next(x for x in space.layouts if x.sizes[4] > 1)
    configs = [space.apply(settings) for settings in changes(space, space.settings(layout))]
    assert {config.model.axes.hidden_state_axis for config in configs} == {None, "tp"}
    assert all(config.pipeline.num_virtual_stages is None for config in configs if config.pipeline.schedule == "zb-v")


def test_the_axes_are_those_that_split_something():
    over_fsdp = dataclasses.replace(CONFIG, mesh=MeshConfig("fsdp:4", rules="fsdp"))
    cases = (CONFIG, "pp dp fsdp tp sp"), (EXPERTS, "pp dp fsdp ep tp sp"), (over_fsdp, "pp dp fsdp sp")
    for config, axes in cases:
        assert make_space(config, parse_topology("v5e:2x2"), FIXED).axes == tuple(axes.split())


@pytest.mark.slow
def test_settings_that_are_fixed_stay_as_they_are():
    topology = parse_topology("v5e:2x2")
    for fixed in SEARCHED:
        space = make_space(CONFIG, topology, [*FIXED, fixed])
        assert space.layouts
        for layout in space.layouts:
            settings = space.settings(layout)
            assert not {fixed, *FIXED} & set(settings)
            assert all(fixed not in each for each in changes(space, settings))
    space = make_space(CONFIG, topology, ["mesh.shape"])
    assert {layout.sizes for layout in space.layouts} == {(1, 1, 2, 1, 2, 1)}
    assert {layout.batch for layout in space.layouts} == {2, 4, 8, 16, 32}
    space = make_space(CONFIG, topology, FIXED)  # settings of the recipe are not repeated
    assert [space.layouts[row].sizes for row in space.own_rows] == [(1, 1, 2, 1, 2, 1)]
    assert [space.settings(space.layouts[row]) for row in space.own_rows] == [{}]
    assert make_space(CONFIG, parse_topology("v5e:2x4"), FIXED).own_rows == []
    first = search_layouts(CONFIG, "v5e:4", fixed=FIXED, plans=1).planned  # the recipe's own layout is the first one
    assert [each.settings for each in first] == [{}]


STATES = [("fsdp:8", "float32", ""), ("fsdp:8", "bfloat16", "dp"), ("dp:2,fsdp:4", "float32", "dp")]
STATES += [("dp:4,fsdp:2", "bfloat16", ""), ("fsdp:2,tp:4", "bfloat16", ""), ("fsdp:2,sp:4", "float32", "")]


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "dtype", "shard_over"), STATES)
def test_no_plan_has_less_state_than_the_lower_bound(shape, dtype, shard_over):
    model = dataclasses.replace(PLANNED.model, param_dtype=dtype, dtype=dtype)
    optimizer, mesh = OptimizerConfig(shard_over=shard_over), MeshConfig(shape)
    config, sizes = dataclasses.replace(PLANNED, model=model, mesh=mesh, optimizer=optimizer), axis_sizes(mesh)
    found = plan(config, "v5e:2x4").memory.at_peak
    least = StateBytes(derive(config, Target(sizes, platform="tpu")), parse_topology("v5e:2x4")).least(
        sizes, shard_over
    )
    assert least <= found["parameters"] + found["optimizer"]
    if shape == "fsdp:8":  # only scales are replicated
        assert least == pytest.approx(found["parameters"] + found["optimizer"], rel=0.05)


# --- the regression ---


@given(
    weights=st.lists(st.floats(-2, 2), min_size=2, max_size=2).filter(lambda w: max(map(abs, w)) > 0.1),
    offset=st.floats(-5, 5),
    seed=st.integers(0, 100),
)
def test_a_linear_function_is_recovered(weights, offset, seed):
    """Inside of the range of 24 points on average within a tenth of the standard deviation of the values."""
    rng = np.random.default_rng(seed)
    known, wanted = rng.uniform(-3, 3, (24, 2)), rng.uniform(-2, 2, (64, 2))
    values = known @ weights + offset
    mean, spread = regress(known, values, wanted)
    assert np.abs(mean - (wanted @ weights + offset)).mean() < 0.1 * values.std()
    assert (spread >= 0).all() and (spread < values.std()).all()


def test_the_uncertainty_is_small_where_the_value_is_known_and_grows_with_the_distance():
    known = np.array([[0.0], [1.0], [2.0]])
    mean, spread = regress(known, np.array([1.0, 3.0, 2.0]), np.array([[1.0], [4.0], [9.0]]))
    assert mean[0] == pytest.approx(3.0, abs=0.1)
    assert spread[0] < 0.05 < spread[1] < spread[2]


# --- the search ---


def fastest(plans: Sequence[Planned]) -> float:
    return min(each.seconds_per_token for each in plans if each.plan.fits)


EIGHT = ("data.batch_size", "pipeline.num_microbatches", "model.remat", "optimizer.shard_over", "model.scan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chips", "text", "fixed", "budget", "tolerance"),
    [("v5e:4", "v5e:2x2", FIXED, 12, 1e-9), ("v5p:8", "v5p:2x2x2", EIGHT, 20, 5e-3)],
    ids=["4 chips", "8 chips"],
)
def test_a_search_finds_what_brute_force_finds(chips, text, fixed, budget, tolerance):
    everything, lines = all_plans(CONFIG, text, fixed), []
    found, again = (search_layouts(CONFIG, chips, fixed=fixed, plans=budget, say=lines.append) for _ in range(2))
    assert len(everything) > 2 * budget and len(found.planned) == budget
    assert fastest(found.planned) <= fastest(everything) * (1 + tolerance)
    assert found.best is not None and found.best is found.planned[0]
    assert found.best.seconds_per_token <= 1.01 * fastest(found.planned)
    assert [each.settings for each in found.planned] == [each.settings for each in again.planned]
    assert len(lines) == 2 * budget and lines[budget - 1].startswith(f"{budget} of {budget} plans; best: ")


def made_plan(config: TrainConfig, topology: Topology, batch: Any = None) -> Any:
    """A plan by a formula: idle time, traffic that grows with the axes, recomputation, memory for activations."""
    shape, parts = axis_sizes(config.mesh), config.pipeline.num_microbatches
    idle = (shape["pp"] - 1) / ((config.pipeline.num_virtual_stages or 1) * parts)
    traffic = 0.2 * math.log2(shape["tp"]) + 0.1 * math.log2(shape["sp"]) + 0.02 * math.log2(shape["fsdp"])
    rows = config.data.batch_size / shape["dp"] / shape["fsdp"] / parts
    stored, compute = {"none": (8.0, 1.0), "full": (1.0, 1.3)}.get(config.model.remat, (3.0, 1.1))
    peak = stored * rows / shape["tp"] / shape["sp"] + 16 * shape["dp"] / topology.num_devices
    seconds = config.data.batch_size * (1 + idle) * (compute + traffic + 0.1 / rows)
    memory = SimpleNamespace(peak=peak, capacity=8.0)
    return SimpleNamespace(fits=peak <= 8.0, time=SimpleNamespace(seconds=seconds), memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("regresses", [True, False])
def test_among_thousands_of_layouts_the_regression_finds_one_of_the_best(regresses, monkeypatch):
    """24 plans of which the first ones are random; without the regression all of them are."""
    space = make_space(CONFIG, parse_topology("v5p:4x4x4"), ["pipeline.num_microbatches"])
    monkeypatch.setattr(module, "plan_layout", made_plan)
    monkeypatch.setattr(Space, "usual", lambda self: [])
    if not regresses:
        monkeypatch.setattr(
            module, "regress", lambda known, values, wanted: (np.random.default_rng(0).random(len(wanted)), 0.0)
        )
    tokens = CONFIG.data.sequence_length
    plans = [(x.batch * tokens, made_plan(space.apply(space.settings(x)), space.topology)) for x in space.layouts[::3]]
    times = sorted(one.time.seconds / count for count, one in plans if one.fits)
    found = search_layouts(CONFIG, space.topology, fixed=space.fixed, plans=24)
    rank = sum(time < fastest(found.planned) for time in times) / len(times)
    assert len(times) > 500
    assert rank < 0.005 if regresses else rank > 0.005


def test_the_usual_layouts_differ_in_one_setting():
    space = make_space(CONFIG, parse_topology("v5e:2x4"), ["pipeline.num_microbatches"])
    center, *others = space.usual()
    assert center.sizes == (1, 1, 8, 1, 1, 1) and center.batch == 8 and center.remat == "full"
    assert {layout.sizes for layout in others} == {
        center.sizes,
        (2, 1, 4, 1, 1, 1),
        (1, 8, 1, 1, 1, 1),
        (1, 1, 2, 1, 4, 1),
        (1, 1, 2, 1, 1, 4),
    }
    for layout in space.layouts[::50]:
        assert space.layouts[space.nearest(layout)] == layout
    for text in ("cpu:1", "cpu:3", "v5e:2x2"):  # axes that 4 does not divide
        small = make_space(CONFIG, parse_topology(text), [])
        assert all(math.prod(layout.sizes) == small.topology.num_devices for layout in small.usual())
    small = make_space(CONFIG, parse_topology("v5e:2x2"), FIXED)  # 4 microbatches, while the usual layouts have 1
    assert all(small.layouts[small.nearest(layout)].sizes == layout.sizes for layout in small.usual())


@pytest.mark.slow
def test_the_best_layout_fits_although_faster_ones_do_not():
    # With a kernel of attention the fastest layout takes less memory than most.
    config = dataclasses.replace(CONFIG, run=dataclasses.replace(CONFIG.run, attention="as_written"))
    everything = sorted(all_plans(config, "v5e:2x2", FIXED), key=lambda each: each.seconds_per_token)
    peaks = sorted(each.plan.memory.peak for each in everything)
    limit = peaks[len(peaks) // 3] + 1
    expected = next(each for each in everything if each.plan.memory.peak <= limit)
    assert everything[0].plan.memory.peak > limit
    reserve = parse_topology("v5e:2x2").chip.memory / (everything[0].plan.memory.capacity or 0)
    found = search_layouts(config, topology_with(limit * reserve), fixed=FIXED, plans=14)
    assert found.best is not None and found.best.plan.memory.peak <= limit
    assert found.best.seconds_per_token <= expected.seconds_per_token * 1.01
    assert all(a.rank <= b.rank for a, b in zip(found.planned[1:], found.planned[2:], strict=False))


@pytest.mark.slow
def test_of_equally_fast_layouts_the_one_with_the_smallest_batch_is_the_best():
    found = search_layouts(CONFIG, "v5e:4", fixed=[name for name in FIXED if name != "data.batch_size"], plans=12)
    assert found.best is not None
    limit = 1.01 * fastest(found.planned)
    assert found.best.tokens == min(x.tokens for x in found.planned if x.plan.fits and x.seconds_per_token <= limit)


# --- what does not fit, and bad input ---


@pytest.mark.slow
def test_if_no_layout_fits_the_nearest_one_shows_what_is_missing():
    found = search_layouts(CONFIG, topology_with(1e6), fixed=FIXED, plans=2)  # less than the state of a device
    assert found.best is None and found.planned
    assert found.excluded[TOO_LARGE] > 0
    text = to_text(found, ["flax-mesh", "train", "r.py"])
    missing = found.planned[0].plan.memory.peak - (found.planned[0].plan.memory.capacity or 0)
    assert f"No layout fits: the one with the least memory needs {bytes_text(missing)} more" in text
    assert "flax-mesh train" not in text
    assert to_dict(found)["fits"] is False


def test_all_invalid_arguments_and_all_reasons_are_reported():
    with pytest.raises(ConfigError) as caught:
        search_layouts(CONFIG, "v5e:4", fixed=["mesh.size"], plans=0)
    assert caught.value.problems[0].startswith("mesh.size is not a setting that is searched; those are mesh.shape,")
    assert caught.value.problems[1] == "plans must be at least 1, got 0"
    config = dataclasses.replace(CONFIG, data=DataConfig(sequence_length=511, batch_size=12))
    with pytest.raises(ConfigError, match=r"(?s)no layout over .* works on v5e:2x2.*data.batch_size"):
        search_layouts(config, "v5e:4", fixed=[*FIXED, "mesh.shape"])


def test_a_search_ends_if_no_layout_can_be_planned(monkeypatch):
    def refuse(config, topology, batch):
        raise ConfigError("the model cannot be traced")

    monkeypatch.setattr(module, "plan_layout", refuse)
    with pytest.raises(ConfigError, match="5: the model cannot be traced"):
        search_layouts(CONFIG, "v5e:4", fixed=FIXED, plans=5)


# --- text ---


@pytest.mark.slow
def test_every_layout_but_the_first_names_the_largest_part_of_its_time():
    found = search_layouts(CONFIG, "v5e:4", fixed=FIXED, plans=16)
    reasons = [comparison(each, found.planned[0]) for each in found.planned]
    assert reasons[0] == "" and all(reasons[1:])
    assert any("slower: " in reason for reason in reasons)
    text = to_text(found, ["flax-mesh", "train", "r.py"])
    assert text.splitlines()[0].startswith("v5e:2x2: 4 devices, ")
    assert text.splitlines()[-1] == shlex.join(["flax-mesh", "train", "r.py", *overrides(found.planned[0].settings)])
    assert "and 6 more layouts that were planned" in text
    assert json.loads(json.dumps(to_dict(found)))["layouts"][0]["tokens_per_s"] > 0
    topology, tokens = parse_topology("v5e:2x2"), CONFIG.data.batch_size * CONFIG.data.sequence_length
    meshes = ["mesh.shape=tp:4"], ["mesh.shape=dp:4"], ["mesh.shape=pp:4"], ["mesh.shape=fsdp:4", "model.remat=full"]
    tp, dp, pp, full = (Planned({}, cached_plan(apply_overrides(CONFIG, x), topology), tokens) for x in meshes)
    assert re.fullmatch(r"\d+% slower: network [\d.]+ times, most all-reduce over tp", comparison(tp, dp))
    assert re.fullmatch(r"\d+% slower: bubble \d+%", comparison(pp, full))


# --- the command ---


@pytest.mark.slow
def test_the_command_prints_settings_that_train_runs(capsys, tmp_path):
    small = ["data.batch_size=8", "data.sequence_length=32", "model.hidden_size=32", "model.mlp_size=64"]
    small += ["pipeline.num_microbatches=2", "model.num_layers=2"]
    assert main(["plan", "recipes/tiny.py", "--search", "cpu:8", "--plans", "3", *small]) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    assert max(map(len, tables)) <= 100
    words = shlex.split(last)
    assert words[:3] == ["flax-mesh", "train", "recipes/tiny.py"] and words[3:9] == small
    run = ["run.steps=1", f"run.folder={tmp_path / 'run'}", "run.sample_tokens=0", "run.eval_every=0"]
    assert main([*words[1:], *run, "pipeline.check=never"]) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


def test_the_command_prints_text_and_json(capsys, monkeypatch):
    monkeypatch.setattr(module, "plan_layout", lambda *_: make_plan("v5e:2x2", "fsdp:4"))
    fixed = ["data.batch_size=8", "mesh.shape=fsdp:4", "model.remat=full", "pipeline.num_microbatches=1"]
    fixed += ["model.num_layers=1", "model.hidden_size=64"]
    assert main(command := ["plan", "recipes/tiny.py", *fixed, "--search", "v5e:4"]) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    assert last == shlex.join(["flax-mesh", "train", "recipes/tiny.py", *fixed])
    assert max(map(len, tables)) <= 100
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["topology"] == "v5e:2x2" and found["num_layouts"] == 1 and found["fits"] is True
    assert [each["settings"] for each in found["layouts"]] == [{}, {"model.scan": "true"}]
