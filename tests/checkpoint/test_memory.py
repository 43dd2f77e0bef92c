"""Extra memory of saves and restores, measured as the peak of a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB, ROOT = 2**20, Path(__file__).parents[2]
STATE, LARGEST = 256 * MIB, 16 * MIB  # as in the program below
BESIDE = 32 * MIB  # besides arrays: buffers of files, threads, the metadata of the tree

START = """
import json, os, resource, sys, threading, time
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, numpy as np
from flax import nnx
from flax_mesh.checkpoint import Checkpointer

mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)

def put(shape, spec):
    return jax.device_put(rng.standard_normal(shape, np.float32), jax.NamedSharding(mesh, spec))

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

peak, done = [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], rss())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
"""
SAVE = (
    START
    + """
folder, kind, host_bytes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

if kind == "list":  # 16 arrays of 16 MiB
    state = nnx.State({f"w{i}": put((4096, 1024), jax.P("fsdp")) for i in range(16)})
else:  # two stacks of 8 layers of 16 MiB
    state = nnx.State({"layers": {name: put((8, 4096, 1024), jax.P(None, "fsdp")) for name in "ab"}})

with Checkpointer(folder, layers=["layers"], host_bytes=host_bytes, compress=False) as checkpointer:
    checkpointer.save(1, nnx.State({"small": put((4, 4), jax.P())}), {})  # imports, threads
    checkpointer.wait()
    for leaf in jax.tree.leaves(state):  # compiles the slicing of layers
        jax.block_until_ready([shard.data[0] for shard in leaf.addressable_shards])
    before = rss()
    watcher.start()
    checkpointer.save(2, state, {})
    checkpointer.wait()
    done.set()
    watcher.join()
    print(peak[0] - before)
"""
)
# The process that saved 16 arrays of 16 MiB does not measure: it has freed memory that would be used again.
RESTORE = (
    START
    + """
from pathlib import Path
import pytest
from flax_mesh.checkpoint import orbax
from tests.checkpoint.stores import store_of_files

path, kind, split = Path(sys.argv[1]), sys.argv[2], jax.NamedSharding(mesh, jax.P(None, "fsdp"))
folder = store_of_files(pytest.MonkeyPatch(), path) / "run" if kind == "store" else path
if not path.exists():
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, nnx.State({f"w{i}": put((4096, 1024), jax.P("fsdp")) for i in range(16)}))
        checkpointer.save(2, nnx.State({"small": put((4, 4), jax.P())}))
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], *sys.argv[1:]])
orbax._BATCH_BYTES = 2**25
checkpointer = Checkpointer(folder)
checkpointer.restore(nnx.State({"small": put((4, 4), jax.P())}), 2)  # imports, threads
target = nnx.State({f"w{i}": jax.ShapeDtypeStruct((4096, 1024), np.float32, sharding=split) for i in range(16)})
before = rss()
watcher.start()
restored = jax.block_until_ready(checkpointer.restore(target, 1, verify=False))
done.set()
watcher.join()
print(peak[0] - before)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stack", "list"])
@pytest.mark.parametrize("host_bytes", [4 * MIB, 64 * MIB, None])
def test_a_save_stays_within_host_bytes_or_one_copy_in_the_background(host_bytes, kind, tmp_path):
    extra = measured(SAVE, str(tmp_path), kind, json.dumps(host_bytes))
    most = STATE if host_bytes is None else max(host_bytes, 2 * LARGEST)
    assert extra <= most + BESIDE, f"{extra / MIB:.1f} MiB"
    assert host_bytes is None or most + BESIDE < STATE / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_restore_needs_a_few_arrays_beside_the_state(kind, tmp_path):
    """From a store: a batch of 32 MiB, compressed and decoded, and requests of 64 MiB."""
    extra = measured(RESTORE, str(tmp_path / "steps"), kind) - STATE
    assert extra <= (2 * 32 + 64) * MIB * (kind == "store") + BESIDE, f"{extra / MIB:.1f} MiB"


def measured(program: str, *arguments: str) -> int:
    returns_freed_memory = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    command = [sys.executable, "-c", program, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=returns_freed_memory, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)
