"""Shardings as text, for tests/golden."""

from flax_mesh import ShardingReport
from flax_mesh.sharding.report.report import group_leaves
from flax_mesh.text import array_text


def golden_text(report: ShardingReport) -> str:
    """One line per array: path, shape, split and bytes per device. A diff of two texts shows the changes."""
    lines = [report.mesh_line]
    for path, members in group_leaves(report.leaves):
        leaf = report.leaves[members[0]]
        lines.append(f"{path}  {array_text(leaf)}  {leaf.spec_text}  {leaf.device_bytes:,} B")
    return "\n".join([*lines, f"state per device {max(report.memory_per_device.values()):,} B", ""])
