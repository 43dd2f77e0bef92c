"""Schedules and published numbers that several test files use."""

from hypothesis import strategies as st

from flax_mesh.mpmd.schedules import Schedule, make_schedule
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES

SIZES = {"num_groups": st.integers(1, 8), "num_microbatches": st.integers(1, 32)}
# Qi et al. (NeurIPS 2024): makespan of a V schedule by (groups, microbatches) and memory limit.
MAKESPANS = {
    (4, 8): {4: 59, 5: 56, 6: 53, 7: 52, 8: 51},
    (4, 16): {4: 107, 5: 104, 6: 101, 7: 100, 8: 99},
    (6, 12): {6: 89, 8: 83, 10: 79, 11: 78, 12: 77},
    (8, 16): {8: 119, 10: 113, 15: 104, 16: 103},
}


def make(name: str, groups: int, microbatches: int, virtual: int | None = None) -> Schedule:
    return make_schedule(name, num_groups=groups, num_microbatches=microbatches, num_virtual_stages=virtual)


@st.composite
def schedules(draw) -> Schedule:
    """Any schedule that is defined, up to 8 groups, 32 microbatches and 4 stages on a group."""
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    num_groups = draw(SIZES["num_groups"])
    virtual = draw(st.integers(1, 4)) if name == "interleaved-1f1b" else None
    least = 2 * num_groups if name == "dualpipe-v" else 1
    num_microbatches = draw(st.integers(least, 32))
    if name == "interleaved-1f1b":
        num_microbatches = max(1, num_microbatches // num_groups) * num_groups
    return make(name, num_groups, num_microbatches, virtual)
