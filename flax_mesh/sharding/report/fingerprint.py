"""Fingerprint of the layout of a tree, and the check that all processes of a run have the same fingerprint."""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding

from flax_mesh.axes import as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.sharding.memory import is_on_host
from flax_mesh.text import path_lines, processes_text
from flax_mesh.tree import PyTree, named_leaves


def sharding_fingerprint(tree: PyTree) -> str:
    """SHA-256, in hex, of the path, shape, dtype, spec and mesh axes (with sizes) of every array of `tree`, and of its
    memory kind if it is in the memory of the host.

    An abstract state and the arrays that are initialized from it have the same fingerprint, on every process. It does
    not depend on the devices of the mesh, on axes of size 1, or on the spelling of a spec: `P("fsdp")` equals
    `P(("fsdp",), None)`. One ShardingError names all arrays without a sharding.

    Example:
        >>> from flax_mesh.sharding import sharding_fingerprint
        >>> mesh = fm.create_mesh((8,), ("fsdp",))
        >>> one, two = (fm.shard(np.ones((8, 2)), spec, mesh) for spec in (jax.P("fsdp"), jax.P(("fsdp",), None)))
        >>> sharding_fingerprint({"w": one}) == sharding_fingerprint({"w": two})
        True
    """
    lines, missing = [], []
    for path, leaf in named_leaves(tree):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            continue  # numbers and text are not on devices
        sharding = getattr(leaf, "sharding", None)
        if sharding is None:
            missing.append(f"{path}: {type(leaf).__name__} {tuple(leaf.shape)} has no sharding")
        else:
            lines.append(f"{path} {leaf.dtype}{list(leaf.shape)} {_layout_text(sharding)}")
    if missing:
        raise ShardingError(
            "\n".join([*path_lines(missing), "Take the fingerprint of an abstract_state, or shard the tree first."])
        )
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def check_same_on_all_processes(text: str, what: str = "sharding") -> None:
    """Raises a ShardingError unless all processes of the run pass the same `text`, such as a fingerprint.

    Processes with different layouts compile different programs, and then hang or compute wrong results. Every process
    must call this function. With a single process it does nothing.

    Example:
        >>> from flax_mesh.sharding import check_same_on_all_processes, sharding_fingerprint
        >>> w = fm.shard(np.ones((8, 2)), jax.P("fsdp"), fm.create_mesh((8,), ("fsdp",)))
        >>> check_same_on_all_processes(sharding_fingerprint({"w": w}))
    """
    if jax.process_count() == 1:
        return
    local = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    groups: dict[bytes, list[int]] = {}
    for process, digest in enumerate(np.asarray(multihost_utils.process_allgather(local))):
        groups.setdefault(digest.tobytes(), []).append(process)
    if len(groups) > 1:
        each = "; ".join(f"{digest.hex()[:12]} on {processes_text(them)}" for digest, them in groups.items())
        raise ShardingError(
            f"all processes of this run must have the same {what}, but there are {len(groups)} versions: {each}. "
            "Start all of them with the same code, recipe and settings."
        )


def _layout_text(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return "one device" if len(sharding.device_set) == 1 else repr(sharding)
    sizes = {name: size for name, size in sharding.mesh.shape.items() if size > 1}
    entries = ["+".join(axis for axis in as_tuple(entry) if axis in sizes) or "-" for entry in sharding.spec]
    while entries and entries[-1] == "-":
        entries.pop()
    kind = f" in {sharding.memory_kind}" if is_on_host(sharding) else ""
    return f"({', '.join(entries)}) on {','.join(f'{name}:{size}' for name, size in sizes.items())}{kind}"
