"""`pipeline.schedule=search`: measured steps, a file in the run folder, and the losses of every other schedule."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.runtime import search
from flax_mesh.mpmd.runtime.search import costs_of_processes
from flax_mesh.mpmd.schedules import check_schedule
from flax_mesh.mpmd.schedules.file import read_schedule
from flax_mesh.train.config import PipelineConfig, pipeline_schedule
from tests.train.decoder import config_of
from tests.train.runs import run

pytestmark = pytest.mark.usefixtures("quick_compilation")

SEARCH = ("mesh.shape=pp:2,fsdp:1", "run.platform=auto", "run.eval_every=0", "pipeline.schedule=search")


@pytest.fixture(autouse=True)
def _short_search(monkeypatch):
    monkeypatch.setattr(search, "SECONDS", 0.05)


def said(lines):
    return [line for line in lines if line.startswith("schedule:")]


@pytest.mark.slow
def test_a_run_searches_after_three_steps_and_resumed_runs_take_the_file_and_have_the_same_bits(tmp_path, text):
    once = run(config_of(tmp_path / "once", text, *SEARCH, "run.steps=6"))
    (line,) = said(once.lines)
    assert re.match(
        r"schedule: searched for the measured stages: makespan [\d.]+ ms, [\d.]+% of that of the first", line
    )
    schedule = read_schedule(str(tmp_path / "once" / "schedule.txt"))
    check_schedule(schedule, 2)
    assert schedule.name == "searched" and schedule.splits_backward
    named = run(config_of(tmp_path / "named", text, *SEARCH[:-1], "pipeline.schedule=zb-h1", "run.steps=6"))
    np.testing.assert_allclose([*once.losses.values()], [*named.losses.values()], rtol=1e-5)
    folder, found = tmp_path / "resumed", {}
    for steps in (2, 5, 6):  # stopped before the search, and after it
        found |= run(config_of(folder, text, *SEARCH, f"run.steps={steps}")).losses
        assert (folder / "schedule.txt").exists() == (steps > 2)
    assert found == once.losses
    before = (folder / "schedule.txt").read_text()
    again = run(config_of(folder, text, *SEARCH, "run.steps=7"))
    assert said(again.lines) == [f"schedule: {folder / 'schedule.txt'}"]
    assert (folder / "schedule.txt").read_text() == before


@pytest.mark.slow
def test_another_mesh_or_a_damaged_file_is_searched_again(tmp_path, text):
    folder, file = tmp_path / "run", tmp_path / "run" / "schedule.txt"
    run(config_of(folder, text, *SEARCH, "run.steps=3"))
    assert file.read_text().startswith("# pp:2, 4 microbatches\n")
    wider = ("mesh.shape=pp:2,fsdp:2", *SEARCH[1:])
    for steps in (6, 9):
        (line,) = said(run(config_of(folder, text, *wider, f"run.steps={steps}")).lines)
        assert "searched for the measured stages" in line
        assert file.read_text().startswith("# pp:2,fsdp:2, 4 microbatches\n")
        file.write_text(file.read_text().replace("0F0", "0F9"))


def test_the_slowest_process_of_a_group_and_all_groups_count():
    first = json.dumps([["F", 0, 1.0], ["B", 0, 2.0], ["W", 0, 3.0]])
    second = json.dumps([["F", 0, 1.5], ["B", 0, 1.0], ["W", 0, 3.5], ["F", 1, 4.0], ["B", 1, 5.0]])
    assert costs_of_processes([first, second], 2) == [(1.5, 2.0, 3.5, 0.0), (4.0, 5.0, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("settings", "peak"), [({}, 4), ({"memory_limit": 2}, 2), ({"num_virtual_stages": 2, "memory_limit": 5}, 5)]
)
def test_the_first_steps_stay_within_the_memory_limit(settings, peak):
    config = PipelineConfig(schedule="search", num_microbatches=8, **settings)
    schedule = pipeline_schedule(config, 4)
    check_schedule(schedule, peak)
    assert schedule.num_stages == 4 * (config.num_virtual_stages or 1)
    with pytest.raises(ConfigError, match=r"^pipeline.schedule=search: no schedule fits a memory limit of 1"):
        pipeline_schedule(replace(config, num_virtual_stages=2, memory_limit=1), 4)
