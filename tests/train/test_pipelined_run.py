"""A recipe whose mesh has pp trains, evaluates and saves, and any other mesh resumes from its checkpoints."""

import json
from typing import Any

import numpy as np
import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss, sample
from flax_mesh.mpmd import CutError, StagedModel
from flax_mesh.mpmd.split import check as split_check
from flax_mesh.train import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    TrainResult,
    apply_overrides,
    loop,
    train,
)
from flax_mesh.train.explain import measure_recipe

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 32,
}


def config_of(folder, text, *settings, **kinds):
    config = TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        sample=sample,
        model=DecoderConfig(vocab_size=256, **SIZES, **kinds),
        data=DataConfig(source=str(text), sequence_length=16, batch_size=16, held_out=0.2, eval_batches=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, decay_steps=10),
        checkpoint=CheckpointConfig(every=2),
        run=RunConfig(steps=2, folder=str(folder), platform="cpu", eval_every=2, sample_tokens=0),
    )
    return apply_overrides(config, ["pipeline.num_microbatches=4", *settings])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}, and its neighbour {i + 1}.\n" for i in range(400)))
    return path


def losses(config):
    rows = []
    result = train(config, hooks=[rows.append])
    return [row["loss"] for row in rows], [row["eval_loss"] for row in rows if "eval_loss" in row], result.sample


SHORT = ("mesh.shape=pp:2,fsdp:1", "run.platform=auto", "run.eval_every=0")


def planted(staged, batch, **kinds):
    raise CutError("the loss differs")


def without_steps(run, checkpointer, state, start, saved):
    return TrainResult("finished", start, run.folder)


@pytest.mark.slow
def test_the_stages_are_checked_at_the_start_of_a_new_run(tmp_path, text, monkeypatch):
    monkeypatch.setattr(loop, "_steps", without_steps)
    calls, printed, folder = [], [], tmp_path / "run"
    with monkeypatch.context() as changed:
        changed.setattr(StagedModel, "check", lambda staged, batch, **kinds: calls.append((batch, kinds)))
        train(config_of(folder, text, *SHORT, "run.seed=3", "pipeline.schedule=zb-h1"), say=printed.append)
    assert "pipeline.check: the stages compute what the model computes, on one microbatch" in printed
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
    monkeypatch.setattr(loop, "_steps", without_steps)
    printed.clear()
    assert train(config_of(folder, text, *SHORT), say=printed.append).step == 1  # resumed, with pipeline.check=auto
    assert any("resuming" in line for line in printed) and not any("pipeline.check" in line for line in printed)
    with pytest.raises(ConfigError, match=r"^the loss differs$"):
        train(config_of(folder, text, *SHORT, "pipeline.check=always"))


def test_a_pipelined_run_has_the_losses_of_a_plain_run(tmp_path, text):
    settings = ("run.eval_every=0", "run.platform=auto")  # auto: four of the devices
    expected = losses(config_of(tmp_path / "plain", text, "mesh.shape=fsdp:4", *settings))
    found = losses(config_of(tmp_path / "pp", text, "mesh.shape=pp:2,fsdp:2", *settings))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


@pytest.mark.slow
def test_a_plain_run_resumes_from_a_pipelined_checkpoint(tmp_path, text):
    plain = "mesh.shape=fsdp:2,tp:2,dp:2"
    expected = losses(config_of(tmp_path / "plain", text, plain, "run.steps=4"))
    first = losses(config_of(tmp_path / "pp", text, "mesh.shape=pp:2,fsdp:2,tp:2"))
    then = losses(config_of(tmp_path / "pp", text, plain, "run.steps=4"))
    np.testing.assert_allclose(first[0] + then[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(first[1] + then[1], expected[1], rtol=1e-5)


@pytest.mark.slow
def test_a_pipelined_run_writes_a_sample(tmp_path, text):
    settings = ("mesh.shape=pp:2,fsdp:2,tp:2", "run.steps=1", "run.eval_every=0", "run.sample_tokens=4")
    pipelined = losses(config_of(tmp_path / "pp", text, *settings))
    plain = losses(config_of(tmp_path / "plain", text, "mesh.shape=fsdp:4,tp:2", *settings[1:]))
    assert pipelined[2] == plain[2] and len(plain[2]) > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("mesh.shape=pp:2,fsdp:4", "pipeline.schedule=zb-h1"),
        ("mesh.shape=pp:2,fsdp:2,tp:2", "pipeline.schedule=interleaved-1f1b", "model.num_layers=4"),
        ("mesh.shape=pp:2,dp:2,tp:2", "model.scan=true"),
        ("mesh.shape=pp:2,fsdp:2,sp:2", "pipeline.cut=1", "pipeline.remat=full"),
        ("mesh.shape=pp:2,ep:2,fsdp:2", "model.num_experts=4", "model.scan=true"),
    ],
)
def test_every_pipeline_resumes_from_a_plain_run_and_back(tmp_path, text, settings):
    experts = [s for s in settings if "experts" in s or "num_layers" in s]
    plain = ("mesh.shape=fsdp:4,tp:2", *experts)
    expected = losses(config_of(tmp_path / "plain", text, *plain, "run.steps=6"))
    parts = [
        losses(config_of(tmp_path / "mixed", text, *kind, f"run.steps={stop}"))
        for kind, stop in ((plain, 2), (settings, 4), (plain, 6))
    ]
    np.testing.assert_allclose([x for part in parts for x in part[0]], expected[0], rtol=5e-5)
    np.testing.assert_allclose([x for part in parts for x in part[1]], expected[1], rtol=5e-5)


@pytest.mark.slow
def test_sharding_the_moments_does_not_change_the_losses(tmp_path, text):
    settings = ("mesh.shape=dp:4,tp:2", "run.eval_every=0", "model.num_layers=1")
    plain = losses(config_of(tmp_path / "plain", text, *settings))
    split = losses(config_of(tmp_path / "split", text, *settings, "optimizer.shard_over=dp"))
    np.testing.assert_allclose(split[0], plain[0], rtol=1e-6)


def test_trace_and_measure_require_a_pipeline(tmp_path, text):
    plain = config_of(tmp_path / "run", text, "mesh.shape=fsdp:4,tp:2")
    with pytest.raises(ConfigError, match=r"--trace t.json: only a pipeline can be traced.* mesh.shape=fsdp:4,tp:2"):
        train(plain, trace="t.json")
    with pytest.raises(ConfigError, match=r"t.svg: the trace is a JSON file(.|\n)*folder /nowhere does not exist"):
        train(plain, trace="/nowhere/t.svg")
    assert not (tmp_path / "run").exists()
    short = config_of(tmp_path / "run", text, "mesh.shape=pp:2,fsdp:4", "run.steps=2")
    with pytest.raises(ConfigError, match=r"--trace .*t.json records step 3, .* but run.steps=2 ends before it"):
        train(short, trace=tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"mesh.shape=fsdp:4,tp:2 has no axis pp"):
        measure_recipe(plain)


@pytest.mark.slow
def test_the_third_step_is_traced(tmp_path, text):
    settings = ("mesh.shape=pp:2,fsdp:4", "run.steps=4", "run.eval_every=0")
    printed, trace = [], tmp_path / "trace.json"
    result = train(config_of(tmp_path / "run", text, *settings), say=printed.append, trace=trace)
    plain = losses(config_of(tmp_path / "plain", text, *settings))
    assert result.last_row["loss"] == pytest.approx(plain[0][-1], rel=1e-6)
    names = [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    assert sorted(names) == sorted(f"{stage}{kind}{m}" for stage in range(2) for kind in "FB" for m in range(4))
    assert trace.with_suffix(".svg").read_text().startswith("<svg")
    assert any("groups busy on average" in line for line in printed)


@pytest.mark.slow
def test_costs_of_a_recipe_are_measured(tmp_path, text):
    measured = measure_recipe(config_of(tmp_path, text, "mesh.shape=pp:2,fsdp:4", "pipeline.schedule=interleaved-1f1b",
                                        "model.num_layers=4"))  # fmt: skip
    assert (measured.num_groups, measured.num_microbatches, len(measured.costs)) == (2, 4, 4)
    assert all(cost.forward > 0 and cost.weights > 0 for cost in measured.costs)
