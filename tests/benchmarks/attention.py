"""Attention in blocks: time and memory beside attention as written, of functions, of models on meshes, and compiled.

functions: value and gradients of an attention that is written by hand, for each mask and length, in alternating pairs:
the ratio of the CPU time (with --gpu: of the time, cuDNN's attention included), MiB of temporaries, and the largest
relative difference of the results. models: MiB of temporaries per device of a train step of an unmodified model on each
mesh; the slope is the growth per 1,024 tokens between the last two lengths, over the growth between the first two.
decoder: temporaries over the activations that the backward pass reads, and the CPU time to trace, lower and compile.

    python -m tests.benchmarks attention [--only functions] [--masks causal,window] [--lengths 4096] [--pairs 5]
        [--blocks 512] [--batch 1] [--heads 8] [--width 64] [--dtype float32] [--gpu]

Targets: CPU time of causal 0.4, of a window of 512 0.2; slope 1; decoder 1.3, and 1.5 for its compilation.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_mesh as fm
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.plan.compile import compile_recipe
from flax_mesh.tree import num_bytes
from tests.benchmarks.common.pipelines import Turn, median_ratio
from tests.benchmarks.common.report import options, report, use_cpu
from tests.blockwise.compare import difference

PARTS = ("functions", "models", "decoder")
MASKS: dict[str, Callable[[Any, Any], Any]] = {  # (positions of queries, of keys) -> which keys a query sees
    "full": lambda q, k: q >= -k,
    "causal": lambda q, k: q >= k,
    "window": lambda q, k: (q >= k) & (q - k < 512),
    "documents": lambda q, k: (q >= k) & (q // 1000 == k // 1000),
}
MESHES = ("dp:1", "fsdp:4", "dp:2,sp:2", "pp:2,dp:2")
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
            yield from compare(f"{mask} {length}", {WRITTEN: plain, **variants}, args, given)


def compare(title: str, variants: dict[str, Callable[..., Any]], args: Sequence[Any], given: Any) -> Iterator[Any]:
    rows: dict[str, dict[str, Any]] = {name: {"attention": title, "variant": name} for name in variants}
    turns: dict[str, Turn] = {}
    for name, fn in variants.items():
        try:
            compiled = jax.jit(with_gradients(fn)).lower(*args).compile()
            rows[name]["MiB"] = temporary_bytes(compiled) / MIB
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


def temporary_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def temporaries(length: int, shape: str) -> float:
    """MiB per device of a step of the model of tests/blockwise; of a pipeline, the most of a program of a stage."""
    devices = math.prod(int(part.partition(":")[2]) for part in shape.split(","))
    overrides = [f"data.sequence_length={length}", f"mesh.shape={shape}"]
    programs = compile_recipe("tests/blockwise/recipe.py", overrides, f"cpu:{devices}").programs
    return max(program.peak - program.arguments for program in programs) / MIB


def measure_models(given: Any) -> Iterator[dict[str, Any]]:
    for shape in MESHES:
        sizes = [temporaries(length, shape) for length in given.lengths]
        row: dict[str, Any] = {
            "mesh": shape,
            **{f"MiB at {length}": size for length, size in zip(given.lengths, sizes, strict=True)},
        }
        if len(sizes) > 2:
            growth = np.diff(sizes) / np.diff(given.lengths)
            row["slope"] = growth[-1] / growth[0]
        yield row


def measure_decoder(length: int = 8192) -> dict[str, Any]:
    """Eight layers of the decoder, scanned: its memory in blocks, and the CPU time until both programs are compiled."""
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 128,
        "mlp_size": 384,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    config = DecoderConfig(**sizes, num_layers=8, scan=True, attention="xla")
    graphdef, params = nnx.split(nnx.eval_shape(lambda: make_decoder(config, nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(params: Any, batch: Any) -> Any:
        return next_token_loss(nnx.merge(graphdef, params), batch)[0]

    args = params, {"inputs": tokens, "targets": tokens}
    row: dict[str, Any] = {"decoder": f"8 layers, {length}"}
    spent = {}
    for name, fn in (("as written", loss), ("blocks", fm.blockwise_attention(loss))):
        began = time.process_time()
        compiled = jax.jit(jax.value_and_grad(fn)).lower(*args).compile()
        spent[name] = time.process_time() - began
        row[f"MiB {name}"] = temporary_bytes(compiled) / MIB
    pull = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)  # its leaves: the inputs of the backward pass
    kept = sum(map(num_bytes, jax.tree.leaves(pull))) - sum(map(num_bytes, jax.tree.leaves(params)))
    return row | {
        "of activations": row["MiB blocks"] * MIB / kept,
        "compilation": spent["blocks"] / spent["as written"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    sizes = {"pairs": 5, "batch": 1, "heads": 8, "width": 64, "dtype": "float32", "blocks": (512,)}
    lengths = {"masks": ("causal", "window"), "lengths": (4096,)}
    given = options("attention", arguments, **sizes, **lengths, only=PARTS, gpu=False)
    if not given.gpu:
        use_cpu()
    rows = []
    if "functions" in given.only:
        rows += measure_functions(given)
    if "models" in given.only:
        rows += measure_models(given)
    if "decoder" in given.only:
        rows.append(measure_decoder())
    return report("attention", arguments, rows)
