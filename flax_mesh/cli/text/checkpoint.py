"""The text output of `flax-mesh checkpoint`. Control characters in names from checkpoints are escaped (`plain`)."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from flax_mesh.checkpoint.diff import SECTIONS, Difference
from flax_mesh.checkpoint.read import Array, plain
from flax_mesh.text import array_text, bytes_text, count_text, folded, group_paths, mesh_text, table_text
from flax_mesh.tree import owners_of

SHOWN_METRICS = ("loss", "eval_loss")
GROUPED = ("layout", "tree")  # sections whose names are paths: paths that differ only in a number share a line
MAX_SHOWN = 20  # arrays listed of those that differ in value


def list_text(data: Mapping[str, Any], width: int) -> str:
    """One line per step, then damaged steps and unfinished saves."""
    steps = data["checkpoints"]
    rows = [
        [
            step["name"],
            bytes_text(step["bytes"]),
            date_text(step["saved"]),
            _state(step, data["verified"]),
            *(_number(step["metrics"].get(name)) for name in SHOWN_METRICS),
            _mesh(step["mesh"]),
        ]
        for step in steps
    ]
    heads = ["step", "size", "saved", "state", *SHOWN_METRICS, "mesh"]
    table = table_text(heads, rows, width, right={"step", "size", *SHOWN_METRICS}, wrap={"mesh"})
    total = bytes_text(sum(step["bytes"] for step in steps))
    lines = [f"{_path(data['folder'])}: {count_text(len(steps), 'checkpoint')}, {total}", "", table]
    if damaged := [step for step in steps if step["problems"]]:
        lines += ["", *(line for step in damaged for line in _problem_lines(step))]
    if data["leftovers"]:
        lines += ["", f"unfinished, from a save or deletion in progress or interrupted: {', '.join(data['leftovers'])}"]
    return "\n".join(lines)


def verify_text(data: Mapping[str, Any]) -> str:
    """One line per step, one per damaged file, and the number of damaged steps."""
    lines, steps = [_path(data["folder"])], data["checkpoints"]
    for step in steps:
        if step["problems"]:
            lines += _problem_lines(step)
        elif step["unreadable"]:
            lines.append(f"step {step['name']}: unreadable")
        else:
            lines.append(
                f"step {step['name']}: valid, {bytes_text(step['bytes'])} in {count_text(step['files'], 'file')}"
            )
    if data["set_aside"]:
        lines.append(f"quarantined as damaged, not verified: {', '.join(data['set_aside'])}")
    if damaged := sum(bool(step["problems"]) for step in steps):
        lines.append(f"{damaged} of {count_text(len(steps), 'checkpoint')} damaged")
    return "\n".join(lines)


def inspect_text(data: Mapping[str, Any], arrays: Sequence[Array], width: int, *, every: bool) -> str:
    """Metadata, arrays with subtotals, rules and settings."""
    copies = {} if every else _copies_of_parameters(arrays)
    copied = {array.path for members in copies.values() for array in members}
    listed = [array for array in arrays if array.path not in copied]
    alike = [(array.shape, array.dtype, array.split) for array in listed]
    paths = [array.path for array in listed]
    groups = [(path, [i]) for i, path in enumerate(paths)] if every else group_paths(paths, alike)
    rows: list[list[str]] = []
    for path, members in groups:
        times, array = len(members), listed[members[0]]
        number = f"{times} x " if times > 1 else ""
        rows.append([plain(path), number + array_text(array), plain(array.split), bytes_text(times * array.nbytes)])
    for head, members in copies.items():
        size = bytes_text(sum(array.nbytes for array in members))
        rows.append([f"{plain(head)}*", f"{len(members)} like the model's", "alike", size])
    tree = table_text(["path", "array", "split when saved", "bytes"], rows, width, right={"bytes"}, wrap={"path"})
    sums = [
        f"{part or 'all':<10}{bytes_text(total['bytes']):>10}, {total['values']:,} values in "
        f"{count_text(total['arrays'], 'array')}"
        for part, total in data["subtotals"].items()
        if total["arrays"]
    ]
    parts = ["\n".join(_facts(data, width)), tree, "\n".join(sums)]
    if data["rules"]:
        rules = [f"  {plain(str(pattern))}  {plain(str(dims))}" for pattern, dims in data["rules"]]
        parts.append("\n".join(["rules (the first whose pattern matches a path applies)", *rules]))
    if data["config"]:
        parts.append("\n".join(["settings", *_settings(data["config"], width)]))
    return "\n\n".join(parts)


def diff_text(data: Mapping[str, Any], rows: Sequence[Difference]) -> str:
    """The differences by section, then the sections without differences."""
    lines = [f"A  {_path(data['a'])}", f"B  {plain(data['b']) if data['recipe'] else _path(data['b'])}"]
    for section in SECTIONS:
        if here := [row for row in rows if row.section == section]:
            lines += ["", section if section in GROUPED else f"{section}, A -> B", *_difference_lines(here)]
    if same := [section for section in data["compared"] if not any(row.section == section for row in rows)]:
        lines += ["", f"the same: {', '.join(same)}"]
    if data["not_compared"]:
        lines += ["", f"not compared, only in one of them: {', '.join(data['not_compared'])}"]
    if data["values"] is not None:
        lines += ["", *_value_lines(data["values"])]
    elif not data["recipe"]:
        lines += ["", "values: not compared; use --values"]
    return "\n".join(lines)


def written_text(data: Mapping[str, Any]) -> str:
    """Warnings and notes, then the source, the output and the change of the mesh."""
    lines = [
        f"warning: step {name} is damaged and was skipped ({plain(problems[0])})"
        for name, problems in data.get("passed_over", {}).items()
    ]
    lines += [plain(note) for note in data.get("notes", ())]
    texts = {"checkpoint": "a checkpoint", "orbax": "a plain Orbax checkpoint", "peft": "adapters for PEFT"}
    what = texts.get(data["to"], data["to"])
    kind = f" of {data['model_type']}" if "model_type" in data else ""
    if data.get("averaged"):
        kind += " with the moving average of the parameters"
    lines.append(_path(data["from"]))
    lines.append(
        f"-> {_path(data['out'])}: {what}{kind}, {count_text(data['arrays'], 'array')}, {bytes_text(data['bytes'])}"
    )
    if "before" in data:
        lines.append(f"mesh {plain(data['before'])} -> {data['mesh']}")
    return "\n".join(lines)


def date_text(saved: str | None) -> str:
    """Format an ISO date in local time, to the minute."""
    return datetime.fromisoformat(saved).astimezone().strftime("%Y-%m-%d %H:%M") if saved else "?"


def _path(path: str) -> str:
    """The path relative to the working directory if it is inside it."""
    here = Path.cwd()
    return plain(str(Path(path).relative_to(here) if Path(path).is_relative_to(here) else path))


def _facts(data: Mapping[str, Any], width: int) -> Iterator[str]:
    files = f"{bytes_text(data['bytes'])} in {count_text(data['files'], 'file')}"
    facts = {
        "damaged": "; ".join(data["problems"] or ()),
        "saved": f"{date_text(data['saved'])}, {files}",
        "recipe": str(data["recipe"] or ""),
        "mesh": _mesh(data["mesh"]),
        "sharding": str(data["sharding"] or ""),
        "data": str(data["data"].get("description", "")),
        "metrics": ", ".join(f"{name} {_number(value)}" for name, value in data["metrics"].items()),
        "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
    }
    yield f"step {data['name']} of {_path(data['folder'])}"
    for name, value in facts.items():
        if value:
            yield folded(f"{name:<10}{plain(value)}", width, indent=" " * 10)


def _settings(config: Mapping[str, Any], width: int) -> list[str]:
    """Settings as `section.key=value` for the command line, one paragraph per section."""
    sections: dict[str, list[str]] = {}
    for key, value in config.items():
        sections.setdefault(key.partition(".")[0], []).append(shlex.quote(plain(f"{key}={value}")))
    return [folded(f"  {' '.join(words)}", width, indent=" " * 4) for words in sections.values()]


def _difference_lines(rows: Sequence[Difference]) -> list[str]:
    if rows[0].section not in GROUPED:
        return [f"  {plain(row.name)}: {_sides(row)}" for row in rows]
    of_model = {row.name.removeprefix("model/"): row[2:] for row in rows if row.name.startswith("model/")}
    owned = owners_of([row.name for row in rows if row.name.startswith("optimizer/")], of_model)
    apart = [row for row in rows if row.name not in owned or of_model[owned[row.name]] != row[2:]]
    lines: list[str] = []
    for path, members in group_paths([row.name for row in apart], [row[2:] for row in apart]):
        number = f" ({len(members)})" if len(members) > 1 else ""
        lines.append(f"  {plain(path)}{number}: {_sides(apart[members[0]])}")
    if count := len(rows) - len(apart):
        number = count_text(count, "array")
        lines.append(f"  optimizer/: {number} with the same differences as their parameters (--json lists all)")
    return lines


def _value_lines(values: Mapping[str, Any]) -> list[str]:
    differing, compared = values["differing"], values["compared"]
    if not differing:
        return [f"values: the same in all {count_text(compared, 'array')}, bit for bit"]
    lines = [f"values: {len(differing)} of {count_text(compared, 'array')} differ; largest absolute difference"]
    ranked = sorted(differing.items(), key=lambda item: -(float("inf") if item[1] is None else item[1]))
    lines += [f"  {'nan' if size is None else f'{size:.3g}':>9}  {plain(path)}" for path, size in ranked[:MAX_SHOWN]]
    return lines + (
        [f"  and {len(ranked) - MAX_SHOWN} smaller ones (--json lists all)"] if len(ranked) > MAX_SHOWN else []
    )


def _problem_lines(step: Mapping[str, Any]) -> list[str]:
    return [f"step {step['name']}: damaged", *(f"  {plain(problem)}" for problem in step["problems"])]


def _state(step: Mapping[str, Any], verified: bool) -> str:
    if step["set_aside"]:
        return "quarantined"
    if step["unreadable"]:
        return "unreadable"
    state = "damaged" if step["problems"] else "valid" if verified else "not verified"
    return state if step["finite"] else f"{state}, not finite"


def _copies_of_parameters(arrays: Sequence[Array]) -> dict[str, list[Array]]:
    """Path prefix -> the optimizer arrays below it with the same shape, dtype and split as their parameters."""
    like = {array.path.removeprefix("model/"): array[1:] for array in arrays if array.path.startswith("model/")}
    owned = owners_of([array.path for array in arrays if array.path.startswith("optimizer/")], like)
    copies: dict[str, list[Array]] = {}
    for array in arrays:
        owner = owned.get(array.path)
        if owner and like[owner] == array[1:]:
            copies.setdefault(array.path.removesuffix(owner), []).append(array)
    return copies


def _sides(row: Difference) -> str:
    if row.section == "tree" and (row.a is None or row.b is None):
        return f"only in B, {row.b}" if row.a is None else f"only in A, {row.a}"
    a, b = ("(absent)" if side is None else plain(side) or '""' for side in (row.a, row.b))
    return f"{a} -> {b}"


def _mesh(shape: Mapping[str, int] | None) -> str:
    return "?" if shape is None else plain(mesh_text(shape))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
