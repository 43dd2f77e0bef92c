"""Saves by several processes: each writes an equal share, to a disk or a store, and a step appears once and whole."""

import json
import math
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import jax
import numpy as np
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.checksums import CHECKSUMS
from flax_mesh.checkpoint.find import committed_steps
from flax_mesh.cli import main
from flax_mesh.processes import agree
from flax_mesh.store import StorePath, stored_path
from flax_mesh.train import read_metrics
from tests.checkpoint.stores import s3_server
from tests.multiprocess.processes import Ended, Running, assert_all_done, commands_of_workers, run_workers
from tests.multiprocess.store_cases import opened, values


@pytest.mark.parametrize("processes", [2, 3, 4, 16])
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


MODULE = "tests.multiprocess.store_cases"
READS = {"list": 5, "read": 17}  # of a restore, in each process, beside the parts of arrays


@pytest.fixture(params=["disk", "files", "s3_server"])
def folder(request, tmp_path, monkeypatch) -> Iterator[str]:
    if request.param == "s3_server":
        with s3_server(monkeypatch, tmp_path / "log") as bucket:
            yield str(bucket / "run")
    else:
        yield f"{'files:' * (request.param == 'files')}{tmp_path / 'bucket'}"


def run(case: str, processes: int, *arguments: str) -> list[Ended]:
    return run_workers(case, processes, 2, *arguments, module=MODULE)


def requests_of(what: str, ended: list[Ended]) -> list[dict[str, int]]:
    texts = [re.findall(rf"^requests of {what}: (.*)$", one.output, re.MULTILINE) for one in ended]
    return [json.loads(text) for (text,) in texts]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "others"), [(2, 3), (4, 1)])
def test_a_step_of_several_processes_is_restored_by_any_number_bit_for_bit(folder, processes, others):
    assert_all_done(saved := run("saves", processes, folder, "nothing", "0"), "saves is done")
    assert_all_done(restored := run("restores", others, folder, "3"), "restores is done")
    path = opened(folder)
    if isinstance(path, StorePath):
        first, *rest = requests_of("3", saved)
        uploads = first.pop("write") + sum(one.pop("write") for one in rest)
        assert uploads == len((path / "3").names()) + processes - 1
        assert first == {"list": 8, "read": processes + 6, "delete": processes + 1, "delete_range": 2}
        assert rest == [{}] * (processes - 1) and requests_of("a restore", restored) == [READS] * others
    files = json.loads((path / "3" / CHECKSUMS).read_bytes())["files"]
    names = [f"state/ocdbt.process_{process}/" for process in range(processes)]
    written = [sum(size for name, (size, _) in files.items() if name.startswith(start)) for start in names]
    assert sum(written) > sum(4 * x.size for x in values(3).values())
    assert max(written) <= 1.1 * sum(written) / processes
    checkpointer = Checkpointer(path, layers=["layers"])
    assert checkpointer.verify(3) == [] and checkpointer.steps() == [2, 3]
    found = checkpointer.restore({"whole": np.zeros((1024, 512), np.float32)}, 3, include="whole")
    assert np.array_equal(found["whole"], values(3)["whole"])


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("folder", ["files", "s3_server"], indirect=True)
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


# (process, least and most requests of its save before the kill): process 0 begins and claims the step, reads what the
# others have uploaded, uploads its files, commits, and removes an old step; process 1 uploads.
KILLS = [(0, 0, 7), (1, 0, 0), (0, 7, 11), (1, 1, 2), (0, 12, 23), (0, 24, 28), (0, 34, 35)]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["files", "s3_server"], indirect=True)
def test_after_kills_of_one_of_two_processes_in_a_save_the_newest_step_is_whole(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # killed processes leave files there
    rng, newest, seen = np.random.default_rng(0), 0, set[bool]()
    checkpointer = Checkpointer(path := opened(folder), layers=["layers"])
    for who, least, most in KILLS:
        arguments = (folder, str(who), str(rng.integers(least, most, endpoint=True)))
        with ExitStack() as stack:  # ends the other process too
            commands = commands_of_workers("is_killed", 2, 2, *arguments, module=MODULE)
            ended = [stack.enter_context(Running(command)) for command in commands][who].ended()
        assert ended.code == -signal.SIGKILL, ended.output
        found = checkpointer.latest_step()
        assert found in (newest + 1, newest + 2) and not checkpointer.damaged
        seen.add(found == newest + 2)
        newest = found
    assert seen == {False, True}, "no kill was after the commit, or all were"
    restored = checkpointer.restore({"whole": np.zeros((1024, 512), np.float32)}, include="whole")
    assert np.array_equal(restored["whole"], values(newest)["whole"])
    with checkpointer:
        checkpointer.save(newest + 1, {"a": np.ones(3)})
    assert {entry.name for entry in path.iterdir()} == {str(step) for step in checkpointer.steps()}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["s3_server"], indirect=True)
def test_a_run_of_two_processes_that_is_killed_has_the_rows_and_weights_of_one_on_a_disk(
    folder, tmp_path, monkeypatch, capsys
):
    for name in ("TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    disk, steps = tmp_path / "disk", stored_path(folder) / "checkpoints"
    codes = {one.code for one in run("trains", 2, str(disk), folder, "5")}
    assert -signal.SIGKILL in codes and 0 not in codes  # JAX may end the second process, once it misses the first
    assert committed_steps(steps) == [2, 4]
    ended = run("trains", 2, "", folder, "0")
    assert_all_done(ended, "trains is done")
    assert "at step 4; resuming, 2 steps to go" in ended[0].output
    losses = [[row["loss"] for row in read_metrics(place)] for place in (disk, folder)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert committed_steps(steps) == [2, 4, 6]
    main(["checkpoint", "diff", f"{disk}", folder, "--values"])
    assert "values: the same in all 12 arrays, bit for bit" in capsys.readouterr().out
