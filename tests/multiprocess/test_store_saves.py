"""Saves by several processes: each writes an equal share, to a disk or a store, and a step appears once and whole."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.checksums import CHECKSUMS
from flax_mesh.checkpoint.find import committed_steps, find_unfinished
from flax_mesh.processes import agree
from flax_mesh.store import stored_path
from flax_mesh.train import read_metrics
from tests.checkpoint.stores import s3_server
from tests.multiprocess import launches
from tests.multiprocess.processes import Ended, assert_all_done, run_workers
from tests.multiprocess.store_cases import opened, values


@pytest.mark.parametrize("processes", [2, 3, 4, 48])
def test_every_part_is_written_by_one_process_and_all_write_as_much(monkeypatch, processes):
    monkeypatch.setattr(agree, "_DIVIDED", 2**10)
    rng = np.random.default_rng(processes)
    shapes = [(96, 16), (25, 13), (3, 5), (), (16, 50), (16, 256)]
    arrays: list[dict[agree.Bounds, list[int]]] = []
    for shape in [shapes[i] for i in rng.integers(len(shapes), size=20 * processes)]:
        whole = tuple((0, size) for size in shape)
        halves = [((0, shape[0] // 2), *whole[1:]), ((shape[0] // 2, shape[0]), *whole[1:])] if shape else []
        groups = [[*range(0, processes, 2)], [*range(1, processes, 2)]]
        is_split = shape and shape[0] % 2 == 0 and processes % 2 == 0 and rng.random() < 0.5
        arrays.append(dict(zip(halves, groups, strict=True)) if is_split else {whole: [*range(processes)]})
    seen = [np.zeros([max(stop for _, stop in dim) for dim in zip(*places, strict=True)], np.int8) for places in arrays]
    written: Counter[int] = Counter()
    for process in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        writers = agree.Shares()
        for places, count in zip(arrays, seen, strict=True):
            shape, parts = writers.of_this_process(places, 4)
            for part in parts:
                assert count[part.index].shape == shape and process in places[part.shard]
                count[part.index] += 1
                written[process] += 4 * math.prod(shape)
    assert all((count == 1).all() for count in seen)
    assert max(written.values()) <= 1.1 * sum(written.values()) / processes


@pytest.fixture(params=["disk", "files", "s3"])
def folder(request, tmp_path, monkeypatch) -> Iterator[str]:
    if request.param == "s3":
        with s3_server(monkeypatch, tmp_path / "log") as bucket:
            yield str(bucket / "run")
    else:
        yield f"{'files:' * (request.param == 'files')}{tmp_path / 'bucket'}"


def run(case: str, processes: int, *arguments: str) -> list[Ended]:
    return run_workers(case, processes, 2, *arguments, module="tests.multiprocess.store_cases")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "others"), [(2, 3), (4, 1)])
def test_a_step_of_several_processes_is_restored_by_any_number_bit_for_bit(folder, processes, others):
    assert_all_done(run("saves", processes, folder, "nothing", "0"), "saves is done")
    assert_all_done(run("restores", others, folder, "2"), "restores is done")
    path = opened(folder)
    files = json.loads((path / "3" / CHECKSUMS).read_bytes())["files"]
    names = [f"state/ocdbt.process_{process}/" for process in range(processes)]
    written = [sum(size for name, (size, _) in files.items() if name.startswith(start)) for start in names]
    assert sum(written) > sum(4 * x.size for x in values(3).values())
    assert max(written) <= 1.1 * sum(written) / processes
    checkpointer = Checkpointer(path, layers=["layers"])
    assert checkpointer.verify(3) == [] and checkpointer.steps() == [1, 2, 3]
    found = checkpointer.restore({"whole": np.zeros((1024, 512), np.float32)}, 3, include="whole")
    assert np.array_equal(found["whole"], values(3)["whole"])


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("folder", ["files", "s3"], indirect=True)
def test_a_store_that_refuses_the_files_of_one_process_fails_the_save_of_all(folder, who):
    ended = run("saves", 2, folder, "answers 500", str(who))
    assert_all_done(ended, "saves is done")
    errors = [re.findall(r"^reported: (.*)$", one.output, re.MULTILINE) for one in ended]
    assert errors[0] == errors[1] and len(errors[0]) == 1
    reason = rf"step 2 could not be saved in .*: process {who}: .*the store answered 500.*; the newest .* of step 1"
    assert re.search(reason, errors[0][0])
    path = opened(folder)
    assert committed_steps(path) == [1, 3] and {entry.name for entry in path.iterdir()} == {"1", "3"}
    assert Checkpointer(path).verify(3) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["files", "s3"], indirect=True)
def test_what_is_left_of_a_save_that_was_killed_before_its_commit_is_removed(folder):
    ended = run("saves", 2, folder, "killed", "0")
    assert ended[0].code == 9 and ended[1].code != 0
    path = opened(folder)
    assert committed_steps(path) == [1] and [entry.name for entry in find_unfinished(path)] == ["2"]
    names = {*(path / "2").names()}
    assert any(name.startswith("state/ocdbt.process_1/d/") for name in names)
    checkpointer = Checkpointer(path, layers=["layers"])
    assert checkpointer.latest_step() == 1
    with checkpointer:
        checkpointer.save(4, {"a": np.ones(3)})
    assert committed_steps(path) == [1, 4] and not (path / "2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_a_run_of_several_processes_in_a_store_has_the_rows_of_one_on_a_disk_and_resumes(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    more = ["mesh.shape=dp:2,fsdp:2", "checkpoint.every=2"]
    launches.run(2, 2, tmp_path / "disk", *more, "run.steps=6")
    launches.run(2, 2, stored_path(folder), *more, "run.steps=4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert "resuming, 2 steps to go" in launches.run(4, 1, stored_path(folder), *more, "run.steps=6")
    losses = [[row["loss"] for row in read_metrics(place)] for place in (tmp_path / "disk", folder)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert committed_steps(stored_path(folder) / "checkpoints") == [2, 4, 6]
