"""Collective operations, coordinated stopping, and the failure of one process of several."""

import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from flax_mesh.cli.main import main
from flax_mesh.cli.train import devices_of_process, same_command
from flax_mesh.errors import CheckpointCorruptedError, ConfigError, PeerError
from flax_mesh.processes import Watch, assert_equal, broadcast_from_process_0, start, stop_together
from flax_mesh.processes.agree import Phases
from flax_mesh.processes.launchers import LAUNCHERS, PORT, detect_launcher, pod_number
from flax_mesh.processes.start import Processes, check_coordinator, parse_processes
from tests.multiprocess.cases import error_of, put_and_get_all
from tests.multiprocess.in_threads import in_threads
from tests.multiprocess.processes import ROOT, TIME_LIMIT_S, free_port, run_workers, texts


def agreement(here: int) -> None:
    """The collective operations have the same results and raise the same errors in all processes."""
    assert_equal("same", {"seed": "0", "mesh": "pp:2"})
    own = {"seed": str(here % 2), "mesh": "pp:2", **({"odd": "x"} if here else {})}
    differing = error_of(lambda: assert_equal("other", own))
    assert "seed: 0 on processes 0, 2; 1 on process 1" in differing, differing
    assert "odd: (missing) on process 0; x on processes 1, 2" in differing, differing
    assert "mesh" not in differing
    assert [broadcast_from_process_0("number", lambda: f"of {here}") for _ in range(2)] == ["of 0", "of 0"]

    def wrong() -> str:
        raise ConfigError("the folder is locked")

    def damaged() -> str:
        raise CheckpointCorruptedError("a file is missing")

    sender = "process 0: " if here else ""
    assert sender + "the folder is locked" == error_of(lambda: broadcast_from_process_0("folder", wrong))
    missing = error_of(lambda: broadcast_from_process_0("step", damaged), CheckpointCorruptedError)
    assert missing == sender + "a file is missing"

    for failing in (2, 0, None):  # None: no process fails
        phases = Phases("task", ("one", "two", "three"))
        phases.passed("one")
        if here == failing:
            phases.failed(f"process {failing}: no room")
        elif failing is None:
            phases.passed("two")
            phases.passed("three")
        else:
            assert f"process {failing}: no room" == error_of(lambda p=phases: p.passed("two"), PeerError)
            phases.failed("already known")
        assert phases.is_past("one") and phases.is_past("two") == phases.is_past("three") == (failing is None)

    stop = stop_together(lambda: here == 2 and step == 3)  # one process is asked to stop, in step 3
    for step in range(1, 20):
        put_and_get_all(f"step {step}", "ended")  # as metrics, which exist once all processes dispatched the step
        if stop():
            break
    assert 3 <= step <= 7, step
    last = put_and_get_all("stopped", str(step))
    assert len(set(last)) == 1, last


def test_collective_operations_have_the_same_result_in_all_processes(monkeypatch):
    in_threads(monkeypatch, 3, agreement)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "codes", "expected"),
    [
        ("fails", [5, 1], ["reported: something in", "process 1 has failed: RuntimeError: something in"]),
        ("fails unheard", [5, 1], ["process 1 has failed: RuntimeError: something in"]),
        ("ends", [5, 7], ["lost process 1: its connection is closed", r"0 was waiting: group 0 for .* \(process 1\)"]),
        ("stuck", [5, 5], ["no step has finished within 4 s, after 4 steps since the start", "Current thread"]),
        ("omits a call", [5] * 4, [r"process 3 was waiting: group 3 for the input of F of stage 3, microbatch \d"]),
    ],
)
def test_a_process_that_fails_or_blocks_ends_the_others_with_a_reason(what, codes, expected):
    ended = run_workers("watched", len(codes), 1, what)
    text = texts(ended)
    assert [one.code for one in ended] == codes, text
    assert all(re.search(pattern, text) for pattern in expected), text
    assert "step 0 loss" in ended[0].output and "step 5 loss" not in ended[0].output, text
    assert "flax_mesh_watch" not in text, text  # no stack of the thread that prints the stacks


def test_a_single_process_has_a_step_timeout_too():
    program = "import time\nfrom flax_mesh.processes import Watch\nwith Watch(print, 1.0):\n    time.sleep(30)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert ended.returncode == 5, ended.stderr
    assert 'File "<string>", line 4' in ended.stderr  # the stack of the main thread
    assert "flax-mesh: no step has finished within 1 s, after 0 steps since the start" in ended.stderr


def test_processes_are_parsed_from_text():
    assert parse_processes("2/4@10.0.0.1:1234") == Processes(2, 4, "10.0.0.1:1234")
    for invalid in ("2/4", "4/4@host:1", "a/b@host:1", "0/1@host"):
        with pytest.raises(ConfigError, match="must be I/N@HOST:PORT"):
            parse_processes(invalid)
    for port in ("0", "65536", "99999"):
        with pytest.raises(ConfigError, match=rf"must have a port in 1\.\.65535, got {port}"):
            parse_processes(f"0/1@host:{port}")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", ("Open MPI", 1, 4, "")),
        ("PMI_RANK=0 PMI_SIZE=2", ("MPICH or Intel MPI", 0, 2, "")),
        ("MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4", ("MVAPICH", 3, 4, "")),
        ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", ("srun", 1, 2, "")),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", None),  # the script of a job, which runs once
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500", ("torchrun", 1, 2, "node0:29500")),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True",
            ("torchrun", 1, 2, "node0:29501"),
        ),
        ("RANK=1 WORLD_SIZE=2", ("torchrun", 1, 2, "")),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=node0", ("torchrun", 1, 2, "")),
        (
            "NODE_RANK=1 NNODES=2 JAX_COORDINATOR_ADDRESS=job-slice-0-0.job JAX_COORDINATOR_PORT=6002",
            ("xpk", 1, 2, "job-slice-0-0.job:6002"),
        ),
        (
            "SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_IPS=10.0.0.1\n10.0.0.2",
            ("SkyPilot", 1, 2, "10.0.0.1:8476"),
        ),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 PMI_RANK=1 PMI_SIZE=2", ("MPICH or Intel MPI", 1, 2, "")),
    ],
)
def test_launchers_are_detected_by_their_variables(variables, expected):
    environment = dict(text.split("=", 1) for text in variables.split(" ") if text)
    found = detect_launcher({name: text.replace("\\n", "\n") for name, text in environment.items()})
    assert expected == (found and (found.launcher.name, found.index, found.count, found.coordinator))


@pytest.mark.parametrize("variables", [{"PMI_RANK": "x", "PMI_SIZE": "2"}, {"PMI_RANK": "2", "PMI_SIZE": "2"}])
def test_numbers_of_a_launcher_that_are_none_are_an_error(variables):
    with pytest.raises(ConfigError, match=r"MPICH or Intel MPI: PMI_RANK and PMI_SIZE must be .* got PMI_RANK="):
        detect_launcher(variables)


NO_CLUSTER = ValueError("coordinator_address should be defined.")
NO_COUNT = ValueError("Number of processes must be defined.")
OPEN_MPI_5 = RuntimeError("Open MPI 5 or newer requires mpi4py for distributed initialization.")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


def stand_ins(monkeypatch, variables, detected, *, has_mpi4py):
    """The calls of a jax.distributed that finds two processes, or raises the error `detected`."""
    calls, state = [], SimpleNamespace(num_processes=None)

    def initialize(*args, **options):
        calls.append(args or options)
        if not args and not options and detected is not None:
            raise detected
        state.num_processes = 2

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(start, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(start, "distributed_state", lambda: state)
    monkeypatch.setattr(start, "find_spec", lambda name: has_mpi4py or None)
    monkeypatch.setattr(start, "detect_launcher", lambda: detect_launcher(variables))
    monkeypatch.setattr(start, "pod_number", lambda: pod_number(variables))
    return calls


@pytest.mark.parametrize("has_mpi4py", [False, True])
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_every_launcher_is_joined_with_and_without_mpi4py(monkeypatch, launcher, has_mpi4py):
    """Where it states the address of process 0, and where it does not and JAX detects no cluster either."""
    numbers, mpi4py = {launcher.index: "1", launcher.count: "2"}, {"cluster_detection_method": "mpi4py"}
    if launcher.hosts:
        address = {launcher.hosts: "10.0.0.1", launcher.port: "1234"}
        calls = stand_ins(monkeypatch, numbers | address, NO_CLUSTER, has_mpi4py=has_mpi4py)
        assert start.start_processes(None) == 2
        asked, stated = [{}] * (not launcher.misleads_jax), f"10.0.0.1:{1234 if launcher.port else PORT}"
        assert calls == [*asked, (stated, 2, 1)]
    calls = stand_ins(monkeypatch, numbers, NO_CLUSTER, has_mpi4py=has_mpi4py)
    if has_mpi4py:
        assert start.start_processes(None) == 2 and calls == [{}, mpi4py]
    else:
        with pytest.raises(ConfigError, match=f"{launcher.count}=2: {launcher.name} has started 2 processes, but JAX"):
            start.start_processes(None)


@pytest.mark.parametrize(
    ("variables", "detected", "has_mpi4py", "coordinator", "expected"),
    [
        ({}, NO_CLUSTER, False, "", [{}]),
        (MPI, None, False, "", [{}]),  # JAX knows Open MPI 4
        (TORCHRUN, NO_CLUSTER, False, "", [{}, ("10.0.0.1:1234", 2, 1)]),
        ({"NODE_RANK": "1", "NNODES": "2"}, NO_COUNT, False, "", r"NNODES=2: xpk has started 2 processes, but JAX has"),
        ({"JOB_COMPLETION_INDEX": "2"}, NO_CLUSTER, False, "", "INDEX=2: Kubernetes has started several pods, but JAX"),
        ({"JOB_COMPLETION_INDEX": "2"}, None, False, "", [{}]),  # by the package kubernetes
        (MPI, OPEN_MPI_5, False, "10.0.0.1:55", [("10.0.0.1:55", 2, 1)]),
        (MPI, NO_CLUSTER, True, "", [{}, {"cluster_detection_method": "mpi4py"}]),
        (MPI, OPEN_MPI_5, False, "", r"OMPI_COMM_WORLD_SIZE=2: Open MPI has started 2 processes, but JAX has one"),
        (MPI, NO_CLUSTER, False, "10.0.0.1", "--coordinator must be HOST:PORT, got '1/2@10.0.0.1'"),
        ({}, NO_CLUSTER, False, "10.0.0.1:55", "needs a launcher that numbers the processes"),
    ],
)
def test_processes_of_a_launcher_are_joined_or_refused(
    monkeypatch, variables, detected, has_mpi4py, coordinator, expected
):
    calls = stand_ins(monkeypatch, variables, detected, has_mpi4py=has_mpi4py)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            start.start_processes(None, coordinator=coordinator)
    else:
        assert start.start_processes(None, coordinator=coordinator) == (2 if variables else 1)
        assert calls == expected


def test_the_job_of_the_docs_is_queued_again_after_a_signal_alone(tmp_path):
    """The script for Slurm, with stand-ins for srun, scontrol and a run that ends with each exit code."""
    page = (ROOT / "docs" / "multiprocess.md").read_text()
    (script,) = [
        block.partition("```")[0] for block in page.split("```bash\n") if "scontrol" in block.partition("```")[0]
    ]
    programs = {"srun": '"$@"', "scontrol": 'echo "$@"', "flax-mesh": 'exit "$CODE"'}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for code in (0, 1, 4, 5):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code), "SLURM_JOB_ID": "7"}
        ended = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S
        )
        assert (ended.returncode, ended.stdout) == (code, "requeue 7\n" if code == 4 else ""), ended.stderr


@pytest.mark.parametrize("command", ["generate", "evaluate"])
@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (MPI, "OMPI_COMM_WORLD_SIZE=2: Open MPI has started 2"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1: Kubernetes has started several pods"),
    ],
)
def test_commands_of_one_process_are_refused_under_a_launcher(monkeypatch, capsys, command, variables, text):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([command, "no such folder"]) == 2
    assert f"flax-mesh {command} runs in one process, but {text}" in capsys.readouterr().err


def test_an_address_at_which_process_0_cannot_listen_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for address, reason in (
            (f"127.0.0.1:{port}", "Address already in use"),
            ("no-such-host.invalid:1234", "not known|resolution|No address"),
            ("127.0.0.1:1234:55", "not known|resolution|No address"),
            ("a" * 300 + ":1234", "label"),
        ):
            with pytest.raises(ConfigError, match=f"process 0 cannot listen at .* \\(.*({reason})"):
                check_coordinator(address)
    check_coordinator(f"127.0.0.1:{free_port()}")


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_step_timeout_must_be_positive(seconds):
    with pytest.raises(ConfigError, match=f"step_timeout_s must be more than 0 seconds, got {seconds:g}"):
        Watch(lambda error: 1, seconds)


def test_virtual_devices_are_divided_evenly_among_processes():
    assert devices_of_process("cpu:8", 4, None) == "cpu:2"
    assert devices_of_process("cpu:8", 1, None) == "cpu:8"
    assert devices_of_process("auto", 4, None) == "auto"
    assert devices_of_process("cpu:8", 4, 3) == "cpu:3"
    with pytest.raises(ConfigError, match="cannot be divided among 3 processes"):
        devices_of_process("cpu:8", 3, None)
    with pytest.raises(ConfigError, match="--devices-per-process requires run"):
        devices_of_process("gpu", 2, 2)


def test_the_command_to_resume_uses_launch_again():
    argv = ["train", "recipe.py", "mesh.shape=pp:4", "--process=0/4@127.0.0.1:1", "--devices-per-process=2"]
    again = "launch -n 4 --devices-per-process=2 -- train recipe.py mesh.shape=pp:4"
    assert same_command(argv, "0/4@127.0.0.1:1") == again.split()
    assert same_command(["train", "recipe.py"], None) == ["train", "recipe.py"]
