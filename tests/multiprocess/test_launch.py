"""`flax-mesh launch`: complete runs in several processes, stopped, killed, and resumed with other process counts."""

import json
import os
import random
import re
import resource
import signal
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli import main
from flax_mesh.cli.main import command
from tests.multiprocess.launches import LIMIT_S, SETTINGS, assert_same_run, run, start, stored, train
from tests.multiprocess.processes import (
    ROOT,
    Running,
    all_killed,
    assert_all_done,
    assert_all_end,
    children,
    free_port,
    listed,
    run_all,
    run_workers,
)
from tests.train.support.finetune import SETTINGS as FINETUNE
from tests.train.support.finetune import write_chats, write_llama

VIT = ("recipes/vit.py",)
DIFFERENT = """
import dataclasses
import jax
from flax_mesh.train import load_recipe

def recipe():
    made = load_recipe("{vit}")
    own = lambda config: lambda step: made.make_batches(config)(step + jax.process_index())
    return dataclasses.replace(made, make_batches=own)
"""

OWN_ROWS = """
from dataclasses import replace
import numpy as np
from flax_mesh.train import load_recipe

class Rows:
    def __init__(self, config, rows=None):
        self.step, self.index = 0, np.arange(config.data.batch_size) if rows is None else rows.index

    def __next__(self):
        random = [np.random.default_rng((self.step, int(row))) for row in self.index]
        self.step += 1
        tokens = np.stack([one.integers(0, 256, 17, np.int32) for one in random])
        return dict(inputs=tokens[:, :-1], targets=tokens[:, 1:])

    def get_state(self):
        return self.step

    def set_state(self, state):
        self.step = state

def recipe():
    return replace(load_recipe("{tiny}"), make_batches=Rows, sample=None)
"""


def losses(folder: Path, *more: str) -> dict[int, list[float]]:
    """Step -> its losses, one for each time that it ran, then of each time the metrics `more` that it has."""
    found: dict[int, list[float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], []).extend(row[name] for name in ("loss", *more) if name in row)
    return found


def assert_same_losses(folder: Path, other: Path, steps: list[int]) -> None:
    found, expected = losses(folder, "held_out/loss"), losses(other, "held_out/loss")
    assert sorted(found) == sorted(expected) == steps
    for step in steps:
        np.testing.assert_allclose(found[step], expected[step], rtol=1e-5)


def assert_same_state(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a and a.keys() == b.keys()
    for path, value in a.items():
        assert value.dtype == b[path].dtype and np.array_equal(value, b[path]), path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "same", "shape", "own"),  # own: settings of the run in two processes
    [
        (SETTINGS, ("model.num_layers=2", "pipeline.schedule=zb-h1"), "pp:2,fsdp:2", ("mesh.axis_types=explicit",)),
        (SETTINGS, ("model.num_layers=2", "pipeline.schedule=zb-h1"), "fsdp:2,tp:2", ("mesh.axis_types=explicit",)),
        (VIT, ("run.eval_every=3", "data.batch_size=16", "pipeline.num_microbatches=2"), "pp:2,fsdp:2", ()),
    ],
    ids=["explicit pipeline", "explicit", "batches of a recipe"],
)
def test_two_processes_have_the_losses_of_one(settings, same, shape, own, tmp_path):
    run(1, 4, tmp_path / "one", "mesh.shape=pp:2,fsdp:2", *same, "run.steps=3", settings=settings)
    run(2, 2, tmp_path / "two", f"mesh.shape={shape}", *same, *own, "run.steps=3", settings=settings)
    assert_same_losses(tmp_path / "two", tmp_path / "one", [1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "shape"), [(2, "fsdp:4"), (4, "dp:2,tp:2"), (2, "pp:2,fsdp:2")])
def test_processes_that_make_their_own_rows_have_the_same_run_bit_for_bit_also_if_it_is_resumed(
    processes, shape, tmp_path
):
    """In the mesh dp:2,tp:2 two processes make the same rows each, and as groups of a pipeline both make all rows."""
    (tmp_path / "own_rows.py").write_text(OWN_ROWS.format(tiny=ROOT / "recipes" / "tiny.py"))
    settings = (str(tmp_path / "own_rows.py"), *SETTINGS[1:], "model.num_layers=2", f"mesh.shape={shape}")
    run(processes, 4 // processes, tmp_path / "all", "run.steps=4", settings=settings)
    for steps in (2, 4):
        own = ("data.rows=process", f"run.steps={steps}")
        run(processes, 4 // processes, tmp_path / "own", *own, settings=settings)
    assert_same_run(tmp_path / "own", tmp_path / "all", 4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["fsdp:2,tp:2", "pp:2,fsdp:2"])
def test_two_processes_train_adapters_of_an_imported_model_and_resume_bit_for_bit(shape, tmp_path):
    pytest.importorskip("torch", reason="comes with the extra hf")
    pytest.importorskip("transformers", reason="comes with the extra finetune")
    write_llama(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl")
    start_from, source = f"checkpoint.start_from={tmp_path / 'base'}", f"data.source={tmp_path / 'chats.jsonl'}"
    settings = ("recipes/finetune.py", *FINETUNE, start_from, source, "lora.rank=2", "run.eval_every=2")
    run(1, 4, tmp_path / "one", "mesh.shape=fsdp:4", "run.steps=4", settings=settings)
    run(2, 2, tmp_path / "whole", f"mesh.shape={shape}", "run.steps=4", settings=settings)
    for steps in (2, 4):
        run(2, 2, tmp_path / "two", f"mesh.shape={shape}", f"run.steps={steps}", settings=settings)
    assert_same_losses(tmp_path / "two", tmp_path / "one", [1, 2, 3, 4])
    assert losses(tmp_path / "two", "held_out/loss") == losses(tmp_path / "whole", "held_out/loss")
    saved = stored(tmp_path / "two", 4)
    assert_same_state(saved, stored(tmp_path / "whole", 4))
    assert not [path for path in saved if path.startswith("model/") and "_lora_" not in path]


@pytest.mark.slow
def test_processes_with_other_batches_are_found_at_the_start(tmp_path):
    (tmp_path / "different.py").write_text(DIFFERENT.format(vit=ROOT / "recipes" / "vit.py"))
    settings = (str(tmp_path / "different.py"), "data.batch_size=16", "mesh.shape=fsdp:4")
    with start(2, 2, tmp_path / "run", settings=settings) as running:
        ended = running.ended(LIMIT_S)
    assert ended.code == 2 and "first batch of make_batches: " in ended.output, ended.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_optimizer_state_of_two_processes_in_the_memory_of_their_hosts(tmp_path):
    same = ["model.num_layers=2", "mesh.shape=pp:2,fsdp:2", "optimizer.shard_over=dp", "checkpoint.every=2"]
    run(2, 2, tmp_path / "device", *same, "run.steps=4")
    run(2, 2, tmp_path / "both", *same, "optimizer.memory=pinned_host", "run.steps=2")
    run(2, 2, tmp_path / "both", *same, "optimizer.memory=device", "run.steps=4")
    expected = losses(tmp_path / "device")
    assert sorted(expected) == [1, 2, 3, 4]
    assert losses(tmp_path / "both") == expected
    assert_same_state(stored(tmp_path / "both", 4), stored(tmp_path / "device", 4))


@pytest.mark.slow
def test_two_processes_search_one_schedule_and_resume_with_it(tmp_path):
    same = ["model.num_layers=2", "mesh.shape=pp:2,fsdp:2"]
    run(1, 4, tmp_path / "named", *same, "pipeline.schedule=zb-h1", "run.steps=5")
    for steps in (4, 5):
        output = run(2, 2, tmp_path / "searched", *same, "pipeline.schedule=search", f"run.steps={steps}")
        assert ("schedule: searched for the measured stages" in output) == (steps == 4), output
    assert (tmp_path / "searched" / "schedule.txt").read_text().startswith("# pp:2,fsdp:2, 4 microbatches\n")
    assert_same_losses(tmp_path / "searched", tmp_path / "named", [1, 2, 3, 4, 5])


@pytest.mark.slow
def test_checkpoints_are_restored_with_other_numbers_of_processes(tmp_path):
    """Saved in each layout and restored in the next, every shard has the bits that plain Orbax reads."""
    folder, reference = tmp_path / "run", tmp_path / "reference"
    layouts = [(4, 1, "pp:4"), (1, 1, "dp:1"), (2, 2, "pp:2,fsdp:2"), (2, 2, "fsdp:4")]
    for step, (processes, devices, shape) in enumerate(layouts, start=1):
        output = run(processes, devices, folder, f"mesh.shape={shape}", f"run.steps={step}")
        if step == 1:
            assert "[0] finished at step 1" in output and "[1] step" not in output
            assert f"[0] train on: flax-mesh launch -n 4 --devices-per-process=1 -- train {SETTINGS[0]}" in output
        else:
            assert f"at step {step - 1}; resuming, 1 steps to go" in output
        if step < len(layouts):
            processes, devices, shape = layouts[step]
            settings = (*SETTINGS, f"run.folder={folder}", f"mesh.shape={shape}", "run.platform=cpu")
            assert_all_done(run_workers("restores", processes, devices, str(folder), str(step), *settings), "is done")
    run(1, 1, reference, "mesh.shape=dp:1", f"run.steps={len(layouts)}")
    assert_same_losses(folder, reference, [1, 2, 3, 4])


@pytest.mark.slow
def test_all_processes_end_with_exit_code_6_or_skip_the_same_updates(tmp_path):
    diverging = ("mesh.shape=pp:2", "optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "checkpoint.every=1")
    with start(2, 1, tmp_path / "run", *diverging, "run.steps=40") as running:
        ended = running.ended(LIMIT_S)
    assert ended.code == 6, ended.output
    assert set(re.findall(r"exit code (\d+)", ended.output)) == {"6"}, ended.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    bad = rows[-1]["step"]
    assert [row["step"] for row in rows if None in (row["loss"], row["grad_norm"])] == [bad] and 1 < bad < 40
    assert f"diverged at step {bad}" in ended.output and "stopped: step" in ended.output
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        assert checkpointer.steps() == list(range(1, bad))
    output = run(2, 1, tmp_path / "run", *diverging, f"run.steps={bad + 1}", "run.on_nonfinite=skip")
    assert "resuming, 2 steps to go" in output and "the update was skipped (2 so far)" in output
    before, after = (stored(tmp_path / "run", step) for step in (bad - 1, bad + 1))
    assert_same_state(before, after)


def limit_files(running: Running, process: int, size: int) -> None:
    resource.prlimit(children(running.process.pid)[process], resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_training_continues_in_all_processes_while_one_cannot_save(who, tmp_path):
    more = ("mesh.shape=pp:2", "run.steps=100000", "checkpoint.every=10", "checkpoint.on_failure=continue")
    with start(2, 1, tmp_path / "run", *more) as running:
        running.wait_for("step     20 ", LIMIT_S)
        limit_files(running, who, 2**14)
        running.wait_for("training continues (checkpoint.on_failure)", 60)
        limit_files(running, who, resource.RLIM_INFINITY)
        step = max(losses(tmp_path / "run"))
        running.wait_for(f"step {step + 25:>6} ", LIMIT_S)
        os.kill(running.process.pid, signal.SIGTERM)
        ended = running.ended(60)
    assert ended.code == 4, ended.output
    warnings = re.findall(r"^\[0\] warning: the checkpoint of step \d+ could not be saved in .*", ended.output, re.M)
    assert warnings and all(re.search(f"process {who}: .*File too large; ", line) for line in warnings), ended.output
    stopped = max(losses(tmp_path / "run"))
    assert f"stopped at step {stopped}" in ended.output
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        assert max(checkpointer.steps()) == stopped and not any(map(checkpointer.verify, checkpointer.steps()))
    output = run(2, 1, tmp_path / "run", "mesh.shape=pp:2", f"run.steps={stopped + 2}")
    assert f"at step {stopped}; resuming, 2 steps to go" in output


@pytest.mark.slow
def test_a_stopped_process_is_detected_within_15_seconds(tmp_path):
    with start(4, 1, tmp_path / "run", "mesh.shape=pp:4", "run.steps=100000", "checkpoint.every=100000") as running:
        running.wait_for("step      5 ", LIMIT_S)
        os.kill(children(running.process.pid)[2], signal.SIGSTOP)
        stopped = time.monotonic()
        running.wait_for("flax-mesh: lost process 2: no heartbeat for", 60)
        assert time.monotonic() - stopped < 15  # the documented limit
        ended = running.ended(60)
    assert ended.code == 5, ended.output
    assert "from group 2 (process 2)" in ended.output
    assert "process 2 was terminated by SIGKILL" in ended.output  # by the launcher: it would stay stopped


@pytest.mark.slow
def test_killed_runs_end_completely_and_resume_bit_for_bit(tmp_path):
    """kill -9 of each process and of the launcher, twice, at a random time."""
    steps, victims = 60, [0, 1, "launcher", 1, "launcher", 0]
    common = ("mesh.shape=pp:2", f"run.steps={steps}", "checkpoint.every=2")
    reference, folder = tmp_path / "reference", tmp_path / "run"
    run(2, 1, reference, *common)
    expected, numbers, outputs = losses(reference), random.Random(0), []
    for kill, victim in enumerate(victims):
        with all_killed(folder), start(2, 1, folder, *common) as running:
            while len(of_launch := children(running.process.pid)) < 2:
                time.sleep(0.1)
            pids = listed(running.process.pid, str(folder))
            running.wait_for(f"step {8 * (kill + 1) + numbers.randrange(3):>6} ", LIMIT_S)
            os.kill(running.process.pid if victim == "launcher" else of_launch[victim], signal.SIGKILL)
            assert_all_end(folder, pids)
            ended = running.ended(60)
        assert ended.code == (-9 if victim == "launcher" else 5), ended.output
        assert victim == "launcher" or f"process {victim} was terminated by SIGKILL" in ended.output, ended.output
        assert losses(folder).items() <= expected.items()
        outputs.append(ended.output)
    outputs.append(run(2, 1, folder, *common))
    assert all("; resuming," in output for output in outputs[1:])
    assert losses(folder) == expected and sorted(expected) == list(range(1, steps + 1))
    assert any("is cut back to the checkpoint" in text for text in outputs)  # some steps were computed more than once
    assert_same_state(stored(folder, steps), stored(reference, steps))


@pytest.mark.slow
def test_processes_with_different_settings_report_the_difference(tmp_path):
    port = free_port()
    arguments = train(tmp_path / "run", "run.platform=cpu:2", "mesh.shape=pp:2")
    own = [[f"run.seed={index}", f"--process={index}/2@127.0.0.1:{port}"] for index in range(2)]
    for one in run_all([["-m", "flax_mesh.cli", *arguments, *more] for more in own], LIMIT_S):
        assert one.code == 2, one.output
        assert "config run.seed: 0 on process 0; 1 on process 1" in one.output


def test_a_command_that_is_interrupted_while_it_imports_ends_with_code_130_and_no_traceback(monkeypatch, capfd):
    started: list[list[str]] = []
    monkeypatch.setattr("flax_mesh.cli.launch.launch", lambda command, *_, **__: started.append(command) or 0)
    assert main(["launch", "-n", "2", "--", "train", "x.py"]) == 0
    assert started == [["-m", "flax_mesh.cli", "train", "x.py"]]
    module = sys.modules["flax_mesh.cli.main"]  # `flax_mesh.cli.main` is the function
    monkeypatch.setattr(module, "import_module", lambda name: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match=r"^130$"):
        command()
    assert capfd.readouterr().err == "flax-mesh: interrupted\n" and signal.getsignal(signal.SIGINT) is before
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"flax-mesh": "flax_mesh.cli.main:command"}


def test_launch_reports_invalid_arguments(capsys):
    assert main(["launch", "-n", "0", "--", "train", "x.py"]) == 2
    assert main(["launch", "-n", "2", "--", "mesh", "dp:2"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "-n must be at least 1, got 0" in first and "launch runs only the command train, got mesh" in second
