"""The command `flax-mesh`, which ends without a traceback if Ctrl-C comes while it imports.

It is no module of flax_mesh, because a package imports its `__init__`, and with it JAX, before any of its modules.
"""

import os
import signal
import sys
from typing import NoReturn


def main() -> int:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a signal that is ignored stays ignored
        signal.signal(signal.SIGINT, _end)
    try:
        from flax_mesh.cli import main as run
    finally:
        signal.signal(signal.SIGINT, before)
    return run()


def _end(number: int, frame: object) -> NoReturn:
    """End at once: an extension module turns an exception during its import into an ImportError."""
    os.write(2, b"flax-mesh: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
