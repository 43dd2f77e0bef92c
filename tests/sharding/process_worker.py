"""One process of the tests of meshes, placement, initialization and fingerprints, started by `run_workers`."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_mesh as fm
from flax_mesh.mesh import describe_mesh
from flax_mesh.sharding import check_same_on_all_processes
from tests.multiprocess.processes import run_case
from tests.sharding.initialize.models import Cheap, Net, Ways, differences, trained


def mesh() -> None:
    """Two processes with 4 devices each."""
    processes_of = np.vectorize(lambda device: device.process_index)
    mesh = fm.create_mesh((2, 2, 2), ("tp", "fsdp", "dp"))
    hosts = processes_of(mesh.devices)
    assert hosts.shape == (2, 2, 2) and (hosts == np.array([0, 1])).all(), hosts  # dp, the last axis, is split
    assert processes_of(fm.create_mesh((4, 2), ("fsdp", "tp")).devices).tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert fm.calculate_host_mesh_shape((2, 4)) == (1, 4)
    assert "2 processes over DCN" in describe_mesh(mesh)


def placement() -> None:
    """Two processes with 4 devices each."""
    rank = jax.process_index()
    # use_jax=False keeps the order of jax.devices(): the devices of process 0 come first, so dp is the process.
    mesh = fm.create_mesh((2, 4), ("dp", "tp"), devices=jax.devices(), use_jax=False)
    values = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    other = values if rank == 0 else values.copy()
    if rank == 1:
        other[:4] = -1  # rows of process 0 alone: each process must read only the shards of its devices
    tree = {"split": other, "copies": values, "both": values.astype(np.int32), "bf16": values.astype("bfloat16")}
    specs = {"split": P("dp", "tp"), "copies": P("tp"), "both": P(("dp", "tp")), "bf16": P(None, "dp")}
    placed = fm.shard(tree, specs, mesh)
    with pytest.raises(fm.ShardingError) as error:  # one half of the arrays is on the other process
        fm.gather(placed)
    text = str(error.value)
    assert f"gather requires all elements on devices of process {rank}" in text, text
    assert f"split: 64 of 128 elements (8, 16) are only on process {1 - rank}\n" in text, text
    assert "both: 64 of 128 elements (8, 16)" in text and "copies" not in text, text
    left = fm.gather(placed, remote="leave")
    assert isinstance(left["split"], jax.Array) and isinstance(left["copies"], np.ndarray)
    for found in (fm.gather(placed, remote="collect"), fm.gather(placed, remote="collect", bytes_in_flight=64)):
        for name, x in found.items():
            expected = values.astype(x.dtype)
            assert x.dtype == placed[name].dtype and np.array_equal(x, expected), name
    for name, x in fm.gather(placed, remote="collect", dtype=np.float16).items():
        # The shards of other processes are cast too; integers keep their dtype.
        expected = np.int32 if name == "both" else np.float16
        assert x.dtype == expected and np.array_equal(x, values), name
    np.testing.assert_array_equal(fm.gather(placed["copies"]), values)  # every element is local too


def fingerprint() -> None:
    """Process 1 passes a different text than all other processes."""
    rank = jax.process_index()
    check_same_on_all_processes("the same")
    with pytest.raises(fm.ShardingError) as error:
        check_same_on_all_processes("another" if rank == 1 else "one", what="rules")
    print(f"process {rank}: {error.value}")


def initialization() -> None:
    """Two processes with 2 devices each."""
    make = functools.partial(trained, lambda: Net(Cheap))
    abstract = fm.abstract_state(make, fm.create_mesh((4,), ("fsdp",)), "fsdp", on_mismatch="drop")
    with pytest.MonkeyPatch.context() as patch:
        ways = Ways(patch)
        whole, by_kind = (way(lambda: fm.init_state(make, abstract)) for way in (ways.whole, ways.by_kind))
    assert differences(whole, by_kind) == []
    assert any(not x.is_fully_addressable for x in jax.tree.leaves(by_kind))


if __name__ == "__main__":
    run_case(globals())
