"""Placement with two processes."""

import pytest

from tests.multiprocess.processes import assert_all_done, run_workers


@pytest.mark.slow
def test_two_processes_shard_and_gather_arrays_that_span_both():
    ended = run_workers("placement", 2, 4, module="tests.sharding.process_worker")
    assert_all_done(ended, "placement is done")
