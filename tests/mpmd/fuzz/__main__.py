"""Checks random pipelines against one device.

python -m tests.mpmd.fuzz SEED                           one case, shrunk if it fails
python -m tests.mpmd.fuzz 0-400                          many cases
python -m tests.mpmd.fuzz 'layers=linear,norm cuts=1'    a case as it is printed
"""

import argparse
import sys
import tempfile

import jax

from tests.mpmd.fuzz.case import Case, random_case
from tests.mpmd.fuzz.run import check_case, check_seeds, describe_failure


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mpmd.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", help="a seed, a range of seeds such as 0-400, or a case as text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--shrinks", type=int, default=1000, help="failures to shrink; the others are listed")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        first, _, last = arguments.case.partition("-")
        if first.isdigit() and last.isdigit():
            seeds = range(int(first), int(last))
            report = check_seeds(seeds, seconds=arguments.seconds, shrinks=arguments.shrinks)
            report.failures, failed = [], bool(report.failures)  # printed already
            print(report)
            return int(failed)
        seed = int(first) if first.isdigit() else None
        case = Case.parse(arguments.case) if seed is None else random_case(seed)
        outcome = check_case(case)
        print(case, outcome.kind, outcome.detail, sep="\n")
        if outcome.failed and seed is not None:
            print(describe_failure(seed, case, outcome))
        return int(outcome.failed)


if __name__ == "__main__":
    sys.exit(main())
