"""Attention in blocks beside attention as written: time and memory of value and gradients, for each mask and length.

In alternating pairs: the ratio of the CPU time, MiB of temporaries, and the largest relative difference of the results.
With --gpu the ratio of the time, and cuDNN's attention, as the function calls it and in the place of its equations.
Targets: CPU time of causal 0.4, of a window of 512 0.2.

    python -m tests.benchmarks attention [--masks causal,window] [--lengths 4096] [--pairs 5] [--blocks 512] [--batch 1]
        [--heads 8] [--width 64] [--dtype float32] [--gpu]
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import flax_mesh as fm
from tests.benchmarks.common.pipelines import Turn, median_ratio
from tests.benchmarks.common.report import options, report, use_cpu
from tests.blockwise.compare import difference, with_kernel

MASKS: dict[str, Callable[[Any, Any], Any]] = {  # (positions of queries, of keys) -> which keys a query sees
    "full": lambda q, k: q >= -k,
    "causal": lambda q, k: q >= k,
    "window": lambda q, k: (q >= k) & (q - k < 512),
    "documents": lambda q, k: (q >= k) & (q // 1000 == k // 1000),
}
WRITTEN = "as written"
MIB = 2**20


def attention_of(mask: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any) -> Any:  # (batch, sequence, heads, head dim)
        at = jnp.arange(q.shape[1])
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask(at[:, None], at), scores, -1e30)).astype(q.dtype)
        return jnp.einsum("bnqk,bknh->bqnh", weights, v)

    return attention


def cudnn(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(fn(*args).astype(jnp.float32))), (0, 1, 2))


def measure_functions(given: Any) -> Iterator[dict[str, Any]]:
    for mask in given.masks:
        for length in given.lengths:
            shape, plain = (given.batch, length, given.heads, given.width), attention_of(MASKS[mask])
            args = [jax.random.normal(jax.random.key(n), shape).astype(given.dtype) for n in range(3)]
            variants = {f"blocks of {n}": fm.blockwise_attention(plain, block=n) for n in given.blocks}
            variants |= {"cuDNN": cudnn} if given.gpu and mask == "causal" else {}
            variants |= (
                {"kernel": with_kernel(plain, "cudnn", platform="gpu")} if given.gpu and mask != "documents" else {}
            )
            yield from compare(f"{mask} {length}", {WRITTEN: plain, **variants}, args, given)


def compare(title: str, variants: dict[str, Callable[..., Any]], args: Sequence[Any], given: Any) -> Iterator[Any]:
    rows: dict[str, dict[str, Any]] = {name: {"attention": title, "variant": name} for name in variants}
    turns: dict[str, Turn] = {}
    for name, fn in variants.items():
        try:
            compiled: Any = jax.jit(with_gradients(fn)).lower(*args).compile()
            rows[name]["MiB"] = compiled.memory_analysis().temp_size_in_bytes / MIB
            turn = Turn(lambda compiled=compiled: compiled(*args))
            turn.run()
            turns[name] = turn
        except jax.errors.JaxRuntimeError as error:  # the scores of long sequences do not fit
            rows[name]["remark"] = str(error)[:60]
    for _ in range(given.pairs):
        for turn in turns.values():
            turn.run()
    spent = {name: (turn.time if given.gpu else turn.cpu)[1:] for name, turn in turns.items()}
    for name, times in spent.items():
        rows[name]["ms"] = 1e3 * statistics.median(times)
        if WRITTEN in spent:
            rows[name]["of written"] = median_ratio(times, spent[WRITTEN])
            if name != WRITTEN and args[0].shape[1] == given.lengths[0]:
                rows[name]["difference"] = difference(variants[name], variants[WRITTEN], args)
    yield from rows.values()


def main(arguments: Sequence[str] | None = None) -> int:
    sizes = {"pairs": 5, "batch": 1, "heads": 8, "width": 64, "dtype": "float32", "blocks": (512,)}
    lengths = {"masks": ("causal", "window"), "lengths": (4096,)}
    given = options("attention", arguments, **sizes, **lengths, gpu=False)
    if not given.gpu:
        use_cpu()
    return report("attention", arguments, list(measure_functions(given)))
