"""Whether the groups of a pipeline run concurrently: the step time over the makespan of its schedule, at most 1.05.

The layers sleep in a native op, in F and in both parts of the backward pass, B and W, so that the time of a stage does
not depend on free cores. A C++ compiler is required.

    python -m tests.benchmarks overlap [--ms 50] [--microbatches 8,32] [--steps 7] [--schedules 1f1b,zb-h1]
"""

import ctypes
import itertools
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_mesh.mpmd import Pipeline
from flax_mesh.mpmd.schedules import Schedule, StageCost, simulate
from tests.benchmarks.common.pipelines import make_pipeline, random_batch, times_of_steps
from tests.benchmarks.common.report import options, report, use_cpu

TARGET = 1.05
GROUPS, WIDTH, ROWS = 4, 256, 8
SCHEDULES = {"gpipe": 4, "1f1b": 4, "interleaved-1f1b": 8, "zb-h1": 4}  # name -> layers, one per stage
SOURCE = Path(__file__).with_name("sleep_op.cc")


def load_nap() -> str | None:
    """Build and register the op. Returns the reason if that fails, else None."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        return "no C++ compiler (c++, g++, clang++)"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnap.so"
        command = [compiler, "-O2", "-std=c++17", "-fPIC", "-shared", f"-I{jax.ffi.include_dir()}", str(SOURCE)]
        built = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
        if built.returncode:
            return f"{compiler} cannot compile {SOURCE.name}: {built.stderr.strip().splitlines()[-1]}"
        handler = ctypes.cdll.LoadLibrary(str(library)).NapHandler
    jax.ffi.register_ffi_target("nap", jax.ffi.pycapsule(handler), platform="cpu")
    return None


def nap(x: jax.Array, us: int, after: jax.Array) -> jax.Array:
    """Return `x`, `us` microseconds after `x` and `after` are available."""
    return jax.ffi.ffi_call("nap", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, after, us=np.int64(us))


def sleepy_product(forward: int, backward: int, weights: int):
    """tanh(x @ w) that sleeps the given microseconds in F, in B (gradient of x) and in W (gradient of w)."""

    @jax.custom_vjp
    def product(x, w):
        return forward_pass(x, w)[0]

    def forward_pass(x, w):
        y = nap(jnp.tanh(x @ w), forward, x)
        return y, (x, w, y)

    def backward_pass(residuals, cotangent):
        x, w, y = residuals
        inner = cotangent * (1 - y * y)
        to_x = nap(inner @ w.T, backward, inner)
        return to_x, nap(x.T @ inner, weights, to_x)  # ordered after B: a device runs one operation at a time

    product.defvjp(forward_pass, backward_pass)
    return product


class Net(nnx.Module):
    def __init__(self, num_layers: int, product, rngs: nnx.Rngs):
        self.embed = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)  # so that stage 0 has a B too
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(num_layers)])
        self.product = product

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + self.product(x, layer.kernel[...])
        return x


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def sleepy_pipeline(name: str, ms: float, count: int, num_groups: int = GROUPS) -> tuple[Pipeline, Any]:
    """A pipeline whose stages sleep, and a batch of `count` microbatches for it. Call `load_nap` before."""
    num_layers, micros = SCHEDULES[name] * num_groups // GROUPS, round(ms * 1000)
    product, batch = sleepy_product(micros, micros, micros), random_batch(count * ROWS, WIDTH)
    make = lambda: Net(num_layers, product, nnx.Rngs(0))  # noqa: E731
    return make_pipeline(make, loss_fn, batch, name, num_groups, count, rate=1e-3), batch


def costs_of_sleep(schedule: Schedule, ms: float) -> list[StageCost]:
    """The costs of the stages of `sleepy_pipeline`.

    If the backward pass is split, stage 0 does all of it in W, since the gradient of its input is not needed.
    """
    first = StageCost(ms, 0, 2 * ms) if schedule.splits_backward else StageCost(ms, ms, ms)
    return [first] + [StageCost(ms, ms, ms)] * (schedule.num_stages - 1)


def measure(name: str, ms: float, count: int, steps: int, num_groups: int = GROUPS) -> dict[str, float]:
    """The median step time, the makespan, their ratio, and the host time until the step returned, in milliseconds."""
    pipeline, batch = sleepy_pipeline(name, ms, count, num_groups)
    took, returned = times_of_steps(pipeline, batch, steps)
    makespan = simulate(pipeline.schedule, costs_of_sleep(pipeline.schedule, ms)).makespan
    found = {"step_ms": statistics.median(took), "makespan_ms": makespan}
    found |= {"ratio": statistics.median(took) / makespan, "best_ratio": min(took) / makespan}
    return found | {"returned_ms": statistics.median(returned)}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("overlap", arguments, ms=50.0, microbatches=(8,), steps=7, schedules=tuple(SCHEDULES))
    use_cpu()
    rows = []
    if reason := load_nap():
        print(f"skipped: {reason}")
    else:
        cases = itertools.product(given.schedules, given.microbatches)
        rows += [{"schedule": name, "M": m, **measure(name, given.ms, m, given.steps)} for name, m in cases]
    return report("overlap", arguments, rows, target=TARGET)
