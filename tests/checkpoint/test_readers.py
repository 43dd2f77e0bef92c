"""Readers beside a run that deletes steps, and files that the system refuses to read: neither is damage."""

import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh.checkpoint import Checkpointer, RetentionPolicy, diff, find, orbax
from flax_mesh.checkpoint import read as describe
from flax_mesh.checkpoint.find import find_steps, find_valid
from flax_mesh.cli.common import BAD_INPUT, DONE, FINDINGS
from flax_mesh.errors import ConfigError, SaveError, StepDeletedError, UnreadableError
from flax_mesh.train import export as export_module
from tests.checkpoint.deleting import before, delete, replace
from tests.checkpoint.states import largest

pytestmark = pytest.mark.usefixtures("on_cpu")

STATE = nnx.State({"model": {"w": np.arange(8, dtype=np.float32), "b": np.ones(3, np.float32)}})


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    with Checkpointer(folder, keep=None) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, STATE, {"metrics": {"eval_loss": float(step)}})
    return folder


@pytest.fixture
def folder(three, tmp_path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "c"))


def refuse(file: Path) -> None:
    """Make the system refuse to read a file, for root too: a link to itself."""
    file.unlink()
    file.symlink_to(file)


@pytest.mark.parametrize("reader", ["find_valid", "latest_step"])
def test_the_newest_step_is_looked_for_again_if_it_is_deleted(folder, monkeypatch, reader):
    for step in (1, 2):
        delete(folder / str(step))
    before(monkeypatch, find, "find_damage", lambda *_: replace(folder / "3"))
    with Checkpointer(folder) as checkpointer:
        found = find_valid(folder) if reader == "find_valid" else (checkpointer.latest_step(), checkpointer.damaged)
    assert found in ((folder / "4", {}), (4, {}))


def test_restore_says_that_the_step_was_deleted(folder, monkeypatch):
    before(monkeypatch, orbax, "read_arrays", lambda step, _: delete(step))
    with Checkpointer(folder) as checkpointer:
        with pytest.raises(StepDeletedError, match=r"/3 was deleted or renamed while it was read"):
            checkpointer.restore(STATE)
        assert checkpointer.latest_step() == 2


def test_an_array_that_cannot_be_read_has_the_reason_of_the_system(folder, monkeypatch):
    def fail(*_, **__):  # as Orbax reports errors of tensorstore
        raise Exception("while reading array index: 0") from ValueError("read failed [os_error_code='5']")

    monkeypatch.setattr(orbax.ocp.PyTreeCheckpointHandler, "restore", fail)
    with Checkpointer(folder) as checkpointer, pytest.raises(UnreadableError, match=r"/3 cannot .*\n.*Input/output"):
        checkpointer.restore(STATE)

    def fail_after_deletion(*_, **__):
        delete(folder / "3")
        fail()

    monkeypatch.setattr(orbax.ocp.PyTreeCheckpointHandler, "restore", fail_after_deletion)
    with Checkpointer(folder) as checkpointer, pytest.raises(StepDeletedError):
        checkpointer.restore(STATE)


EXPORT = ["export", "{}", "{}/../out", "--to", "orbax"]


@pytest.mark.parametrize(
    ("argv", "module", "name", "step"),
    [
        *(([*EXPORT, "--step", "3"], export_module, name, 3) for name in ("saved_record", "read_tree", "read_batch")),
        (["inspect", "{}", "--step", "3"], describe, "read_record", 3),
        (["inspect", "{}/3"], describe, "read_tree", 3),
        (["diff", "{}/2", "{}/3", "--values"], describe, "read_tree", 2),
        (["verify", "{}/3"], describe, "folder_size", 3),
    ],
)
def test_a_command_says_that_the_step_was_deleted(command, folder, monkeypatch, argv, module, name, step):
    before(monkeypatch, module, name, lambda *_: delete(folder / str(step)))
    code, out, err = command(*(text.format(folder) for text in argv))
    assert code == BAD_INPUT and not out
    assert err.startswith(f"flax-mesh: {folder / str(step)} was deleted or renamed while it was read"), err
    assert err.count("\n") == 1 and sorted(os.listdir(folder.parent)) == ["c"]


@pytest.mark.parametrize(
    ("argv", "module", "name"),
    [
        *((EXPORT, export_module, name) for name in ("saved_record", "read_tree", "read_batch")),
        (["inspect", "{}"], describe, "read_tree"),
        (["verify", "{}"], describe, "folder_size"),
        (["list", "{}"], describe, "step_data"),
        (["diff", "{}/2", "{}", "--values"], diff, "read_batch"),
    ],
)
def test_a_command_takes_a_newer_step_if_a_run_deletes_the_one_it_reads(
    command, folder, monkeypatch, argv, module, name
):
    if argv[0] != "diff":
        for step in (1, 2):
            delete(folder / str(step))
    before(monkeypatch, module, name, lambda *_: replace(folder / "3"))
    code, out, err = command(*(text.format(folder) for text in [*argv, "--json"]))
    assert (code, err) == (DONE, "") and "4" in out.replace(str(folder), ""), out


def test_a_command_gives_up_if_every_step_is_deleted(command, folder, monkeypatch):
    read, found = export_module.read_tree, []

    def replaced(step, record):
        found.append(step.name)
        replace(step)
        return read(step, record)

    monkeypatch.setattr(export_module, "read_tree", replaced)
    code, _, err = command(*(text.format(folder) for text in EXPORT))
    assert code == BAD_INPUT and err.count("\n") == 1 and "/7 was deleted or renamed" in err and len(found) == 5


def test_list_and_verify_leave_out_deleted_steps(command, folder, monkeypatch):
    before(monkeypatch, describe, "read_record", lambda *_: delete(folder / "2"))
    code, out, err = command("list", folder)
    assert (code, err) == (DONE, "") and "2 checkpoints" in out
    before(monkeypatch, describe, "folder_size", lambda *_: delete(folder / "1"))
    code, out, err = command("verify", folder)
    assert (code, err) == (DONE, "") and "damaged" not in out and "step 3: valid" in out


def test_an_unreadable_step_is_neither_damaged_nor_passed_over(folder):
    refuse(largest(folder / "3"))
    with Checkpointer(folder) as checkpointer:
        for read in (checkpointer.latest_step, lambda: checkpointer.restore(STATE), lambda: checkpointer.verify(3)):
            with pytest.raises(UnreadableError, match=r"not known whether it is damaged.*\n.*symbolic links"):
                read()
        assert checkpointer.damaged == {}
        checkpointer.save(4, STATE, {})
    assert not list(folder.glob("*.damaged"))
    with pytest.raises(UnreadableError, match="symbolic links"):
        delete(folder / "4")
        find_valid(folder)


def test_commands_report_an_unreadable_step_and_the_damage_of_others(command, folder, tmp_path):
    refuse(folder / "3" / "metadata" / "metadata")
    for argv in (["list"], ["list", "--quick"], ["verify"]):
        code, out, err = command(argv[0], folder, *argv[1:])
        assert code == BAD_INPUT and "unreadable" in out and "damaged" not in out, argv
        assert "3 cannot be read" in err and "symbolic links" in err
    for argv in (["inspect", folder], ["export", folder, tmp_path / "x", "--to", "orbax"], ["diff", folder, folder]):
        code, out, err = command(*argv)
        assert (code, out) == (BAD_INPUT, "") and "3 cannot be read" in err, argv
    data = largest(folder / "2")
    data.write_bytes(b"?" + data.read_bytes()[1:])
    code, out, _ = command("verify", folder)
    assert code == FINDINGS and "step 2: damaged" in out and "step 3: unreadable" in out


def test_a_step_whose_folder_is_unreadable_is_a_step(command, folder):
    shutil.rmtree(folder / "3")
    (folder / "3").symlink_to(folder / "3")
    assert [step.name for step in find_steps(folder)] == ["1", "2", "3"]
    code, _, err = command("inspect", folder)
    assert code == BAD_INPUT and "3 cannot be read" in err
    with Checkpointer(folder) as checkpointer, pytest.raises(UnreadableError):
        checkpointer.latest_step()


def test_a_folder_that_cannot_be_read_is_one_line(command, tmp_path):
    (tmp_path / "c").mkdir()
    with Checkpointer(tmp_path / "c") as checkpointer:
        (tmp_path / "c").rmdir()
        (tmp_path / "c").symlink_to(tmp_path / "c")
        with pytest.raises(UnreadableError, match="symbolic links"):
            checkpointer.steps()
        with pytest.raises(SaveError, match="symbolic links"):
            checkpointer.save(1, STATE)
    code, _, err = command("list", tmp_path / "c")
    assert (code, err.count("\n")) == (BAD_INPUT, 1) and "symbolic links" in err


def test_retention_keeps_a_step_whose_metrics_cannot_be_read(folder):
    refuse(folder / "1" / "metadata" / "metadata")
    with Checkpointer(folder, keep=RetentionPolicy(1, best=1)) as checkpointer:
        checkpointer.save(4, STATE, {"metrics": {"eval_loss": 9.0}})
    assert sorted(os.listdir(folder)) == ["1", "2", "4"]


def test_retention_ignores_metrics_that_are_no_numbers(tmp_path):
    with Checkpointer(tmp_path, keep=RetentionPolicy(1, best=1)) as checkpointer:
        for step, metrics in enumerate(["", [], {"eval_loss": "low"}, {"eval_loss": 10**400}, {"eval_loss": True}]):
            checkpointer.save(step, STATE, {"metrics": metrics, "finite": True})
        checkpointer.wait()
        assert checkpointer.steps() == [4]


@pytest.mark.parametrize("step", ["../x", "1", -1, True, False, 1.0, 1.5, None, np.zeros(2), "x" * 300, 10**18, 2**63])
def test_a_step_must_be_an_integer_of_at_most_18_digits(tmp_path, step):
    with Checkpointer(tmp_path / "c") as checkpointer:
        for call in (lambda: checkpointer.save(step, STATE), lambda: checkpointer.metadata(step)):
            with pytest.raises(ConfigError, match="a step must be an integer from 0 to 999999999999999999, got "):
                call()
    assert os.listdir(tmp_path) == []


def test_a_step_may_be_an_integer_of_numpy_or_jax(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(jnp.int32(3), STATE)
        assert checkpointer.restore(STATE, jnp.int32(3))["model"]["b"].shape == (3,)
        assert checkpointer.latest_step() == 3
