"""Agreement, stopping together, and what happens when one process of several fails."""

import re
import subprocess
import sys

import pytest

from flax_mesh.cli.train import devices_of_process, same_command
from flax_mesh.errors import ConfigError
from flax_mesh.processes import Processes, parse_processes
from tests.multiprocess.processes import ROOT, Ended, assert_all_done, run_workers


def test_processes_agree_or_learn_how_they_differ():
    assert_all_done(run_workers("agreement", 3, 1), "agreement is done")


def texts(ended: list[Ended]) -> str:
    return "\n".join(f"--- process {i}, exit code {one.code}\n{one.output}" for i, one in enumerate(ended))


def test_a_process_that_fails_in_a_stage_ends_the_others():
    ended = run_workers("watched", 2, 1, "fails")
    assert [one.code for one in ended] == [5, 1], texts(ended)
    assert "told: something in" in ended[1].output
    assert "process 1 has failed: RuntimeError: something in" in ended[0].output, texts(ended)
    assert "step 0 loss" in ended[0].output and "step 5 loss" not in ended[0].output


@pytest.mark.slow
def test_a_process_that_is_gone_is_noticed_with_what_it_owed():
    ended = run_workers("watched", 2, 1, "ends")
    assert [one.code for one in ended] == [5, 7], texts(ended)
    assert "process 1 is gone: its connection is closed" in ended[0].output
    # What it is, is a matter of how far process 1 has come.
    assert re.search(r"process 0 was waiting: group 0 for .* from group 1 \(process 1\)", ended[0].output), texts(ended)


@pytest.mark.slow
def test_a_step_that_does_not_end_shows_all_stacks():
    ended = run_workers("watched", 2, 1, "stuck")
    assert {one.code for one in ended} == {5}, texts(ended)
    assert any("no step has ended within 4 s, after 4 of this start" in one.output for one in ended), texts(ended)
    assert any("Current thread" in one.output and "flax_mesh_watch" not in one.output for one in ended), texts(ended)


def test_one_process_has_a_limit_for_its_steps_too():
    lines = ("import time", "from flax_mesh.processes import Watch", "with Watch(print, 1.0):", "    time.sleep(30)")
    program = "\n".join(lines)
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 5, ended.stderr
    assert (
        "time.sleep" not in ended.stderr and 'File "<string>", line 4' in ended.stderr
    )  # the stack of the main thread
    assert "flax-mesh: no step has ended within 1 s, after 0 of this start" in ended.stderr


def test_process_is_read_from_text():
    assert parse_processes("2/4@10.0.0.1:1234") == Processes(2, 4, "10.0.0.1:1234")
    for wrong in ("2/4", "4/4@host:1", "a/b@host:1", "0/1@host"):
        with pytest.raises(ConfigError, match="must be I/N@HOST:PORT"):
            parse_processes(wrong)


def test_virtual_devices_are_divided_among_processes():
    assert devices_of_process("cpu:8", 4, None) == "cpu:2"
    assert devices_of_process("cpu:8", 1, None) == "cpu:8"
    assert devices_of_process("auto", 4, None) == "auto"
    assert devices_of_process("cpu:8", 4, 3) == "cpu:3"
    with pytest.raises(ConfigError, match="cannot be divided among 3 processes"):
        devices_of_process("cpu:8", 3, None)
    with pytest.raises(ConfigError, match="--devices-per-process requires run"):
        devices_of_process("gpu", 2, 2)


def test_the_command_to_go_on_launches_again():
    argv = ["train", "recipe.py", "mesh.shape=pp:4", "--process=0/4@127.0.0.1:1", "--devices-per-process=2"]
    assert same_command(argv, "0/4@127.0.0.1:1") == [
        *("launch", "-n", "4", "--devices-per-process=2", "--"),
        *("train", "recipe.py", "mesh.shape=pp:4"),
    ]
    assert same_command(["train", "recipe.py"], None) == ["train", "recipe.py"]
