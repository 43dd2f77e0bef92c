"""From the command to the first step: what JAX traces, lowers, compiles and reads, and kept programs of no use."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import jax

from flax_mesh.recipe.overrides import to_texts
from flax_mesh.recipe.program import TrainProgram
from flax_mesh.recipe.saved import versions
from flax_mesh.text import at_most, count_text, listed, mesh_text
from flax_mesh.train.run_folder import Row

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
}
HIT, READ = "/jax/compilation_cache/cache_hits", "read"  # from the folder of compiled programs
STAGES = (*EVENTS.values(), READ)
MOST = 4  # programs of a stage that are named
FACTS = "made_with.json"  # in the folder of compiled programs
KEPT = re.compile(r"jit_(.+)-[0-9a-f]{16,}-cache")  # JAX's name for the file of a program
# Settings that no program depends on.
NOT_COMPILED = re.compile(r"checkpoint\.|run\.(steps|folder|platform|eval_every|sample_tokens|hardware|hooks|profile)")


@dataclass
class Work:
    """The work of a stage on the programs of one name."""

    times: int = 0
    seconds: float = 0.0  # of CPU time
    longest: float = 0.0  # in seconds of the clock


@dataclass
class _Stage:
    name: str
    began: float
    within: float = 0.0  # CPU seconds of other stages within this one
    is_hit: bool = False


@dataclass
class Programs:
    """A context that counts the programs of this process by (name, stage), in all threads.

    JAX announces the begin of a stage as a scalar, and its end as a duration of the same name. A trace within a trace
    is a part of it.
    """

    works: dict[tuple[str, str], Work] = field(default_factory=dict[tuple[str, str], Work])

    def __enter__(self) -> "Programs":
        self._open, self._exit = threading.local(), ExitStack()
        monitoring = jax.monitoring
        monitoring.register_scalar_listener(self._begin)
        self._exit.callback(monitoring.unregister_scalar_listener, self._begin)
        monitoring.register_event_listener(self._event)
        self._exit.callback(monitoring.unregister_event_listener, self._event)
        monitoring.register_event_duration_secs_listener(self._end)
        self._exit.callback(monitoring.unregister_event_duration_listener, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Count no more. A second call does nothing."""
        self._exit.close()

    def of(self, stage: str) -> dict[str, Work]:
        """The programs of a stage, the longest work first."""
        works = {name: work for (name, each), work in [*self.works.items()] if each == stage}
        return dict(sorted(works.items(), key=lambda item: -item[1].seconds))

    @property
    def _stack(self) -> list[_Stage]:
        return self._open.__dict__.setdefault("stack", [])

    def _begin(self, event: str, value: float | int, **_: object) -> None:
        if stage := EVENTS.get(event):
            self._stack.append(_Stage(stage, _clock(stage)))

    def _event(self, event: str, **_: object) -> None:
        if event == HIT and self._stack:
            self._stack[-1].is_hit = True

    def _end(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event not in EVENTS or not self._stack:  # it began before this context
            return
        stage, parent = self._stack.pop(), self._stack[-1] if self._stack else None
        spent = _clock(stage.name) - stage.began
        if parent is not None and parent.name == stage.name:
            parent.within += stage.within
            return
        if parent is not None:
            parent.within += spent
        name = re.sub(r"^jit\((.*)\)$", r"\1", str(details.get("fun_name", "")))
        work = self.works.setdefault((name, READ if stage.is_hit else stage.name), Work())
        work.times, work.seconds = work.times + 1, work.seconds + max(spent - stage.within, 0.0)
        work.longest = max(work.longest, duration_secs)


def _clock(stage: str) -> float:
    """CPU seconds; XLA compiles in threads of its own."""
    return time.process_time() if stage == "compiled" else time.thread_time()


class Start:
    """Prints one line about the start of a run when its first row is known, and one about kept programs of no use."""

    def __init__(self, say: Callable[[str], None], programs: Programs):
        self._say, self._programs = say, programs
        self._kept: set[str] = set()
        self._folder: Path | None = None
        self._facts: dict[str, str] = {}

    def begin(self, program: TrainProgram, folder: Path | None) -> None:
        """`folder` has the programs that earlier starts have kept; None: no programs are kept."""
        self._folder, self._facts = folder, facts_of(program)
        if folder is not None and folder.is_dir():
            self._kept = {match[1] for file in folder.iterdir() if (match := KEPT.fullmatch(file.name))}

    def row(self, row: Row) -> None:
        """A hook: it prints at the first row."""
        if not self._facts:
            return
        self._programs.close()
        parts = [f"{stage} {text}" for stage in STAGES if (text := _works_text(self._programs.of(stage)))]
        self._say(f"start: {time.process_time():.1f} s of CPU time to the first row; {'; '.join(parts)}")
        if self._folder is not None:
            self._compare(self._folder / FACTS)
        self._facts = {}

    def _compare(self, file: Path) -> None:
        least = getattr(jax.config, "jax_persistent_cache_min_compile_time_secs")  # noqa: B009 (not in JAX's types)
        if again := lost_programs(self._programs, self._kept, least):
            before = _read_facts(file)
            self._say(f"compiled again, although {file.parent} has {listed(again)}: {reason(before, self._facts)}")
        if self._programs.of("compiled") and file.parent.is_dir():
            try:
                file.write_text(json.dumps(self._facts, indent=1))
            except OSError as error:
                self._say(f"warning: {file} cannot be written: {error.strerror}")


def _read_facts(file: Path) -> Mapping[str, str]:
    """{} if they are damaged or were not written."""
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return cast(Mapping[str, str], facts) if isinstance(facts, dict) else {}


def _works_text(works: Mapping[str, Work]) -> str:
    """`step 0.9 s, 2 x split 0.1 s and 3 others 0.0 s`."""
    named = [
        f"{f'{work.times} x ' * (work.times > 1)}{name} {work.seconds:.1f} s"
        for at, (name, work) in enumerate([*works.items()][:MOST])
        if at == 0 or work.seconds >= 0.05
    ]
    others = [*works.values()][len(named) :]
    if others:
        count = sum(work.times for work in others)
        named.append(f"{count_text(count, 'other')} {sum(work.seconds for work in others):.1f} s")
    return ", ".join(named)


def lost_programs(programs: Programs, kept: set[str], least: float) -> list[str]:
    """The names of `kept` programs of which none was read, and one compiled for `least` seconds: JAX keeps those."""
    read = programs.of(READ)
    return [
        name
        for name, work in programs.of("compiled").items()
        if name in kept and name not in read and work.longest >= least
    ]


def facts_of(program: TrainProgram) -> dict[str, str]:
    """The values on which compiled programs depend, without the code of the recipe."""
    devices = program.mesh.devices
    facts = {"mesh": mesh_text(program.mesh.shape), "devices": f"{devices.size} x {devices.flat[0].device_kind}"}
    settings = to_texts(program.recipe.config)
    return versions() | facts | {key: text for key, text in settings.items() if not NOT_COMPILED.match(key)}


def reason(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Why programs that were made with the facts `before` cannot be used."""
    keys = [key for key in {**before, **now} if before and before.get(key) != now.get(key)]
    changed = [f"{key} {before.get(key, '(absent)')} -> {now.get(key, '(absent)')}" for key in keys]
    return "; ".join(at_most(changed, MOST)) or (
        "the code of the recipe or of a library, XLA's options or the processors have changed, or the file is damaged"
    )
