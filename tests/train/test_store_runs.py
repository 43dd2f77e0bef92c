"""Runs whose folder is in a store: the same rows, files and checkpoints as in a folder, under a lease."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flax_mesh import ConfigError, SaveError
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.find import committed_steps
from flax_mesh.checkpoint.hf.kept import KEPT, keep_files
from flax_mesh.cli import main
from flax_mesh.data import preferences
from flax_mesh.store import StorePath, stored_path, working_copy
from flax_mesh.train import apply_overrides, read_metrics, train
from flax_mesh.train.run_folder import MetricsFile, folder_of_run
from flax_mesh.train.stores import copy, lease
from flax_mesh.train.stores.copy import RunFiles
from tests.checkpoint.stores import failing_server, gs_server, s3_server, store_of_files
from tests.multiprocess.in_threads import in_threads
from tests.train import bigram
from tests.train.bigram import recipe
from tests.train.support.runs import losses, run

SERVERS = {"s3_server": s3_server, "gs_server": gs_server}
SETTINGS = ["run.steps=12", "run.eval_every=0", "run.sample_tokens=0", "checkpoint.every=4"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of working copies: another one is another machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["files", *(pytest.param(name, marks=pytest.mark.slow) for name in SERVERS)])
def bucket(request, tmp_path, monkeypatch) -> Iterator[StorePath]:
    if request.param == "files":
        yield store_of_files(monkeypatch, tmp_path / "bucket")
    else:
        with SERVERS[request.param](monkeypatch, tmp_path / "log") as bucket:
            yield bucket


@pytest.fixture
def files(tmp_path, monkeypatch) -> StorePath:
    return store_of_files(monkeypatch, tmp_path / "bucket") / "run"


def hook_that_counts(folder: Path, config: object, start: int):
    """A hook with a file, which a resumed run finds again, and one in a folder."""
    starts = folder / "starts.txt"
    starts.write_text((starts.read_text() if start else "") + f"{start}\n")
    (folder / "hook").mkdir(exist_ok=True)
    return lambda row: (folder / "hook" / "last").write_text(str(row["step"]))


def test_a_killed_run_in_a_store_resumes_bit_for_bit_on_another_machine(bucket, tmp_path, monkeypatch, capsys):
    config = apply_overrides(recipe(), [*SETTINGS, f"run.folder={tmp_path / 'plain'}"])
    expected = run(config).losses
    config = apply_overrides(
        recipe(), [*SETTINGS, f"run.folder={bucket / 'run'}", f"run.hooks={__name__}.hook_that_counts"]
    )
    killed = run(config, kill_at=7)
    assert [row["step"] for row in read_metrics(bucket / "run")] == list(range(1, 8))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    resumed = run(config)
    assert resumed.result.status == "finished" and resumed.result.folder == bucket / "run"
    assert f"run: found {bucket / 'run'} at step 4; resuming, 8 steps to go" in resumed.lines
    assert "run: metrics.jsonl is cut back to the checkpoint of step 4: 7 rows before, 4 now" in resumed.lines
    rows = read_metrics(str(bucket / "run"))
    assert losses(rows) == expected == killed.losses | resumed.losses
    assert [row["step"] for row in rows if "resumed_from" in row] == [5]
    names = {name for name in (bucket / "run").names() if not name.startswith("checkpoints/")}
    assert names == {"metrics/000000.jsonl", "config.txt", "starts.txt", "hook/last"}
    assert (bucket / "run/starts.txt").read_bytes() == b"0\n4\n" and (bucket / "run/hook/last").read_bytes() == b"12"
    assert main(["checkpoint", "list", str(bucket / "run")]) == 0 and "3 checkpoints" in capsys.readouterr().out
    again = run(apply_overrides(config, ["run.steps=1"]), restart=True)
    assert again.result.folder == bucket / "run-2" and committed_steps(bucket / "run-2/checkpoints") == [1]


def test_a_folder_that_was_copied_to_a_store_is_resumed_there(files, tmp_path):
    config = apply_overrides(recipe(), [*SETTINGS, f"run.folder={tmp_path / 'plain'}"])
    run(config, kill_at=7)
    for path in [path for path in (tmp_path / "plain").rglob("*") if path.is_file() and path.name != ".lock"]:
        (files / path.relative_to(tmp_path / "plain").as_posix()).write_bytes(path.read_bytes())
    others = {".keep", "notes.part", "wandb", "read me"}
    for name in others:
        (files / name).write_bytes(b"of the user")
    run(apply_overrides(config, [f"run.folder={files}"]))
    assert [row["step"] for row in read_metrics(files)] == list(range(1, 13)) and not (
        files / "metrics.jsonl"
    ).is_file()
    assert others <= {*files.names()}


@pytest.mark.slow
def test_a_run_that_is_killed_in_saves_to_an_s3_server_has_the_rows_of_an_undisturbed_one(tmp_path, monkeypatch):
    settings = [*SETTINGS[1:-1], "run.steps=40", "checkpoint.every=1", "run.platform=cpu:2"]
    train = [sys.executable, "-m", "flax_mesh.cli", "train", bigram.__file__, *settings]
    subprocess.run([*train, f"run.folder={tmp_path / 'plain'}"], stdout=subprocess.DEVNULL, check=True)
    expected = losses(read_metrics(tmp_path / "plain"))
    rng, last = np.random.default_rng(0), 0
    with s3_server(monkeypatch, tmp_path / "log") as bucket:
        command = [*train, f"run.folder={bucket / 'run'}"]
        for _ in range(5):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                steps = (line for line in process.stdout if line.startswith("step "))
                last = [int(next(steps).split()[1]) for _ in range(int(rng.integers(2, 6)))][-1]
                time.sleep(rng.uniform(0, 0.2))
                process.kill()
            rows = [row["step"] for row in read_metrics(bucket / "run")]
            saved = max(committed_steps(bucket / "run/checkpoints"), default=0)
            assert rows == list(range(1, len(rows) + 1)) and saved <= len(rows) and last <= saved + 3
        assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
        assert losses(read_metrics(bucket / "run")) == expected


def test_files_beside_the_parameters_and_the_reference_of_preferences_are_kept_in_a_store(files, tmp_path):
    for names in (("config.json", "vocab.txt"), ("config.json", "tokenizer.json")):
        (tmp_path / names[1]).mkdir()
        for name in names:
            (tmp_path / names[1] / name).write_text("{}")
        keep_files(tmp_path / names[1], files / "checkpoints")
        assert {*(files / "checkpoints" / KEPT).names()} == {*names}
    preferences._write(files / preferences.FILE, "key", np.arange(3.0))
    kept = preferences._read(files / preferences.FILE, "key")
    assert kept is not None and np.array_equal(kept, np.arange(3.0))
    assert preferences._read(files / preferences.FILE, "another key") is None is preferences._read(files / "x", "key")


# --- rows in parts ---


def rows_in(text: str) -> list[int]:
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_parts_are_the_lines_of_the_file_however_it_changes(files, monkeypatch):
    monkeypatch.setattr(copy, "PART", 100)
    rng, folder = np.random.default_rng(0), working_copy(files)
    written: list[str] = []
    write = StorePath.write_bytes
    monkeypatch.setattr(StorePath, "write_bytes", lambda self, data: written.append(self.name) or write(self, data))
    for _ in range(8):  # starts
        folder.mkdir(parents=True, exist_ok=True)
        with RunFiles(files, folder, lambda text: None) as here:
            steps = rows_in((folder / "metrics.jsonl").read_text()) if (folder / "metrics.jsonl").exists() else []
            file = MetricsFile(folder, [], start := int(rng.integers(len(steps) + 1)), lambda text: None)
            for step in range(start + 1, start + int(rng.integers(30)) + 2):
                file.write({"step": step, "loss": rng.random()})
                if rng.random() < 0.4:
                    written.clear()
                    here.publish()
                    first, parts = copy.joined_rows(files)
                    assert b"".join([first, *parts]) == (folder / "metrics.jsonl").read_bytes()
                    assert all(len(part) >= 100 for part in parts[:-1]) and max(map(len, parts)) < 200
            file.close()
        assert [row["step"] for row in read_metrics(files)] == list(range(1, step + 1))
    assert not [name for name in written if name < f"{len(copy.joined_rows(files)[1]) - 9:06}"]  # earlier parts stay


def test_rows_of_an_earlier_run_are_published_under_their_new_name_before_they_are_replaced(files, monkeypatch):
    folder = working_copy(files)
    folder.mkdir(parents=True)
    (files / "metrics/000000.jsonl").write_bytes(b'{"step": 1, "loss": 2}\n')
    written: list[str] = []
    write = StorePath.write_bytes
    monkeypatch.setattr(StorePath, "write_bytes", lambda self, data: written.append(self.name) or write(self, data))
    monkeypatch.setattr(lease, "RENEWED", 0.01)  # the thread
    with RunFiles(files, folder, lambda text: None):
        file = MetricsFile(folder, ["new"], 0, lambda text: None)
        file.write({"step": 1})
        file.close()
        end = time.monotonic() + 60
        while not (files / "config.txt").is_file() and time.monotonic() < end:
            time.sleep(0.01)
    assert written.index("metrics.jsonl.old") < written.index("000000.jsonl")
    assert b'"loss"' in (files / "metrics.jsonl.old").read_bytes()


# --- the lease ---


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in {"SECONDS": 1.0, "RENEWED": 0.05, "_POLLED": 0.1}.items():
        monkeypatch.setattr(lease, name, seconds)


def opened(folder: StorePath, machine: Path, said: list[str]) -> RunFiles:
    machine.mkdir(exist_ok=True)
    return RunFiles(folder, machine, said.append)


def killed_in(folder: StorePath, machine: Path) -> None:
    """Leave the lease of a run that was killed."""
    machine.mkdir(exist_ok=True)
    lease.Lease(folder, machine, print).claim()


def test_a_second_run_is_refused_while_the_first_renews_its_lease(files, quick, tmp_path):
    said: list[str] = []
    with opened(files, tmp_path / "a", said):
        with pytest.raises(ConfigError, match=r"is in use by another run, .*, process \d+ since 20.*ends 1 s later"):
            opened(files, tmp_path / "b", said).__enter__()
        assert len(said) == 1 and "waiting up to 1 s for its end" in said[0]
    assert files.names() == [] and not (tmp_path / "a" / ".lease").exists()
    with opened(files, tmp_path / "b", said):
        assert len(said) == 1


def test_the_lease_of_a_killed_run_is_taken_over_after_its_time_and_at_once_on_its_machine(files, quick, tmp_path):
    killed_in(files, tmp_path / "a")
    said: list[str] = []
    with opened(files, tmp_path / "b", said):
        assert len(said) == 2 and "taking over the lease of " in said[1] and "not renewed for 1 s" in said[1]
    killed_in(files, tmp_path / "a")
    with opened(files, tmp_path / "a", said):
        assert len(said) == 2


def test_a_run_whose_lease_was_taken_over_writes_nothing_more(files, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEWED", 100.0)  # it is suspended
    said: list[str] = []
    with opened(files, tmp_path / "a", said) as first, opened(files, tmp_path / "b", said) as second:
        (tmp_path / "a" / "config.txt").write_text("a")
        with pytest.raises(ConfigError, match=r"it was taken over by .*this run ends, and saves nothing more there"):
            first.publish()
        second.publish()
    assert files.names() == []


def test_the_lease_is_renewed_while_a_large_file_is_written(files, quick, tmp_path, monkeypatch):
    write, is_writing = StorePath.write_bytes, threading.Event()

    def slow(self: StorePath, data: bytes) -> int:
        is_writing.set()
        time.sleep(3)
        return write(self, data)

    with opened(files, tmp_path / "a", []) as first:
        (tmp_path / "a" / "large").write_text("a")
        monkeypatch.setattr(StorePath, "write_bytes", slow)
        thread = threading.Thread(target=first.publish)
        thread.start()
        assert is_writing.wait(60)
        with pytest.raises(ConfigError, match="is in use by another run"):
            opened(files, tmp_path / "b", []).__enter__()
        thread.join()
    assert files.names() == ["large"]


def test_files_that_disappear_on_this_machine_stay_in_the_store_and_one_that_is_not_readable_is_a_warning(
    files, tmp_path, monkeypatch
):
    said, here, read = list[str](), tmp_path / "a", Path.read_bytes

    def refused(self: Path) -> bytes:
        if self.name == "secret":
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", refused)
    with opened(files, here, said) as run_files:
        for name in ("config.txt", "secret", "metrics.jsonl"):
            (here / name).write_text('{"step": 1}\n')
        for _ in range(2):
            run_files.publish()
        assert len(said) == 1 and said[0].endswith("secret: Permission denied")
        published = {"config.txt", "metrics/000000.jsonl"}
        assert {*files.names()} == published | {lease.LEASE}
        shutil.rmtree(here)
        with pytest.raises(ConfigError, match=r"its files on this machine, .*, were removed; this run ends"):
            run_files.publish()
    assert {*files.names()} == published


def test_of_two_runs_that_start_together_one_is_refused(files, tmp_path, monkeypatch):
    exchange = StorePath.exchange

    def after_another_run(self: StorePath, *arguments) -> bool:
        monkeypatch.setattr(StorePath, "exchange", exchange)
        killed_in(files, tmp_path / "b")
        return self.exchange(*arguments)

    monkeypatch.setattr(StorePath, "exchange", after_another_run)
    with pytest.raises(ConfigError, match="is in use by another run"):
        killed_in(files, tmp_path / "a")


# --- stores that fail ---


def test_a_store_that_fails_for_a_while_costs_warnings_and_no_row(files, monkeypatch):
    write, step = StorePath.write_bytes, [0]

    def unavailable(self: StorePath, data: bytes) -> int:
        if 6 < step[0] < 11:
            raise OSError(5, "the store answered 503", str(self))
        return write(self, data)

    monkeypatch.setattr(StorePath, "write_bytes", unavailable)
    lines: list[str] = []
    config = apply_overrides(recipe(), [*SETTINGS[:-1], f"run.folder={files}", "checkpoint.every=2"])

    def hook(row: dict) -> None:
        while row["step"] == 7 and 6 not in committed_steps(files / "checkpoints"):
            time.sleep(0.01)
        step[0] = row["step"]

    result = train(config, say=lines.append, hooks=[hook])
    assert result.status == "finished"
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == 2 and all("the store answered 503" in line for line in warnings)
    assert all(line.endswith("training continues (checkpoint.on_failure)") for line in warnings)
    assert committed_steps(files / "checkpoints") == [4, 6, 12]
    assert [row["step"] for row in read_metrics(files)] == list(range(1, 13))
    step[0] = 7
    config = apply_overrides(config, ["run.steps=14", "checkpoint.on_failure=stop"])
    with pytest.raises(SaveError, match="metrics and other files could not be written to"):
        train(config)


def test_a_store_that_refuses_is_an_error_before_anything_compiles(monkeypatch, capsys):
    with failing_server(monkeypatch, 403) as bucket:
        with pytest.raises(ConfigError, match=r"cannot be used: the store answered 403 \(AccessDenied\); repair that"):
            train(apply_overrides(recipe(), [*SETTINGS, f"run.folder={bucket / 'run'}"]))
        with pytest.raises(ConfigError, match=r"the metrics of .* cannot be read: the store answered 403"):
            read_metrics(bucket / "run")


def test_a_file_that_the_store_refuses_is_a_warning_and_others_are_written(files, tmp_path, monkeypatch):
    monkeypatch.setattr(copy, "LARGEST", 100)
    write, said, here = StorePath.write_bytes, list[str](), tmp_path / "a"

    def refused(self: StorePath, data: bytes) -> int:
        if self.name == "b":
            raise OSError(5, "the store answered 400 (EntityTooLarge)", str(self))
        return write(self, data)

    monkeypatch.setattr(StorePath, "write_bytes", refused)
    with opened(files, here, said) as run_files:
        for name, content in {"a": "x" * 101, "b": "x", "c": "x", "metrics.jsonl": '{"step": 1}\n'}.items():
            (here / name).write_text(content)
        run_files.publish()
        assert {*files.names()} == {"c", "metrics/000000.jsonl", lease.LEASE}
    expected = f"{here}/a: it is larger than 5 GiB, which a store refuses; {here}/b: the store answered 400"
    assert len(said) == 1 and expected in said[0]


def test_a_run_whose_lease_was_taken_over_does_not_commit_the_step_that_it_writes(files, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEWED", 100.0)  # it is suspended
    folder, state = files / "checkpoints", {"a": np.ones(3)}
    with (
        opened(files, tmp_path / "a", []) as first,
        Checkpointer(folder, keep=1, before_commit=first.check) as checkpointer,
    ):
        checkpointer.save(1, state)
        checkpointer.wait()
        with opened(files, tmp_path / "b", []):
            checkpointer.save(2, state)
            with pytest.raises(SaveError, match=r"step 2 could not be saved .* it was taken over by .*; this run ends"):
                checkpointer.wait()
            assert committed_steps(folder) == [1] and not (folder / "2").exists()


def test_what_process_0_cannot_publish_is_an_error_in_all_processes(files, tmp_path, monkeypatch):
    def refused() -> None:
        raise OSError(5, "the store answered 500", "")

    def start(number: int) -> str:
        with folder_of_run(files, False, print) as place:
            place.publish()
            monkeypatch.setattr(RunFiles, "_send_rows", lambda self: refused())
            with pytest.raises(SaveError, match=r"metrics and other files could not be written .* answered 500"):
                place.publish()
            return str(place.folder)

    assert in_threads(monkeypatch, 2, start) == [str(files)] * 2


def test_wrong_addresses_are_refused(monkeypatch):
    with (
        pytest.raises(ConfigError, match="is a bucket; use a folder in it"),
        folder_of_run(stored_path("s3://bucket"), False, print),
    ):
        pass
    with pytest.raises(ConfigError, match="Invalid S3 bucket name"):
        train(apply_overrides(recipe(), ["run.folder=s3://a/run"]))
