"""`python orphans.py SECONDS`: ends its process group if the process at the other end of its standard input ends.

`flax-mesh launch` starts it first, and then its processes in the same group. The operating system closes the pipe even
if the launcher is killed. This is a separate process because a thread in each of them could not end a process that
is stopped, or that blocks while it holds the GIL. It imports only the standard library, to start in milliseconds.
"""

import os
import signal
import sys
import time


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)  # returns when the launcher has ended, which never writes
    os.killpg(0, signal.SIGTERM)  # processes that can save do so, and end
    time.sleep(float(sys.argv[1]))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
