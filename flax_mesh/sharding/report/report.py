"""A sharding report as text for a terminal, and as plain data for JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flax_mesh.axes import dims_text
from flax_mesh.text import array_text, bytes_text, count_text, group_paths, mesh_text, table_text

if TYPE_CHECKING:  # a report prints itself by this file
    from flax_mesh.sharding.report.account import Leaf, ShardingReport


def report_text(report: ShardingReport, *, width: int = 100, mesh: bool = True) -> str:
    """The mesh unless told otherwise, every array of the model, totals, mesh axes and collectives.

    Arrays of numbered layers that are alike share a line; bytes are then those of all of them. The optimizer's arrays
    are in the totals alone.
    """
    parts = [
        mesh_line(report) if mesh else "",
        arrays_text(report, width),
        totals_text(report),
        axes_text(report, width),
    ]
    return "\n\n".join(part for part in parts if part)


def mesh_line(report: ShardingReport) -> str:
    """`mesh dp:4,fsdp:128,tp:8, 4,096 devices`; axes of size 1 are left out."""
    devices = count_text(len(report.memory_per_device), "device")
    return f"mesh {mesh_text(report.mesh)}, {devices}" if report.mesh else f"no mesh, {devices}"


def arrays_text(report: ShardingReport, width: int) -> str:
    """The table of arrays, without its rule columns where no rules and no annotations are known."""
    leaves = [leaf for leaf in report.leaves if leaf.kind != "optimizer"]
    with_rules = any(leaf.rule is not None or leaf.logical for leaf in leaves)
    groups = group_leaves(leaves)
    prefixes = [_prefix(path) for path, _ in groups]
    rows: list[list[str]] = []
    for i, (path, members) in enumerate(groups):
        leaf, prefix, times = leaves[members[0]], prefixes[i], len(members)
        number = f"{times} x " if times > 1 else ""
        if prefix and prefixes.count(prefix) > 1:
            if i == 0 or prefixes[i - 1] != prefix:
                rows.append([prefix, f"{number}these:" if number else "", *[""] * (4 if with_rules else 2)])
            path, number = "  " + path.removeprefix(prefix), number if "{" in path.removeprefix(prefix) else ""
        middle = [str(leaf.rule + 1) if leaf.rule is not None else "-", logical_text(leaf)] if with_rules else []
        rows.append([path, number + array_text(leaf), *middle, spec_text(leaf), bytes_text(leaf.device_bytes * times)])
    heads = ["path", "array", *(["rule", "logical axes"] if with_rules else []), "split over", "per device"]
    return table_text(
        heads, rows, width, right={"rule", "per device"}, wrap={"logical axes"} if with_rules else {"path"}
    )


def totals_text(report: ShardingReport) -> str:
    """Bytes of the fullest device and of all devices together."""
    parameters = [leaf for leaf in report.leaves if leaf.kind == "parameter"]
    fullest = max(report.memory_per_device.values(), default=0)
    everywhere = sum(report.memory_per_device.values()) + report.host_bytes
    host = f", {bytes_text(report.host_bytes)} of it in host memory" if report.host_bytes else ""
    lines = [
        f"parameters   {report.total_parameters:,} in {len(parameters):,} arrays; "
        f"{report.sharded_parameters:,} are split, {report.total_parameters - report.sharded_parameters:,} are whole",
        f"per device   {bytes_text(fullest)}: parameters {bytes_text(report.parameter_bytes)}, optimizer "
        f"{bytes_text(report.optimizer_bytes)}, variables {bytes_text(report.variable_bytes)}; "
        f"gradients add {bytes_text(report.gradient_bytes)}",
        f"all devices  {bytes_text(everywhere)}{host}: one copy {bytes_text(report.total_bytes)}, further copies "
        f"{bytes_text(report.replicated_bytes)}, padding {bytes_text(report.padded_bytes)}; "
        f"balance {report.balance_score:.3f}",
    ]
    return "\n".join(lines)


def axes_text(report: ShardingReport, width: int) -> str:
    """What each mesh axis splits; below it, where a compiled step was given, what it carries."""
    rows = [
        [name, str(stats.size), f"{stats.arrays:,} arrays, {bytes_text(stats.total_bytes)}" if stats.arrays else "-"]
        for name, stats in report.partition_stats.items()
        if stats.size > 1
    ]
    text = table_text(["mesh axis", "size", "splits"], rows, width, right={"size"}) if rows else ""
    if not report.traffic:
        return text
    rows = [
        [
            "+".join(one.axes),
            one.kind,
            f"{one.times:,}" if one.times_known else f"{one.times:,} or more",
            bytes_text(one.payload_bytes),
            bytes_text(one.sent_bytes),
        ]
        for one in report.traffic
    ]
    heads = ["over", "collective", "times a step", "payload", "a device sends"]
    return f"{text}\n\n{table_text(heads, rows, width, right={*heads[2:]})}"


def report_data(report: ShardingReport) -> dict[str, Any]:
    """The report as plain data for `json.dumps`: every array on its own, devices by their text."""
    devices = {str(device): size for device, size in report.memory_per_device.items()}
    same = set(devices.values())
    return {
        **{name: value for name, value in report.items() if isinstance(value, int | float)},
        "mesh": report.mesh,
        "num_devices": len(devices),
        # Thousands of equal numbers say no more than one.
        "memory_per_device": devices if len(same) > 1 else {"every device": next(iter(same), 0)},
        "partition_stats": {
            name: {**stats._asdict(), "traffic": [one._asdict() for one in stats.traffic]}
            for name, stats in report.partition_stats.items()
        },
        "traffic": [one._asdict() for one in report.traffic],
        "leaves": [leaf_data(leaf) for leaf in report.leaves],
    }


def leaf_data(leaf: Leaf) -> dict[str, Any]:
    """One array as plain data; its spec as a list with None, a name or a list of names for each dim."""
    spec = None if leaf.spec is None else [list(e) if isinstance(e, tuple) else e for e in leaf.spec]
    return leaf._asdict() | {"spec": spec, "copies": round(leaf.copies, 6)}


def group_leaves(leaves: Sequence[Leaf]) -> list[tuple[str, list[int]]]:
    """`group_paths` of leaves that are alike in all but their path."""
    return group_paths([leaf.path for leaf in leaves], [leaf._replace(path="") for leaf in leaves])


def spec_text(leaf: Leaf) -> str:
    """`fsdp+dp, -, tp`; `whole` where no dim names an axis, `?` for a sharding that is not written as a spec."""
    if leaf.spec is None:
        return "one device" if leaf.num_devices == 1 else "?"
    return dims_text(leaf.spec) if any(leaf.spec) else "whole"


def logical_text(leaf: Leaf) -> str:
    """`embed, heads, head_dim`; `-` where the rule is a PartitionSpec, or there is none."""
    return dims_text(leaf.logical) if leaf.logical else "-"


def _prefix(path: str) -> str:
    """What lines of the table share: up to the numbers of a layer list, else the first name."""
    match = re.match(r".*?\{\d+\.\.\d+\}/|[^/]+/", path)
    return match[0] if match else ""
