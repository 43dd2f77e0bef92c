"""Schedules as data: invariants of every named schedule at all sizes, and the text form."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.schedules import Schedule, make_schedule
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, forward_schedule
from flax_mesh.mpmd.schedules.text import is_schedule_file, read_schedule, schedule_text
from flax_mesh.recipe.schedule import pipeline_schedule
from flax_mesh.train import PipelineConfig
from tests.mpmd.schedules.examples import SIZES, schedules


@given(schedules())
@settings(max_examples=40, deadline=None)
def test_every_action_appears_once_in_the_row_of_its_group_and_the_text_parses_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule
    kinds = "FBW" if schedule.splits_backward else "FB"
    for group, row in enumerate(schedule.rows):
        stages = [s for s, owner in enumerate(schedule.stage_to_group) if owner == group]
        wanted = [(k, s, m) for k in kinds for s in stages for m in range(schedule.num_microbatches)]
        assert sorted(row) == sorted(wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f1b\n0F0 0B0", "line 1: expected a name and the group of every stage"),
        ("1f1b 0\n0F0 0X0 B0", "(?s)line 2: '0X0' is not an action; .* such as 2F0\nline 2: 'B0' is not an action"),
        ("1f1b 0\n0F0 1F0 7B2", "line 2: stages are 0 to 0, the stages of the first line; found 1, 7"),
        ("1f1b 0\n0F\u0660", "line 2: '0F\u0660' is not an action"),
        ("1f1b 0\n0F" + "9" * 5000, r"line 2: '0F9{170,}\.\.\. \(5,002 characters\)' is not an action"),
        ("1f1b 0\n" + "0X0 " * 1000, r"(?s)not an action.*\nand 976 more$"),
        ("1f1b " + "9" * 5000 + "\n0F0", r"line 1: expected a name .* \(5,005 characters\)"),
        ("1f1b 0,1\n0F0 0B0", "stages are placed on groups up to 1, but there are 1 rows"),
    ],
)
def test_invalid_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Schedule.parse(text)


# --- where a schedule is not defined ---


@given(name=st.sampled_from(("interleaved-1f1b", "dualpipe-v")), **SIZES)
@settings(max_examples=40, deadline=None)
def test_no_valid_number_is_nearer_than_the_one_named(name, num_groups, num_microbatches):
    def error(microbatches: int) -> str:
        try:
            make_schedule(name, num_groups=num_groups, num_microbatches=microbatches)
        except ValueError as error:
            return str(error)
        return ""

    message = error(num_microbatches)
    assume(message)
    assert re.fullmatch(rf"{name} on {num_groups} groups requires .* got {num_microbatches}; .* is \d+", message)
    nearest = int(message.rpartition(" ")[2])
    distance = abs(nearest - num_microbatches)
    assert not error(nearest)
    assert all(error(m) for m in range(max(1, num_microbatches - distance + 1), num_microbatches + distance))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "1f1"},
            r"unknown schedule '1f1'; did you mean 1f1b\? \(available: gpipe, .*dualpipe-v and v-K, K a number\)",
        ),
        ({"num_groups": 0}, "the number of groups must be at least 1, got 0"),
        ({"num_microbatches": 0, "num_virtual_stages": -1}, "microbatches must be at least 1, got 0; .* got -1"),
        ({"num_virtual_stages": 2}, "1f1b has 1 stage per group, got 2; interleaved-1f1b supports other numbers"),
        ({"name": "zb-v", "num_virtual_stages": 1}, "zb-v has 2 stages per group, got 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**{"name": "1f1b", "num_groups": 4, "num_microbatches": 8, **arguments})


# --- evaluation ---


@given(
    num_microbatches=st.integers(1, 12),
    stage_to_group=st.sampled_from([(0,), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 2, 2, 1, 0)]),
)
@settings(max_examples=50, deadline=None)
def test_the_busiest_group_bounds_a_forward_schedule(num_microbatches, stage_to_group):
    num_groups = 1 + max(stage_to_group)
    schedule = forward_schedule(num_groups, num_microbatches, stage_to_group)
    times = schedule.times(lambda action: 1.0)
    assert sorted(times) == [("F", s, m) for s in range(len(stage_to_group)) for m in range(num_microbatches)]
    busiest = max(map(len, schedule.rows))
    assert max(end for _, end in times.values()) <= busiest + len(stage_to_group) - 1


# --- text files: a written file is read, edits are checked, and mistakes name the file and the line ---


@pytest.fixture
def file(tmp_path):
    return tmp_path / "best.schedule"


@pytest.mark.parametrize("name", [*SCHEDULE_NAMES, "v-5"])
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
    with pytest.raises(ConfigError, match=rf"^pipeline.schedule={re.escape(str(file))}: no such file"):
        pipeline_schedule(PipelineConfig(schedule=str(file), num_microbatches=4), 2)
