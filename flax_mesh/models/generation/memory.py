"""Whether the cache of the keys and values fits in memory, before anything compiles."""

import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from flax_mesh.axes import num_parts
from flax_mesh.errors import ConfigError
from flax_mesh.fields import MAX_SIZE
from flax_mesh.models.cache import STATE_DIMS, cache_dims, cache_shape
from flax_mesh.models.config import DecoderConfig
from flax_mesh.text import bytes_text, count_text


def check_cache(
    config: DecoderConfig,
    mesh: Mesh,
    lengths: Sequence[int],
    *,
    max_tokens: int,
    batch_size: int,
    cache_length: int | None,
    advice: str = "lower max_tokens, cache_length or batch_size",
) -> None:
    """Raise a ConfigError if the cache for prompts of these lengths cannot be allocated."""
    sizes = {"max_tokens": max_tokens, "batch_size": batch_size, "cache_length": cache_length}
    num_rows, num_slots = cache_shape(config.axes, mesh, lengths, **sizes)
    if problem := _cache_problem(config, mesh, num_rows, num_slots):
        raise ConfigError(f"{problem}; {advice}")


def _cache_problem(config: DecoderConfig, mesh: Mesh, num_rows: int, num_slots: int) -> str:
    """Why a cache of that many rows and slots cannot be allocated, "" if it may fit."""
    if num_slots > MAX_SIZE:
        return f"the cache needs {num_slots:,} slots for a prompt and its text, above the {MAX_SIZE:,} of int32"
    config = config.on_mesh(mesh)
    heads, numbers = config.cached(mesh)
    parts = num_parts(config.axes, mesh.shape, *filter(None, cache_dims(config.axes, heads)), mode="decode")
    values = config.num_of(delta=False) * num_rows * num_slots * heads * numbers
    needed, limit = values * jnp.dtype(config.dtype).itemsize // parts, _device_bytes(mesh)
    state = 4 * config.delta_value_heads * config.delta_key_dim * config.delta_value_dim  # float32
    states = config.num_of(delta=True) * num_rows * state
    needed += states // num_parts(config.axes, mesh.shape, *filter(None, STATE_DIMS), mode="decode")
    if limit is None or needed <= limit:
        return ""
    return (
        f"the cache of {count_text(num_rows, 'row')} with {num_slots:,} slots each needs {bytes_text(needed)} per "
        f"device, which has {bytes_text(limit)} left"
    )


def _device_bytes(mesh: Mesh) -> int | None:
    """Free memory of a device; of virtual CPU devices an equal share of the memory of the host. None: not known."""
    device: Any = mesh.local_devices[0]
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return limit - stats.get("bytes_in_use", 0)
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(mesh.local_devices)
