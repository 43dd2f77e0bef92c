"""Checkpoints in a store: what holds in a folder holds there. The same tests run on files and on a server of S3."""

import os
import re
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import ConfigError, SaveError, create_mesh, store
from flax_mesh.checkpoint import Checkpointer, RetentionPolicy
from flax_mesh.checkpoint.checksums import files_below
from flax_mesh.checkpoint.find import UPLOAD, committed_steps
from flax_mesh.checkpoint.hf.kept import TOKENIZERS
from flax_mesh.cli import main
from flax_mesh.errors import CheckpointCorruptedError, UnreadableError
from flax_mesh.inference.source import find_source
from flax_mesh.store import StorePath, stored_path
from flax_mesh.train.warm_start import find_start
from tests.checkpoint.stores import failing_server, gs_server, s3_server, store_of_files

STATE = {"a": np.arange(6.0), "b": {"c": np.ones(3, ml_dtypes.bfloat16)}}
DONE = "commit_success.txt"


SERVERS = {"s3_server": s3_server, "gs_server": gs_server}


@pytest.fixture(params=["files", *(pytest.param(name, marks=pytest.mark.slow) for name in SERVERS)])
def folder(request, tmp_path, monkeypatch):
    if request.param == "files":
        yield store_of_files(monkeypatch, tmp_path) / "run"
    else:
        with SERVERS[request.param](monkeypatch, tmp_path / "log") as bucket:
            yield bucket / "run"


def save(folder, *steps, state=STATE, **options):
    with Checkpointer(folder, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state, {"metrics": {"eval_loss": float(step)}})
    return checkpointer


def test_a_checkpoint_in_a_store_is_restored_in_any_layout_with_every_kind_of_leaf(folder):
    mesh = create_mesh((4, 2), ("x", "y"))
    here = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    values = {"a": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b": np.ones((2, 4), ml_dtypes.bfloat16)}
    state = {name: jax.device_put(x, here("x" if name == "a" else None, "y")) for name, x in values.items()}
    checkpointer = save(folder, 1, state=state | {"key": jax.random.key(3), "n": 5, "host": np.arange(3)})
    other = {"a": here("y"), "b": here()}
    target = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other[name]) for name, x in values.items()}
    found: Any = checkpointer.restore(target | {"key": jax.random.key(0), "n": 0, "host": np.zeros(3, int)})
    for name, value in values.items():
        assert found[name].sharding == other[name] and np.array_equal(found[name], value)
    assert found["n"] == 5 and type(found["n"]) is int and np.array_equal(found["host"], np.arange(3))
    assert found["key"] == jax.random.key(3)
    cast: Any = checkpointer.restore({"a": target["a"].update(dtype=jnp.bfloat16)}, include="a", cast=True)["a"]
    assert cast.dtype == jnp.bfloat16 and np.array_equal(cast, values["a"].astype(ml_dtypes.bfloat16))


def test_objects_without_a_marker_are_no_step_and_are_removed_by_the_next_save(folder):
    save(folder, 3)
    for name in (folder / "3").names():
        if name != DONE:
            (folder / "5" / name).write_bytes((folder / "3" / name).read_bytes())
    checkpointer = Checkpointer(folder)
    assert checkpointer.steps() == [3] and checkpointer.latest_step() == 3 and (folder / "5").is_dir()
    (folder / "5" / "state" / "left").write_bytes(b"1")
    save(folder, 5)
    assert checkpointer.verify(5) == [] and not (folder / "5" / "state" / "left").exists()
    (folder / "3" / DONE).unlink()  # as a deletion that was interrupted
    checkpointer.clear_leftovers()
    assert not (folder / "3").exists() and checkpointer.steps() == [5]


def test_steps_are_retained_and_a_damaged_one_is_set_aside(folder):
    checkpointer = save(folder, 1, 2, 3, 4, keep=RetentionPolicy(1, best=1))
    assert checkpointer.steps() == [1, 4] and not (folder / "2").exists()
    damaged = next(name for name in (folder / "4").names() if "ocdbt.process_0/d/" in name)
    data = (folder / "4" / damaged).read_bytes()
    (folder / "4" / damaged).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert [line.partition(":")[0] for line in checkpointer.verify(4)] == [damaged]
    with pytest.raises(CheckpointCorruptedError, match=re.escape(damaged)):
        checkpointer.restore(STATE, 4)
    (folder / "4" / damaged).write_bytes(data[:-1])
    assert checkpointer.verify(4) == [f"{damaged}: {len(data) - 1} bytes, saved with {len(data)}"]
    (folder / "4" / damaged).unlink()
    assert checkpointer.verify(4) == [f"{damaged}: missing"]
    with Checkpointer(folder) as again:
        assert again.latest_step() == 1 and list(again.damaged) == [4]
        again.save(4, STATE)
    assert again.steps() == [1, 4] and again.verify(4) == [] and (folder / "4.damaged").is_dir()


def test_a_step_is_committed_once(folder, monkeypatch):
    checkpointer = save(folder, 1)
    with pytest.raises(ConfigError, match="already contains a checkpoint of step 1; nothing was overwritten"):
        checkpointer.save(1, STATE)
    create, others = StorePath.create, []

    def after_another_process(self: StorePath, data: bytes) -> bool:
        monkeypatch.setattr(StorePath, "create", create)
        others.append(save(folder, 2, state={"a": np.full(6, 7.0)}))
        return self.create(data)

    monkeypatch.setattr(StorePath, "create", after_another_process)
    with pytest.raises(SaveError, match="another process has saved this step, or is saving it"):
        save(folder, 2)
    assert checkpointer.steps() == [1, 2] and checkpointer.verify(2) == []
    assert (checkpointer.restore({"a": np.zeros(6)}, 2)["a"] == 7).all()


def test_a_save_whose_objects_another_process_removed_is_not_committed(folder, monkeypatch):
    write = StorePath.write_bytes

    def and_remove(self: StorePath, data: bytes) -> int:
        monkeypatch.setattr(StorePath, "write_bytes", write)
        (folder / "1" / UPLOAD).unlink()  # as the first save of a restarted run does, with all other objects
        return self.write_bytes(data)

    monkeypatch.setattr(StorePath, "write_bytes", and_remove)
    with pytest.raises(SaveError, match="another process has removed objects of this step, or added some"):
        save(folder, 1)
    assert Checkpointer(folder).steps() == []


@pytest.mark.parametrize("is_store", [False, True])
def test_what_is_called_before_a_commit_sees_no_step_yet_and_its_error_fails_the_save(is_store, tmp_path, monkeypatch):
    folder, seen = store_of_files(monkeypatch, tmp_path) / "run" if is_store else tmp_path / "run", list[object]()

    def check() -> None:
        seen.append(committed_steps(folder))
        if len(seen) == 2:
            raise ConfigError("not now")

    with Checkpointer(folder, keep=1, before_commit=check) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save(2, STATE)
        with pytest.raises(SaveError, match=r"step 2 could not be saved in .*: not now; the newest .* is of step 1"):
            checkpointer.wait()
        assert checkpointer.steps() == [1] == [int(entry.name) for entry in folder.iterdir()]
        checkpointer.save(3, STATE)
    assert seen == [[], [1], [1]] and checkpointer.steps() == [3] and checkpointer.verify(3) == []


def test_objects_of_others_are_neither_steps_nor_leftovers(folder):
    for name in ("2024/a.png", "1/checkpoints/3/commit_success.txt", "5/state/a"):
        (folder / name).write_bytes(b"of another program")
    (folder / "7/metadata/").write_bytes(b"")  # as consoles make folders
    save(folder, 2)
    assert (folder / "2024" / "a.png").is_file() and (folder / "5/state/a").is_file()
    with pytest.raises(ConfigError, match="already contains 5, which is not a committed checkpoint; nothing was"):
        save(folder, 5)
    assert Checkpointer(folder).steps() == [2]


@pytest.mark.parametrize("name", ["../../escaped", "state//a", "./b"])
def test_names_that_leave_the_folder_are_refused(name, monkeypatch):
    kvstore = tensorstore.KvStore.open({"driver": "memory"}).result()
    monkeypatch.setattr(store, "_bucket", lambda *at: kvstore)
    kvstore.write(f"run/5/state/{name}", b"x").result()
    with pytest.raises(UnreadableError, match="an object whose name is no path below a folder"):
        Checkpointer("s3://bucket/run").latest_step()


def test_the_commands_read_no_array(folder, monkeypatch, capsys):
    save(folder, 1, 2)
    read: list[StorePath] = []
    function = StorePath._read
    monkeypatch.setattr(StorePath, "_read", lambda self: read.append(self) or function(self))
    assert main(["checkpoint", "list", "--quick", str(folder)]) == 0
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: 2 checkpoints" in out and re.search(r"b/c +bf16\[3\]", out)
    assert read and not [path for path in read if "ocdbt.process_0" in str(path)]
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert [path for path in read if "ocdbt.process_0" in str(path)]


def test_a_save_that_fails_half_way_leaves_the_earlier_step_and_the_next_save_works(tmp_path, monkeypatch):
    folder = store_of_files(monkeypatch, tmp_path) / "run"
    write, count = StorePath.write_bytes, [0]

    def full(self: StorePath, data: bytes) -> int:
        count[0] += 1
        if 30 > count[0] > 5:
            raise OSError(28, "the store is full", str(self))
        return write(self, data)

    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.wait()
        monkeypatch.setattr(StorePath, "write_bytes", full)
        checkpointer.save(2, STATE)
        with pytest.raises(
            SaveError, match=r"step 2 could not be saved .*the store is full.*newest checkpoint is of step 1"
        ):
            checkpointer.wait()
        assert checkpointer.steps() == [1] and not (folder / "2").exists()
        count[0] = 30
        checkpointer.save(3, STATE)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3] and checkpointer.verify(3) == []


@pytest.mark.parametrize(("status", "text"), [(500, "answered 500"), (403, r"answered 403 \(AccessDenied\)"), (0, "")])
def test_a_store_that_refuses_or_is_slow_is_an_error_without_the_names_of_keys(status, text, monkeypatch):
    if not status:
        text = "did not answer within 0 seconds"
        monkeypatch.setattr(store, "_DEADLINE", 0.2)
        monkeypatch.setattr(store, "_SLOWEST", 2**40)
    with failing_server(monkeypatch, status or 500, seconds=60 * (not status)) as bucket:
        with pytest.raises(UnreadableError, match=text) as unreadable:
            Checkpointer(bucket / "run").latest_step()
        with pytest.raises(SaveError, match=f"step 1 could not be saved in .*{text}") as failed:
            save(bucket / "run", 1)
    assert "NAMEOFTHEKEY" not in f"{unreadable.value} {failed.value}"


def test_an_object_is_no_file_of_this_machine():
    path = stored_path("s3://bucket/run/") / "1"
    assert str(path) == "s3://bucket/run/1" == str(stored_path(str(path)))
    assert path.parent == stored_path("s3://bucket/run") and path.name == "1"
    for use in (os.path.exists, os.listdir, open, lambda path: path.stat(), lambda path: path.glob("*")):
        with pytest.raises(TypeError, match="is in an object store"):
            use(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3://", "must be s3://BUCKET/NAME"),
        ("s3://a/b", "Invalid S3 bucket name"),
        ("s3+https://host", r"must be s3\+https://HOST:PORT/BUCKET/NAME"),
        ("gs://bucket/../b", "must be SCHEME://BUCKET/NAME"),
        ("hdfs://a/b", "must be a path of this machine"),
    ],
)
def test_other_addresses_are_refused(text, problem):
    with pytest.raises(ConfigError, match=problem):
        Checkpointer(text)


SAVES = """
import sys
import numpy as np
import jax
jax.config.update("jax_platforms", "cpu")
from flax_mesh.checkpoint import Checkpointer
with Checkpointer(sys.argv[1], keep=2) as checkpointer:
    step = checkpointer.latest_step() or 0
    while True:
        step += 1
        checkpointer.save(step, {f"a{i}": np.full(50, step) for i in range(20)})
        print(step, flush=True)
"""


@pytest.mark.slow
def test_after_kills_in_saves_to_an_s3_server_the_newest_step_is_whole(tmp_path, monkeypatch):
    rng, newest = np.random.default_rng(0), 0
    with s3_server(monkeypatch, tmp_path / "log") as bucket:
        for _ in range(20):
            command = [sys.executable, "-c", SAVES, str(bucket / "run")]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                started = [int(process.stdout.readline()) for _ in range(3)]  # the first of them is committed
                time.sleep(rng.uniform(0, 0.5))
                process.kill()
            checkpointer = Checkpointer(bucket / "run", keep=2)
            assert started[0] == newest + 1
            newest = checkpointer.latest_step() or 0
            assert newest >= started[1] and not checkpointer.damaged
            found = checkpointer.restore({f"a{i}": np.zeros(50, int) for i in range(20)})
            assert all((x == newest).all() for x in found.values())
        save(bucket / "run", newest + 1, keep=2)
        assert {path.name for path in (bucket / "run").iterdir()} == {str(newest), str(newest + 1)}


def test_a_run_that_was_copied_to_a_store_is_read_there(saved, folder, tmp_path):
    for file in files_below(saved):
        (folder / file).write_bytes((saved / file).read_bytes())
    (folder / "checkpoints" / "huggingface" / "tokenizer.json").write_bytes(b"{}")
    start = find_start(str(folder))
    assert start.step == folder / "checkpoints" / "10"
    assert [file.name for file in start.files.iterdir()] == [TOKENIZERS[0]]
    source = find_source(str(folder), 5)
    assert source.path == folder / "checkpoints" / "5" and (source.files / "tokenizer.json").read_bytes() == b"{}"
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "model"), "--to", "safetensors"]) == 0
    assert main(["checkpoint", "diff", str(folder), str(saved), "--values"]) == 0
    assert main(["checkpoint", "export", str(saved), str(folder / "out"), "--to", "safetensors"]) == 2


def test_a_store_that_fails_while_a_step_is_verified_is_no_damage_and_no_deletion(tmp_path, monkeypatch):
    folder = store_of_files(monkeypatch, tmp_path) / "run"
    save(folder, 1)
    read = StorePath._read

    def refused(self: StorePath) -> bytes | None:
        if "ocdbt.process_0" in str(self) or self.name == DONE:
            raise OSError(5, "the store answered 403", str(self))
        return read(self)

    monkeypatch.setattr(StorePath, "_read", refused)
    with pytest.raises(UnreadableError, match="the store answered 403"):
        Checkpointer(folder).latest_step()
