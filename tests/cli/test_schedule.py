"""flax-mesh schedule: its output and files, and one line for every mistake."""

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE
from flax_mesh.mpmd.schedules import Action, Schedule, check_schedule, make_schedule, simulate
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES

SIZES = ("--stages", "4", "--microbatches", "8")
PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


@pytest.fixture
def output_of(capsys):
    """Run a command that must succeed, and return its output."""

    def run(*argv: str) -> str:
        assert main(["schedule", *argv]) == DONE
        return capsys.readouterr().out

    return run


def rows(data: dict) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row)) for row in data["rows"])
    splits = any(action.kind == "W" for row in actions for action in row)
    return Schedule(data["name"], actions, tuple(data["stage_to_group"]), splits)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_json_of_every_named_schedule(name, output_of):
    data = json.loads(output_of(name, *SIZES, "--json"))
    schedule = make_schedule(name, num_groups=4, num_microbatches=8)
    assert rows(data) == schedule
    result = simulate(schedule)
    assert (data["makespan"], data["bubble"], data["transfers"]) == (result.makespan, result.bubble, result.transfers)
    assert data["peak_activations"] == list(result.peak_activations)


def test_costs_apply_to_all_stages_or_to_each_and_virtual_stages_are_counted(output_of):
    def makespan(*argv: str) -> float:
        return json.loads(output_of("1f1b", *SIZES, "--json", *argv))["makespan"]

    assert makespan() == makespan("--costs", "1,1,1") == 33
    assert makespan("--costs", "2,3,1") == 6 * 11
    assert makespan("--costs", "1,1,1,0.5") > 33
    assert makespan("--costs", "1,1,1/1,1,1/1,1,1/1,1,1") == 33
    assert makespan("--costs", "1,1,1/1,1,1/2,2,2/1,1,1") > 6 * 8
    data = json.loads(output_of("interleaved-1f1b", *SIZES, "--virtual", "4", "--json"))
    assert data["makespan"] == 3 * 4 * 8 + 3 * 3 and data["stage_to_group"] == [0, 1, 2, 3] * 4


def test_the_table_and_the_picture(output_of, tmp_path):
    text = output_of("zb-v", *SIZES, "--svg", str(tmp_path / "zb-v.svg"))
    assert "zb-v: 4 groups, 8 stages, 8 microbatches" in text
    assert "makespan 51, period 48, bubble 5.9%, 96 transfers" in text
    boxes = [e for e in ElementTree.parse(tmp_path / "zb-v.svg").iter() if e.get("class", "")[:1] in ("F", "B", "W")]
    assert len(boxes) == 3 * 8 * 8 + 3 * 2  # and the legend


def test_a_schedule_is_written_and_printed_from_its_file(output_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "makespan 56, period 56" in output_of("v-5", *SIZES, "--out", "best.schedule")
    lines = Path("best.schedule").read_text().splitlines()
    assert lines[0].startswith("# flax-mesh schedule v-5 --stages 4 --microbatches 8")
    assert lines[1] == "# makespan 56, period 56, bubble 14.3%, 96 transfers"
    data = json.loads(output_of("best.schedule", "--json"))
    check_schedule(rows(data), 5)
    assert (data["makespan"], data["period"]) == (56, 56)


INVALID = """
zb-w SIZES | unknown schedule 'zb-w'; did you mean zb-v\\?
v-9 SIZES | v-9 on 4 groups requires v-4 to v-8: .*; the nearest is v-8
1f1b SIZES --out best | --out best: a file of a schedule must contain a dot or a slash
./no.schedule | ./no.schedule: no such file; write one with flax-mesh schedule NAME --out
1f1b --stages 4 | --microbatches: required; see flax-mesh schedule --help
dualpipe-v --stages 4 --microbatches 7 | at least 2 \\* 4, got 7; the nearest is 8
1f1b SIZES --virtual 2 | 1f1b has 1 stage per group, got 2; interleaved-1f1b supports other
1f1b SIZES --costs 1,1 | --costs must be F,B,W or F,B,W,T, got 1,1$
1f1b SIZES --costs 1,1,1,1,1/1,1 | --costs must be F,B,W or F,B,W,T, got 1,1,1,1,1 and 1,1$
1f1b SIZES --costs 1,x,1 | --costs must be numbers joined by commas, got '1,x,1'
1f1b SIZES --costs=-1,1,1 | costs of stage 0: expected 0 or numbers from 1e-100 to 1e\\+100, got -1,1,1,0
1f1b SIZES --costs 1e-320,1,1 | stage 0: .* got 9.99989e-321,1,1,0$
1f1b SIZES --costs 1,1,1/1,1,1 | expected costs of 4 stages, got 2
1f1b --stages 999999999 --microbatches 9 | would have 8,999,999,991 forward
interleaved-1f1b SIZES --virtual 999999999 | at most 3,000,000 are supported; use fewer stages
gpipe SIZES --svg LONG | --svg [x/]{80}: this text is too long for a path: 5000 bytes
NAME SIZES | unknown schedule 'x{100,}
gpipe SIZES --svg /nowhere/x.svg | --svg /nowhere/x.svg cannot be written
"""


@pytest.mark.parametrize("row", INVALID.strip().splitlines())
def test_invalid_input_is_one_line_and_exit_code_2(row, capsys):
    command, line = row.split(" | ")
    words = {"SIZES": SIZES, "LONG": ["x/" * 2500], "NAME": ["x" * 5000]}
    assert main(["schedule", *(part for word in command.split() for part in words.get(word, [word]))]) == BAD_INPUT
    printed = capsys.readouterr()
    assert not printed.out
    assert re.search(line, printed.err.removesuffix("\n")) and printed.err.count("\n") == 1


def test_the_commands_of_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("flax-mesh schedule ")]
    found = [shlex.split(line)[1:] for line in lines]
    assert len(found) >= 4
    for command in found:
        assert main(command) == DONE, command


@pytest.mark.slow
def test_the_table_of_the_docs_has_makespan_period_and_bubble_of_every_schedule():
    """The column for 4 groups and 8 microbatches, and the one after it."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = {row[0].strip(" `"): row for row in rows if len(row) == 7}
    assert {*SCHEDULE_NAMES, "v-7"} == set(found)
    for name, row in found.items():
        result = simulate(make_schedule(name, num_groups=4, num_microbatches=8))
        assert row[3].strip() == f"{result.makespan:g}, {result.period:g}", name
        assert row[4].strip() == f"{result.bubble:.1%}", name


def test_the_pictures_of_the_docs_are_drawn_by_the_command(tmp_path):
    for name in SCHEDULE_NAMES:
        file = tmp_path / f"{name}.svg"
        assert main(["schedule", name, *SIZES, "--svg", str(file)]) == DONE
        committed = PAGE.parent / "pictures" / f"schedule-{name}.svg"
        assert committed.read_text() == file.read_text(), f"redraw {committed.name}: see docs/schedules.md"
