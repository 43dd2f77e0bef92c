"""ShardingReport: the memory and traffic of a sharding as a mapping, text, data for JSON and an HTML page."""

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from flax_mesh.axes import as_tuple, dims_text
from flax_mesh.hlo.collectives import Traffic
from flax_mesh.html import html_findings, html_frame, html_page, html_section, html_table, html_tiles
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import (
    Table,
    array_text,
    bytes_text,
    count_text,
    folded,
    group_paths,
    mesh_text,
    plain_data,
    table_text,
)

Kind = Literal["parameter", "optimizer", "variable"]
TEMPLATE = Path(__file__).with_name("page.html")


class ArrayReport(NamedTuple):
    """One array and its placement. `rule` and `logical` are set by `explain_sharding` only."""

    path: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None  # None: a sharding without a spec
    pieces: tuple[int, ...]  # number of shards along each dim
    total_bytes: int  # bytes of one copy
    device_bytes: int  # bytes of one shard
    num_devices: int
    padded_bytes: int  # bytes on all devices, where all shards of an array have the size of its largest shard
    rule: int | None = None  # index in the rule table
    logical: tuple[str | None, ...] | None = None
    on_host: bool = False  # stored in the memory of the host

    @property
    def copies(self) -> float:
        """Number of devices that store each element, on average."""
        return (self.num_devices * self.device_bytes - self.padded_bytes) / max(self.total_bytes, 1)

    @property
    def spec_text(self) -> str:
        """`fsdp+dp, -, tp`; `replicated` if no dim names a mesh axis, `?` for a sharding without a spec."""
        if self.spec is None:
            return "one device" if self.num_devices == 1 else "?"
        return dims_text(self.spec) if any(self.spec) else "replicated"

    @property
    def logical_text(self) -> str:
        """`embed, heads, head_dim`; `-` without a rule, or if the rule has a PartitionSpec."""
        return dims_text(self.logical) if self.logical else "-"

    def to_dict(self) -> dict[str, Any]:
        """Plain data. The spec is a list with None, a name or a list of names per dim."""
        spec = None if self.spec is None else [list(e) if isinstance(e, tuple) else e for e in self.spec]
        return self._asdict() | {"spec": spec, "copies": round(self.copies, 6)}


class AxisStats(NamedTuple):
    """The arrays that are sharded over one mesh axis, and its collectives, including those over several axes."""

    size: int
    arrays: int
    parameters: int  # number of elements
    total_bytes: int  # bytes of one copy
    traffic: tuple[Traffic, ...] = ()


@dataclass(frozen=True, repr=False)
class ShardingReport(Mapping[str, object]):
    """Memory and traffic of a sharding, by attribute or by key: `report["balance_score"]`. Activations are not counted.

    Attributes:
        memory_per_device: Device, or its index in an AbstractMesh -> bytes of the state that it stores.
        balance_score: The smallest value of `memory_per_device` divided by the largest; 1.0 if all are equal.
        replicated_bytes: Bytes on all devices together in excess of one copy of every array.
        parameter_bytes, optimizer_bytes, variable_bytes: Parts of the device with the most bytes. Variables are the
            statistics of BatchNorm, random streams and the like.
        gradient_bytes: Bytes that gradients add on that device, with the dtypes and shardings of the floating
            parameters; `explain_sharding` counts only the parameters that the optimizer trains. Not part of
            `memory_per_device`.
        host_bytes: Bytes in pinned host memory, on all devices together. Not part of the other figures per device.
    """

    total_parameters: int
    sharded_parameters: int
    memory_per_device: dict[Hashable, int]
    balance_score: float
    partition_stats: dict[str, AxisStats]
    total_bytes: int
    replicated_bytes: int
    padded_bytes: int
    host_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    variable_bytes: int
    gradient_bytes: int
    mesh: dict[str, int]
    leaves: tuple[ArrayReport, ...]
    traffic: tuple[Traffic, ...] = ()

    def __getitem__(self, name: str) -> Any:
        if name not in set(self):
            raise KeyError(f"{name!r} is none of {', '.join(self)}")
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __str__(self) -> str:
        return self.to_text()

    @property
    def mesh_line(self) -> str:
        """Axis sizes and the number of devices, as text; axes of size 1 are left out."""
        split = any(size > 1 for size in self.mesh.values())
        mesh = f"mesh {mesh_text(self.mesh)}" if split else "mesh of one device" if self.mesh else "no mesh"
        return f"{mesh}, {count_text(len(self.memory_per_device), 'device')}"

    def to_text(self, *, width: int = 100, mesh: bool = True) -> str:
        """The mesh (unless `mesh=False`), every array of the model, totals, mesh axes and collectives.

        Equal arrays of numbered layers share one line with their summed bytes. Optimizer arrays are only in the totals.
        """
        parts = [
            self.mesh_line if mesh else "",
            _arrays_text(self, width),
            _totals_text(self, width),
            _axes_text(self, width),
            _traffic_table(self).to_text(width),
        ]
        return "\n\n".join(filter(None, parts))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`, with one entry per array. Devices are converted to text."""
        devices = {str(device): size for device, size in self.memory_per_device.items()}
        sizes = set(devices.values())
        return {
            **{name: value for name, value in self.items() if isinstance(value, int | float)},
            "mesh": self.mesh,
            "num_devices": len(devices),
            # A mesh may have thousands of devices, usually with equal numbers.
            "memory_per_device": devices if len(sizes) > 1 else {"every device": next(iter(sizes), 0)},
            "partition_stats": plain_data(self.partition_stats),
            "traffic": plain_data(self.traffic),
            "leaves": [leaf.to_dict() for leaf in self.leaves],
        }

    def to_html(self, *, title: str = "sharding") -> str:
        """One HTML file without external resources that draws the shards of every array on the mesh."""
        return report_page(self, title)

    def _repr_html_(self) -> str:
        return html_frame(self.to_html())


def report_page(
    report: ShardingReport,
    title: str,
    note: str = "",
    rules: Table | None = None,
    findings: Sequence[Finding] | None = None,
) -> str:
    """The HTML page of a report, with the rules and findings of an Explanation. `findings` None: not computed."""
    leaves = [leaf for leaf in report.leaves if leaf.kind != "optimizer"]
    arrays = [_array_data(path, [leaves[i] for i in where], report) for path, where in group_leaves(leaves)]
    shown = {name: size for name, size in report.mesh.items() if size > 1} or {"device": 1}
    data = {"mesh": [{"name": name, "size": size} for name, size in shown.items()], "arrays": arrays}
    return html_page(
        TEMPLATE,
        title=escape(title),
        mesh=escape("\n".join(filter(None, [report.mesh_line, note]))),
        tiles=html_tiles(_tiles(report)),
        findings="" if findings is None else html_findings(findings),
        traffic=_section("Collectives of a step", _traffic_table(report)),
        rules=_section("Rules, the first that matches applies", rules),
        data=json.dumps(data).replace("<", "\\u003c"),  # a path that contains </script> must not end the element
    )


def _section(title: str, table: Table | None) -> str:
    return html_section(title, html_table(table)) if table is not None and table.rows else ""


def group_leaves(leaves: Sequence[ArrayReport]) -> list[tuple[str, list[int]]]:
    """`group_paths` of leaves that differ only in their path."""
    return group_paths([leaf.path for leaf in leaves], [leaf._replace(path="") for leaf in leaves])


def _arrays_text(report: ShardingReport, width: int) -> str:
    """The table of arrays, without the columns on rules if there are neither rules nor annotations."""
    leaves = [leaf for leaf in report.leaves if leaf.kind != "optimizer"]
    with_rules = any(leaf.rule is not None or leaf.logical for leaf in leaves)
    groups = group_leaves(leaves)
    # Paths with a common prefix are indented below it: the prefix up to the layer numbers, or else the first name.
    matches = [re.match(r".*?\{\d+\.\.\d+\}/|[^/]+/", path) for path, _ in groups]
    prefixes = [match[0] if match else "" for match in matches]
    rows: list[list[str]] = []
    for i, (path, members) in enumerate(groups):
        leaf, prefix, times = leaves[members[0]], prefixes[i], len(members)
        number = f"{times} x " if times > 1 else ""
        if prefix and prefixes.count(prefix) > 1:
            if i == 0 or prefixes[i - 1] != prefix:
                rows.append([prefix, f"{number}these:" if number else "", *[""] * (4 if with_rules else 2)])
            path, number = "  " + path.removeprefix(prefix), number if "{" in path.removeprefix(prefix) else ""
        middle = [str(leaf.rule + 1) if leaf.rule is not None else "-", leaf.logical_text] if with_rules else []
        rows.append([path, number + array_text(leaf), *middle, leaf.spec_text, bytes_text(leaf.device_bytes * times)])
    heads = ["path", "array", *(["rule", "logical axes"] if with_rules else []), "split over", "per device"]
    return table_text(
        heads, rows, width, right={"rule", "per device"}, wrap={"logical axes"} if with_rules else {"path"}
    )


def _totals_text(report: ShardingReport, width: int) -> str:
    parameters = [leaf for leaf in report.leaves if leaf.kind == "parameter"]
    fullest = max(report.memory_per_device.values(), default=0)
    everywhere = sum(report.memory_per_device.values()) + report.host_bytes
    host = f", {bytes_text(report.host_bytes)} of it in host memory" if report.host_bytes else ""
    lines = [
        f"parameters   {report.total_parameters:,} in {count_text(len(parameters), 'array')}; "
        f"{report.sharded_parameters:,} sharded, {report.total_parameters - report.sharded_parameters:,} replicated",
        f"per device   {bytes_text(fullest)}: parameters {bytes_text(report.parameter_bytes)}, optimizer "
        f"{bytes_text(report.optimizer_bytes)}, variables {bytes_text(report.variable_bytes)}; "
        f"gradients add {bytes_text(report.gradient_bytes)}",
        f"all devices  {bytes_text(everywhere)}{host}: one copy {bytes_text(report.total_bytes)}, further copies "
        f"{bytes_text(report.replicated_bytes)}, padding {bytes_text(report.padded_bytes)}; "
        f"balance {report.balance_score:.3f}",
    ]
    return "\n".join(folded(line, width, indent=" " * 13) for line in lines)


def _axes_text(report: ShardingReport, width: int) -> str:
    rows = [
        [name, str(x.size), f"{count_text(x.arrays, 'array')}, {bytes_text(x.total_bytes)}" if x.arrays else "-"]
        for name, x in report.partition_stats.items()
        if x.size > 1
    ]
    return Table(("mesh axis", "size", "splits"), rows, right={"size"}).to_text(width)


def _traffic_table(report: ShardingReport) -> Table:
    heads = ("mesh axes", "collective", "times per step", "payload", "sent per device")
    rows = [
        [
            "+".join(traffic.axes),
            traffic.kind,
            f"{traffic.times:,}" if traffic.times_known else f"{traffic.times:,} or more",
            bytes_text(traffic.payload_bytes),
            bytes_text(traffic.sent_bytes),
        ]
        for traffic in report.traffic
    ]
    return Table(heads, rows, right=heads[2:])


def _tiles(report: ShardingReport) -> list[tuple[str, str]]:
    units = (("trillion", 10**12), ("billion", 10**9), ("million", 10**6))
    count = report.total_parameters
    number = next((f"{count / size:.3g} {word}" for word, size in units if count >= size), f"{count:,}")
    return [
        ("state per device", bytes_text(max(report.memory_per_device.values(), default=0))),
        ("parameters per device", bytes_text(report.parameter_bytes)),
        ("optimizer per device", bytes_text(report.optimizer_bytes)),
        ("gradients, in addition", bytes_text(report.gradient_bytes)),
        ("number of parameters", number),
        ("one copy of the state", bytes_text(report.total_bytes)),
        ("further copies", bytes_text(report.replicated_bytes)),
        ("balance, min / max", f"{report.balance_score:.3f}"),
    ]


def _array_data(path: str, leaves: Sequence[ArrayReport], report: ShardingReport) -> dict[str, object]:
    leaf, number = leaves[0], len(leaves)
    entries = [] if leaf.spec is None else [[a for a in as_tuple(e) if report.mesh[a] > 1] for e in leaf.spec]
    return {
        "path": path,
        "number": number,
        "text": array_text(leaf),
        "kind": leaf.kind,
        "rule": "" if leaf.rule is None else str(leaf.rule + 1),
        "logical": leaf.logical_text,
        "split": leaf.spec_text,
        "bytes": leaf.device_bytes * number,
        "bytesText": bytes_text(leaf.device_bytes * number),
        "pieceText": bytes_text(leaf.device_bytes),
        "copies": f"{leaf.copies:g}",
        "shape": list(leaf.shape),
        "pieces": list(leaf.pieces),
        "names": list(leaf.logical or ()),
        "axes": entries + [[]] * (len(leaf.shape) - len(entries)),
    }
