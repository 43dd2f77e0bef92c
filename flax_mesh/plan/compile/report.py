"""A compiled step as text and as plain data, beside the estimate."""

from collections.abc import Sequence

from flax_mesh.plan.compile.results import CompiledProgram, Sent
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.report import BYTES, VERDICTS, number, of_capacity, time_text, unit_of
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import Table, bytes_text, folded, grouped, listed

OFF = 0.1  # an estimate that is off by more is a finding
SMALL = 0.05  # of the bytes of all collectives: axes with less are not compared


def cost_line(plan: Plan, seconds: float, cpu_seconds: float, rss: int) -> str:
    cost = f"{time_text(seconds)} ({time_text(cpu_seconds)} of CPU time, {bytes_text(rss)} of host memory)"
    return f"compiled for {plan.topology.text} in {cost}"


def memory_line(plan: Plan, fits: bool | None, peak: int) -> str:
    text = f"{VERDICTS[fits]}: {of_capacity(peak, plan.memory.capacity)} per device by XLA"
    text += f"; the estimate is {bytes_text(plan.memory.peak)} ({plan.memory.peak / peak - 1:+.1%})" if peak else ""
    return text


def programs_text(programs: Sequence[CompiledProgram], width: int) -> str:
    """The programs of a pipeline; the single program of a step is in the line above."""
    if len(programs) < 2:
        return ""
    unit = unit_of([program.peak for program in programs], BYTES)
    heads = ["program", "times", f"arguments {unit.name}", f"temporary {unit.name}"]
    rows = [
        [p.name, f"{p.times:,}", *(number(size / unit.size) for size in (p.arguments, p.peak - p.arguments))]
        for p in programs
    ]
    return Table(heads, rows, right=heads[1:]).to_text(width)


def arrays_text(programs: Sequence[CompiledProgram], width: int) -> str:
    """The largest arrays of the program with the highest peak."""
    if not programs:
        return ""
    program = max(programs, key=lambda program: program.peak)
    unit = unit_of([array.bytes for array in program.live], BYTES)
    heads = [unit.name, "array", "operation", "made by"]
    rows = [
        [number(x.bytes / unit.size), x.array + (f" x {x.count}" if x.count > 1 else ""), x.operation, x.place]
        for x in program.live
    ]
    title = f"the largest arrays at the peak{'' if program.name == 'step' else f' of {program.name}'}"
    table = Table(heads, rows, title, right=heads[:1], wrap=heads[2:])
    share = f"they are {sum(array.bytes for array in program.live) / max(program.walked, 1):.0%} of the arrays found"
    text = f"{share}, {bytes_text(program.walked)}; XLA allocates {bytes_text(program.peak)}"
    return f"{table.to_text(width)}\n{folded(text, width, '  ')}"


def compared(sent: Sequence[Sent], plan: Plan) -> list[tuple[tuple[str, ...], float, float]]:
    """(axes, operand bytes by XLA, bytes of the estimate), most bytes first. Transfers of a pipeline are left out."""
    rows = [(each.axes, each.operand_bytes, 0.0) for each in sent]
    rows += [(each.axes, 0.0, float(each.operand_bytes)) for each in plan.traffic if each.kind != "transfer"]
    groups = grouped(rows, lambda row: frozenset(row[0])).values()
    totals = [(group[0][0], sum(row[1] for row in group), sum(row[2] for row in group)) for group in groups]
    return sorted(totals, key=lambda row: -max(row[1:]))


def traffic_text(sent: Sequence[Sent], plan: Plan, width: int) -> str:
    rows = compared(sent, plan)
    if not rows:
        return "no collectives"
    unit = unit_of([size for _, *sizes in rows for size in sizes], BYTES)
    heads = ["axes", f"XLA {unit.name}", f"estimate {unit.name}", "error", "kinds"]
    texts: list[list[str]] = []
    for axes, by_xla, estimated in rows:
        kinds = [f"{each.kind} {each.times:,}" for each in sent if set(each.axes) == set(axes)]
        error = f"{estimated / by_xla - 1:+.0%}" if by_xla else ""
        texts.append([listed(axes), number(by_xla / unit.size), number(estimated / unit.size), error, listed(kinds)])
    caption = "operands of collectives, of one device per step"
    return Table(heads, texts, caption, right=heads[1:4], wrap=heads[4:]).to_text(width)


def estimate_findings(peak: int, sent: Sequence[Sent], plan: Plan) -> list[Finding]:
    """Where the estimate was off."""
    findings: list[Finding] = []
    repair = "Rely on the compiler's number here"
    if abs(plan.memory.peak / peak - 1) > OFF:
        sizes = f"{bytes_text(plan.memory.peak)}, XLA's peak {bytes_text(peak)}"
        findings.append(Finding("estimate of the memory", f"it is {sizes}: {plan.memory.peak / peak - 1:+.0%}", repair))
    rows = compared(sent, plan)
    total = max(sum(row[1] for row in rows), sum(row[2] for row in rows))
    for axes, by_xla, estimated in rows:
        if max(by_xla, estimated) >= SMALL * total and abs(estimated - by_xla) > OFF * by_xla:
            error = f": {estimated / by_xla - 1:+.0%}" if by_xla else ""
            sizes = f"{bytes_text(estimated)} per step, XLA's program has {bytes_text(by_xla)}{error}"
            findings.append(Finding(f"estimate of collectives over {listed(axes)}", f"it is {sizes}", repair))
    return findings
