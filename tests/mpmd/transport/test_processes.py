"""MpmdMesh, mpmd.device_put and mpmd.jit between real processes, over jax.distributed on 127.0.0.1."""

import pytest

from tests.multiprocess.processes import assert_all_done, run_workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "processes", "devices"), [("two_groups", 2, 2), ("shared_groups", 4, 1), ("late", 2, 1)]
)
def test_every_case_of_the_worker_ends(case, processes, devices):
    ended = run_workers(case, processes, devices, module="tests.mpmd.transport.worker")
    assert_all_done(ended, f"{case} is done")
