"""Plans that are written by hand."""

from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.plan.forecast import thinned
from flax_mesh.plan.plan import Plan
from flax_mesh.plan.results import Memory, Moment, Part, Time, Traffic
from flax_mesh.plan.topology import parse_topology
from flax_mesh.sharding.rules import Finding

GIB = 2**30
FINDING = Finding("data.batch_size=8", "too small for <b> & 'fsdp' " + "on many devices " * 4, "Use data.batch_size=64")


def make_plan(
    topology: str = "v5p:4x4x8", mesh: str = "fsdp:16,tp:8", *, capacity: int | None = 93 * GIB, num_moments: int = 60
) -> Plan:
    sizes = {name: int(size) for name, _, size in (part.partition(":") for part in mesh.split(","))}
    half = GIB // 2
    moments = [
        Moment(f"layer {i} <dot>", {"parameters": 20 * GIB, "optimizer": 40 * GIB, "residuals": min(i, 60 - i) * half})
        for i in range(num_moments)
    ]
    peak = max(moments, key=lambda moment: moment.total)
    groups, schedule = sizes.get("pp", 1), None
    if groups > 1:
        schedule = make_schedule("1f1b", num_groups=groups, num_microbatches=4 * groups)
    times = [0.04 if s in (0, groups - 1) else 0.03 for s in range(groups)]
    parts = [
        Part(f"stage {s} {kind}", 32, n * 9e12, n * 3e10, n * compute, n * 0.01, n * 0.012, n * 0.035)
        for s, compute in enumerate(times)
        for kind, n in (("F", 1), ("B", 2))
    ]
    parts.append(Part("optimizer update", 1, 1e9, 9e10, 1e-4, 0.0325, 0.001, 0.034))
    of_groups = tuple(peak.total - g for g in range(groups))
    memory = Memory(capacity, 2 * GIB, 60 * GIB, peak.total, peak.bytes, thinned(moments), of_groups)
    traffic = (
        Traffic("all-gather", ("fsdp",), 126, 12 * GIB, 11 * GIB, 0, 0.4),
        Traffic("reduce-scatter", ("fsdp",), 63, 12 * GIB, 11 * GIB, 0, 0.2),
        Traffic("all-reduce", ("dp", "fsdp"), 1, 3 * GIB, GIB, 6 * GIB, 0.15),
    )
    time = Time(4.35, tuple(parts), 15060.4, 0.421, 3e14, 0.12 if groups > 1 else 0.0, schedule)
    return Plan(parse_topology(topology), sizes, memory, time, traffic, (FINDING,), "Compute limits the run. Use tp:4.")
