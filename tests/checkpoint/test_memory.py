"""Extra memory of saves, measured as the peak of a separate process."""

import json
import os
import subprocess
import sys

import pytest

MIB = 2**20
STATE, LARGEST = 256 * MIB, 16 * MIB  # as in the program below
BESIDE = 32 * MIB  # besides arrays: buffers of files, threads, the metadata of the tree

SAVE = """
import json, resource, sys, threading, time
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, numpy as np
from flax import nnx
from flax_mesh.checkpoint import Checkpointer

folder, kind, host_bytes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)

def put(shape, spec):
    return jax.device_put(rng.standard_normal(shape, np.float32), jax.NamedSharding(mesh, spec))

if kind == "list":  # 16 arrays of 16 MiB
    state = nnx.State({f"w{i}": put((4096, 1024), jax.P("fsdp")) for i in range(16)})
else:  # two stacks of 8 layers of 16 MiB
    state = nnx.State({"layers": {name: put((8, 4096, 1024), jax.P(None, "fsdp")) for name in "ab"}})

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

peak, done = [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], rss())
        time.sleep(0.001)

with Checkpointer(folder, layers=["layers"], host_bytes=host_bytes, compress=False) as checkpointer:
    checkpointer.save(1, nnx.State({"small": put((4, 4), jax.P())}), {})  # imports, threads
    checkpointer.wait()
    for leaf in jax.tree.leaves(state):  # compiles the slicing of layers
        jax.block_until_ready([shard.data[0] for shard in leaf.addressable_shards])
    before = rss()
    watcher = threading.Thread(target=watch)
    watcher.start()
    checkpointer.save(2, state, {})
    checkpointer.wait()
    done.set()
    watcher.join()
    print(peak[0] - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stack", "list"])
@pytest.mark.parametrize("host_bytes", [4 * MIB, 64 * MIB, None])
def test_a_save_stays_within_host_bytes_or_one_copy_in_the_background(host_bytes, kind, tmp_path):
    command = [sys.executable, "-c", SAVE, str(tmp_path), kind, json.dumps(host_bytes)]
    returns_freed_memory = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=returns_freed_memory)
    assert run.returncode == 0, run.stderr
    extra, most = int(run.stdout), STATE if host_bytes is None else max(host_bytes, 2 * LARGEST)
    assert extra <= most + BESIDE, f"{extra / MIB:.1f} MiB"
    assert host_bytes is None or most + BESIDE < STATE / 2
