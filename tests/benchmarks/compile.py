"""Time and memory to compile the train step of a decoder (AdamW) of 4 to 96 layers, scanned and unrolled.

Every figure is the best of `--rounds` fresh processes. "plain" is the script of the benchmark `step`. "temp MiB" is the
memory beside arguments and results, as planned by XLA, and "rest MiB" is temp without the arrays that must grow with
the layers if remat is "full": the gradients and the inputs of the layers.

Target, scanned with remat "full": 96 layers at most 1.2 times 4 layers, in seconds, host memory, program and rest.

    python -m tests.benchmarks compile [--layers 4,12,24,48,96] [--rounds 3] [--kinds "scanned;unrolled"]
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_mesh import abstract_state, create_mesh
from flax_mesh.models import DecoderConfig, make_decoder
from flax_mesh.models.decoder import next_token_loss
from flax_mesh.step.state import abstract_train_state
from flax_mesh.train import make_train_step
from tests.benchmarks.common.report import options, print_json, print_table, use_cpu
from tests.benchmarks.step import plain_step

ROOT = Path(__file__).parent.parent.parent
TARGET = 1.2
BOUND = ("seconds", "CPU s", "host MiB", "program KiB", "rest MiB")  # the figures to which the target applies
ROWS, LENGTH = 4, 128
SIZES: dict[str, Any] = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_size": 128}
KINDS: dict[str, dict[str, Any]] = {
    "scanned": {"scan": True, "remat": "full"},
    "scanned, plain": {"scan": True, "remat": "full"},
    "scanned, no remat": {"scan": True, "remat": "none"},
    "unrolled": {"scan": False, "remat": "full"},
    "unrolled, plain": {"scan": False, "remat": "full"},
}
MIB = 2**20


def program(kind: str, config: DecoderConfig) -> tuple[Any, tuple[Any, ...], Any]:
    """(jitted step, its abstract arguments, the abstract parameters)."""
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32))
    tx = optax.adamw(1e-3)
    if kind.endswith("plain"):
        graphdef, params = nnx.split(nnx.eval_shape(lambda: make_decoder(config, nnx.Rngs(0))))
        return plain_step(next_token_loss, graphdef, tx), (params, jax.eval_shape(tx.init, params), batch), params

    def make() -> tuple[Any, nnx.Optimizer]:
        model = make_decoder(config, nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    abstract = abstract_state(make, create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1]))
    state = abstract_train_state(make, abstract)
    return make_train_step(next_token_loss, state, layers=("layers",)), (state, batch), abstract["model"]


def measure(kind: str, num_layers: int) -> dict[str, float]:
    """Seconds and memory of one compilation in this process."""
    config = DecoderConfig(num_layers=num_layers, **SIZES, **KINDS[kind])
    step, arguments, params = program(kind, config)
    before, cpu, began, found = peak_mib(), time.process_time(), time.perf_counter(), {}
    traced = step.trace(*arguments)
    found["trace s"] = time.perf_counter() - began
    lowered = traced.lower()
    found["lower s"] = time.perf_counter() - began - found["trace s"]
    compiled = lowered.compile()
    found["seconds"] = time.perf_counter() - began
    found |= {"XLA s": found["seconds"] - found["trace s"] - found["lower s"], "CPU s": time.process_time() - cpu}
    found |= {"host MiB": peak_mib() - before, "program KiB": len(compiled.as_text()) / 1024}
    found["temp MiB"] = compiled.memory_analysis().temp_size_in_bytes / MIB
    if config.remat == "full":
        found["gradients MiB"] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) / MIB
        found["inputs MiB"] = num_layers * ROWS * LENGTH * config.hidden_size * jnp.dtype(config.dtype).itemsize / MIB
        found["rest MiB"] = found["temp MiB"] - found["gradients MiB"] - found["inputs MiB"]
    return found


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else 1024)


def in_fresh_process(kind: str, num_layers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks", "compile", f"--worker={kind}:{num_layers}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("compile", arguments, layers=(4, 12, 24, 48, 96), rounds=3, kinds=";".join(KINDS), worker="")
    if given.worker:
        use_cpu(1)
        kind, _, depth = given.worker.partition(":")
        print(json.dumps(measure(kind, int(depth))))
        return 0
    depths, kinds = given.layers, given.kinds.split(";")
    best: dict[tuple[str, int], dict[str, float]] = {}
    for _ in range(given.rounds):
        for kind in kinds:
            for depth in depths:
                found = in_fresh_process(kind, depth)
                known = best.setdefault((kind, depth), found)
                best[kind, depth] = {what: min(known[what], value) for what, value in found.items()}
    rows = [{"step": kind, "layers": depth, **found} for (kind, depth), found in best.items()]
    growth = []
    for kind in kinds:
        first, last = best[kind, depths[0]], best[kind, depths[-1]]
        growth.append({"step": kind, **{what: last[what] / first[what] for what in BOUND if what in first}})
    print_table(rows)
    print(f"\n{depths[-1]} layers over {depths[0]}")
    print_table(growth)
    print_json("compile", arguments, target=TARGET, rows=rows, growth=growth)
    return 0
