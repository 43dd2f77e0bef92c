"""Compares a random pipeline with one device.

python -m tests.mpmd.fuzz SEED                           the case of a seed
python -m tests.mpmd.fuzz 'layers=linear,norm cuts=1'    a case as it is printed
"""

import sys
import tempfile

import jax

from tests.mpmd.fuzz.case import Case, random_case
from tests.mpmd.fuzz.run import check_case

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        case = random_case(int(sys.argv[1])) if sys.argv[1].isdigit() else Case.parse(sys.argv[1])
        outcome = check_case(case)
        print(case, outcome.kind, outcome.detail, sep="\n")
        sys.exit(outcome.failed)
