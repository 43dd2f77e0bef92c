"""One of three processes: `python -m tests.sharding.report.fingerprint_worker PORT RANK`."""

import sys

import jax

import flax_mesh as fm
from flax_mesh.sharding import check_same_on_all_processes


def main(port: str, rank: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"localhost:{port}", num_processes=3, process_id=rank)
    check_same_on_all_processes("the same")
    try:
        check_same_on_all_processes("another" if rank == 1 else "one", what="rules")
    except fm.ShardingError as error:
        print(f"process {rank}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
