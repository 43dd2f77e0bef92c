"""Nothing keeps running after the launcher, one process, or the reader of the output was killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.multiprocess.launches import run, train
from tests.multiprocess.processes import ROOT, Running, run_workers

LIMIT_S = 30  # after a kill

# What the processes of a launch do here instead of training. Their first argument is the folder of the test.
STUBBORN = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):  # the kernel hangs up a group without a parent if one of it is stopped
    signal.signal(number, lambda number, frame: open(sys.argv[1] + "/saved", "w"))
print("is ready", flush=True)
while True:
    time.sleep(300)
"""
SAVING = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(4)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGHUP, save)
for number in range(15000):
    print("step", number, flush=True)
    time.sleep(0.02)
"""
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", *sys.argv[1:]])
print("has started another", flush=True)
"""
LAUNCHER = """
import sys
from flax_mesh.processes import launch
from flax_mesh.processes.output import tolerant_output
launch.ORPHAN_GRACE_S = launch.DRAIN_S = 4.0
with tolerant_output():
    sys.exit(launch.launch(["-c", *sys.argv[1:]], 2))
"""


def processes(folder: Path, launcher: int = -1) -> dict[int, str]:
    """The processes with `folder` in their arguments and the children of `launcher`: pid -> arguments."""
    found = {}
    listed = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        pid, parent, state, arguments = line.split(maxsplit=3)
        if (str(folder) in arguments or int(parent) == launcher) and not state.startswith("Z"):
            found[int(pid)] = arguments
    return found


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


def assert_all_end(folder: Path, pids: set[int]) -> None:
    """Waits until none of `pids` and no process of `folder` runs."""
    end = time.monotonic() + LIMIT_S
    while (left := processes(folder)) or any(map(is_running, pids)):
        assert time.monotonic() < end, f"still running after {LIMIT_S} s: {left} or one of {pids}"
        time.sleep(0.1)


@contextmanager
def all_killed(folder: Path) -> Iterator[None]:
    """Ends what a failed test leaves behind."""
    try:
        yield
    finally:
        for pid in processes(folder):
            os.kill(pid, signal.SIGKILL)


def launched(program: str, folder: Path) -> Running:
    return Running(["-c", LAUNCHER, program, str(folder)])


def test_processes_may_save_but_not_go_on_after_their_launcher_was_killed(tmp_path):
    """One process does not end after SIGTERM, and the other is stopped."""
    with all_killed(tmp_path), launched(STUBBORN, tmp_path) as launcher:
        launcher.wait_for("[0] is ready")
        launcher.wait_for("[1] is ready")
        children = processes(tmp_path, launcher.process.pid)
        stopped = next(pid for pid, arguments in children.items() if "--process=1/2@" in arguments)
        os.kill(stopped, signal.SIGSTOP)
        launcher.process.kill()
        assert_all_end(tmp_path, set(children))
    assert len(children) == 4  # the launcher, its two processes, and the one that waits for its end
    assert (tmp_path / "saved").exists()


def test_the_end_of_the_reader_stops_all_processes(tmp_path):
    """`launch | head -1`: the rest of the output is on standard error."""
    with all_killed(tmp_path), open(tmp_path / "errors", "w+") as errors:
        command = [sys.executable, "-c", LAUNCHER, SAVING, str(tmp_path)]
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert launcher.stdout is not None
        assert "step 0" in launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(LIMIT_S) == 4
        assert_all_end(tmp_path, set())
        errors.seek(0)
        text = errors.read()
    assert "flax-mesh launch: standard output is closed: stopping all processes" in text
    assert "[0] saved" in text and "[1] saved" in text and text.endswith("flax-mesh launch: stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize("is_ignored", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sighup_is_forwarded_unless_the_launcher_ignores_it(tmp_path, is_ignored):
    prefix = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" if is_ignored else ""  # as nohup does
    with all_killed(tmp_path), Running(["-c", prefix + LAUNCHER, SAVING, str(tmp_path)]) as launcher:
        launcher.wait_for("[0] step 5\n")
        launcher.wait_for("[1] step 5\n")
        os.kill(launcher.process.pid, signal.SIGHUP)
        if is_ignored:
            launcher.wait_for(f"step {100 + launcher.output.count('[0] step')}\n")
            os.kill(launcher.process.pid, signal.SIGTERM)
        assert launcher.ended(LIMIT_S).code == 4, launcher.output


@pytest.mark.slow
def test_a_launch_ends_although_its_processes_have_started_others(tmp_path):
    with all_killed(tmp_path), launched(PARENT, tmp_path) as launcher:
        ended = launcher.ended(LIMIT_S)
        assert ended.code == 0 and "[0] has started another" in ended.output, ended.output
        assert_all_end(tmp_path, set())


WATCHED = """
import os, time
from flax_mesh.processes import Watch, watchdog
watchdog.REPORT_S = watchdog.LINGER_S = 0.5
print("ready", flush=True)
with Watch(print, 1.0):
    time.sleep(60)
"""


@pytest.mark.parametrize("what", ["closed", pytest.param("full", marks=pytest.mark.slow)])
def test_a_step_timeout_ends_a_process_whose_report_is_not_read(what):
    read, write = os.pipe()
    if what == "closed":
        os.close(read)
    else:
        os.set_blocking(write, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(write, bytes(2**16))
        os.set_blocking(write, True)
    process = subprocess.Popen([sys.executable, "-c", WATCHED], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=write)
    try:
        assert process.wait(45) == 5
    finally:
        process.kill()
        process.wait()
        os.close(write)
        if what == "full":
            os.close(read)


@pytest.mark.slow
def test_a_process_that_cannot_report_its_error_ends_the_others():
    ended = run_workers("watched", 2, 1, "fails unheard")
    assert [one.code for one in ended] == [5, 1], ended
    assert "process 1 has failed: RuntimeError: something in" in ended[0].output, ended


# --- complete runs, killed at random moments ---


class Pipeline:
    """A launch whose output goes through `cat` to a file, as in a shell."""

    def __init__(self, folder: Path, *more: str):
        self.folder, self.log = folder, Path(f"{folder}.log")
        with open(self.log, "w") as log:
            self.reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
            options = ["launch", "-n", "2", "--devices-per-process", "1", "--", *train(folder, *more)]
            command = [sys.executable, "-u", "-m", "flax_mesh.cli", *options]
            self.launcher = subprocess.Popen(command, cwd=ROOT, stdout=self.reader.stdin, stderr=log)
        assert self.reader.stdin is not None
        self.reader.stdin.close()

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + 240
        while f"step {step:>6} " not in self.log.read_text():
            assert self.launcher.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def children(self) -> list[int]:
        found = processes(self.folder, self.launcher.pid)
        return sorted(pid for pid, arguments in found.items() if "--process=" in arguments)

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self.launcher, self.reader):
            process.kill()
            process.wait()


def kill_launcher(pipeline: Pipeline, numbers: random.Random) -> None:
    pipeline.launcher.kill()


def kill_process(pipeline: Pipeline, numbers: random.Random) -> None:
    while not (children := pipeline.children()):
        assert pipeline.launcher.poll() is None
        time.sleep(0.1)
    os.kill(numbers.choice(children), signal.SIGKILL)


def kill_reader(pipeline: Pipeline, numbers: random.Random) -> None:
    pipeline.reader.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("kill", "code"), [(kill_launcher, -9), (kill_process, 5), (kill_reader, 4)])
def test_nothing_runs_30_seconds_after_a_kill_at_a_random_moment(
    kill: Callable[[Pipeline, random.Random], None], code: int, tmp_path: Path
) -> None:
    """Two kills of each kind, one of them while the run starts. A closed output is noticed when a step is printed."""
    numbers = random.Random(code)
    common = ("mesh.shape=pp:2", "checkpoint.every=3")
    run(2, 1, tmp_path / "warm", *common, "run.steps=3")  # compiles, for all the others
    for number in range(2):
        folder = tmp_path / f"run{number}"
        with ExitStack() as stack:
            stack.enter_context(all_killed(folder))
            pipeline = stack.enter_context(Pipeline(folder, *common, "run.steps=1000000"))
            if number % 2 == 0 or kill is kill_reader:
                pipeline.wait_for_step(numbers.randrange(1, 30))
            time.sleep(numbers.uniform(0.5, 4.0))
            pids = set(processes(folder, pipeline.launcher.pid)) | {pipeline.launcher.pid}
            kill(pipeline, numbers)
            assert_all_end(folder, pids)
            assert pipeline.launcher.wait(1) == code, pipeline.log.read_text()


FAILS_LAST = """
import sys, time
first = sys.argv[1].startswith("--process=0/")
time.sleep(1.0 if first else 0.0)
sys.exit(1 if first else 5)
"""


@pytest.mark.slow
def test_the_code_of_the_process_that_failed_goes_before_that_of_those_that_lost_it():
    done = subprocess.run([sys.executable, "-c", LAUNCHER, FAILS_LAST], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert (
        "first, process 1 ended with exit code 5" in done.stderr and "process 0 ended with exit code 1" in done.stderr
    )
