"""Predicted step times of published training runs; needs no devices, and measures nothing here.

The constants were fitted to a random half of the rows with a bar; the others are held out. `--fit` fits them again.
`--compiled` compares memory and collectives with the memory and the collectives of XLA's programs, for the cases of
tests/plan/cases.py, as Markdown; `--tpu` includes cases on TPU topologies, which need libtpu and a minute each.
`--ranking` compares the plans of 8 layouts with the CPU time of their steps: Spearman's correlation should be 0.8.

    python -m tests.benchmarks plan [--only ID] [--fit | --compiled [--tpu] | --ranking [--rounds N]]
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from flax_mesh.jax_compat import kernels_without_devices
from flax_mesh.mesh.shape import parse_mesh_shape
from flax_mesh.plan import plan
from flax_mesh.plan.calibrate import calibrate
from flax_mesh.plan.forecast import SLICES, Estimate, estimate, parts_of
from flax_mesh.plan.recipe import arguments_of
from flax_mesh.plan.topology import parse_topology
from flax_mesh.recipe.program import train_program
from flax_mesh.recipe.resolve import resolve_checked
from flax_mesh.recipe.target import chip_target
from tests.benchmarks.common.report import options, print_json, print_table, report, use_cpu
from tests.plan.cases import CASES, Case
from tests.plan.compiled import Figures, compiled, estimated, memory_error, operand_errors
from tests.plan.published import EXPERTS, RUNS, SMALL, Run, fitted, held_out, of_chips, of_experts
from tests.plan.ranking import LAYOUTS, config_of, rank, spearman

LIMIT = 0.12
MATMUL, OVERLAP = [n / 100 for n in range(45, 100)], [n / 10 for n in range(11)]  # fractions that are tried
SHARES = [n / 1000 for n in range(0, 41, 5)]  # of SLICES
INDEXED = [n / 20 for n in range(1, 21)]
RUN = {run.id: run for run in RUNS}
HEADER = "| Case | Mesh | XLA, MiB | Estimate, MiB | Error | Operand bytes, error by mesh axes | Remark |"


def main(arguments: Sequence[str] | None = None) -> int:
    use_cpu()
    figures = {"only": "", "fit": False, "compiled": False, "tpu": False, "ranking": False, "rounds": 9}
    given = options("plan", arguments, **figures)
    if given.fit:
        return fit(arguments)
    if given.compiled:
        return compare_compiled(given, arguments)
    if given.ranking:
        return compare_ranks(given, arguments)
    of_fit, errors, rows = {run.id for run in fitted()}, {}, []
    of_fit |= {run.id for run in of_experts()[0]}
    for run in (run for run in RUNS if given.only in run.id):
        seconds = plan(run.config(), run.topology).time.seconds
        errors[run.id] = seconds / run.seconds - 1
        row = {"run": run.id, "topology": run.topology, "published, s": run.seconds, "predicted, s": seconds}
        with_bar = not run.no_bar or run.no_bar.startswith(EXPERTS)
        use = ("fitted" if run.id in of_fit else "held out") if with_bar else run.no_bar
        rows.append(row | {"error": f"{errors[run.id]:+.0%}", "use, or why there is no bar": use})
    print_table(rows)
    held = [run.id for run in held_out() if run.id in errors]
    within = sum(abs(errors[name]) <= LIMIT for name in held)
    print(f"held out: {within} of {len(held)} within {LIMIT:.0%}")
    print_json("plan", arguments, errors=errors, within=within, held_out=len(held))
    return 0


def estimate_of(run: Run) -> Estimate:
    sizes = dict(parse_mesh_shape(run.mesh, ("dp", "fsdp", "ep", "tp", "sp"), omitted=1))
    with kernels_without_devices():
        target = chip_target(sizes, parse_topology(run.topology).chip)
        program = train_program(resolve_checked(run.config(), target))
        return estimate(program.step, arguments_of(program), sizes, "tpu")


def fit(arguments: Sequence[str] | None) -> int:
    """The fraction of products of every chip, the overlap and SLICES of all, then the fraction of the bandwidth that
    rows at indices reach with the constants in the table, by least squares of log ratios.

    Of a chip with few runs, also the error of each with the fraction that the others give.
    """
    ratios = {run.id: ratios_of(run) for run in fitted()}
    slices = {run.id: math.log2(parse_topology(run.topology).num_slices) for run in fitted()}
    chips = {name: [run.id for run in runs if run.id in ratios] for name, runs in of_chips().items()}

    def error(one: str, matmul: float, overlap: float, share: float) -> float:
        return math.log(ratios[one][matmul, overlap] * (1 + share * slices[one]))

    def best(ids: Sequence[str], overlap: float, share: float) -> tuple[float, float]:
        return min((math.fsum(error(i, m, overlap, share) ** 2 for i in ids), m) for m in MATMUL)

    def squares(common: tuple[float, float]) -> float:
        return math.fsum(best(ids, *common)[0] for ids in chips.values())

    common = min(((overlap, share) for overlap in OVERLAP for share in SHARES), key=squares)
    rows: list[dict[str, Any]] = []
    for name, ids in chips.items():
        chip = parse_topology(RUN[ids[0]].topology).chip
        found = (best(ids, *common)[1], *common)
        rows.append({"chip": name, "runs": len(ids)} | dict(zip(("matmul", "overlap", "slices"), found, strict=True)))
        rows[-1]["in the table"] = f"{chip.matmul_fraction:g}, {chip.overlap_fraction:g}, {SLICES:g}"
        for one in ids if len(of_chips()[name]) < SMALL else ():
            matmul = best([i for i in ids if i != one], *common)[1]
            rows.append({"chip": f"{name}, without {one}", "error": f"{math.expm1(error(one, matmul, *common)):+.1%}"})
    runs = of_experts()[0]
    estimates = {run.id: estimate_of(run) for run in runs}

    def squares_of_experts(indexed: float) -> float:
        ratios = [seconds_of(estimates[run.id], run, indexed_fraction=indexed) / run.seconds for run in runs]
        return math.fsum(math.log(ratio) ** 2 for ratio in ratios)

    found = min(INDEXED, key=squares_of_experts)
    chip = parse_topology(runs[0].topology).chip
    rows.append({"chip": "all", "runs": len(runs), "indexed": found, "in the table": f"{chip.indexed_fraction:g}"})
    return report("plan", arguments, rows)


def seconds_of(one: Estimate, run: Run, **constants: float) -> float:
    """Predicted seconds with other constants of the chip, without the wait for other slices."""
    topology = parse_topology(run.topology)
    topology = replace(topology, chip=replace(topology.chip, **constants))
    return math.fsum(part.seconds for part in parts_of(one, topology))


def ratios_of(run: Run) -> dict[tuple[float, float], float]:
    """Predicted over published seconds for all constants, without the wait for other slices."""
    one, pairs = estimate_of(run), itertools.product(MATMUL, OVERLAP)
    return {(m, o): seconds_of(one, run, matmul_fraction=m, overlap_fraction=o) / run.seconds for m, o in pairs}


def compare_compiled(given: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    print(f"{HEADER}\n|---|---|--:|--:|--:|---|---|")
    errors = {}
    for case in CASES:
        if given.only not in case.name or (case.platform == "tpu" and not given.tpu):
            continue
        for program, true in compiled(case).items():
            found = estimated(case)[program]
            print(case_row(case, program, found, true), flush=True)
            errors[f"{case.name} {program}"] = memory_error(found, true)
    print()
    print_json("plan", arguments, errors=errors)
    return 0


def case_row(case: Case, program: str, found: Figures, true: Figures) -> str:
    name = case.name if program == "step" else f"{case.name}: {program}"
    place = case.mesh if case.platform == "cpu" else f"{case.mesh} on {case.topology}"
    errors = operand_errors(found, true)
    operands = ", ".join(f"{axes} {size:+.1%}" for axes, size in errors.items()) or "none"
    remarks = [case.outside, *(f"{axes}: {why}" for axes, why in case.differs.items() if axes in errors)]
    totals = [f"{each.total / 2**20:,.1f}" for each in (true, found)]
    cells = [name, f"`{place}`", *totals, f"{memory_error(found, true):+.1%}", operands]
    return f"| {' | '.join([*cells, '; '.join(filter(None, remarks))])} |"


def compare_ranks(given: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    calibration = calibrate(jax.devices())
    print(f"{calibration.to_text()}\n", flush=True)
    configs = {f"{shape}, remat {remat}": config_of(shape, remat) for shape, remat in LAYOUTS}
    chosen = {name: config for name, config in configs.items() if given.only in name}
    found = rank(calibration.chip, chosen, given.rounds)
    columns = ("layout", "predicted, busy s", "measured, CPU s / cores")
    rows: list[dict[str, Any]] = []
    for row in sorted(found, key=lambda row: row.measured):
        rows.append(dict(zip(columns, row, strict=True)))
    print_table(rows)
    figure = spearman([row.predicted for row in found], [row.measured for row in found])
    print(f"Spearman's rank correlation: {figure:.3f}")
    print_json("plan", arguments, layouts=rows, spearman=figure)
    return 0
