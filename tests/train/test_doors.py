"""A run that uses every door of the trainer, killed with SIGKILL and resumed, is bitwise an undisturbed one.

The recipe has batches of an iterator with a state, its own evaluation, an optimizer with groups, frozen parameters and
a moving average in the memory of the host, hooks, a profile and a compilation cache; without a pipeline and in one.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig

PATIENCE = 240.0
STEPS = 8
MESHES = {"plain": ["mesh.shape=dp:2,fsdp:2"], "pp": ["mesh.shape=pp:2,fsdp:2", "pipeline.num_microbatches=4"]}


class Numbers:
    """Batches that depend on all earlier draws of a random generator."""

    def __init__(self, seed):
        self._random = np.random.Generator(np.random.PCG64(seed))

    def __next__(self):
        tokens = self._random.integers(0, 32, (8, 9), np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def get_state(self):
        return {name: str(value) for name, value in self._random.bit_generator.state["state"].items()}

    def set_state(self, state):
        new = {name: int(value) for name, value in state.items()}
        self._random.bit_generator.state = {**self._random.bit_generator.state, "state": new}


def make_batches(config):
    return Numbers(config.run.seed)


def held_out(config, evaluate):
    sums = evaluate(next(Numbers(99)))
    return {"loss": sums["loss"] / sums["weight"]}


def make_hook(folder, config, start):
    def hook(row):
        with (folder / "hook.txt").open("a") as file:
            file.write(f"{row['step']}\n")
        if "FLAX_MESH_TEST_SLOW" in os.environ:  # so that the kill arrives before the end
            time.sleep(0.3)

    return hook


def recipe():
    return TrainConfig(
        make_decoder,
        next_token_loss,
        DecoderConfig(
            vocab_size=32, hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=32,
            remat="attention+mlp_up:2,none",
        ),
        data=DataConfig(batch_size=8, sequence_length=8),
        optimizer=OptimizerConfig(
            name="muon", schedule="wsd", learning_rate=0.01, warmup_steps=2, decay_steps=8, ema=0.8,
            moment_dtype="bfloat16", memory="pinned_host", shard_over="fsdp",
            groups="^embed learning_rate*0.5; layers/0/ frozen",
        ),
        checkpoint=CheckpointConfig(every=2),
        run=RunConfig(steps=STEPS, platform="cpu:4", eval_every=2, sample_tokens=0, profile=2, hooks="tensorboard"),
        make_batches=make_batches,
        eval_fns={"held_out": held_out},
        hooks=(make_hook,),
    )  # fmt: skip


def start(folder, mesh, *, slow=False):
    command = [sys.executable, "-m", "flax_mesh.cli", "train", __file__, f"run.folder={folder}", *MESHES[mesh]]
    environment = os.environ | ({"FLAX_MESH_TEST_SLOW": "1"} if slow else {})
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder):
    names = ("step", "loss", "grad_norm", "learning_rate", "held_out/loss")
    return [{name: row[name] for name in names if name in row} for row in rows_of(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_killed_run_with_every_door_resumes_bit_for_bit(tmp_path, mesh):
    whole = start(tmp_path / "whole", mesh)
    output = whole.communicate(timeout=PATIENCE)[0]
    assert whole.returncode == 0, output
    expected = numbers(tmp_path / "whole")
    assert [row["step"] for row in expected] == list(range(1, STEPS + 1))
    assert sum("held_out/loss" in row for row in expected) == STEPS // 2

    folder, killed = tmp_path / "killed", start(tmp_path / "killed", mesh, slow=True)
    deadline = time.monotonic() + PATIENCE
    while not any(Path(folder, "checkpoints").glob("4/commit_success.txt")) and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    saved = max(int(path.parent.name) for path in Path(folder, "checkpoints").glob("[0-9]*/commit_success.txt"))
    assert 4 <= saved < STEPS, "killed too late"
    resumed = start(folder, mesh)
    output = resumed.communicate(timeout=PATIENCE)[0]
    assert resumed.returncode == 0 and f"at step {saved}; resuming" in output, output
    assert numbers(folder) == expected
    called = [int(line) for line in (folder / "hook.txt").read_text().splitlines()]
    assert called[-(STEPS - saved) :] == list(range(saved + 1, STEPS + 1))
    assert {"tensorboard", "profile"} <= {path.name for path in folder.iterdir()}
    losses = {row["held_out/loss"] for row in expected if "held_out/loss" in row}
    assert len(losses) == STEPS // 2  # the average changes


def test_the_recipe_with_every_door_is_valid():
    from flax_mesh.train.checks import check_config

    assert check_config(replace(recipe())) == []
