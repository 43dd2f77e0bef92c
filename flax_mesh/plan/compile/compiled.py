"""Compiled: a step compiled by XLA, as numbers that can be printed and compared with the plan."""

from dataclasses import dataclass
from typing import Any

from flax_mesh.plan.compile import report
from flax_mesh.plan.compile.results import CompiledProgram, Sent
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.report import WIDTH, findings_text, folded_lines
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import plain_data


@dataclass(frozen=True)
class Compiled:
    """A step compiled by XLA.

    Attributes:
        plan: The estimate without compiling.
        programs: The step; of a pipeline F, B and W of its stages. Empty if the compiler refused a step that does not
            fit.
        peak: Bytes of the fullest device.
        groups: Peak of every group of a pipeline; one number without a pipeline.
        sent: Collectives of one device per step: of the busiest group of a pipeline, without its transfers.
        findings: Surprises: a path, the problem and a repair.
        seconds: Wall time of the process that compiled.
        cpu_seconds: Its CPU time.
        rss: Its largest memory, in bytes.
    """

    plan: Plan
    programs: tuple[CompiledProgram, ...]
    peak: int
    groups: tuple[int, ...]
    sent: tuple[Sent, ...]
    findings: tuple[Finding, ...]
    seconds: float
    cpu_seconds: float
    rss: int

    @property
    def fits(self) -> bool | None:
        """Whether the compiled step fits into the memory of a device; None if its size is unknown."""
        capacity = self.plan.memory.capacity
        if not self.programs:
            return False
        return None if capacity is None else self.peak <= capacity

    def to_text(self, *, width: int = WIDTH) -> str:
        """The tables for a terminal."""
        cost = report.cost_line(self.plan, self.seconds, self.cpu_seconds, self.rss)
        sections = [
            folded_lines([cost, report.memory_line(self.plan, self.fits, self.peak)], width),
            report.programs_text(self.programs, width),
            report.arrays_text(self.programs, width),
            report.traffic_text(self.sent, self.plan, width) if self.programs else "",
            findings_text(self.findings, width),
        ]
        return "\n\n".join(filter(None, sections))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for `json.dumps`, without the plan: bytes, seconds and numbers per step."""
        names = ["fits", "peak", "groups", "programs", "sent", "findings", "seconds", "cpu_seconds", "rss"]
        return {name: plain_data(getattr(self, name)) for name in names}
