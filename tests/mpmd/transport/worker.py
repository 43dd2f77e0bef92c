"""One process of the tests in test_processes.py, started by `run_workers`.

Every process runs the same case and has a different part of the arrays as local shards.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_mesh import mpmd
from flax_mesh.mpmd import MpmdArray, MpmdMesh
from tests.multiprocess.processes import run_case

P = PartitionSpec
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def groups(shape: tuple[int, ...], names: tuple[str, ...] = ("pp", "fsdp")) -> MpmdMesh:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return MpmdMesh(Mesh(np.array(devices).reshape(shape), names), "pp")


def check(array: MpmdArray, expected: np.ndarray) -> None:
    """Every local shard has its part of `expected`. An array without local shards is remote."""
    parts = array.sharding.addressable_devices_indices_map(array.shape)
    assert array.is_fully_remote == (not parts)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    if parts:
        shards = {shard.device: shard.data for shard in array.block_until_ready().jax_array.addressable_shards}
        assert set(shards) == set(parts)
        for device, part in parts.items():
            assert np.array_equal(shards[device], expected[part]), (device, shards[device], expected[part])


def two_groups() -> None:
    """Two processes with a group of two devices each."""
    process = jax.process_index()
    mpmd_mesh = groups((2, 2))
    assert mpmd_mesh.my_mpmd_axis_index == process and mpmd_mesh.my_mpmd_axis_indices == (process,)
    first, second = (NamedSharding(mesh, P("fsdp")) for mesh in mpmd_mesh.unstack)
    with mpmd_mesh:
        x = mpmd.device_put(X, first)
    check(x, X)
    assert x.groups == (0,)
    for spec in (P("fsdp"), P(None, "fsdp"), P(), P("pp", "fsdp")):  # local to remote, or remote to local; and back
        there = mpmd.device_put(x, NamedSharding(mpmd_mesh.unstack[1], spec))
        check(there, X)
        assert there.groups == (1,)
        check(mpmd.device_put(there, first), X)
    one = mpmd.device_put(x, SingleDeviceSharding(mpmd_mesh.unstack[1].devices.ravel()[1]))  # another number of devices
    check(one, X)
    check(mpmd.device_put(one, first), X)
    everywhere = mpmd.device_put(x, NamedSharding(mpmd_mesh.jax_mesh, P(("fsdp", "pp"))))  # partly here, partly there
    check(everywhere, X)
    check(mpmd.device_put(everywhere, second), X)

    for i, array in enumerate([mpmd.device_put(mpmd.device_put(X + i, first), second) for i in range(20)]):
        check(array, X + i)
    # Both ways at once, each process receiving before it sends.
    both = {0: (mpmd.device_put(X, first), second), 1: (mpmd.device_put(-X, second), first)}
    crossed = {i: mpmd.device_put(*both[i]) for i in ((1, 0) if process == 0 else (0, 1))}
    check(crossed[0], X)
    check(crossed[1], -X)

    fill = mpmd.jit(lambda x: x * 0 - 7, out_shardings=first, donate_argnums=0)
    given = mpmd.device_put(X, first)
    orders = {
        "early": lambda: mpmd.device_put(given, second, "early"),
        "late": lambda: mpmd.device_put(x, second, "late"),
    }
    if process == 0:
        orders["early"]()
        fill(given).block_until_ready()  # reuses the donated buffer of the array that was sent before it is read
        assert given.jax_array.is_deleted()
        orders["late"]()
    else:
        check(orders["late"](), X)
        check(orders["early"](), X)

    host = NamedSharding(mpmd_mesh.unstack[1], P("fsdp"), memory_kind="pinned_host")
    pinned = mpmd.device_put(x, host)
    check(pinned, X)
    assert pinned.is_fully_remote or pinned.jax_array.sharding.memory_kind == "pinned_host"

    step = mpmd.jit(lambda x, w: (x @ w, jnp.sum(x)), out_shardings=(first, NamedSharding(mpmd_mesh.unstack[0], P())))
    y, total = step(x, np.eye(4, dtype=np.float32) * 2)
    check(y, X * 2)
    check(total, np.asarray(np.sum(X)))


def shared_groups() -> None:
    """Four processes with one device each; two groups of two processes."""
    process = jax.process_index()
    mpmd_mesh = groups((2, 2))
    assert mpmd_mesh.my_mpmd_axis_index == process // 2
    first, second = mpmd_mesh.unstack
    with mpmd_mesh:
        x = mpmd.device_put(X, NamedSharding(first, P("fsdp")))  # every process of the group puts its shards
    check(x, X)
    for spec in (P("fsdp"), P(None, "fsdp"), P()):
        there = mpmd.device_put(x, NamedSharding(second, spec))
        check(there, X)
        check(mpmd.device_put(there, NamedSharding(first, P("fsdp"))), X)
        check(mpmd.device_put(there, NamedSharding(second, P("fsdp"))), X)  # another layout within the group
    total = mpmd.jit(lambda x: x + jnp.sum(x), out_shardings=NamedSharding(first, P()))(x)  # a sum over two processes
    check(mpmd.device_put(total, NamedSharding(second, P(None, "fsdp"))), X + np.sum(X))
    scaled = mpmd.jit(lambda x, w: x * w, out_shardings=NamedSharding(second, P("fsdp")))(there, np.float32(3))
    check(scaled, X * 3)


def late() -> None:
    """The sender has finished its program before the receiver asks; jax.distributed keeps both alive until then."""
    process = jax.process_index()
    mpmd_mesh = groups((2, 1))
    first, second = (NamedSharding(mesh, P()) for mesh in mpmd_mesh.unstack)
    x = mpmd.device_put(X, first)
    if process == 1:
        time.sleep(3)
    check(mpmd.device_put(x, second), X)


if __name__ == "__main__":
    run_case(globals())
