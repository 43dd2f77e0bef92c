"""A recipe whose mesh has pp trains, evaluates, samples, is checked, traced and measured, and searches its schedule."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import partitioned
from flax_mesh.cli.text.start import Programs
from flax_mesh.errors import ConfigError
from flax_mesh.mpmd import CutError, StagedModel
from flax_mesh.mpmd.runtime import search
from flax_mesh.mpmd.runtime.search import costs_of_processes
from flax_mesh.mpmd.schedules import check_schedule
from flax_mesh.mpmd.schedules.text import read_schedule
from flax_mesh.mpmd.split import check as split_check
from flax_mesh.recipe.config import PipelineConfig
from flax_mesh.recipe.schedule import pipeline_schedule
from flax_mesh.train import TrainConfig, TrainResult, loop, train
from tests.train import bigram
from tests.train.support.decoder import config_of
from tests.train.support.runs import run

pytestmark = pytest.mark.usefixtures("quick_compilation")


SHORT = ("mesh.shape=pp:2,fsdp:1", "run.platform=auto", "run.eval_every=0")


def planted(staged, batch, **kinds):
    raise CutError("the loss differs")


def without_steps(run, checkpointer, state, start, saved):
    return TrainResult("finished", start, run.folder)


@pytest.mark.slow
def test_the_stages_are_checked_at_the_start_of_a_new_run(tmp_path, text, monkeypatch):
    monkeypatch.setattr(loop, "run_steps", without_steps)
    calls, printed, folder = [], [], tmp_path / "run"
    with monkeypatch.context() as changed:
        changed.setattr(StagedModel, "check", lambda staged, batch, **kinds: calls.append((batch, kinds)))
        train(config_of(folder, text, *SHORT, "run.seed=3", "pipeline.schedule=zb-h1"), say=printed.append)
    assert "pipeline.check: the stages compute the same as the model, on two microbatches" in printed
    ((batch, kinds),) = calls
    assert batch["inputs"].shape == (16, 16) and kinds == {"seed": 3, "remat": "none", "split_backward": True}
    monkeypatch.setattr(StagedModel, "check", planted)
    for setting in ("auto", "always"):
        with pytest.raises(ConfigError, match=r"^the loss differs$"):
            train(config_of(tmp_path / setting, text, *SHORT, f"pipeline.check={setting}"))
        assert not (tmp_path / setting / "config.txt").exists()  # before the run has a state
    train(config_of(tmp_path / "never", text, *SHORT, "pipeline.check=never"))
    train(config_of(tmp_path / "plain", text, "mesh.shape=fsdp:2", *SHORT[1:], "pipeline.check=always"))


@pytest.mark.slow
def test_expensive_models_and_resumed_runs_are_checked_on_request_only(tmp_path, text, monkeypatch):
    folder, printed, skipped = tmp_path / "run", [], "pipeline.check: left out, because a microbatch takes more than"
    monkeypatch.setattr(StagedModel, "check", planted)
    with monkeypatch.context() as changed:
        changed.setattr(split_check, "CHEAP_FLOPS", 0)
        train(config_of(folder, text, *SHORT, "run.steps=1"), say=printed.append)
        assert f"{skipped} 1e10 FLOPs or 1 GiB" in printed
    monkeypatch.setattr(loop, "run_steps", without_steps)
    printed.clear()
    assert train(config_of(folder, text, *SHORT), say=printed.append).step == 1  # resumed, with pipeline.check=auto
    assert any("resuming" in line for line in printed) and not any("pipeline.check" in line for line in printed)
    with pytest.raises(ConfigError, match=r"^the loss differs$"):
        train(config_of(folder, text, *SHORT, "pipeline.check=always"))


@dataclass(frozen=True)
class StackConfig:
    vocab_size: int = 256


@partitioned(rules=[(".*", ())])
class Stack(nnx.Module):
    """Two layers of one product each, which compile in a tenth of the time of a decoder."""

    def __init__(self, config: StackConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab_size, 16, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(16, config.vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def stack_config(folder: Path, text: Path, *settings: str) -> TrainConfig:
    config = config_of(folder, text, *settings)
    return replace(config, make_model=Stack, model=StackConfig(), loss_fn=bigram.loss_fn, sample=bigram.sample)


def test_a_traced_pipelined_run_equals_a_plain_run(tmp_path, text):
    settings = ("run.steps=3", "run.eval_every=3", "run.sample_tokens=4", "run.platform=auto", "pipeline.check=never")
    plain = run(stack_config(tmp_path / "plain", text, "mesh.shape=fsdp:1", *settings))
    trace = tmp_path / "trace.json"
    with Programs() as programs:
        found = run(stack_config(tmp_path / "pp", text, "mesh.shape=pp:2,fsdp:1", *settings), trace=trace)
    for works in (programs.of("traced"), programs.of("lowered"), programs.of("compiled") | programs.of("read")):
        assert {work.times for name, work in works.items() if name.endswith("backward")} == {1}
    for row, expected in zip(found.rows, plain.rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found.rows[-1]["eval_loss"] == pytest.approx(plain.rows[-1]["eval_loss"], rel=1e-5)
    assert found.result.sample == plain.result.sample and len(plain.result.sample) > 4
    names = [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    assert sorted(names) == sorted(f"{stage}{kind}{m}" for stage in range(2) for kind in "FB" for m in range(4))
    assert trace.with_suffix(".svg").read_text().startswith("<svg")
    assert any("groups busy on average" in line for line in found.lines)


def test_a_trace_requires_a_pipeline(tmp_path, text):
    plain = stack_config(tmp_path / "run", text, "mesh.shape=fsdp:4,tp:2")
    with pytest.raises(ConfigError, match=r"--trace t.json: only a pipeline can be traced.* mesh.shape=fsdp:4,tp:2"):
        train(plain, trace="t.json")
    with pytest.raises(ConfigError, match=r"t.svg: the trace is a JSON file(.|\n)*folder /nowhere does not exist"):
        train(plain, trace="/nowhere/t.svg")
    assert not (tmp_path / "run").exists()
    short = stack_config(tmp_path / "run", text, "mesh.shape=pp:2,fsdp:4", "run.steps=2")
    with pytest.raises(ConfigError, match=r"--trace .*t.json records step 3, .* but run.steps=2 ends before it"):
        train(short, trace=tmp_path / "t.json")


SEARCH = ("mesh.shape=pp:2,fsdp:1", "run.platform=auto", "run.eval_every=0", "pipeline.schedule=search")


@pytest.fixture(autouse=True)
def _short_search(monkeypatch):
    monkeypatch.setattr(search, "SECONDS", 0.05)


def said(lines):
    return [line for line in lines if line.startswith("schedule:")]


@pytest.mark.slow
def test_a_run_searches_after_three_steps_and_resumed_runs_take_the_file_and_have_the_same_bits(tmp_path, text):
    once = run(config_of(tmp_path / "once", text, *SEARCH, "run.steps=6"))
    (line,) = said(once.lines)
    searched = r"schedule: searched for the measured stages: makespan [\d.]+ ms, [\d.]+% of the makespan of the first"
    assert re.match(searched, line)
    schedule = read_schedule(str(tmp_path / "once" / "schedule.txt"))
    check_schedule(schedule, 2)
    assert schedule.name == "searched" and schedule.splits_backward
    named = run(config_of(tmp_path / "named", text, *SEARCH[:-1], "pipeline.schedule=zb-h1", "run.steps=6"))
    np.testing.assert_allclose([*once.losses.values()], [*named.losses.values()], rtol=1e-5)
    folder, found = tmp_path / "resumed", {}
    for steps in (2, 5, 6):  # stopped before the search, and after it
        found |= run(config_of(folder, text, *SEARCH, f"run.steps={steps}")).losses
        assert (folder / "schedule.txt").exists() == (steps > 2)
    assert found == once.losses
    before = (folder / "schedule.txt").read_text()
    again = run(config_of(folder, text, *SEARCH, "run.steps=7"))
    assert said(again.lines) == [f"schedule: {folder / 'schedule.txt'}"]
    assert (folder / "schedule.txt").read_text() == before


def test_the_slowest_process_of_a_group_and_all_groups_count():
    first = json.dumps([["F", 0, 1.0], ["B", 0, 2.0], ["W", 0, 3.0]])
    second = json.dumps([["F", 0, 1.5], ["B", 0, 1.0], ["W", 0, 3.5], ["F", 1, 4.0], ["B", 1, 5.0]])
    assert costs_of_processes([first, second], 2) == ((1.5, 2.0, 3.5, 0.0), (4.0, 5.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("settings", "peak"), [({}, 4), ({"memory_limit": 2}, 2), ({"num_virtual_stages": 2, "memory_limit": 5}, 5)]
)
def test_the_first_steps_stay_within_the_memory_limit(settings, peak):
    config = PipelineConfig(schedule="search", num_microbatches=8, **settings)
    schedule = pipeline_schedule(config, 4)
    check_schedule(schedule, peak)
    assert schedule.num_stages == 4 * (config.num_virtual_stages or 1)
    with pytest.raises(ConfigError, match=r"^pipeline.schedule=search: no schedule fits a memory limit of 1"):
        pipeline_schedule(replace(config, num_virtual_stages=2, memory_limit=1), 4)
