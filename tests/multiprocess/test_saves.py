"""Saves that fail in one of several processes: all raise the same error, none waits, the last valid one remains."""

import json
import re

import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.checksums import CHECKSUMS, MARKERS
from tests.multiprocess.processes import assert_all_done, run_workers

THERE = "{}/own{} already contains a checkpoint of step 2; nothing was overwritten."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "who", "reason"),  # the fault, its process, and the reason that is reported
    [
        ("no room for files", 1, "File too large"),
        ("no room for files", 0, "File too large"),
        ("no way to the folder", 0, "the folder is gone"),
        ("no way to the folder", 1, "the folder is gone"),
        ("something in the way", 0, "Cannot call rmtree on a symbolic link"),
        ("a step that is there", 0, THERE),
        ("a step that is there", 1, THERE),
    ],
)
def test_a_save_that_fails_in_one_process_fails_in_all(what, who, reason, tmp_path):
    ended = run_workers("saves", 2, 1, str(tmp_path), what, str(who))
    assert_all_done(ended, "saves is done")
    errors = [re.findall(r"^reported: (.*)$", one.output, re.MULTILINE) for one in ended]
    errors = [re.sub(r" in \S+/own\d: ", ": ", error) for (error,) in errors]
    reason = reason.format(tmp_path, who)
    newest = "the newest checkpoint is of step 1"
    expected = f"the checkpoint of step 2 could not be saved: process {who}: {reason}; {newest}"
    assert errors[1 - who] == expected
    if what == "no way to the folder":  # nor to the newest checkpoint
        expected = expected.replace(newest, "no checkpoint exists")
    assert errors[who] == (reason if what == "a step that is there" else expected)
    assert len({"save has returned" in one.output for one in ended}) == 1  # the same call raises in all
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "3"]


@pytest.mark.slow
def test_each_process_reads_only_its_own_files_for_the_checksums(tmp_path):
    ended = run_workers("checksums", 2, 1, str(tmp_path))
    assert_all_done(ended, "checksums is done")
    for one in ended:
        (count,) = re.findall(r"read (\d+) bytes", one.output)
        assert 2**23 <= int(count) < 1.5 * 2**23, one.output  # the 8 MiB of this process, not the other's
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.verify(2) == []
    files = json.loads((tmp_path / "2" / CHECKSUMS).read_text())["files"]
    there = {path.relative_to(tmp_path / "2").as_posix() for path in (tmp_path / "2").rglob("*") if path.is_file()}
    assert files.keys() == there - {CHECKSUMS, *MARKERS}
    for process in range(2):
        own = {name: size for name, (size, _) in files.items() if name.startswith(f"state/ocdbt.process_{process}/")}
        assert sum(own.values()) >= 2**23
