"""Ordered transport between real processes: calls that are matched only by number give the transfer server's results.

On CPU `jax.device_put` cannot transfer arrays between processes. `tests.multiprocess.counted` replaces it, with the
semantics that are known.
"""

import re

import pytest

from tests.multiprocess.processes import assert_all_done, run_workers

# model, schedule, mesh, processes, devices of each
MATRIX = [
    ("net", "1f1b", "pp:2", 2, 1),
    ("decoder", "1f1b", "pp:4", 4, 1),
    ("net", "zb-v", "pp:2", 2, 1),
    ("net", "zb-h1", "pp:4", 4, 1),
    ("decoder", "zb-h1", "pp:2,fsdp:2", 2, 2),
    ("net", "1f1b", "pp:4,fsdp:2", 4, 2),
    ("net", "gpipe", "pp:4", 2, 2),  # two groups in each process
    ("net", "zb-h1", "pp:2,fsdp:2", 4, 1),  # two processes share a group
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "schedule", "sizes", "processes", "devices"), MATRIX)
def test_calls_matched_by_number_equal_the_transfer_server_bit_for_bit(model, schedule, sizes, processes, devices):
    ended = run_workers("ordered", processes, devices, model, schedule, sizes, "4")
    assert_all_done(ended, "ordered is done")
    for one in ended:
        assert 'forced: transport="ordered" is not supported by every process' in one.output, one.output
        for process in range(processes):
            line = f"process {process}: the cpu client does not support transfers between processes"
            assert line in one.output, one.output
        failed = r"test of jax.device_put from group \d \(process(es)? .*\) to group \d \(.*\) failed: "
        for reason in (r"received \[\d+(, \d+)*\], expected \[\d+(, \d+)*\]\n", "timed out\n"):
            assert re.search(failed + reason, one.output), one.output
        assert 'Use transport="server" (in a recipe pipeline.transport=server).' in one.output, one.output
    assert len({re.search(r"\d+ transfers a step", one.output)[0] for one in ended}) == 1  # pyright: ignore
