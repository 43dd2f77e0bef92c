"""The plan's memory and collectives compared with what XLA allocates and sends, for every case of tests/plan/cases.py.

Prints Markdown: bytes on one device, the errors of the estimate, and why a case has no bar.

    python -m tests.benchmarks plan_memory [--tpu] [--only NAME]

--tpu: also the cases on TPU topologies, which need libtpu and a minute each, but no TPU.
"""

import argparse
from collections.abc import Sequence

from tests.benchmarks._report import print_json, use_cpu
from tests.plan.cases import CASES, Case
from tests.plan.compiled import Figures, compiled, estimated, memory_error, operand_errors

HEADER = "| Case | Mesh | XLA, MiB | Estimate, MiB | Error | Operand bytes, error by mesh axes | Remark |"


def row(case: Case, program: str, found: Figures, true: Figures) -> str:
    name = case.name if program == "step" else f"{case.name}: {program}"
    place = case.mesh if case.platform == "cpu" else f"{case.mesh} on {case.topology}"
    errors = operand_errors(found, true)
    operands = ", ".join(f"{axes} {size:+.1%}" for axes, size in errors.items()) or "none"
    remarks = [case.outside, *(f"{axes}: {why}" for axes, why in case.differs.items() if axes in errors)]
    cells = (
        name,
        f"`{place}`",
        f"{true.total / 2**20:,.1f}",
        f"{found.total / 2**20:,.1f}",
        f"{memory_error(found, true):+.1%}",
        operands,
        "; ".join(filter(None, remarks)),
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks plan_memory", description=__doc__)
    parser.add_argument("--tpu", action="store_true", help="also the cases on TPU topologies")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    options = parser.parse_args(arguments)
    use_cpu()
    print(f"{HEADER}\n|---|---|--:|--:|--:|---|---|")
    errors = {}
    for case in CASES:
        if options.only not in case.name or (case.platform == "tpu" and not options.tpu):
            continue
        for program, true in compiled(case).items():
            found = estimated(case)[program]
            print(row(case, program, found, true), flush=True)
            errors[f"{case.name} {program}"] = memory_error(found, true)
    print()
    print_json("plan_memory", arguments, errors=errors)
    return 0
