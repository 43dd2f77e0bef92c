"""The step of a recipe on one accelerator, compared in one run with the same step handwritten in jax and optax.

`python -m tests.benchmarks gpu [RECIPE] [section.key=value ...]` runs recipes of the decoder in alternating blocks:
`flax_mesh` is the step of the recipe with batches on the device, `fed` the same with batches created and metrics read
as in `flax_mesh.train`, `plain` the one of `common/plain_llama.py`. docs/benchmarks.md has the formula of MFU. Targets:
MFU 0.5, ratio of flax_mesh to plain at least 0.99.

--tiny       small sizes, to test the benchmark on a CPU
--profile F  write a trace of 5 steps to the folder F, and print its ten longest kernels
--all F      run every variant of VARIANTS in a separate process until --time-limit; the same command continues
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mesh import create_mesh
from flax_mesh.data.batches import make_batch_fn, prefetch
from flax_mesh.hardware import peak_flops
from flax_mesh.recipe.compiler_options import options_text, parse_compiler_options
from flax_mesh.recipe.program import batch_sharding, train_program
from flax_mesh.recipe.resolve import check, resolve
from flax_mesh.recipe.target import target_of
from flax_mesh.train import TrainConfig, apply_overrides, load_recipe
from flax_mesh.train.metrics import peak_memory
from flax_mesh.tree import named_leaves
from tests.benchmarks.common.plain_llama import make_optimizer, make_step
from tests.benchmarks.common.profile import kernels_text, profile
from tests.benchmarks.common.report import origin

RECIPE = "recipes/llama_1b.py"
BATCHES = 4  # number of different batches on the device
TINY = [
    *(f"model.{name}={size}" for name, size in {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
      "num_kv_heads": 2, "head_dim": 8, "mlp_size": 48, "loss_chunk": 32}.items()),
    *("model.dtype=float32", "model.attention=xla", "data.batch_size=4", "data.sequence_length=16", "run.platform=cpu"),
    *("optimizer.warmup_steps=1", "optimizer.learning_rate=1e-3", "optimizer.end_learning_rate=1e-4"),
]  # fmt: skip
LLAMA_3 = f"{RECIPE}:llama_3_2_1b"
LATENCY = "run.compiler_options=xla_gpu_enable_latency_hiding_scheduler=true"
OPTIONS = f"{LATENCY},xla_allow_excess_precision=false"  # of the recipe
# name -> the settings in which it differs from `base`, most important first.
SETTINGS: dict[str, tuple[str, ...]] = {
    "batch-24": ("data.batch_size=24",),
    "no-options": ("run.compiler_options=",),
    "excess-precision": (LATENCY,),
    "whole-logits": ("model.loss_chunk=0",),
    "chunk-8192": ("model.loss_chunk=8192",),
    "chunk-2048": ("model.loss_chunk=2048",),
    "no-triton-gemm": (f"{OPTIONS},xla_gpu_enable_triton_gemm=false",),
    "no-command-buffer": (f"{OPTIONS},xla_gpu_enable_command_buffer=",),
    "cudnn-gemm-fusion": (f"{OPTIONS},xla_gpu_cudnn_gemm_fusion_level=2",),
    "exhaustive-tiling": (f"{OPTIONS},xla_gpu_exhaustive_tiling_search=true",),
    "remat-dots": ("model.remat=dots_saveable",),
    "remat-dots-batch-32": ("model.remat=dots_saveable", "data.batch_size=32"),
    "remat-full": ("model.remat=full",),
    "batch-8": ("data.batch_size=8",),
    "scan-batch-8": ("model.scan=true", "data.batch_size=8"),
    "attention-xla-batch-4": ("model.attention=xla", "data.batch_size=4"),
    "attention-cudnn-batch-4": ("data.batch_size=4",),
    "attention-blockwise-batch-4": ("model.attention=xla", "run.attention=blockwise", "data.batch_size=4"),
    "experts": ("model.num_experts=8", "model.mlp_size=1408", "data.batch_size=8"),
    "long": ("data.batch_size=1", "data.sequence_length=32768"),
    "long-blockwise": ("model.attention=xla", "run.attention=blockwise", "data.batch_size=1",
                       "data.sequence_length=32768"),
}  # fmt: skip
SHORT = ("--no-plain", "--steps=20")
VARIANTS = {"base": (RECIPE, "--ceilings", "--profile"), "llama-3.2-1b": (LLAMA_3, "--profile")}
VARIANTS |= {name: (RECIPE, *settings, *SHORT) for name, settings in SETTINGS.items()}
VARIANTS["llama-3.2-1b-whole-logits"] = (LLAMA_3, "model.loss_chunk=0", *SHORT)

Block = Callable[[int], list[jax.Array]]  # runs a number of steps, waits for them and returns the losses


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("recipe", nargs="?", default=RECIPE)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--ceilings", action="store_true")
    parser.add_argument("--profile", type=Path, nargs="?", const=Path("profile"))
    parser.add_argument("--all", type=Path, metavar="FOLDER", dest="folder")
    parser.add_argument("--time-limit", type=float, default=1500, help="of --all, in seconds")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.folder:
        return run_all(arguments.folder, arguments.time_limit, ["--tiny"] * arguments.tiny)
    # By default JAX preallocates three quarters of the memory. Must be set before JAX is initialized.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    print(json.dumps(origin("gpu", argv) | run_one(arguments)))
    return 0


def run_one(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one configuration, printing its results, and return its row."""
    tiny = TINY if arguments.tiny else []
    config = apply_overrides(apply_overrides(load_recipe(arguments.recipe), tiny), arguments.overrides)
    device = jax.devices()[0]
    row: dict[str, Any] = {"recipe": arguments.recipe, "overrides": arguments.overrides, "device": device.device_kind}
    print(f"jax {jax.__version__}, {device.device_kind}: {arguments.recipe} {' '.join(arguments.overrides)}")
    if arguments.ceilings:
        row["ceilings"] = ceilings(512 if arguments.tiny else 8192)
        print("ceilings: {matmul_tflops:.0f} TFLOP/s bf16 product, {copy_gbs:.0f} GB/s copy".format(**row["ceilings"]))
    bench = Bench(config, device, plain=not arguments.no_plain)
    row |= {"parameters": bench.num_parameters, "options": options_text(bench.options)}
    print(f"{bench.num_parameters / 1e6:.1f}M parameters; compiler: {row['options'] or 'no options'}")
    row |= bench.compare(arguments.warmup, arguments.steps, arguments.block)
    print(text_of(row))
    if arguments.profile:
        kernels = profile(lambda: bench.flax_mesh(5), arguments.profile)
        print(kernels_text(kernels, 5))
        row["kernels"] = [{"name": n, "ms_per_step": 200 * t, "calls": c} for n, t, c in kernels.longest[:10]]
        row |= {"kinds": kernels.kinds, "idle": 1 - kernels.busy / kernels.window}
    return row


class Bench:
    """The steps of one recipe on one device. Each block continues from the end of the previous one."""

    def __init__(self, config: TrainConfig, device: Any, *, plain: bool = True):
        # The learning rate schedule must not end within any number of blocks.
        self.config = replace(config, optimizer=replace(config.optimizer, decay_steps=10**6))
        self.options = parse_compiler_options(config.run.compiler_options)
        self.mesh = mesh = create_mesh((1,) * 5, devices=[device])
        check(self.config)
        self.device, self.program = device, train_program(resolve(self.config, target_of(mesh)))
        self.state = self.program.init()
        model, data = self.config.model, self.config.data
        parameters = named_leaves(self.state.to_nnx()["model"])
        self.num_parameters = sum(leaf.size for _, leaf in parameters)
        self.flops = self.config.flops_per_token
        self.tokens_per_step = data.batch_size * data.sequence_length
        count = self.tokens_per_step * BATCHES + 1
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, count).astype(np.int32)
        self.make_batch = make_batch_fn(
            tokens, seed=0, config=data, sharding=batch_sharding(mesh, self.program.rules.axes)
        )
        batches = [self.make_batch(i) for i in range(BATCHES)]
        self.feeds = {name: itertools.cycle(batches) for name in ("flax_mesh", "plain")}
        # On the host, so that they do not count in the peak of device memory.
        self.initial = plain_parameters(parameters, model.num_layers) if plain else None

    def flax_mesh(self, steps: int) -> list[jax.Array]:
        losses = []
        for batch in itertools.islice(self.feeds["flax_mesh"], steps):
            self.state, metrics = self.program.step(self.state, batch)
            losses.append(metrics["loss"])
        jax.block_until_ready(self.state.leaves)
        return losses

    def fed(self, steps: int) -> list[jax.Array]:
        state, before, losses = self.state, None, []
        for _, batch, _ in prefetch(self.make_batch, 0, steps):
            state, metrics = self.program.step(state, batch)
            if before is not None:  # of the previous step, while this one runs
                losses.append(jax.device_get(before)["loss"])
            before = metrics
        self.state = jax.block_until_ready(state)
        return losses

    def start_plain(self) -> None:
        optimizer = make_optimizer(self.config.optimizer)
        self.plain_step = make_step(self.config.model, optimizer, self.options)
        # In the layout that the step returns; otherwise the second step would compile again.
        replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self.plain_params = jax.device_put(self.initial, replicated)
        self.plain_state = jax.jit(optimizer.init, out_shardings=replicated)(self.plain_params)

    def plain(self, steps: int) -> list[jax.Array]:
        losses = []
        for batch in itertools.islice(self.feeds["plain"], steps):
            self.plain_params, self.plain_state, loss, _ = self.plain_step(self.plain_params, self.plain_state, batch)
            losses.append(loss)
        jax.block_until_ready((self.plain_params, self.plain_state))
        return losses

    def compare(self, warmup: int, steps: int, block: int) -> dict[str, Any]:
        """Times of `steps` steps of each variant in alternating blocks, after `warmup` steps of each."""
        began = time.perf_counter()
        losses = self.flax_mesh(1)
        row: dict[str, Any] = {"first_step_seconds": time.perf_counter() - began}
        losses += self.flax_mesh(warmup - 1)
        row["peak_bytes"] = peak_memory([self.device])
        self.fed(warmup)
        blocks: dict[str, Block] = {"flax_mesh": self.flax_mesh, "fed": self.fed}
        if self.initial is not None:
            self.start_plain()
            others = self.plain(warmup)
            row["loss_difference"] = max(float(abs(a - b) / abs(b)) for a, b in zip(losses, others, strict=True))
            blocks["plain"] = self.plain
        times: dict[str, list[float]] = {name: [] for name in blocks}
        for _ in range(max(1, steps // block)):
            for name, run in blocks.items():
                began = time.perf_counter()
                run(block)
                times[name].append((time.perf_counter() - began) / block)
        seconds = {name: statistics.mean(spent) for name, spent in times.items()}
        row |= {"losses": [float(loss) for loss in losses], "steps": steps, "seconds_per_step": seconds}
        row["spread"] = {name: max(spent) / min(spent) for name, spent in times.items()}
        data, peak = self.config.data, peak_flops(self.device.device_kind)
        flops = self.flops(self.config.model, self.num_parameters, data.sequence_length) if self.flops else None
        rates = {name: self.tokens_per_step / time for name, time in seconds.items()}
        mfu = {name: rate * flops / peak for name, rate in rates.items()} if flops and peak else None
        ratios = {f"{name}/plain": rates[name] / rates["plain"] for name in rates if "plain" in rates}
        return row | {"tokens_per_s": rates, "mfu": mfu, "ratios": ratios, "flops_per_token": flops}


def plain_parameters(leaves: Sequence[tuple[str, Any]], num_layers: int) -> dict[str, Any]:
    """Convert the leaves of a decoder, listed or stacked, to numpy parameters of `plain_llama`."""
    params: dict[str, Any] = {"layers": [{} for _ in range(num_layers)]}
    for path, leaf in leaves:
        parts = path.split("/")
        name = parts[-2] if parts[-1] in ("kernel", "scale", "embedding") else path
        if parts[0] != "layers":
            params[name] = np.asarray(leaf)
        elif parts[1].isdecimal():
            params["layers"][int(parts[1])][name] = np.asarray(leaf)
        else:
            for layer, part in zip(params["layers"], np.asarray(leaf), strict=True):
                layer[name] = part
    return params


def ceilings(size: int) -> dict[str, float]:
    """Speed of the device for a product of bf16 matrices and for a copy."""
    # Random, since products of equal numbers take less power, and a higher clock. An argument, since XLA compiles each
    # product with the constants that it reads: with one of 128 MiB for more than 5 minutes.
    x = jnp.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32).astype(jnp.bfloat16))
    values = jnp.zeros((8 * size, size), jnp.float32)
    nbytes, multiply = 2 * values.nbytes, jax.jit(lambda a: (a @ a) * size**-0.5)
    product, copy = best_of(multiply, x), best_of(jax.jit(lambda a: a + 1, donate_argnums=0), values)
    return {"matmul_tflops": 2 * size**3 / product / 1e12, "copy_gbs": nbytes / copy / 1e9}


def best_of(run: Callable[[Any], Any], value: Any, count: int = 20) -> float:
    """The least seconds of a call on the result of the previous one, of three series."""
    times, value = [], jax.block_until_ready(run(value))
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            value = run(value)
        jax.block_until_ready(value)
        times.append((time.perf_counter() - began) / count)
    return min(times)


def text_of(row: dict[str, Any]) -> str:
    peak = row["peak_bytes"]
    lines = [f"first step {row['first_step_seconds']:.0f} s; peak {peak / 2**30:.1f} GiB" if peak else ""]
    for name, rate in row["tokens_per_s"].items():
        mfu = f"  MFU {row['mfu'][name]:.1%}" if row["mfu"] else ""
        ratio = f"  {row['ratios'][f'{name}/plain']:.3f} of plain" if row["ratios"] else ""
        spread = f"  blocks within {row['spread'][name] - 1:.1%}"
        ms = 1e3 * row["seconds_per_step"][name]
        lines.append(f"{name:10} {ms:9.2f} ms {rate:10,.0f} tokens/s{mfu}{ratio}{spread}")
    if "loss_difference" in row:
        lines.append(f"losses of flax_mesh and plain differ by at most {row['loss_difference']:.1e}")
    return "\n".join(filter(None, lines))


def run_all(folder: Path, limit: float, extra: Sequence[str]) -> int:
    """Run every variant without a result in `folder` in a separate process, then print the table of all results."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit
    for name, arguments in VARIANTS.items():
        result = folder / f"{name}.json"
        left = end - time.monotonic()
        if result.exists() or left < 60:
            continue
        given = [a if a != "--profile" else f"--profile={folder / name}" for a in arguments]
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", "tests.benchmarks", "gpu", *given, *extra]
        with (folder / f"{name}.log").open("w") as log:
            try:
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=left, check=True)
            except subprocess.CalledProcessError as error:
                print(f"failed with {error.returncode}: see {log.name}")
            except subprocess.TimeoutExpired:
                print(f"stopped after {left:.0f} s")
                continue
        output = Path(log.name).read_text()
        print(output, flush=True)
        last = output.splitlines()[-1] if output else ""
        result.write_text(last if last.startswith("{") else json.dumps({"failed": output[-500:]}))
    print(table(folder))
    return 0


def table(folder: Path) -> str:
    """One line per variant: tokens/s, MFU, peak memory."""
    lines = ["| variant | tokens/s | MFU | of plain | peak GiB |", "|---|---|---|---|---|"]
    for name in VARIANTS:
        path = folder / f"{name}.json"
        row = json.loads(path.read_text()) if path.exists() else {}
        if "tokens_per_s" not in row:
            lines.append(f"| {name} | {'failed' if row else 'not run'} | | | |")
            continue
        mfu = f"{row['mfu']['flax_mesh']:.1%}" if row["mfu"] else ""
        ratio = f"{row['ratios']['flax_mesh/plain']:.3f}" if row["ratios"] else ""
        peak = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else ""
        lines.append(f"| {name} | {row['tokens_per_s']['flax_mesh']:,.0f} | {mfu} | {ratio} | {peak} |")
    return "\n".join(lines)
