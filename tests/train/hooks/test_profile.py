"""`run.profile`: which steps are recorded, and where; a run with it has the same losses."""

import gzip
import json

import pytest

from flax_mesh.train import apply_overrides
from tests.train.bigram import recipe
from tests.train.runs import run


def config_of(tmp_path, text, *settings, folder="run", steps=6):
    more = [f"data.source={text}", f"run.folder={tmp_path / folder}", "run.platform=auto", f"run.steps={steps}"]
    return apply_overrides(recipe(), [*more, *settings])


def recorded(folder):
    """(numbers of the recorded steps, names of all events)."""
    (file,) = (folder / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {int(e["args"]["step_num"]) for e in events if e.get("name") == "train" and "step_num" in e.get("args", {})}
    return sorted(steps), {event.get("name", "") for event in events}


def test_the_steps_after_compilation_are_recorded_and_evaluated_and_losses_are_the_same(tmp_path, text):
    other = run(config_of(tmp_path, text, "run.eval_every=2", folder="other"))
    assert not any("profile" in line for line in other.lines)
    ran = run(config_of(tmp_path, text, "run.profile=2", "run.eval_every=2"))
    assert ran.losses == other.losses
    assert [row["step"] for row in ran.rows if "eval_loss" in row] == [2, 4, 6]  # the last recorded step too
    steps, names = recorded(tmp_path / "run")
    assert steps == [3, 4]
    assert any("step" in name and "jit" in name.lower() for name in names)
    folder = tmp_path / "run" / "profile"
    (line,) = [line for line in ran.lines if line.startswith("profile: ")]
    assert line == f"profile: {folder}; to open it: xprof --logdir {folder}"


def test_a_resumed_run_records_its_own_third_step_or_nothing_if_it_ends_before(tmp_path, text):
    run(config_of(tmp_path, text, steps=3))
    ended = run(config_of(tmp_path, text, "run.profile=2", steps=5))
    assert ended.result.step == 5
    assert any(line.startswith("note: nothing is recorded: run.profile=2 records") for line in ended.lines)
    assert not (tmp_path / "run" / "profile").exists()
    run(config_of(tmp_path, text, "run.profile=1", steps=8))
    assert recorded(tmp_path / "run")[0] == [8]


@pytest.mark.slow
def test_a_run_that_stops_while_it_records_closes_the_trace(tmp_path, text):
    stops = iter([False] * 3 + [True] * 9)
    stopped = run(config_of(tmp_path, text, "run.profile=3"), should_stop=lambda: next(stops))
    assert stopped.result.status == "stopped" and recorded(tmp_path / "run")[0] == [3, 4]
    again = run(config_of(tmp_path, text, "run.profile=3", folder="other"))
    assert again.result.status == "finished"  # a new trace may start


def test_a_profiler_that_fails_is_one_warning(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file")
    ran = run(config_of(tmp_path, text, "run.profile=2"))
    assert ran.result.status == "finished"
    (line,) = [line for line in ran.lines if "run.profile" in line]
    assert line.startswith(f"warning: run.profile: nothing is recorded in {tmp_path / 'run' / 'profile'}: ")
