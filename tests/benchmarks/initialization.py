"""CPU time to initialize a decoder and AdamW of 4 to 96 layers, over the CPU time to compile its train step.

Each number of layers is a fresh process without kept programs. It initializes the state by one program per kind of
array, and, after `jax.clear_caches()`, by one program for all arrays; both must have the same bits. Then it traces and
compiles the train step. All figures are seconds of CPU time.

Target: the initialization takes at most a quarter of the time of the step.

    python -m tests.benchmarks initialization [--layers 4,22,96] [--rounds 1]
"""

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh import abstract_state, create_mesh
from flax_mesh.models import DecoderConfig, make_decoder
from flax_mesh.models.loss import next_token_loss
from flax_mesh.sharding.initialize import run
from flax_mesh.train import init_train_state, make_train_step
from tests.benchmarks.common.report import in_fresh_process, options, report, use_cpu
from tests.sharding.initialize.models import differences, trained

TARGET = 0.25
ROWS, LENGTH = 4, 128
SIZES: dict[str, Any] = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_size": 128}
Result = TypeVar("Result")


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    start = time.process_time()
    return function(), time.process_time() - start


def measure(num_layers: int) -> dict[str, float]:
    """CPU seconds of both ways, and of the step, in this process."""
    config = DecoderConfig(num_layers=num_layers, **SIZES)
    make = functools.partial(trained, lambda: make_decoder(config, nnx.Rngs(0)))
    abstract = abstract_state(make, create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1]))
    initialize = lambda: jax.block_until_ready(init_train_state(make, abstract))  # noqa: E731
    state, by_kind = timed(initialize)
    jax.clear_caches()
    run.EARLY = math.inf
    one, whole = timed(initialize)
    if differences(one.to_nnx(), state.to_nnx()):
        raise ValueError("the two ways must initialize the same bits")
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32))
    step = make_train_step(next_token_loss, state, layers=("layers",))
    _, of_step = timed(lambda: step.trace(state, batch).lower().compile())
    return {"arrays": len(state.leaves), "by kind": by_kind, "one program": whole, "step": of_step}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("initialization", arguments, layers=(4, 22, 96), rounds=1, worker=0)
    if given.worker:
        use_cpu(1)
        print(json.dumps(measure(given.worker)))
        return 0
    rows: list[dict[str, Any]] = []
    for depth in given.layers:
        measured = [in_fresh_process("initialization", f"--worker={depth}") for _ in range(given.rounds)]
        best = {name: min(each[name] for each in measured) for name in measured[0]}
        rows.append({"layers": depth, **best, "by kind / step": best["by kind"] / best["step"]})
    return report("initialization", arguments, rows, target=TARGET)
