"""Saving and restoring 1 GiB in 64 arrays, against plain Orbax and tensorstore alone (docs/benchmarks.md).

flax_mesh and Orbax use the same compression; tensorstore writes one zarr3 array per leaf, without a record of the tree
and without a commit. Every round saves new steps in another order of the libraries: most of an uncompressed save is the
kernel's work on fresh pages. The result is the best round, in time and in CPU time of all threads.

Targets: save at least 0.9x Orbax's speed; restore at most 1.5x its time; the caller blocked at most 1.2x as long.
Options: --folder (on the disk to measure; default: a temporary one), --mib, --rounds.
"""

import asyncio
import functools
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.checksums import write_checksums
from tests.benchmarks.common.report import options, print_json, use_cpu

ARRAYS, DEVICES = 64, 8
COLUMNS: tuple[str, ...] = ("save", "save_cpu", "blocked", "restore", "restore_cpu")
TARGETS = {"save": 1 / 0.9, "blocked": 1.2, "restore": 1.5}  # of Orbax's time


def make_arrays(mib: int) -> dict[str, jax.Array]:
    """Normally distributed float32, as weights are: zstd compresses them by about a sixth."""
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    rng = np.random.default_rng(0)
    shape = (mib * 2**20 // ARRAYS // 4 // 1024, 1024)
    return {f"w{i}": jax.device_put(rng.standard_normal(shape, np.float32), sharding) for i in range(ARRAYS)}


def layout(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays.items()}


def save_by_flax_mesh(folder: Path, arrays: dict[str, jax.Array], compress: bool) -> dict[str, float]:
    with Checkpointer(folder, compress=compress) as checkpointer:
        checkpointer.save(0, nnx.State({"first": arrays["w0"]}), {})  # creates the folder and the threads
        checkpointer.wait()
        return timed(functools.partial(checkpointer.save, 1, nnx.State(arrays), {}), checkpointer.wait)


def restore_by_flax_mesh(folder: Path, target: dict[str, Any]) -> Any:
    with Checkpointer(folder) as checkpointer:
        return checkpointer.restore(nnx.State(target), 1)


def save_by_orbax(folder: Path, arrays: dict[str, jax.Array], compress: bool) -> dict[str, float]:
    with closing(ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=compress))) as checkpointer:
        checkpointer.save(folder / "0", args=ocp.args.PyTreeSave({"first": arrays["w0"]}))
        checkpointer.wait_until_finished()
        save = functools.partial(checkpointer.save, folder / "1", args=ocp.args.PyTreeSave(arrays))
        return timed(save, checkpointer.wait_until_finished)


def restore_by_orbax(folder: Path, target: dict[str, Any]) -> Any:
    args = ocp.args.PyTreeRestore(item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    with closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as checkpointer:
        return checkpointer.restore(folder / "1", args=args)


def save_by_tensorstore(folder: Path, arrays: dict[str, jax.Array], compress: bool) -> dict[str, float]:
    codecs = [{"name": "bytes"}, *([{"name": "zstd", "configuration": {"level": 1}}] if compress else [])]
    written = []

    def start() -> None:
        for name, x in arrays.items():
            chunk = {"name": "regular", "configuration": {"chunk_shape": list(x.addressable_shards[0].data.shape)}}
            metadata = {"shape": list(x.shape), "data_type": "float32", "chunk_grid": chunk, "codecs": codecs}
            spec = {"driver": "zarr3", "kvstore": f"file://{folder / name}/", "metadata": metadata, "create": True}
            store = ts.open(spec).result()
            for shard in x.addressable_shards:
                # A view of the array, as both other libraries use for CPU arrays; nothing modifies it here.
                write, data = store[shard.index].write, np.asarray(shard.data)
                written.append(write(data, can_reference_source_data_indefinitely=True))

    return timed(start, lambda: [write.result() for write in written])


def restore_by_tensorstore(folder: Path, target: dict[str, Any]) -> Any:
    async def one(name: str, x: Any) -> jax.Array:
        store = await ts.open({"driver": "zarr3", "kvstore": f"file://{folder / name}/"})
        parts = x.sharding.addressable_devices_indices_map(x.shape)
        read = await asyncio.gather(*(store[index].read() for index in parts.values()))
        shards = [jax.device_put(part, device) for part, device in zip(read, parts, strict=True)]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    async def every() -> dict[str, jax.Array]:
        found = await asyncio.gather(*(one(name, x) for name, x in target.items()))
        return dict(zip(target, found, strict=True))

    return asyncio.run(every())


LIBRARIES = {
    "flax_mesh": (save_by_flax_mesh, restore_by_flax_mesh),
    "orbax": (save_by_orbax, restore_by_orbax),
    "tensorstore": (save_by_tensorstore, restore_by_tensorstore),
}


def timed(start: Callable[[], Any], finish: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Seconds until the arrays may be modified, until the save is complete, and of CPU time."""
    began, cpu = time.perf_counter(), time.process_time()
    start()
    blocked = time.perf_counter() - began
    finish()
    return {"blocked": blocked, "save": time.perf_counter() - began, "save_cpu": time.process_time() - cpu}


def measure(folder: Path, arrays: dict[str, jax.Array], compress: bool, rounds: int) -> dict[str, dict[str, float]]:
    """library -> best seconds of save, blocked and restore, and MiB on disk."""
    best: dict[str, dict[str, float]] = {name: {} for name in LIBRARIES}
    for number in range(rounds):
        orders = list(itertools.permutations(LIBRARIES))
        for name in orders[number % len(orders)]:
            save, restore = LIBRARIES[name]
            place = folder / name
            place.mkdir()
            os.sync()  # pending writes of the previous save
            seconds = save(place, arrays, compress)
            if name == "flax_mesh":
                seconds["checksums"] = timed(lambda place=place: write_checksums(place / "1"))["save"]
            os.sync()
            began, cpu = time.perf_counter(), time.process_time()
            restored = jax.block_until_ready(restore(place, layout(arrays)))
            seconds |= {"restore": time.perf_counter() - began, "restore_cpu": time.process_time() - cpu}
            assert jax.tree.all(jax.tree.map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(arrays))), name
            best[name] |= {what: min(best[name].get(what, value), value) for what, value in seconds.items()}
            best[name]["mib"] = sum(f.stat().st_size for f in place.rglob("*") if f.is_file()) / 2**20
            shutil.rmtree(place)
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("checkpoints", arguments, folder="", mib=1024, rounds=6)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about missing optional files
    use_cpu(DEVICES)
    arrays = make_arrays(given.mib)
    rows = []
    with tempfile.TemporaryDirectory(dir=given.folder or None) as folder:
        for compress in (False, True):
            found = measure(Path(folder), arrays, compress, given.rounds)
            print(f"{given.mib} MiB in {ARRAYS} arrays, {'zstd' if compress else 'not compressed'}; seconds")
            print(" " * 14 + "".join(f"{what.replace('_cpu', ', CPU'):>16}" for what in COLUMNS))
            for name, seconds in found.items():
                ratios = {what: seconds[what] / found["orbax"][what] for what in COLUMNS}
                text = "".join(f"{seconds[what]:7.3f} ({ratios[what]:5.2f}x)" for what in COLUMNS)
                print(f"  {name:12}{text} {seconds['mib']:6.0f} MiB")
                if sums := seconds.get("checksums"):
                    print(f"{'':14}of it checksums: {sums:.3f} s, {sums / seconds['save']:.0%}")
                rows.append({"library": name, "compress": compress, **seconds, "of_orbax": ratios})
    print("targets, of Orbax's time: " + ", ".join(f"{what} {limit:.2f}x" for what, limit in TARGETS.items()))
    print_json("checkpoints", arguments, mib=given.mib, targets=TARGETS, rows=rows)
    return 0
