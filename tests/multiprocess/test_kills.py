"""Nothing keeps running after the launcher, one process, or the reader of the output was killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flax_mesh.processes.launch import launch
from tests.multiprocess.processes import ROOT, TIME_LIMIT_S, Running, all_killed, assert_all_end, children, listed

# Programs that the processes of a launch run here instead of training. Their first argument is the folder of the test.
STUBBORN = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):  # the kernel hangs up a group without a parent if one of it is stopped
    signal.signal(number, lambda number, frame: open(sys.argv[1] + "/saved", "w"))
print("is ready", flush=True)
while True:
    time.sleep(300)
"""
SAVING = """
import os, signal, sys, time
def save(number, frame):
    os.write(1, b"saved\\n")
    sys.exit(4)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGHUP, save)
for number in range(15000):
    os.write(1, b"step %d\\n" % number)  # whole lines: a signal may come between the parts that print() writes
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
launch.ORPHAN_GRACE_S = launch.DRAIN_S = 2.0
with tolerant_output():
    sys.exit(launch.launch(["-c", *sys.argv[1:]], 2))
"""


def launched(program: str, folder: Path) -> Running:
    return Running(["-c", LAUNCHER, program, str(folder)])


def test_processes_may_save_but_not_go_on_after_their_launcher_was_killed(tmp_path):
    """One process does not end after SIGTERM, and the other is stopped."""
    with all_killed(tmp_path), launched(STUBBORN, tmp_path) as launcher:
        launcher.wait_for("[0] is ready")
        launcher.wait_for("[1] is ready")
        pids = listed(launcher.process.pid, str(tmp_path))
        os.kill(children(launcher.process.pid)[1], signal.SIGSTOP)
        launcher.process.kill()
        assert_all_end(tmp_path, pids)
    assert len(pids) == 4  # the launcher, its two processes, and the one that waits for its end
    assert (tmp_path / "saved").exists()


def test_the_end_of_the_reader_stops_all_processes(tmp_path):
    """`launch | head -1`: the rest of the output is on standard error."""
    with all_killed(tmp_path), open(tmp_path / "errors", "w+") as errors:
        command = [sys.executable, "-c", LAUNCHER, SAVING, str(tmp_path)]
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert launcher.stdout is not None
        starting = {"[0] step 0\n", "[1] step 0\n"}  # a process that has not started yet is ended by SIGTERM
        while starting and (line := launcher.stdout.readline()):
            starting.discard(line)
        launcher.stdout.close()
        assert launcher.wait(TIME_LIMIT_S) == 4
        assert_all_end(tmp_path)
        errors.seek(0)
        text = errors.read()
    assert "flax-mesh launch: standard output is closed: stopping all processes" in text
    assert "[0] saved" in text and "[1] saved" in text and text.endswith("flax-mesh launch: stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize("is_ignored", [False, True])
def test_sighup_is_forwarded_unless_the_launcher_ignores_it(tmp_path, is_ignored):
    action = "SIG_IGN" if is_ignored else "SIG_DFL"  # with and without nohup, under which pytest itself may run
    prefix = f"import signal\nsignal.signal(signal.SIGHUP, signal.{action})\n"
    with all_killed(tmp_path), Running(["-c", prefix + LAUNCHER, SAVING, str(tmp_path)]) as launcher:
        launcher.wait_for("[0] step 5\n")
        launcher.wait_for("[1] step 5\n")
        os.kill(launcher.process.pid, signal.SIGHUP)
        if is_ignored:
            launcher.wait_for(f"step {100 + launcher.output.count('[0] step')}\n")
            os.kill(launcher.process.pid, signal.SIGTERM)
        assert launcher.ended().code == 4, launcher.output


@pytest.mark.slow
def test_a_launch_ends_although_its_processes_have_started_others(tmp_path):
    with all_killed(tmp_path), launched(PARENT, tmp_path) as launcher:
        ended = launcher.ended()
        assert ended.code == 0 and "[0] has started another" in ended.output, ended.output
        assert_all_end(tmp_path)


WATCHED = """
import os, time
from flax_mesh.processes import Watch, watchdog
watchdog.REPORT_S = watchdog.LINGER_S = 0.5
print("ready", flush=True)
with Watch(print, 1.0):
    time.sleep(300)
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
        assert process.wait(TIME_LIMIT_S) == 5
    finally:
        process.kill()
        process.wait()
        os.close(write)
        if what == "full":
            os.close(read)


FIRST_5 = "(?s)first, process 1 ended with exit code 5"


@pytest.mark.parametrize(
    ("codes", "expected", "text"),
    [
        ((0, 0), 0, ""),
        ((4, 4), 4, "exit code 4\nflax-mesh launch: stopped"),
        ((3, 0), 3, "first, process 0 ended with exit code 3"),
        ((-9, 0), 5, "first, process 0 was terminated by SIGKILL"),
        ((7, 5), 7, "ended with exit code 7"),
        pytest.param((1, 5), 1, f"{FIRST_5}.*process 0 ended with exit code 1", marks=pytest.mark.slow),
    ],
)
def test_a_launch_exits_with_the_code_of_the_first_failure(codes, expected, text, capfd):
    program = f"""
import os, sys, time
code = {codes}[int(sys.argv[1].removeprefix("--process=")[0])]
print("own", sys.argv[2], flush=True)
time.sleep(4 * (code == 1))
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
    assert launch(["-S", "-c", program], 2, ["last"]) == expected
    out, errors = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] own last", "[1] own last"]
    assert re.search(text, errors) and bool(errors) == bool(text)
