"""`run.profile`: which steps are recorded, and where; a run with it has the same losses."""

import gzip
import json

import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.train import apply_overrides, train
from tests.train.bigram import recipe, write_text


def config_of(tmp_path, *settings, folder="run", steps=6):
    more = [f"data.source={write_text(tmp_path)}", f"run.folder={tmp_path / folder}", "run.platform=auto"]
    return apply_overrides(recipe(), [*more, f"run.steps={steps}", "run.eval_every=0", *settings])


def recorded(folder):
    """(numbers of the recorded steps, names of all events)."""
    (file,) = (folder / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {int(e["args"]["step_num"]) for e in events if e.get("name") == "train" and "step_num" in e.get("args", {})}
    return sorted(steps), {event.get("name", "") for event in events}


def losses(config, printed):
    rows = []
    train(config, hooks=[rows.append], say=printed.append)
    return [row["loss"] for row in rows]


def test_the_steps_after_compilation_are_recorded(tmp_path):
    printed = []
    expected = losses(config_of(tmp_path, folder="other"), printed)
    assert not any("profile" in line for line in printed)
    assert losses(config_of(tmp_path, "run.profile=2"), printed) == expected
    steps, names = recorded(tmp_path / "run")
    assert steps == [3, 4]
    assert any("step" in name and "jit" in name.lower() for name in names)
    (line,) = [line for line in printed if line.startswith("profile: ")]
    assert line == f"profile: {tmp_path / 'run' / 'profile'}; to open it: xprof --logdir {tmp_path / 'run' / 'profile'}"


def test_the_last_recorded_step_is_evaluated(tmp_path):
    rows = []
    config = apply_overrides(config_of(tmp_path, "run.profile=2"), ["run.eval_every=2"])
    train(config, hooks=[rows.append])
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 6]  # steps 3 and 4 are recorded


def test_a_resumed_run_records_its_own_third_step(tmp_path):
    train(config_of(tmp_path, steps=3))
    train(config_of(tmp_path, "run.profile=1"))
    assert recorded(tmp_path / "run")[0] == [6]


def test_a_run_that_ends_before_is_refused_and_a_resumed_one_goes_on(tmp_path):
    with pytest.raises(ConfigError, match=r"^run.profile=5 records the steps 3 to 7, but run.steps=6 ends before that"):
        train(config_of(tmp_path, "run.profile=5"))
    assert not (tmp_path / "run").exists()
    train(config_of(tmp_path, steps=3))
    printed = []
    assert train(config_of(tmp_path, "run.profile=5"), say=printed.append).step == 6
    assert any(line.startswith("note: nothing is recorded: run.profile=5 records") for line in printed)
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.slow
def test_a_run_that_stops_while_it_records_closes_the_trace(tmp_path):
    stops = iter([False] * 3 + [True] * 9)
    result = train(config_of(tmp_path, "run.profile=3"), should_stop=lambda: next(stops))
    assert result.status == "stopped" and recorded(tmp_path / "run")[0] == [3, 4]
    assert (
        train(config_of(tmp_path, folder="other"), say=lambda line: None).status == "finished"
    )  # a new trace may start


def test_a_profiler_that_fails_is_one_warning(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file")
    printed = []
    assert train(config_of(tmp_path, "run.profile=2"), say=printed.append).status == "finished"
    (line,) = [line for line in printed if "run.profile" in line]
    assert line.startswith(f"warning: run.profile: nothing is recorded in {tmp_path / 'run' / 'profile'}: ")
