"""Plan: the memory and the time of a step, as numbers that can be printed and compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax_mesh.plan import report
from flax_mesh.plan.results import Memory, Time, Traffic
from flax_mesh.plan.topology import Topology
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import folded, plain_data


@dataclass(frozen=True)
class Plan:
    """The forecast for one step on one topology.

    Attributes:
        topology: The hardware.
        mesh: Sizes of the mesh axes.
        memory: Bytes over the time of the step.
        time: Seconds per step and their parts.
        traffic: Collectives by kind and mesh axes, most seconds first.
        findings: Surprises and errors: a subject, the problem and a repair.
        summary: One sentence: the limit of the run, and changes that would help.
        notes: Notes of the model config on this mesh, such as the kernel of its attention, and how far forecasts
            of this kind were from measured steps.
    """

    topology: Topology
    mesh: Mapping[str, int]
    memory: Memory
    time: Time
    traffic: tuple[Traffic, ...]
    findings: tuple[Finding, ...]
    summary: str
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into the memory of a device; None if its size is unknown."""
        return self.memory.fits

    def to_text(self, *, width: int = report.WIDTH) -> str:
        """The tables for a terminal; the last lines are the summary."""
        lines = [report.hardware_line(self.topology, self.mesh), report.memory_line(self.memory)]
        lines += [report.time_line(self.time, self.topology.num_devices), *self.notes]
        sections = [
            report.folded_lines(lines, width),
            report.memory_text(self.memory, width),
            report.part_table(self.time.parts).to_text(width),
            report.traffic_table(self.traffic).to_text(width),
            report.findings_text(self.findings, width),
            folded(self.summary, width),
        ]
        return "\n\n".join(filter(None, sections))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for `json.dumps`: bytes, seconds, FLOPs, numbers per second."""
        return {
            "topology": report.topology_dict(self.topology),
            "mesh": dict(self.mesh),
            "fits": self.fits,
            "memory": report.memory_dict(self.memory),
            "time": report.time_dict(self.time, self.topology.num_devices),
            "traffic": plain_data(self.traffic),
            "findings": plain_data(self.findings),
            "summary": self.summary,
            "notes": list(self.notes),
        }
