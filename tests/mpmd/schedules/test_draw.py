"""Drawings of schedules: their contents, the time scale, and that the colours are distinguishable."""

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from flax_mesh.mpmd.schedules import (
    Schedule,
    StageCost,
    draw_schedule_svg,
    draw_timeline_svg,
    make_schedule,
    schedule_table,
    simulate,
)
from flax_mesh.mpmd.schedules.draw import fills
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES, forward_schedule
from tests.mpmd.schedules.examples import schedules

SVG = "{http://www.w3.org/2000/svg}"


def parse(picture: str) -> tuple[list[ElementTree.Element], str]:
    """The boxes of the actions, and all text."""
    root = ElementTree.fromstring(picture)
    boxes = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class")]
    return boxes, " | ".join(text.text or "" for text in root.iter(f"{SVG}text"))


def test_the_picture_has_a_box_per_action_to_scale_and_names_its_numbers():
    schedule = make_schedule("zb-h1", num_groups=3, num_microbatches=5)
    boxes, text = parse(draw_schedule_svg(schedule, StageCost(1, 2, 1)))
    legend, boxes = boxes[-3:], boxes[:-3]
    assert [rect.get("class") for rect in legend] == ["F0", "B0", "W0"]
    assert len(boxes) == 3 * 3 * 5
    widths = {kind: {float(r.get("width", 0)) for r in boxes if r.get("class") == kind} for kind in ("F0", "B0", "W0")}
    assert max(widths["F0"]) == pytest.approx(min(widths["F0"]), abs=0.11)
    assert max(widths["B0"]) + 0.8 == pytest.approx(2 * (max(widths["F0"]) + 0.8), abs=0.2)
    result = simulate(schedule, StageCost(1, 2, 1))
    for part in (f"makespan {result.makespan:g}", f"bubble {result.bubble:.1%}", "3 groups, 5 microbatches"):
        assert part in text
    assert text.count("peak 3 activations") == 3
    for part in ("F: forward", "B: input gradients", "W: weight gradients", "idle", "stored activations"):
        assert part in text


@given(schedules())
@settings(max_examples=15, deadline=None)
def test_boxes_of_a_group_do_not_overlap_and_stay_inside_the_picture(schedule):
    picture = draw_schedule_svg(schedule)
    root = ElementTree.fromstring(picture)
    boxes, _ = parse(picture)
    spans: dict[float, list[tuple[float, float]]] = {}
    for rect in boxes:
        x, y, width, height = (float(rect.get(name) or 0) for name in ("x", "y", "width", "height"))
        spans.setdefault(y + height, []).append((x, x + width))  # W is lower, but has the same baseline
        assert x + width <= float(root.get("width") or 0) and y + height <= float(root.get("height") or 0)
    assert sum(map(len, spans.values())) >= sum(map(len, schedule.rows))
    for row in spans.values():
        assert all(end <= start + 0.05 for (_, end), (start, _) in itertools.pairwise(sorted(row)))


def test_the_timeline_is_drawn_above_the_simulation_on_one_scale():
    schedule = make_schedule("1f1b", num_groups=2, num_microbatches=2)
    times = simulate(schedule).times
    slow = [(schedule.stage_to_group[a.stage], a, 50 + 2 * start, 50 + 2 * end) for a, (start, end) in times.items()]
    boxes, text = parse(draw_timeline_svg(schedule, reversed(slow), StageCost()))
    assert "measured: 18, bubble 33.3%, 1.33 groups busy on average" in text
    assert "makespan 9, period 9, bubble 33.3%" in text
    measured, simulated = boxes[: len(times)], boxes[len(times) : 2 * len(times)]
    for rect, other in zip(measured, simulated, strict=True):
        assert float(rect.get("width") or 0) + 0.8 == pytest.approx(2 * (float(other.get("width") or 0) + 0.8), abs=0.3)
    assert float(measured[0].get("x") or 0) == float(simulated[0].get("x") or 1)
    _, text = parse(draw_timeline_svg(schedule, slow, StageCost(), unit="ms"))
    assert "measured: 18 ms, " in text and "makespan 9 ms, " in text and text.count("time, ms") == 2
    with pytest.raises(ValueError, match="measured has no events to draw"):
        draw_timeline_svg(schedule, [], StageCost())


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("groups", "microbatches"), [(1, 2), (4, 8)])
def test_all_text_is_inside_the_picture(name, groups, microbatches):
    schedule = make_schedule(name, num_groups=groups, num_microbatches=microbatches)
    root = ElementTree.fromstring(draw_schedule_svg(schedule))
    for text in root.iter(f"{SVG}text"):
        if text.get("text-anchor") == "start":  # no letter of Helvetica is wider on average
            end = float(text.get("x") or 0) + 0.5 * int(text.get("font-size") or 0) * len(text.text or "")
            assert end <= float(root.get("width") or 0), text.text
            assert float(text.get("y") or 0) < float(root.get("height") or 0)


def test_names_are_escaped_and_a_forward_schedule_stores_nothing():
    rows = forward_schedule(2, 3, (0, 0, 0, 1))  # groups may have different numbers of stages
    boxes, text = parse(picture := draw_schedule_svg(Schedule("<a&b>", rows.rows, rows.stage_to_group, False)))
    used = {rect.get("class") or "" for rect in boxes}
    assert used == {"F0", "F1", "F2"} and all(f".{name}{{fill:" in picture for name in used)
    assert "<a&b>: 2 groups" in text and "peak 0 activations" in text


# Machado, Oliveira and Fernandes 2009: full protanopia, deuteranopia and tritanopia, on linear RGB.
VISION = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
DIFFERENT = 20.0  # CIE 1976 colour difference; 2.3 is just noticeable


def lab(colour: tuple[int, int, int], vision: str) -> tuple[float, float, float]:
    linear = [c / 12.92 if (c := part / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for part in colour]
    seen = [min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in VISION[vision]]
    to_xyz = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))  # relative to white
    x, y, z = (sum(a * b for a, b in zip(row, seen, strict=True)) for row in to_xyz)
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISION)
def test_kinds_of_actions_and_idle_time_are_distinguishable_with_every_colour_vision(vision):
    colours = {**fills(2), ("idle", 0): (255, 255, 255)}
    for (kind, chunk), (other, its_chunk) in itertools.combinations(colours, 2):
        if kind != other:
            pair = lab(colours[kind, chunk], vision), lab(colours[other, its_chunk], vision)
            difference = sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5
            assert difference > DIFFERENT, (vision, kind, chunk, other, its_chunk)


# --- the terminal ---


def test_the_table_of_a_small_schedule():
    assert schedule_table(make_schedule("zb-h1", num_groups=2, num_microbatches=2), width=80) == (
        "zb-h1: 2 groups, 2 microbatches, F=1 B=1 W=1\n"
        "makespan 7, period 7, bubble 14.3%, 4 transfers\n"
        "\n"
        "group  stages  busy   peak activations\n"
        "0      0       85.7%  2\n"
        "1      1       85.7%  2\n"
        "\n"
        "group 0  0F0 0F1 ....0B0 0W0 0B1 0W1\n"
        "group 1  ....1F0 1B0 1F1 1B1 1W0 1W1"
    )


def test_longer_actions_are_wider_and_long_schedules_continue_in_further_blocks():
    text = schedule_table(make_schedule("1f1b", num_groups=2, num_microbatches=4), [(1, 1, 1), (2, 1, 1)], width=60)
    assert "uneven costs" in text
    assert "1F0---- 1B0---- 1F1----" in text
    blocks = text.split("\n\n")
    assert [block[:7] for block in blocks[2:]] == ["group 0", "group 0"]
    assert all(len(line) <= 60 for block in blocks[2:] for line in block.splitlines())


def test_an_action_of_one_character_is_its_kind():
    text = schedule_table(make_schedule("gpipe", num_groups=1, num_microbatches=300), [(1, 1, 0)], width=115)
    bars = [line for line in text.splitlines() if line.startswith("group 0")]
    assert set("".join(bar.removeprefix("group 0") for bar in bars)) == {"F", "B", " "}
    assert bars[0].count("F") > 90
