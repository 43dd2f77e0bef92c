"""Hooks by name, by dotted path and of the recipe, their arguments, and `run.profile`."""

import gzip
import json
import struct
from dataclasses import replace
from typing import Any

import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.train import apply_overrides
from flax_mesh.train.hooks import load, trackers
from flax_mesh.train.hooks.load import Hooks, find_hooks
from flax_mesh.train.hooks.profile import Profile
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


def test_hooks_are_called_with_every_row_and_closed(tmp_path, text):
    CALLS.clear()
    config = config_of(tmp_path, text, f"run.hooks={__name__}.make_recorder", "run.eval_every=0", steps=4)
    changed = replace(config, hooks=(make_recorder,))
    ran = run(changed)
    assert CALLS[:2] == [("made", ran.result.folder, 4, 0)] * 2
    assert [call[1] for call in CALLS if call[0] == "row"] == [row for row in ran.rows for _ in range(2)]
    assert CALLS[-2:] == [("closed",)] * 2
    CALLS.clear()
    run(apply_overrides(changed, ["run.steps=5"]))
    assert CALLS[0] == ("made", ran.result.folder, 5, 4)


def test_a_hook_that_fails_is_reported_once_and_not_called_again(tmp_path):
    CALLS.clear()
    (tmp_path / "metrics.jsonl").touch()
    of_recipe, warnings = (lambda *_: {}["made"], lambda *_: 3, make_recorder, lambda *_: None), []
    hooks = Hooks(find_hooks(f"{__name__}:failing", of_recipe), tmp_path, recipe(), 0, warnings.append)
    for step in range(1, 5):
        hooks({"step": step})
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


def test_tensorboard_has_the_numbers_of_metrics_after_a_kill_too(tmp_path):
    rows = [{"step": i, "loss": i / 2, "mfu": None, "is_on": True} for i in range(1, 6)]
    rows[3]["eval_loss"] = 0.5
    ((_, make),) = find_hooks("tensorboard", ())
    for start, last in ((0, 4), (2, 5)):  # as after a kill between the saves of steps 2 and 4
        hook: Any = make(tmp_path, None, start)
        for row in rows[start:last]:
            hook(row)
        hook.close()
    values: dict = {}
    for step, purged, scalars in read_events(tmp_path / "tensorboard"):
        if purged is not None:
            values = {key: value for key, value in values.items() if key[0] < purged}
        for name, value in scalars.items():
            assert (step, name) not in values, "a step occurs twice"
            values[step, name] = value
    assert values == {(i, "loss"): i / 2 for i in range(1, 6)} | {(4, "eval_loss"): 0.5}


# --- wandb and trackio ---


@pytest.mark.parametrize(("first", "sent"), [(0, [1, 2, 3, 4]), (2, [2, 3, 4]), (3, [3, 4]), (5, [])])
def test_a_tracker_gets_the_rows_that_it_lacks_once(first, sent, tmp_path):
    rows = [{"step": i, "loss": i / 2, "eval_loss": None, "is_on": True} for i in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))  # 3 is the first row
    found = []
    tracker = trackers._Tracker(tmp_path, 2, first, lambda values, step: found.append((step, values)), lambda: None)
    for row in rows[2:]:  # as `Hooks` calls it
        tracker(row)
    assert found == [(i, {"loss": i / 2}) for i in sent]


def killed_and_resumed(tmp_path, text, name):
    """The rows of a run that saves steps 2 and 4 and is killed at 3, and then resumed; its folder."""
    configs = [config_of(tmp_path, text, "checkpoint.every=2", f"run.hooks={name}", steps=n) for n in (4, 4, 5)]
    run(configs[0], kill_at=3)
    for config in configs[1:]:
        ran = run(config)
        assert ran.result.status == "finished" and not [line for line in ran.lines if line.startswith("warning")]
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 5
    return {row["step"]: load.numbers(row) for row in rows}, tmp_path / "run"


def read_wandb(file):
    """The rows of a .wandb file: records of protobuf in blocks of 32 KiB, as in the logs of LevelDB."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    data, rows, record = file.read_bytes(), [], b""
    at = 7  # the header of the file
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            parsed, record = wandb_internal_pb2.Record.FromString(record), b""
            if parsed.HasField("history"):
                items = parsed.history.item
                rows.append({x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items})
    return rows


@pytest.mark.slow
def test_wandb_has_every_row_once_after_a_kill_and_a_resume(tmp_path, text, monkeypatch):
    pytest.importorskip("wandb", reason="comes with the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    expected, folder = killed_and_resumed(tmp_path, text, "wandb")
    found = read_wandb(next((folder / "wandb" / "latest-run").glob("*.wandb")))
    assert [row["_step"] for row in found] == [1, 2, 3, 4, 5]
    for row in found:
        assert {name: row[name] for name in expected[row["_step"]]} == expected[row["_step"]]
    # offline-run-TIME-ID, and for a second run that begins in the same second offline-run-TIME-ID-1
    names = {path.name.split("-")[3] for path in (folder / "wandb").glob("offline-run-*")}
    assert names == {(folder / "wandb.id").read_text()}


@pytest.mark.slow
def test_trackio_has_every_row_once_after_a_kill_and_a_resume(tmp_path, text, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="comes with the extra trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    expected, folder = killed_and_resumed(tmp_path, text, "trackio")
    name = f"run-{(folder / 'trackio.id').read_text()}"
    (found,) = [x for x in trackio.Api().runs(trackers.PROJECT) if x.name == name]
    rows = SQLiteStorage.get_logs(trackers.PROJECT, name, run_id=found.id)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and found.config["checkpoint.every"] == "2"
    for row in rows:
        row_of_run = expected[row["step"]]
        assert row["loss"] == row_of_run["loss"] and row_of_run.keys() <= row.keys()


# --- profiles ---


def recorded(folder):
    """(numbers of the recorded steps, names of all events)."""
    (file,) = (folder / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {int(e["args"]["step_num"]) for e in events if e.get("name") == "train" and "step_num" in e.get("args", {})}
    return sorted(steps), {event.get("name", "") for event in events}


def test_the_third_step_of_a_run_and_those_after_it_are_recorded_and_evaluated_and_losses_are_the_same(tmp_path, text):
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
    # A resumed run records its own third step, or nothing if it ends before.
    ended = run(config_of(tmp_path, text, "run.profile=2", folder="other", steps=9))
    assert ended.result.step == 9
    assert any(line.startswith("note: nothing is recorded: run.profile=2 records") for line in ended.lines)
    assert not (tmp_path / "other" / "profile").exists()
    run(config_of(tmp_path, text, "run.profile=1", folder="other", steps=12))
    assert recorded(tmp_path / "other")[0] == [12]


def test_a_profiler_that_fails_is_one_warning(tmp_path):
    (tmp_path / "profile").write_text("a file")
    profile = Profile(tmp_path, 2, 0, (lines := []).append)
    for step in range(1, 6):
        with profile.step(step):
            pass
        if profile.ends_after(step):
            profile.close()
    profile.close()
    (line,) = lines
    assert line.startswith(f"warning: run.profile: nothing is recorded in {tmp_path / 'profile'}: ")
