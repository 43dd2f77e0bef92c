"""The longest kernels of a few steps, from a trace of jax.profiler."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

# Lines that the profiler derives from the kernels of the streams.
DERIVED = ("Steps", "XLA", "Framework", "Source", "Launch", "python")


class Kernels(NamedTuple):
    """Times in seconds over the whole trace; `busy` is the time in which at least one kernel ran."""

    longest: list[tuple[str, float, int]]  # name, time, calls
    total: float
    busy: float
    window: float
    kinds: dict[str, float]


def profile(run: Callable[[], Any], folder: Path) -> Kernels:
    """Trace `run()`, which must wait for its results, and read the trace from `folder`."""
    with jax.profiler.trace(str(folder)):
        run()
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return summarize(jax.profiler.ProfileData.from_file(str(newest)))


def summarize(data: Any) -> Kernels:
    """Kernels of the first device; on a backend without device planes, the HLO operations on the host."""
    planes = sorted((p for p in data.planes if p.name.startswith("/device:") and list(p.lines)), key=lambda p: p.name)
    plane = planes[0] if planes else next(p for p in data.planes if p.name.startswith("/host:CPU"))
    with warnings.catch_warnings():
        # jaxlib's event types warn once on Python 3.12; as an error, this warning would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        events = list(_kernels(plane, host=not planes))
    spent, calls = defaultdict(float), defaultdict(int)
    for name, begin, end in events:
        spent[name] += (end - begin) / 1e9
        calls[name] += 1
    longest = [(name, spent[name], calls[name]) for name in sorted(spent, key=lambda name: -spent[name])]
    total = sum(spent.values())
    kinds = defaultdict(float)
    for name, time, _ in longest:
        kinds[kind_of(name)] += time
    spans = sorted((begin, end) for _, begin, end in events)
    window = (max(end for _, end in spans) - spans[0][0]) / 1e9 if spans else 0.0
    return Kernels(longest, total, _union(spans) / 1e9, window, dict(sorted(kinds.items(), key=lambda item: -item[1])))


def kind_of(name: str) -> str:
    """Matrix product, attention, copy or other, by the name of a kernel."""
    name = name.lower()
    marks = {
        "attention": ("fmha", "flash", "sdpa", "cudnn_generated"),
        "product": ("gemm", "cutlass", "nvjet", "cublas", "dot"),
        "copy": ("memcpy", "memset", "copy"),
    }
    return next((kind for kind, parts in marks.items() if any(part in name for part in parts)), "other")


def kernels_text(kernels: Kernels, steps: int, top: int = 10) -> str:
    """One line for each of the longest kernels, then the shares of the kinds and the idle time."""
    lines = [
        f"{1e3 * time / steps:9.3f} ms/step {time / kernels.total:6.1%}  {calls / steps:6.1f} calls/step  {name[:90]}"
        for name, time, calls in kernels.longest[:top]
    ]
    kinds = ", ".join(f"{kind} {time / kernels.total:.1%}" for kind, time in kernels.kinds.items())
    idle = 1 - kernels.busy / kernels.window
    return "\n".join(
        [*lines, f"by kind: {kinds}; no kernel ran in {idle:.1%} of {1e3 * kernels.window / steps:.1f} ms"]
    )


def _kernels(plane: Any, *, host: bool) -> Iterator[tuple[str, float, float]]:
    for line in plane.lines:
        if not host and line.name.startswith(DERIVED):
            continue
        for event in line.events:
            if event.duration_ns > 0 and (not host or any(key == "hlo_op" for key, _ in event.stats)):
                yield event.name, event.start_ns, event.end_ns


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of sorted intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total
