"""Time, dispatches and bytes per token of generation, against its compiled program alone and one token per dispatch.

    python -m tests.benchmarks generate                                                     # on one CPU device
    python -m tests.benchmarks generate --size llama-1b --dtype bfloat16 --platform cuda --peer

The second one is for a GPU; `--peer` adds transformers' `generate` with a static cache, if torch has the GPU too. Of
every way the table has the milliseconds per token of a prompt, with the prompts read before. `bare` dispatches the same
groups and reads nothing. Targets: `over bare` 1.1, `dispatches` 0.125, `bytes/floor` 1.15. The floor reads the
parameters and the keys and values of all slots once. Bytes are those that the instructions of the compiled program read
and write, for greedy tokens of a list of layers.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_mesh.hardware import chip_of
from flax_mesh.hlo.program import Array, HloProgram, Instruction, Shape, read_hlo
from flax_mesh.models import Decoder, DecoderConfig, Sampling, generate, make_decoder
from flax_mesh.models.generation.batches import Batches
from flax_mesh.models.generation.programs import GROUP, Computed, Programs
from flax_mesh.tree import num_bytes
from tests.benchmarks.common.report import options, report, use_cpu

SIZES = {
    "tiny": DecoderConfig(vocab_size=96, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
                          mlp_size=48),
    "small": DecoderConfig(vocab_size=8192, hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64,
                           mlp_size=1536, tied=False),
    "llama-1b": DecoderConfig(vocab_size=32000, hidden_size=2048, num_layers=22, num_heads=32, num_kv_heads=4,
                              head_dim=64, mlp_size=5632, tied=False),
}  # fmt: skip

FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def first_tokens(model: Decoder, rows: int, length: int, tokens: int) -> tuple[Programs, Computed]:
    programs = Programs(model, 0, Sampling(), (), tokens)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (rows, length)).astype(np.int32)
    ids = np.arange(rows, dtype=np.int32)
    return programs, programs.prefill(prompts, np.full(rows, length, np.int32), ids, length + tokens)


def bare(model: Decoder, rows: int, length: int, tokens: int) -> None:
    programs, last = first_tokens(model, rows, length, tokens)
    for _ in range(-(-(tokens - 1) // GROUP)):
        last = programs.decode(last.tokens_B, last.cache, last.ids_B)
    jax.block_until_ready(last)


def one_by_one(model: Decoder, rows: int, length: int, tokens: int) -> None:
    """One token per dispatch, read while the next one is computed: the way before groups."""
    programs, last = first_tokens(model, rows, length, tokens)
    for _ in range(tokens - 1):
        following = programs.decode(last.tokens_B, last.cache, last.ids_B, 1)
        jax.device_get((last.tokens_GB, last.log_probs_GB))
        last = following
    jax.block_until_ready(last)


def grouped(model: Decoder, rows: int, length: int, tokens: int) -> None:
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (rows, length))
    results = generate(model, list(prompts), max_tokens=tokens, batch_size=rows)
    assert all(len(one.tokens) == tokens for one in results)


def dispatches(model: Decoder, rows: int, length: int, tokens: int) -> int:
    programs, counted = Programs(model, 0, Sampling(), (), tokens), 0
    call = programs._call

    def counting(*args: Any, **options: Any) -> Computed:
        nonlocal counted
        counted += 1
        return call(*args, **options)

    programs._call = counting  # pyright: ignore[reportAttributeAccessIssue]
    Batches(programs, [np.zeros(length, int)] * rows, rows, length + tokens, tokens, frozenset()).run(None, None)
    return counted


def bytes_of(config: DecoderConfig, rows: int, length: int, tokens: int) -> tuple[int, int]:
    """Bytes of one token of all rows, of the compiled program and of the floor. No array is made."""
    model = nnx.eval_shape(lambda: make_decoder(config, nnx.Rngs(0)))
    programs, ids = Programs(model, 0, Sampling(), (), tokens), np.arange(rows, dtype=np.int32)
    prompts = np.zeros((rows, length), np.int32), np.full(rows, length, np.int32), ids, np.int32(length)
    prefill = partial(programs._prefill, num_slots=length + tokens)
    first = jax.eval_shape(prefill, programs.leaves, programs._options, *prompts)
    program = programs._decode.lower(
        programs.leaves, programs._options, first.state, np.int32(1), np.bool_(False)
    ).compile()
    arrays = [*programs.leaves, *jax.tree.leaves((first.cache.keys, first.cache.values))]
    table = 0 if config.tied else num_bytes(programs.leaves[0])  # of which a token reads a row
    return moved(read_hlo(program)), sum(map(num_bytes, arrays)) - table


def moved(program: HloProgram) -> int:
    """Bytes that the instructions read and write, those of a loop once, of a choice those of the cheapest branch.

    XLA's own count has all branches, and of a scatter in place and of a gather the whole array.
    """

    def of(name: str) -> int:
        sizes = {x.name: bytes_in(x.shape) for x in program.computations[name]}
        return sum(of_one(x, sizes) for x in program.computations[name] if x.opcode not in FREE)

    def of_one(x: Instruction, sizes: dict[str, int]) -> int:
        if x.opcode == "conditional":
            return min(map(of, x.branches))
        if x.opcode in ("while", "call"):
            return of(x.called["body" if x.opcode == "while" else "to_apply"])
        inside = {x.opcode, *(y.opcode for y in program.computations.get(x.called.get("calls", ""), ()))}
        read, written = [sizes[name] for name in x.operands], sizes[x.name]
        if inside & {"scatter", "dynamic-update-slice"} and written in read:
            return 2 * (sum(read) - written)
        if inside & {"gather", "dynamic-slice"}:
            return sum(read) - max(read) + 2 * written
        return sum(read) + written

    return of(program.entry)


def bytes_in(shape: Shape) -> int:
    return shape.content if isinstance(shape, Array) else sum(map(bytes_in, shape))


def with_transformers(config: DecoderConfig, rows: int, length: int, tokens: int) -> Callable[[], None] | None:
    transformers, torch = map(importlib.import_module, ("transformers", "torch"))
    if not torch.cuda.is_available():
        return None
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.mlp_size}
    sizes |= {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    sizes |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16).eval()
        prompts = torch.randint(0, config.vocab_size, (rows, length))
    kinds = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "cache_implementation": "static"}

    def run() -> None:
        model.generate(prompts, **kinds)
        torch.cuda.synchronize()

    return run


def times_of(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of every way, the median of rounds after one that compiles."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def measure(given: Any, config: DecoderConfig, model: Decoder, rows: int) -> dict[str, Any]:
    sizes = (rows, given.length, given.tokens)
    ways: dict[str, Callable[[], None]] = {name: partial(way, model, *sizes) for name, way in WAYS.items()}
    if given.peer and (other := with_transformers(config, *sizes)):
        ways["transformers"] = other
    times = {name: 1e3 * each / given.tokens for name, each in times_of(ways, given.rounds).items()}
    used, floor = bytes_of(config, *sizes)
    chip = chip_of(jax.devices()[0].device_kind)
    row: dict[str, Any] = {"prompts": rows, **{f"{name} ms": each for name, each in times.items()}}
    row |= {"over bare": times["generate"] / times["bare"], "tokens/s": 1e3 * rows / times["generate"]}
    row |= {
        "dispatches": dispatches(model, *sizes) / given.tokens,
        "bytes/floor": used / floor,
        "floor MB": floor / 1e6,
    }
    return row | ({"floor ms": 1e3 * floor / chip.memory_bandwidth} if chip else {})


WAYS = {"generate": grouped, "bare": bare, "one by one": one_by_one}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("generate", arguments, size="small", dtype="float32", platform="cpu", prompts=(1, 32), length=128,
                    tokens=128, rounds=3, peer=False)  # fmt: skip
    if given.platform == "cpu":
        use_cpu(1)
    config = SIZES[given.size]
    config = DecoderConfig(**{**vars(config), "dtype": given.dtype, "param_dtype": given.dtype})
    model = nnx.jit(lambda: make_decoder(config, nnx.Rngs(0)))()
    rows = [measure(given, config, model, rows) for rows in given.prompts]
    return report("generate", arguments, rows, target={"over bare": 1.1, "dispatches": 0.125, "bytes/floor": 1.15})
