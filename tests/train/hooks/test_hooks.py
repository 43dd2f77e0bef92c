"""Hooks by name, by dotted path and of the recipe, their arguments, and `run.profile`."""

import gzip
import json
import shutil
import struct
from dataclasses import replace

import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.train import apply_overrides
from flax_mesh.train.hooks import load
from flax_mesh.train.hooks.load import find_hooks
from tests.train.bigram import recipe
from tests.train.support.runs import rows_of, run

CALLS: list = []


def make_recorder(folder, config, start):
    assert (folder / "metrics.jsonl").exists()  # the row was written before
    CALLS.append(("made", folder, config.run.steps, start))
    return Recorder()


class Recorder:
    def __call__(self, row):
        CALLS.append(("row", row))

    def close(self):
        CALLS.append(("closed",))


def failing(folder, config, start):
    def hook(row):
        CALLS.append(("row", row))
        if row["step"] == 2:
            raise RuntimeError("no \x1b[31mroom")

    return hook


def config_of(tmp_path, text, *settings, folder="run", steps=6):
    more = [f"data.source={text}", f"run.folder={tmp_path / folder}", "run.platform=auto", f"run.steps={steps}"]
    return apply_overrides(recipe(), [*more, *settings])


@pytest.fixture
def config(tmp_path, text):
    CALLS.clear()
    return config_of(tmp_path, text, "checkpoint.every=2", steps=4)


def with_hooks(config, text):
    return apply_overrides(config, [f"run.hooks={text}"])


def test_hooks_are_called_with_every_row_and_closed(config):
    here = f"{__name__}.make_recorder"
    changed = replace(with_hooks(config, here), hooks=(make_recorder,))
    ran = run(changed)
    assert CALLS[:2] == [("made", ran.result.folder, 4, 0)] * 2
    assert [call[1] for call in CALLS if call[0] == "row"] == [row for row in ran.rows for _ in range(2)]
    assert CALLS[-2:] == [("closed",)] * 2
    CALLS.clear()
    run(apply_overrides(changed, ["run.steps=5"]))
    assert CALLS[0] == ("made", ran.result.folder, 5, 4)


def test_a_hook_that_fails_is_reported_once_and_not_called_again(config):
    hooks = (lambda *_: {}["made"], lambda *_: 3, make_recorder, lambda *_: None)
    ran = run(replace(with_hooks(config, f"{__name__}:failing"), hooks=hooks))
    assert ran.result.status == "finished" and len(ran.rows) == 4
    warnings = [line for line in ran.lines if line.startswith("warning")]
    assert len(warnings) == 4
    assert "test_hooks.py, line" in warnings[0] and "KeyError: 'made'; this hook is not" in warnings[0]
    assert "hooks[1] of the recipe: " in warnings[1] and "must return a function of a row, got 3" in warnings[1]
    assert "hooks[3] of the recipe: " in warnings[2] and "must return a function of a row, got None" in warnings[2]
    assert (
        warnings[3].startswith(f"warning: run.hooks={__name__}:failing: ")
        and r"RuntimeError: no \x1b[31mroom" in warnings[3]
    )
    steps = [call[1]["step"] for call in CALLS if call[0] == "row"]
    assert steps == [1, 1, 2, 2, 3, 4]  # the first hook two times, the recorder four times


def test_a_module_that_fails_names_its_line_and_a_missing_extra_its_package(tmp_path, monkeypatch):
    (tmp_path / "hook_of_a_user.py").write_text("import math\nmath.nope()\n")
    (tmp_path / "hook_without_package.py").write_text("import nonexistent_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"^run.hooks=hook_of_a_user.f: .*hook_of_a_user.py, line 2: AttributeError"):
        find_hooks("hook_of_a_user.f", ())
    with pytest.raises(ConfigError, match=r"hook_without_package.py, line 1: ModuleNotFoundError: No module named 'no"):
        find_hooks("hook_without_package.f", ())
    with pytest.raises(ConfigError, match=r"^hooks\[0\] of the recipe must be a function .*, got 7$"):
        find_hooks("", (7,))
    monkeypatch.setitem(load.REQUIRED, "tensorboard", "a_package_that_does_not_exist")
    with pytest.raises(ConfigError, match=r"^run.hooks=tensorboard requires .* install 'flax-mesh\[tensorboard\]'$"):
        find_hooks("tensorboard", ())


# --- TensorBoard ---


def read_events(folder):
    """[(step, purged from, {name: value})] of the event files in order of time, by the framing of TFRecord files."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] (made by protobuf)

    found = []
    for file in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            purged = event.step if event.HasField("session_log") and event.session_log.status == 1 else None
            found.append((event.step, purged, {v.tag: v.simple_value for v in event.summary.value}))
    return found


def test_tensorboard_has_the_numbers_of_metrics_after_a_kill_too(config, tmp_path):
    folder = tmp_path / "run"
    run(with_hooks(config, "tensorboard"))
    shutil.rmtree(folder / "checkpoints" / "4")  # as after a kill between the saves of steps 2 and 4
    run(with_hooks(config, "tensorboard"))
    values: dict = {}
    for step, purged, scalars in read_events(folder / "tensorboard"):
        if purged is not None:
            values = {key: value for key, value in values.items() if key[0] < purged}
        for name, value in scalars.items():
            assert (step, name) not in values, "a step occurs twice"
            values[step, name] = value
    rows = rows_of(folder)
    found = {(row["step"], name): value for row in rows for name, value in row.items() if name != "step"}
    expected = {key: value for key, value in found.items() if isinstance(value, int | float)}
    assert values == pytest.approx(expected, rel=1e-6) and len(rows) == 4


# --- profiles ---


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


def test_a_profiler_that_fails_is_one_warning(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file")
    ran = run(config_of(tmp_path, text, "run.profile=2"))
    assert ran.result.status == "finished"
    (line,) = [line for line in ran.lines if "run.profile" in line]
    assert line.startswith(f"warning: run.profile: nothing is recorded in {tmp_path / 'run' / 'profile'}: ")
