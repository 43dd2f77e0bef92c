"""A sharding as one HTML file without external resources: who holds which piece of every array, on meshes of any rank.

The array and the mesh are drawn by one function: a box of any number of dims becomes a grid of its last two, inside a
grid of the two before, and so on. A piece of the array and the devices that hold it share a colour.
"""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from flax_mesh.axes import as_tuple, dims_text
from flax_mesh.sharding.report.account import Leaf, ShardingReport
from flax_mesh.sharding.report.explain import Explanation
from flax_mesh.sharding.report.report import array_text, group_leaves, logical_text, mesh_line, spec_text
from flax_mesh.text import bytes_text, count_text

TEMPLATE = Path(__file__).with_name("page.html")


def sharding_page(what: Explanation | ShardingReport, *, title: str = "sharding") -> str:
    """The HTML document, of an explanation or of a report alone."""
    report, rules, findings = (what, [], []) if isinstance(what, ShardingReport) else (what.report, *_notes(what))
    leaves = [leaf for leaf in report.leaves if leaf.kind != "optimizer"]
    arrays = [_array(path, len(members), leaves[members[0]], report) for path, members in group_leaves(leaves)]
    shown = {name: size for name, size in report.mesh.items() if size > 1} or {"device": 1}
    data = {"mesh": [{"name": name, "size": size} for name, size in shown.items()], "arrays": arrays}
    parts = {
        "title": escape(title),
        "mesh": escape("; ".join(filter(None, [mesh_line(report), getattr(what, "note", "")]))),
        "tiles": "".join(
            f"<li><b>{escape(value)}</b><span>{escape(label)}</span></li>" for label, value in _tiles(report)
        ),
        "findings": _findings(findings) if isinstance(what, Explanation) else "",
        "rules": _table(["rule", "pattern", "dims", "decides"], rules, "Rules, the first that matches decides"),
        "traffic": _table(
            ["over", "collective", "times a step", "payload", "a device sends"],
            _traffic(report),
            "Collectives of a step",
        ),
        "data": json.dumps(data).replace("<", "\\u003c"),  # so that no text can end the script
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    return re.sub("%([a-z]+)%", lambda match: parts[match[1]], page)  # in one pass: a title may hold %data%


def _array(path: str, number: int, leaf: Leaf, report: ShardingReport) -> dict[str, Any]:
    entries = [] if leaf.spec is None else [[a for a in as_tuple(e) if report.mesh[a] > 1] for e in leaf.spec]
    return {
        "path": path,
        "number": number,
        "text": array_text(leaf),
        "kind": leaf.kind,
        "rule": "" if leaf.rule is None else str(leaf.rule + 1),
        "logical": logical_text(leaf),
        "split": spec_text(leaf),
        "bytes": leaf.device_bytes * number,
        "bytesText": bytes_text(leaf.device_bytes * number),
        "pieceText": bytes_text(leaf.device_bytes),
        "copies": f"{leaf.copies:g}",
        "shape": list(leaf.shape),
        "pieces": list(leaf.pieces),
        "names": list(leaf.logical or ()),
        "axes": entries + [[]] * (len(leaf.shape) - len(entries)),
    }


def _tiles(report: ShardingReport) -> list[tuple[str, str]]:
    fullest = max(report.memory_per_device.values(), default=0)
    return [
        ("state on a device", bytes_text(fullest)),
        ("parameters of that", bytes_text(report.parameter_bytes)),
        ("optimizer of that", bytes_text(report.optimizer_bytes)),
        ("gradients on top", bytes_text(report.gradient_bytes)),
        ("parameters in all", _count(report.total_parameters)),
        ("one copy of the state", bytes_text(report.total_bytes)),
        ("further copies", bytes_text(report.replicated_bytes)),
        ("balance, least over most", f"{report.balance_score:.3f}"),
    ]


def _count(number: int) -> str:
    for unit, size in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _notes(what: Explanation) -> tuple[list[list[str]], list[str]]:
    rules = [[str(i), use.pattern, dims_text(use.dims), str(use)] for i, use in enumerate(what.rules, start=1)]
    return rules, [str(finding) for finding in what.findings]


def _findings(findings: list[str]) -> str:
    if not findings:
        return '<p class="clean">No findings.</p>'
    items = "".join(f"<li>{escape(text)}</li>" for text in findings)
    title = count_text(len(findings), "finding")
    return f'<section class="findings"><h2>{title}</h2><ul>{items}</ul></section>'


def _traffic(report: ShardingReport) -> list[list[str]]:
    return [
        [
            "+".join(one.axes),
            one.kind,
            f"{one.times:,}" + ("" if one.times_known else " or more"),
            bytes_text(one.payload_bytes),
            bytes_text(one.sent_bytes),
        ]
        for one in report.traffic
    ]


def _table(heads: list[str], rows: Any, title: str) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<section><h2>{escape(title)}</h2><div class="wide">{table}</div></section>'
