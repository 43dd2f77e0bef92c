"""The run folder: its lock, entries of another kind, rows of metrics after a kill, and starts that fail."""

import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.errors import ConfigError, SaveError
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.overrides import to_lines, to_texts
from flax_mesh.train import apply_overrides, train
from flax_mesh.train.metadata import config_lines, repeats_rows
from flax_mesh.train.run_folder import MetricsFile, check_agreement, next_free, rows_until, run_folder
from tests.train.bigram import recipe, snapshot

STEPS = 5
NOBODY = 65534
LONG = "a" * 999


def row(step: int) -> dict:
    return {"step": step, "loss": step / 4, "mfu": None} | ({"eval_loss": float("nan")} if step % 2 else {})


def line(step: int) -> bytes:
    return (json.dumps(row(step)).replace("NaN", "null") + "\n").encode()


ROWS = [line(step) for step in range(1, STEPS + 1)]
TEXT = b"".join(ROWS)


def write_rows(folder: Path, start: int, end: int = STEPS) -> list[str]:
    """Write the rows of a run that has completed `start` steps. Returns its messages."""
    said: list[str] = []
    file = MetricsFile(folder, to_lines(recipe()), start, said.append)
    for step in range(start + 1, end + 1):
        file.write(row(step))
    file.close()
    return said


def metrics(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


def steps_of(text: bytes) -> list[int]:
    return [json.loads(line)["step"] for line in text.splitlines()]


# --- rows of a run that was killed ---


@pytest.mark.parametrize("start", range(1, STEPS))
def test_a_file_that_was_cut_at_any_byte_gets_the_rows_of_an_uninterrupted_run(start, tmp_path):
    """Rows before the checkpoint, which only a crash of the machine can remove, stay missing."""
    saved = len(b"".join(ROWS[:start])) - 1  # a row is written before its checkpoint; it is complete without newline
    for end in range(len(TEXT) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(TEXT[:end])
        said = write_rows(tmp_path, start)
        complete = sum(end >= len(b"".join(ROWS[:step])) - 1 for step in range(1, start + 1))
        assert metrics(tmp_path) == b"".join([*ROWS[:complete], *ROWS[start:]]), (start, end)
        if end >= saved:
            rest = TEXT[saved + 1 : end]
            lines = start + rest.count(b"\n") + (rest != b"" and not rest.endswith(b"\n"))
            cut = f"run: metrics.jsonl is cut back to the checkpoint of step {start}: {lines} rows before, {start} now"
            assert [re.sub(r"\b1 row\b", "1 rows", text) for text in said] == [cut] * (end != saved + 1)
    assert sorted(os.listdir(tmp_path)) == ["config.txt", "metrics.jsonl"]


@pytest.mark.parametrize(
    ("written", "until", "kept"),
    [
        ([1, 2, 3, 4, 3, 4, 5], 5, [1, 2, 3, 4, 5]),  # a run that was killed after step 4 and resumed after step 2
        ([1, 2, 3, 4, 2], 3, [1, 2, 3]),
        ([2, 1, 5], 4, [1, 2]),
    ],
)
def test_rows_that_earlier_versions_wrote_twice_are_repaired(written, until, kept):
    expected = b"".join(ROWS[step - 1] for step in kept)
    last = {step: i for i, step in enumerate(written)}
    rows = [ROWS[step - 1] if last[step] == i else line(step).replace(b"mfu", b"old") for i, step in enumerate(written)]
    text = b"".join(rows)
    assert rows_until(text, until) == rows_until(text[:-1], until) == expected  # the last newline may be missing


NO_ROWS = (b"", b"[]", b"3", b"null", b'{"loss": 1}', b'{"step": "3"}', b'{"step": null}', b"\xff\xfe", b"\0" * 40)
NO_ROWS += (b"[" * 9999, b'{"step": 2, "lo{"step": 2, "loss": 1}', b'{"step": 2, "loss": \0\0\0}', b'{"step": 1e999}')


@pytest.mark.parametrize("bad", [*NO_ROWS, b'{"step": -2}'])
def test_lines_that_are_not_rows_are_removed(bad):
    braces = b'{"step": 2, "norm of {embed}": 2.0}\n'
    assert rows_until(ROWS[0] + bad + b"\n" + braces + ROWS[2], STEPS) == ROWS[0] + braces + ROWS[2]


def test_a_new_run_keeps_the_files_of_an_old_one_under_other_names(tmp_path):
    for expected in ("", ".old", ".old-2"):
        said = write_rows(tmp_path, 0, 3)
        files = f"metrics.jsonl{expected} and config.txt{expected}"
        moved = f"run: the folder has no checkpoint of its earlier run; its files are now {files}"
        assert said == ([moved] if expected else [])
    assert {metrics(tmp_path), (tmp_path / "metrics.jsonl.old").read_bytes()} == {b"".join(ROWS[:3])}
    assert len(os.listdir(tmp_path)) == 6


@pytest.mark.parametrize(
    ("before", "now", "is_repeated"),
    [
        ([], [], True),
        ([], ["mesh.shape=dp:4", "checkpoint.every=2", "run.steps=3"], True),  # these do not change a row
        (["run.seed=1"], [], False),
        (["run.eval_every=0"], [], False),
        ([], ["data.source=other.txt"], False),
        ([], ["run.steps=2"], False),  # the last row is not computed again
        (["checkpoint.every=3"], [], False),  # it had a checkpoint, which was removed
        (["run.steps=3"], [], False),
        (["data"], [], False),
        (["no data"], [], False),  # a config.txt of an earlier version
        (["no file"], [], False),
    ],
)
def test_a_run_that_was_killed_before_its_first_save_is_repeated_in_its_file(before, now, is_repeated, tmp_path):
    def write(config: TrainConfig, data: str, end: int) -> list[str]:
        said: list[str] = []
        record = {"config": to_texts(config), "data": {"name": "text.txt", "content_hash": data}}
        file = MetricsFile(tmp_path, config_lines(record), 0, said.append, partial(repeats_rows, record, config))
        for step in range(1, end + 1):
            file.write(row(step))
        file.close()
        return said

    changed = [setting for setting in before if "=" in setting]
    write(apply_overrides(recipe(), changed), "other" if "data" in before else "same", 3)
    if "no data" in before:
        (tmp_path / "config.txt").write_text("\n".join(to_lines(recipe())))
    if "no file" in before:
        (tmp_path / "config.txt").unlink()
    said = write(apply_overrides(recipe(), now), "same", 2)
    assert metrics(tmp_path) == b"".join(ROWS[:2])
    if is_repeated:
        assert sorted(os.listdir(tmp_path)) == ["config.txt", "metrics.jsonl"]
        assert said == ["run: metrics.jsonl is cut back to its start, as nothing was saved: 3 rows before, 0 now"]
    else:
        assert (tmp_path / "metrics.jsonl.old").read_bytes() == b"".join(ROWS[:3])


def test_a_folder_does_not_change_before_the_first_row(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(TEXT[:-7])
    before = snapshot(tmp_path)
    MetricsFile(tmp_path, to_lines(recipe()), 2, print).close()
    assert snapshot(tmp_path) == before


# --- a file that is changed while the run writes it ---


def rotate(path: Path) -> None:
    path.rename(path.with_name("metrics.jsonl.1"))


def restore_a_copy(path: Path) -> None:
    """As an editor saves it: another file with the same content."""
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").replace(path)


@pytest.mark.parametrize(
    ("change", "rows", "lost"),
    [
        (Path.unlink, [4, 5], "3 rows"),
        (rotate, [4, 5], "3 rows"),
        (lambda path: os.truncate(path, 0), [4, 5], "3 rows"),
        (lambda path: os.truncate(path, len(ROWS[0]) + 9), [1, 4, 5], "2 rows"),  # in a row
        (restore_a_copy, [1, 2, 3, 4, 5], ""),
    ],
)
def test_rows_are_written_to_the_file_of_the_name_and_missing_ones_are_counted(change, rows, lost, tmp_path):
    said: list[str] = []
    file = MetricsFile(tmp_path, to_lines(recipe()), 0, said.append)
    for step in (1, 2, 3):
        file.write(row(step))
    change(tmp_path / "metrics.jsonl")
    for step in (4, 5):
        file.write(row(step))
    file.close()
    assert steps_of(rows_until(metrics(tmp_path), STEPS)) == rows
    assert metrics(tmp_path).endswith(b"\n" + ROWS[4])
    warning = (
        f"warning: {tmp_path}/metrics.jsonl was removed, replaced or cut while the run wrote it: it lacks {lost} "
        "before step 4; later rows are appended to the file of this name"
    )
    assert said == [warning] * bool(lost)
    assert write_rows(tmp_path, 5) == []  # nothing was left to repair, except of a torn row
    if change is rotate:
        assert (tmp_path / "metrics.jsonl.1").read_bytes() == b"".join(ROWS[:3])


def test_rows_of_a_relative_folder_do_not_follow_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = MetricsFile(Path(), to_lines(recipe()), 0, print)
    file.write(row(1))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    file.write(row(2))
    file.close()
    assert metrics(tmp_path) == ROWS[0] + ROWS[1] and os.listdir() == []


def test_a_row_for_which_there_is_no_room_is_left_out_completely(tmp_path):
    file = MetricsFile(tmp_path, to_lines(recipe()), 0, print)
    file.write(row(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(ROWS[0]) + 9, limits[1]))
    try:
        with pytest.raises(SaveError, match=r"the row of step 2 could not be written to .*: No space left on device"):
            file.write(row(2))
        assert metrics(tmp_path) == ROWS[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.write(row(3))
    file.close()
    assert metrics(tmp_path) == ROWS[0] + ROWS[2]


# --- the lock, and files in the way ---


def test_a_second_run_is_rejected_though_the_lock_file_was_deleted(tmp_path):
    folder = tmp_path / "run"
    with run_folder(folder):
        for _ in range(2):
            in_use = f"run.folder={folder} is in use by another run; stop that run, or use another folder"
            assert rejected(folder) == [in_use]
            (folder / ".lock").unlink(missing_ok=True)
        (folder / "metrics.jsonl").touch()
    with run_folder(folder):
        pass


OTHERS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a file": Path.touch,
    "a broken link (Too many levels of symbolic links)": lambda path: path.symlink_to(path),
    "a broken link (No such file or directory)": lambda path: path.symlink_to(path.with_name("gone")),
    "neither a file nor a folder": os.mkfifo,
}
WANTED = {"metrics.jsonl": "a file", "config.txt": "a file", "checkpoints": "a folder", "": "a folder"}


def rejected(folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught, run_folder(folder):
        pass
    return caught.value.lines


@pytest.mark.parametrize("found", OTHERS)
def test_entries_of_another_kind_are_listed_and_stay(found, tmp_path):
    OTHERS[found](run := tmp_path / "run")
    if WANTED[""] != found:
        (problem,) = rejected(run)
        assert problem.startswith(f"run.folder: {run} must be a folder, found {found}; rename or remove it")
    assert os.listdir(tmp_path) == ["run"]
    folder, wrong = tmp_path / "other", [name for name in WANTED if name and WANTED[name] != found]
    folder.mkdir()
    for name in wrong:
        OTHERS[found](folder / name)
    assert rejected(folder) == [
        f"run.folder: {folder / name} must be {WANTED[name]}, found {found}; rename or remove it, or use another "
        "run.folder"
        for name in wrong
    ]
    assert sorted(os.listdir(folder)) == sorted(wrong)


@contextmanager
def without_rights(path: Path, mode: int) -> Iterator[None]:
    """A mode of a file or folder, as a user other than root, who may read and write everything."""
    outside = [one for one in path.parents if one.stat().st_uid == os.getuid() and one.stat().st_mode & 7 == 0]
    modes = {one: one.stat().st_mode & 0o777 for one in [*outside, path]}
    for one in outside:
        one.chmod(0o711)
    path.chmod(mode)
    user = os.geteuid()
    os.seteuid(user or NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        for one, old in modes.items():
            one.chmod(old)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", ""])
@pytest.mark.parametrize("mode", [0o000, 0o555, 0o333])
def test_entries_without_rights_are_an_error(name, mode, tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    if os.geteuid() == 0:
        for path in (tmp_path, folder, folder / "checkpoints", folder / "metrics.jsonl"):
            os.chown(path, NOBODY, NOBODY)
    with without_rights(folder / name, mode):
        problems = rejected(folder)
    wrong = f"run.folder: {folder / name} must be readable and writable"
    assert problems == [f"{wrong}; change its rights, or use another run.folder"]


def test_folders_are_removed_as_far_as_they_were_created(tmp_path):
    (tmp_path / "runs").mkdir()
    for _ in range(2):
        with run_folder(tmp_path / "runs" / "a" / "b"):
            assert os.listdir(tmp_path / "runs" / "a" / "b") == [".lock"]
            (tmp_path / "runs" / "a" / "b" / "compiled").mkdir()  # programs of a start that fails
        assert os.listdir(tmp_path / "runs") == []
    assert "cannot be written (File name too long)" in rejected(tmp_path / "x" / LONG)[0]
    assert os.listdir(tmp_path) == ["runs"]


def test_a_restart_passes_over_everything_that_exists(tmp_path):
    (tmp_path / "run").touch()
    (tmp_path / "run-2").symlink_to("gone")
    assert next_free(tmp_path / "run") == tmp_path / "run-3"


def test_processes_must_agree_on_the_sharding_the_data_and_each_setting(monkeypatch):
    compared: dict[str, str] = {}
    monkeypatch.setattr("flax_mesh.train.run_folder.assert_equal", lambda name, facts: compared.update(facts))
    record = {"config": {"a": "1"}, "versions": {"jax": "0.9"}, "mesh": "dp:2", "rules": [], "axes": {}}
    check_agreement(record | {"sharding": "5e", "data": {"name": "text.txt", "content_hash": "c0"}})
    assert compared.pop("sharding of the state") == "5e" and compared.pop("text.txt") == "c0"
    assert compared == {"config a": "1", "version of jax": "0.9", "mesh": "dp:2", "rules": "[]", "axes": "{}"}


# --- runs in this process ---


@pytest.fixture
def config(text, tmp_path):
    common = (f"data.source={text}", f"run.folder={tmp_path / 'run'}", "run.eval_every=0", "model.hidden_size=8")
    return lambda *settings: apply_overrides(recipe(), [*common, *settings])


def fail(*arguments: object) -> None:
    raise ZeroDivisionError("in the recipe")


IN_CALLBACK = f"a callback of the step: {__file__}, line {fail.__code__.co_firstlineno + 1}: ZeroDivisionError: in the"


def fail_in_a_step(model, batch):
    jax.debug.callback(fail)
    return model(batch["inputs"])[0].sum(), jnp.float32(1)


@pytest.mark.slow
def test_a_first_step_that_fails_leaves_no_folder_or_the_old_one_unchanged(config, tmp_path):
    with pytest.raises(ConfigError, match=IN_CALLBACK):
        train(replace(config("run.steps=4", "mesh.shape=dp:8"), loss_fn=fail_in_a_step))
    assert os.listdir(tmp_path) == []
    train(config("run.steps=2"))
    (tmp_path / "run" / ".lock").unlink()
    before, longer = snapshot(tmp_path), config("run.steps=4", "checkpoint.every=7", "mesh.shape=dp:8")
    with pytest.raises(ConfigError, match=IN_CALLBACK):
        train(replace(longer, loss_fn=fail_in_a_step), allow_changes=True)
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_save_is_repeated_in_the_same_files(config, tmp_path):
    def end(row):
        if row["step"] == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(config("run.steps=4"), hooks=[end])
    assert steps_of(metrics(tmp_path / "run")) == [1, 2]
    train(config("run.steps=4"))
    assert steps_of(metrics(tmp_path / "run")) == [1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "checkpoints", "config.txt", "metrics.jsonl"]


@pytest.mark.sampled
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_rows_that_can_no_longer_be_written_stop_the_run_or_are_counted_at_its_end(on_failure, config, tmp_path):
    path, said = tmp_path / "run" / "metrics.jsonl", []

    def replace_by_a_folder(row):
        if row["step"] == 4:
            path.rmdir()
        if row["step"] in (2, 5):
            path.rename(tmp_path / f"old{row['step']}")
            path.mkdir()

    reason = f"the row of step 3 could not be written to {path}: Is a directory"
    changed = config(f"checkpoint.on_failure={on_failure}", "run.steps=8")
    if on_failure == "stop":
        with pytest.raises(SaveError, match=re.escape(reason)):
            train(changed, hooks=[replace_by_a_folder], say=said.append)
        expected = []
    else:
        assert train(changed, hooks=[replace_by_a_folder], say=said.append).status == "finished"
        expected = [
            f"warning: {reason}; training continues (checkpoint.on_failure)",
            "metrics are written again from step 5 on; rows lost: 2",
            f"warning: {reason.replace('step 3', 'step 6')}; training continues (checkpoint.on_failure)",
            "warning: the last rows of metrics could not be written; rows lost: 3",
        ]
        assert steps_of((tmp_path / "old5").read_bytes()) == [5]
    lines = [line for line in said if "could not be" in line or "written again" in line]
    assert lines == expected
    assert steps_of((tmp_path / "old2").read_bytes()) == [1, 2]


def test_a_checkpoint_from_the_python_api_is_an_error_that_names_start_from(text, tmp_path):
    with Checkpointer(tmp_path / "other" / "checkpoints") as checkpointer:
        checkpointer.save(7, {"w": jnp.ones(3)}, {"loss": 1.0})
    message = (
        rf"^{tmp_path}/other/checkpoints/7 was not saved by a run \(its metadata has no settings\), so that no run can "
        rf"resume from it\. Use another run\.folder, and checkpoint\.start_from={tmp_path}/other/checkpoints/7 to"
    )
    before = snapshot(tmp_path / "other")
    with pytest.raises(ConfigError, match=message):
        train(apply_overrides(recipe(), [f"data.source={text}", f"run.folder={tmp_path}/other"]))
    assert snapshot(tmp_path / "other") == before
