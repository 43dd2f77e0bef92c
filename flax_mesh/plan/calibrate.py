"""Figures of the devices that are here, measured: `flax-mesh plan --calibrate FILE`.

Every case is a loop inside of one program, without the time of its dispatch; the cases are interleaved, so that a
disturbance reaches all of them. docs/plan.md ("Calibrate") says what is measured and how figures follow from it.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from flax_mesh.errors import ConfigError
from flax_mesh.hardware import CHIPS, Chip, chip_of
from flax_mesh.mesh.create import create_mesh
from flax_mesh.mesh.torus.torus import DeviceLike
from flax_mesh.plan.report import number, time_text
from flax_mesh.plan.topology import Network, network_of, topology_of_devices
from flax_mesh.text import bytes_text, count_text, table_text

Values = NDArray[np.float64]
Make = Callable[[], jax.Array]
Body = Callable[..., jax.Array]
AXIS = "all"
DTYPES = ("bfloat16", "float32")
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
FIGURES = ("matmul_fraction", "memory", "memory_bandwidth", "link_bandwidth", "link_fraction", "hop_latency")
PASSES = {"copy": 2, "normalize": 3}  # reads and writes of the array
LEAST_LATENCY = 1e-9  # seconds, if none can be measured
TARGET, LEAST_TIMES, MOST_TIMES = 0.1, 3, 1000  # seconds of a repetition, and executions in it
ROUNDS = 7
MIB, ROW = 2**20, 4096  # bytes; bytes of a normalized row


class Sizes(NamedTuple):
    matmul: tuple[int, ...]  # of the sides of square matrices
    copy: tuple[int, ...]  # bytes of one device
    collective: tuple[int, ...]  # bytes of the payload


ACCELERATOR = Sizes((2048, 4096, 8192), (256 * MIB, 512 * MIB, 1024 * MIB), (MIB // 4, 4 * MIB, 64 * MIB))


def cpu_sizes(count: int) -> Sizes:
    """The caches are shared as the memory is, so that the copies of all devices together exceed them."""
    return Sizes((256, 512, 1024), tuple(n * MIB // count for n in (128, 192, 256)), (MIB // 16, 4 * MIB, 16 * MIB))


class Sample(NamedTuple):
    kind: str  # matmul, copy, normalize or a collective
    dtype: str
    size: int  # of a side of the matrices, or bytes
    seconds: float
    spread: float = 0.0  # between the quartiles, as a part of the median

    @property
    def work(self) -> float:
        """FLOPs of a product, bytes that are read and written, or bytes of a payload."""
        return 2.0 * self.size**3 if self.kind == "matmul" else float(PASSES.get(self.kind, 1) * self.size)

    @property
    def text(self) -> str:
        return f"{self.dtype} {self.size}" if self.kind == "matmul" else bytes_text(self.size)

    @property
    def rate(self) -> str:
        unit = "GFLOP/s" if self.kind == "matmul" else "GB/s"
        return f"{number(self.work / self.seconds / 1e9)} {unit}"


@dataclass(frozen=True)
class Calibration:
    """The measurements on `count` devices, and the chip with the figures that follow from it.

    `base` is the chip of the table that has all other figures; `findings` say which figures are not measured.
    """

    device_kind: str
    count: int
    samples: tuple[Sample, ...]
    base: Chip
    chip: Chip
    forecasts: tuple[float, ...]  # seconds of every sample by the figures of the chip
    findings: tuple[str, ...]

    def to_text(self) -> str:
        """The measurements beside the forecasts, then the figures beside the base chip's figures."""
        heads = ["measured", "size", "time", "rate", "spread", "by the figures"]
        rows = [
            [s.kind, s.text, time_text(s.seconds), s.rate, f"{s.spread:.0%}", time_text(forecast)]
            for s, forecast in zip(self.samples, self.forecasts, strict=True)
        ]
        written, before = _figures_of(self.chip), _figures_of(self.base)
        table = [[name, f"{before[name]:.3g}" if name in before else "", f"{x:.3g}"] for name, x in written.items()]
        figure_heads = ["figure", self.base.name, "written"]
        return "\n\n".join(
            [
                f"{count_text(self.count, 'device')} ({self.device_kind}), all at the same time",
                table_text(heads, rows, right=heads[2:]),
                table_text(figure_heads, table, right=figure_heads[1:]),
                "\n".join(f"- {finding}" for finding in self.findings) or "no findings",
            ]
        )

    def to_toml(self) -> str:
        """The file that `run.hardware=` reads, with the text as comments."""
        lines = [f"jax {jax.__version__}", *self.to_text().splitlines()]
        head = [f'base = "{self.base.name}"', f'name = "{self.chip.name}"']
        values = [f"{name} = {getattr(self.chip, name):.6g}" for name in FIGURES]
        peaks = ["[peak_flops]", *(f"{name} = {self.chip.peak_flops[name]:.6g}" for name in DTYPES)]
        return "\n".join([*(f"# {line}".rstrip() for line in lines), *head, *values, *peaks, ""])


def _figures_of(chip: Chip) -> dict[str, float]:
    peaks = {f"peak_flops.{name}": chip.peak_flops[name] for name in DTYPES if name in chip.peak_flops}
    return peaks | {name: getattr(chip, name) for name in FIGURES}


def calibrate(devices: Sequence[Any], sizes: Sizes | None = None, rounds: int = ROUNDS) -> Calibration:
    """Measure the devices of this process.

    Raises a ConfigError if their kind is a TPU without figures, whose torus is not known.
    """
    first, count = devices[0], len(devices)
    base = base_of(first.device_kind, first.platform)
    network = partial(unit_network, devices)
    sizes = sizes or (cpu_sizes(count) if first.platform == "cpu" else ACCELERATOR)
    samples = measure(devices, sizes, rounds)
    memory = (first.memory_stats() or {}).get("bytes_limit")
    name = base.name if chip_of(first.device_kind) else re.sub(r"[^\w.-]+", "-", first.device_kind)[:40]
    start = replace(base, name=name, memory=float(memory or base.memory))
    chip, findings = chip_of_samples(samples, start, network, trusted=name == base.name and base.platform != "cpu")
    forecasts = [forecast(sample, chip, network(chip)) for sample in samples]
    if name != base.name:
        findings.append(f"no figures are known for {first.device_kind}: those not measured are of {base.name}")
    return Calibration(first.device_kind, count, tuple(samples), base, chip, tuple(forecasts), tuple(findings))


def base_of(device_kind: str, platform: str) -> Chip:
    """The chip of the table whose figures are used where nothing is measured."""
    names = {"gpu": "H100", "cpu": "cpu"}
    base = chip_of(device_kind) or next((chip for chip in CHIPS if chip.name == names.get(platform)), None)
    if base is None:
        raise ConfigError(
            f"no figures are known for {device_kind!r}, so the torus of its chips is not; write a TOML file with base="
        )
    return base


def unit_network(devices: Sequence[DeviceLike], chip: Chip) -> Network:
    """How a collective over all devices travels."""
    topology = topology_of_devices(devices, chip)
    return network_of(topology, {AXIS: topology.num_devices}, (AXIS,))


# --- from samples to figures ---


def chip_of_samples(
    samples: Sequence[Sample], base: Chip, network: Callable[[Chip], Network], *, trusted: bool
) -> tuple[Chip, list[str]]:
    """The chip, and findings. `trusted`: whether the peak of the base is the vendor's for this kind of device."""
    rates = {d: [s.work / s.seconds for s in samples if s.kind == "matmul" and s.dtype == d] for d in DTYPES}
    typical, best = {d: median(values) for d, values in rates.items()}, max(rates[DTYPES[0]])
    peak = max(best, base.peak(DTYPES[0])) if trusted else best
    fraction = typical[DTYPES[0]] / peak
    peaks = {**base.peak_flops, DTYPES[0]: peak, DTYPES[1]: typical[DTYPES[1]] / fraction}
    bandwidths = [median(s.work / s.seconds for s in samples if s.kind == kind) for kind in PASSES]
    chip = replace(base, peak_flops=peaks, matmul_fraction=fraction, memory_bandwidth=geometric_mean(bandwidths))
    collectives = [s for s in samples if s.kind in KINDS]
    if not collectives:
        return chip, [f"one device has no collectives: the links are those of {base.name}"]
    unit = network(replace(base, hop_latency=1.0, link_bandwidth=1.0, link_fraction=1.0))
    rows = []
    for s in collectives:
        hops = unit.seconds(s.kind, 0)
        rows.append((hops, unit.seconds(s.kind, s.work) - hops, s.seconds))
    latency, link, problems = fit_links(rows)
    return replace(chip, hop_latency=latency, link_bandwidth=link, link_fraction=1.0), problems


def fit_links(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float, list[str]]:
    """(latency, bandwidth, findings) of rows (a, b, seconds), where seconds should be a latency + b / bandwidth.

    `_balanced` computes the fit. A latency that is not positive is replaced by `LEAST_LATENCY`. If the seconds do not
    grow with b, all of them are latency, to which the bandwidth adds a tenth in the row with the largest b.
    """
    table = np.array(list(rows), dtype=float)
    latency, inverse = _balanced(table[:, :2], table[:, 2])
    if inverse <= 0:
        _, sent, seconds = table[table[:, 1].argmax()]
        text = "collectives of more bytes take no more time: the links are at least as fast as written"
        return float(np.exp(np.log(table[:, 2] / table[:, 0]).mean())), float(10 * sent / seconds), [text]
    if latency <= 0:
        bandwidth = np.exp(np.log(table[:, 1] / table[:, 2]).mean())
        text = f"the collectives have no positive latency; {LEAST_LATENCY:g} s is used"
        return LEAST_LATENCY, float(bandwidth), [text]
    return float(latency), float(1 / inverse), []


def _balanced(terms: Values, seconds: Values) -> Values:
    """x with `terms @ x` near `seconds`: of kinds that differ, near the harmonic mean of their times.

    The residuals are relative to the geometric mean of forecast and measurement; with those to the measurement alone a
    forecast of nothing would be no worse than twice too much. An x that is not positive is returned at once.
    """
    weights, x = seconds, np.zeros(2)
    for _ in range(50):
        scaled = terms / weights[:, None]
        unit = scaled.max(axis=0)
        x = np.linalg.lstsq(scaled / unit, seconds / weights, rcond=None)[0] / unit
        if x.min() <= 0:
            break
        weights = np.sqrt(seconds * (terms @ x))
    return x


def forecast(sample: Sample, chip: Chip, network: Network) -> float:
    """Seconds of a sample by the figures of a chip."""
    if sample.kind == "matmul":
        return sample.work / (chip.peak(sample.dtype) * chip.matmul_fraction)
    return sample.work / chip.memory_bandwidth if sample.kind in PASSES else network.seconds(sample.kind, sample.work)


# --- measurement ---


def measure(devices: Sequence[DeviceLike], sizes: Sizes, rounds: int) -> list[Sample]:
    """The samples of all cases, interleaved."""
    mesh = create_mesh((len(devices),), (AXIS,), devices=devices)
    cases = [_matmul(mesh, dtype, n) for dtype in DTYPES for n in sizes.matmul]
    cases += [_Case(mesh, "copy", "float32", size // 4 * 4, lambda i, x: x + 1) for size in sizes.copy]
    cases += [_Case(mesh, "normalize", "float32", size // ROW * ROW, _normalize) for size in sizes.copy]
    if len(devices) > 1:
        cases += [_collective(mesh, kind, size) for kind in KINDS for size in sizes.collective]
    for _ in range(rounds):
        for case in cases:
            case.run()
    return [case.sample(on_cpu=devices[0].platform == "cpu") for case in cases]


class _Case:
    """A loop over `body(i, x, *rest)` on all devices; x is the donated carry, so that the loop works in place."""

    def __init__(self, mesh: Mesh, kind: str, dtype: str, size: int, body: Body, *initial: Make):
        self.kind, self.dtype, self.size = kind, dtype, size
        self.initial = initial or (partial(jnp.ones, size // 4, dtype),)
        self.readings: list[tuple[float, float]] = []
        split = P(AXIS)
        make = jax.shard_map(lambda: tuple(f() for f in self.initial), mesh=mesh, in_specs=(), out_specs=split)
        self.x, *self.rest = jax.jit(make)()

        def loop(times: int, x: jax.Array, *rest: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, times, lambda i, x: body(i, x, *rest), x)

        specs = (P(), *(split for _ in self.initial))
        self.program = jax.jit(
            jax.shard_map(loop, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False), donate_argnums=1
        )
        self.times = 1
        self.run()  # compiles
        self.run()
        self.times = min(MOST_TIMES, max(LEAST_TIMES, round(TARGET / self.readings[-1][0])))
        self.readings.clear()

    def run(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.x = jax.block_until_ready(self.program(self.times, self.x, *self.rest))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        self.readings.append((wall / self.times, cpu / self.times))

    def sample(self, *, on_cpu: bool) -> Sample:
        seconds = [wall for wall, _ in self.readings]
        if on_cpu:
            cores = max(cpu / wall for wall, cpu in self.readings)
            seconds = [cpu / cores for _, cpu in self.readings]
        middle = median(seconds)
        low, high = np.quantile(seconds, (0.25, 0.75))
        return Sample(self.kind, self.dtype, self.size, middle, float(high - low) / middle)


def _matmul(mesh: Mesh, dtype: str, n: int) -> _Case:
    """Products with a reflection, which is orthogonal: repeated products neither overflow nor vanish."""

    def reflection() -> jax.Array:
        signs = 1 - 2 * (jnp.arange(n) % 2)
        return (jnp.eye(n) - 2 / n * jnp.outer(signs, signs)).astype(dtype)

    def start() -> jax.Array:
        return jax.random.normal(jax.random.key(0), (n, n), dtype)

    return _Case(mesh, "matmul", dtype, n, lambda i, x, w: x @ w, start, reflection)


def _normalize(i: jax.Array, x: jax.Array) -> jax.Array:
    rows = x.reshape(-1, ROW // 4)
    return (rows * jax.lax.rsqrt((rows * rows).mean(-1, keepdims=True))).reshape(-1)


def _collective(mesh: Mesh, kind: str, size: int) -> _Case:
    count = mesh.devices.size
    payload = size // (4 * count) * count  # elements of float32
    ring = [(k, (k + 1) % count) for k in range(count)]
    length = payload // count if kind == "all-gather" else payload

    def gather(i: jax.Array, x: jax.Array) -> jax.Array:
        # Which part is used depends on i, so that XLA cannot omit the others.
        return jax.lax.dynamic_slice(jax.lax.all_gather(x, AXIS, tiled=True), (i % count * length,), (length,))

    bodies: dict[str, Body] = {
        "all-gather": gather,
        "all-reduce": lambda i, x: jax.lax.psum(x, AXIS),
        "all-to-all": lambda i, x: jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        "collective-permute": lambda i, x: jax.lax.ppermute(x, AXIS, ring),
    }
    return _Case(mesh, kind, "float32", 4 * payload, bodies[kind], partial(jnp.zeros, length, "float32"))
