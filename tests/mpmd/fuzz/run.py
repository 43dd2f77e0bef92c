"""Runs a case as a pipeline and on one device, and compares."""

import functools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_mesh import ConfigError
from flax_mesh.mpmd import Pipeline, split_stages
from flax_mesh.step.state import TrainState
from flax_mesh.train import make_train_step
from tests.mpmd.fuzz.case import Case
from tests.mpmd.fuzz.model import Model, make_batch, make_loss, make_optimizer
from tests.mpmd.zoo.base import FAST, groups, initial_state, run_steps

SEED = 7
LAYERS = ("layers",)
Values = dict[str, np.ndarray]  # metrics of every step and leaves of the final state, by name


class Outcome(NamedTuple):
    """kind: same, refused (by a ConfigError), different, raised, or not finite (on one device already)."""

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("different", "raised")


def check_case(case: Case) -> Outcome:
    """The pipeline of a case compared with one device."""
    try:
        have = pipelined(case)  # first: many cases are refused here
        want = on_one_device(case.on_one_device)
        if not all(np.isfinite(x).all() for x in want.values()):
            return Outcome("not finite")
        found = differences(want, have, case)
    except ConfigError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # a fuzzer reports whatever is raised
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("raised", f"{type(error).__name__}: {error}\n({where.filename}:{where.lineno})")
    return Outcome("different", "\n".join(found)) if found else Outcome("same")


@functools.lru_cache(maxsize=2)
def on_one_device(case: Case) -> Values:
    """`make_train_step` with as many microbatches."""
    state = start(case)
    step = make_train_step(
        make_loss(case), state, seed=SEED, num_microbatches=case.microbatches, layers=LAYERS, compiler_options=FAST
    )
    return _follow(step, state, case)


def pipelined(case: Case, seed: int = SEED) -> Values:
    staged = split_stages(
        make_loss(case),
        lambda: Model(case),
        make_batch(case),
        mesh=groups(pp=case.groups),
        schedule=case.make_schedule(),
        cuts=case.cuts or None,
    )
    optimizer: Any = make_optimizer(case)
    pipeline = Pipeline(staged, optimizer, seed=seed, remat=case.remat, compiler_options=FAST)  # pyright: ignore
    abstract = pipeline.abstract
    leaves = [jax.device_put(x, a.sharding) for x, a in zip(start(case).leaves, abstract.leaves, strict=True)]
    return _follow(pipeline.step, TrainState(tuple(leaves), abstract.definition), case)


def start(case: Case) -> TrainState:
    return initial_state(lambda: Model(case), make_optimizer(case))


def _follow(step: Callable[..., Any], state: TrainState, case: Case) -> Values:
    run = run_steps(step, state, make_batch(case))
    return run.after | {f"step {n}: {name}": x for n, row in enumerate(run.metrics) for name, x in row.items()}


def differences(want: Values, have: Values, case: Case) -> list[str]:
    """One line per value that differs by more than rounding.

    Rounding is measured relative to the largest element of a leaf, or to a small part of the largest one of the model
    or the optimizer: the gradient of a bias before a norm is a sum that cancels.
    """
    rtol, floor = (5e-2, 1e-2) if "cast" in case.features else (2e-4, 2e-5)
    largest: dict[str, float] = {}
    for name, x in want.items():
        group = name.split("/")[0]
        largest[group] = max(largest.get(group, 0.0), float(np.abs(x).max(initial=0.0)))
    found = [f"{name}: only in one of the runs" for name in sorted(want.keys() ^ have.keys())]
    for name in want.keys() & have.keys():
        a, b = want[name], have[name]
        bound = rtol * float(np.abs(a).max(initial=0.0)) + floor * largest[name.split("/")[0]]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a.dtype}{a.shape} and {b.dtype}{b.shape}")
        elif not np.isfinite(b).all() or np.abs(a - b).max(initial=0.0) > bound:
            at = np.unravel_index(np.abs(a - b).argmax(), a.shape)
            place = f", at {tuple(map(int, at))}" if a.shape else ""
            found.append(f"{name}: {a[at]} on one device, {b[at]} here{place}")
    return sorted(found)
