"""Schedules as text files: a written file is read, edits are checked, and mistakes name the file and the line."""

import re

import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from flax_mesh.mpmd.schedules.text import is_schedule_file, read_schedule, schedule_text
from flax_mesh.recipe.schedule import pipeline_schedule
from flax_mesh.train import PipelineConfig


@pytest.fixture
def file(tmp_path):
    return tmp_path / "best.schedule"


@pytest.mark.parametrize("name", [*SCHEDULE_NAMES, "v-5", "seq1f1b-2"])
def test_a_schedule_that_is_written_is_read(name, file):
    schedule = make_schedule(name, num_groups=4, num_microbatches=8)
    file.write_text(schedule_text(schedule, "one note\nanother"))
    assert file.read_text().startswith("# one note\n# another\n# The name")
    assert read_schedule(str(file)) == schedule
    assert is_schedule_file(str(file)) and not is_schedule_file(name)


def test_comments_and_empty_lines_are_skipped_and_counted(file):
    file.write_text("# mine\n\nmine 0,1\n  0F0 0B0\n# the second group\n1F0 1B0\n\n")
    schedule = read_schedule(str(file))
    assert str(schedule) == "mine 0,1\n0F0 0B0\n1F0 1B0"
    file.write_text("# mine\n\nmine 0,1\n0F0 0C0\n1F0 1B0 7F0\n")
    with pytest.raises(ConfigError) as caught:
        read_schedule(str(file))
    assert caught.value.problems[0].startswith(f"{file}: line 4: '0C0' is not an action")
    assert caught.value.problems[1].startswith(f"{file}: line 5: stages are 0 to 1")


def test_a_file_that_is_no_schedule_is_refused(file):
    for text, message in (
        ("", "line 1: expected a name and the group of every stage"),
        ("mine 0,1\n0F0 0B0\n1F0\n", "1B0 is missing from the row of group 1"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            read_schedule(str(file))
        assert all(problem.startswith(f"{file}: ") for problem in caught.value.problems)


def test_a_file_that_cannot_be_read_is_refused(file, tmp_path):
    with pytest.raises(ConfigError, match="no such file; write one with flax-mesh schedule NAME --out"):
        read_schedule(str(file))
    with pytest.raises(ConfigError, match="cannot be read: it must be a file, but is a folder"):
        read_schedule(str(tmp_path))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not a text file in UTF-8"):
        read_schedule(str(file))
    with pytest.raises(ConfigError, match="null byte"):
        read_schedule("a\0b.schedule")


def test_the_setting_takes_a_file_that_fits_the_other_settings_and_names_it_once(file):
    schedule = make_schedule("v-min", num_groups=2, num_microbatches=4)
    file.write_text(schedule_text(schedule))
    config = PipelineConfig(schedule=str(file), num_microbatches=4)
    assert pipeline_schedule(config, 2) == schedule
    wrong = PipelineConfig(schedule=str(file), num_microbatches=8, num_virtual_stages=1)
    with pytest.raises(ConfigError) as caught:
        pipeline_schedule(wrong, 4)
    assert caught.value.problems == [
        f"pipeline.schedule={file}: pp in mesh.shape is 4, but the schedule has 2",
        f"pipeline.schedule={file}: pipeline.num_microbatches is 8, but the schedule has 4",
    ]
    file.unlink()
    with pytest.raises(ConfigError, match="seq1f1b-2: a pipeline runs whole sequences, not slices; use 1f1b"):
        pipeline_schedule(PipelineConfig(schedule="seq1f1b-2", num_microbatches=4), 2)
    with pytest.raises(ConfigError, match=rf"^pipeline.schedule={re.escape(str(file))}: no such file"):
        pipeline_schedule(PipelineConfig(schedule=str(file), num_microbatches=4), 2)
