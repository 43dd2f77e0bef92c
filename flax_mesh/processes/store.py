"""The key-value store that the processes of jax.distributed share: short texts, each written once."""

from collections import Counter
from typing import Any

import jax

from flax_mesh.jax_compat import distributed_state

ROOT = "flax_mesh"
_calls: Counter[str] = Counter()  # one, as there is one jax.distributed in a process


def put_text(key: str, text: str, *, overwrite: bool = False) -> None:
    """Write what every process can read. A key that is written already is an error, unless `overwrite`."""
    _client().key_value_set(f"{ROOT}/{key}", text, allow_overwrite=overwrite)


def get_text(key: str, timeout_s: float) -> str:
    """What some process writes under `key`, waiting for it; TimeoutError after `timeout_s`."""
    try:
        return _client().blocking_key_value_get(f"{ROOT}/{key}", int(1000 * timeout_s))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(f"nobody has written {key} within {timeout_s:.0f} s") from error


def try_get_text(key: str) -> str | None:
    """What stands under `key` now, None: nothing."""
    try:
        return _client().key_value_try_get(f"{ROOT}/{key}")
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def delete_texts(folder: str) -> None:
    """Forget all that stands under keys below `folder`."""
    _client().key_value_delete(f"{ROOT}/{folder}/")


def call_number(name: str) -> int:
    """How often this process has asked for it: equal in all processes that make the same calls, so that a key that is
    written once can be used again under another number."""
    _calls[name] += 1
    return _calls[name]


def _client() -> Any:
    client = distributed_state().client
    if client is None:
        raise RuntimeError("jax.distributed is not initialised: this process has nobody to share anything with.")
    return client
