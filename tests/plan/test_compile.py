"""`plan --compile`: the numbers are XLA's, the walk over the program finds them, and the process that compiles ends.

The tests for TPUs are slow, and need libtpu.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from flax_mesh.cli import main
from flax_mesh.errors import ConfigError
from flax_mesh.hlo.collectives import read_collectives
from flax_mesh.hlo.program import read_hlo
from flax_mesh.plan.compile import Compiled, compile_recipe, recipe, worker
from flax_mesh.plan.compile.child import ask, first_message, how_it_ended
from flax_mesh.plan.compile.live import walk
from flax_mesh.plan.compile.read import gathers, operation_text, rematerialized
from flax_mesh.plan.compile.target import GPU_TARGETS, check_target, environment, group_topology
from flax_mesh.plan.topology import parse_topology

ROOT = Path(__file__).parents[2]
TINY, MOE = str(ROOT / "recipes" / "tiny.py"), str(ROOT / "recipes" / "tiny_moe.py")
SMALL = ["model.scan=true", "model.num_layers=2"]
WALK = 0.05  # the walk finds XLA's peak of a step within this part of it
STAGE = 0.12  # and the peak of a small stage, whose results XLA allocates for the whole run on CPUs
TPU_FIXED = 8 * 2**20  # on TPUs, where XLA counts on-chip arrays of small programs otherwise

NO_LIBTPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install flax-mesh[tpu-aot]")


def on_tpus(test):
    return pytest.mark.slow(NO_LIBTPU(test))


def check_walk(found: Compiled, fixed: int = 0) -> None:
    for program in found.programs:
        assert abs(program.walked - program.peak) <= WALK * program.peak + fixed, program


# Compiled for CPUs


@pytest.fixture
def in_this_process(monkeypatch, tmp_path):
    """Compiles here instead of in another process."""
    limit, messages = "jax_traceback_in_locations_limit", tmp_path / "messages"
    before = jax.config.values[limit]
    messages.touch()

    def ask(request, topology, limit, say):
        found = worker.compile_request({**request, "messages": messages}, say)
        return "result", found | {"seconds": 1.0, "cpu_seconds": 1.0, "rss": 1}

    monkeypatch.setattr(recipe, "ask", ask)
    yield
    jax.config.update(limit, before)


def test_a_pipeline_is_compiled_stage_by_stage_and_may_not_fit(tmp_path, capsys, in_this_process, quick_compilation):
    hardware = tmp_path / "small.toml"
    hardware.write_text('base = "cpu"\nname = "small"\nmemory = 1e6\n')
    pipeline = ["mesh.shape=pp:2,fsdp:2,tp:2", "pipeline.num_microbatches=4", "pipeline.schedule=zb-h1"]
    settings = [*pipeline, f"run.hardware={hardware}", *SMALL]
    code = main(["plan", TINY, *settings, "--topology", "small:8", "--compile", "--json"])
    printed = json.loads(capsys.readouterr().out)
    found = printed["compiled"]
    assert code == 3 and found["fits"] is False and printed["fits"] is False
    assert {(program["name"], program["times"]) for program in found["programs"]} == {
        (f"{kind} of stage {stage}", 4) for kind in "FBW" for stage in (0, 1)
    }
    assert len(found["groups"]) == 2 and found["peak"] == max(found["groups"])
    assert found["peak"] == pytest.approx(printed["memory"]["peak"], rel=0.1)
    for program in found["programs"]:
        assert program["walked"] == pytest.approx(program["peak"], rel=STAGE)
    assert found["sent"] and all("pp" not in each["axes"] for each in found["sent"])
    sent, planned = (
        {tuple(each["axes"]): each["operand_bytes"] for each in one if each["kind"] == "all-gather"}
        for one in (found["sent"], printed["traffic"])
    )
    assert not found["findings"]
    places = [array["place"] for program in found["programs"] for array in program["live"]]
    assert any("/Decoder/DecoderLayer/" in place for place in places), places
    assert sent[("fsdp",)] == pytest.approx(planned[("fsdp",)], rel=0.02)


SURPRISES = """
import jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from flax_mesh.train import *

class Swap(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.out = nnx.Embed(256, 256, rngs=rngs), nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, x):
        fixed = jax.lax.with_sharding_constraint
        x = fixed(jnp.sin(self.embed(x)), P("fsdp", None, "tp"))
        x = fixed(jnp.cos(x), P("tp", "fsdp", None))
        x = fixed(jnp.sin(x), P(None, None, ("fsdp", "tp")))
        return self.out(fixed(jnp.tanh(x), P()))

def loss(model, batch):
    return jnp.square(model(batch["inputs"])).sum(), batch["inputs"].size

def recipe():
    return TrainConfig(
        lambda config, rngs: Swap(rngs), loss, None, rules="fsdp", mesh=MeshConfig("fsdp:2,tp:4"),
        data=DataConfig(source="stdlib", batch_size=8, sequence_length=64), run=RunConfig(platform="cpu:8"),
    )
"""


def test_rematerialized_and_gathered_activations_are_findings_with_their_module(tmp_path):
    recipe = tmp_path / "surprises.py"
    recipe.write_text(SURPRISES)
    said: list[str] = []
    compiled = compile_recipe(str(recipe), [], "cpu:8", say=said.append)
    assert said == ["tracing", "lowering", "compiling", "reading the program"]
    check_walk(compiled)
    assert compiled.fits and compiled.peak == compiled.programs[0].peak == compiled.groups[0]
    assert compiled.programs[0].arguments == compiled.plan.memory.arguments
    assert any(array.place.startswith("Swap (surprises.py:") for array in compiled.programs[0].live)
    assert len(compiled.programs[0].live) == 10
    text = compiled.to_text()
    assert "fits: " in text and "the largest arrays at the peak" in text and max(map(len, text.splitlines())) <= 80
    found = [f for f in compiled.findings if f.path.startswith("Swap (surprises.py:")]
    assert any("involuntary full rematerialization" in finding.problem for finding in found), found
    assert any("exchanges an activation here (all-gather" in finding.problem for finding in found), found


# The process


def test_a_compile_over_its_limit_is_an_error_in_one_line():
    with pytest.raises(ConfigError, match=r"^compiling took longer than the limit of 0.2 s and was stopped while \w+"):
        ask({}, parse_topology("cpu:8"), 0.2, print)


PARENT = """
import sys
from flax_mesh.plan.compile import compile_recipe
compile_recipe(sys.argv[1], [], "cpu:8", say=lambda text: print(text, flush=True))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children of a process are read from /proc")
def test_the_process_ends_when_its_parent_is_killed():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PARENT, TINY]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "tracing\n"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        workers = [pid for pid in children if b"plan.compile.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 1
        while parent.stdout.readline() != "compiling\n":
            pass
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while runs(workers[0]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs(workers[0])


def runs(pid: str) -> bool:
    """Whether the process exists and is neither a zombie nor dead."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"


def test_the_environment_of_the_process_is_its_own():
    inherited = {"HOME": "/", "JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--x"}
    found = environment(parse_topology("v5e:2x4"), inherited)
    assert found["JAX_PLATFORMS"] == "cpu" and found["TPU_SKIP_MDS_QUERY"] == "1" and found["HOME"] == "/"
    assert "XLA_FLAGS" not in found and "TPU_SKIP_MDS_QUERY" not in environment(parse_topology("cpu:8"), inherited)


def test_the_reason_why_a_compiler_ended_or_failed_is_one_line():
    messages = "W1123 spmd: a warning\nF1123 08:00:00.1 77 cost_model.cc:912] Check failed: replica_groups\n@ 0x1\n"
    assert how_it_ended(-6, messages).startswith("by SIGABRT: F1123 08:00:00.1 77 cost_model.cc:912] Check failed")
    assert how_it_ended(1, "") == "with exit code 1: it printed no reason"
    text = "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem"
    assert first_message(text) == "E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem"
    assert first_message("INVALID_ARGUMENT: no such\n topology") == "INVALID_ARGUMENT: no such"


# Errors before it


def without(module: str):
    installed = importlib.util.find_spec(module) is not None
    return pytest.mark.slow, pytest.mark.skipif(installed, reason=f"{module} is installed")


@pytest.mark.parametrize(
    ("topology", "settings", "limit", "problem"),
    [
        ("v9:2x4", [], 600, "unknown chip 'v9'"),
        ("cpu:8", ["mesh.shape=dp:4"], 600, "the sizes multiply to 4, not to 8"),
        ("cpu:8", [], 0, "positive number of seconds, got 0"),
        ("b200:1x8", SMALL, 600, "known for H100 only"),
        pytest.param("v5e:2x4", [], 600, r"requires libtpu: pip install .*\[tpu-aot\]'$", marks=without("libtpu")),
        pytest.param("h100:1x8", [], 600, r"plugin and nvcc: .*\[gpu-aot\]'$", marks=without("jax_cuda12_plugin")),
    ],
)
def test_wrong_input_and_a_missing_compiler_are_errors_in_one_line(topology, settings, limit, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        compile_recipe(TINY, settings, topology, limit=limit)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("name", GPU_TARGETS.values())
def test_the_figures_of_a_gpu_are_part_of_the_package(name):
    path = ROOT / "flax_mesh" / "plan" / "compile" / name
    assert "cuda_compute_capability { major: 9 }" in path.read_text()


GROUPS = [("v5p:4x4x4", {"pp": 2, "fsdp": 32}, 32), ("v5e:2x4*2", {"pp": 2, "fsdp": 8}, 8)]
GROUPS += [("v5e:4x4", {"pp": 4, "fsdp": 2, "tp": 2}, 4)]


@pytest.mark.parametrize(("topology", "mesh", "group"), GROUPS)
def test_a_group_has_a_topology_of_its_own_shape_of_whole_chips(topology, mesh, group):
    found = group_topology(parse_topology(topology), mesh)
    assert found.num_devices == group and found.num_slices == 1
    assert parse_topology(found.text) == found
    with pytest.raises(ConfigError, match="pp splits the devices of a chip"):
        group_topology(parse_topology("v7x:2x2x2"), {"pp": 4, "fsdp": 4})


# Findings


def test_the_operation_of_a_source():
    recomputed = "jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/mul"
    assert operation_text(recomputed) == "recomputed mul"
    assert operation_text("jit(step)/jvp()/vmap(BTNH,BSNH->BNTS)/dot_general") == "dot_general"
    assert operation_text("broadcast.92") == "broadcast"


ESCAPED = r"""HloModule step, num_partitions=2

FileNames
1 "/home/me/model.py"

FunctionNames
1 "Net.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY %main (a: f32[256]) -> f32[512] {
  %a = f32[256]{0} parameter(0)
  %sine = f32[256]{0} sine(%a)
  ROOT %r = f32[512]{0} all-gather(%sine), replica_groups={{0,1}}, metadata={op_name="METADATA" stack_frame_id=1}
}
""".replace("METADATA", r"jit(step)/jvp()/a\"b\\c\'d\303\251/sin")


def test_findings_of_an_operation_with_quotes_and_backslashes_have_its_line():
    program = read_hlo(ESCAPED)
    collectives = read_collectives(program, AbstractMesh((2,), ("tp",)))
    assert [one.source for one in collectives] == ["jit(step)/jvp()/a\"b\\c'dé/sin"]
    (gathered,) = gathers(collectives, walk(program).weights, program)
    instruction = ESCAPED.splitlines()[-2]
    message = f"Involuntary full rematerialization: go from sharding {{a}} to {{b}} for {instruction}"
    (rematerialized_value,) = rematerialized(message, [program])
    assert gathered.path == rematerialized_value.path == "Net (model.py:10) sin"


# Compiled for TPUs

TPU_CASES = [
    ("v5e:2x4", TINY, ["model.remat=full"]),
    ("v5p:2x2x2", TINY, ["mesh.shape=fsdp:4,tp:2"]),
    ("v5e:2x4", MOE, ["mesh.shape=fsdp:2,ep:2,tp:2"]),
    ("v5p:2x2x2", MOE, ["mesh.shape=fsdp:4,ep:2"]),
    ("v5e:2x4", TINY, ["mesh.shape=fsdp:2,tp:2,sp:2"]),
    ("v5p:2x2x2", TINY, ["mesh.shape=fsdp:2,sp:4"]),
    ("v5e:2x4", TINY, ["mesh.shape=pp:2,fsdp:4", "pipeline.num_microbatches=4"]),
    ("v5p:2x2x2", TINY, ["mesh.shape=pp:2,fsdp:2,tp:2", "pipeline.num_microbatches=4"]),
    ("v5e:2x2*2", TINY, ["mesh.shape=dp:2,fsdp:4"]),
]


@on_tpus
@pytest.mark.parametrize(("topology", "recipe", "settings"), TPU_CASES)
def test_recipes_are_compiled_for_tpus(topology, recipe, settings):
    found = compile_recipe(recipe, ["model.scan=true", "model.num_layers=2", *settings], topology)
    assert found.fits and found.sent
    split = {axis for axis, size in found.plan.mesh.items() if size > 1}
    assert {axis for each in found.sent for axis in each.axes} == split - {"pp"}
    check_walk(found, TPU_FIXED)
    assert any("Decoder" in array.place or "argument" in array.place for array in found.programs[0].live)


def peaks(lengths: tuple[int, ...], *settings: str) -> list[int]:
    base = ["model.scan=true", "model.num_layers=2", "model.remat=full", "model.dtype=bfloat16", "data.batch_size=4"]
    base += ["mesh.shape=fsdp:4,tp:2", *settings]
    return [compile_recipe(TINY, [*base, f"data.sequence_length={n}"], "v5p:2x2x2").peak for n in lengths]


@on_tpus
def test_splash_attention_stores_no_scores_on_tpus():
    """Twice the length doubles the peak, which is below the scores of one layer; with XLA's attention it is above."""
    short, long = peaks((2048, 4096))
    scores = 2 * 4096 * 4096 * 2  # of one row, two heads of a device, in bfloat16
    assert 1.8 * short < long < 2.2 * short and long < scores / 2
    assert peaks((4096,), "model.attention=xla") == [long]  # run.attention=auto takes splash attention
    assert peaks((4096,), "model.attention=xla", "run.attention=as_written")[0] > 2 * scores


@on_tpus
@pytest.mark.parametrize(
    "settings",
    [
        ["model.dtype=bfloat16", "model.sliding_window=700", "model.head_dim=12", "mesh.shape=fsdp:2,tp:2,sp:2"],
        ["model.dtype=bfloat16", "mesh.shape=pp:2,fsdp:2,tp:2", "pipeline.num_microbatches=2"],
        ["model.dtype=float32", "model.head_dim=256", "mesh.shape=fsdp:8", "model.remat=attention"],
    ],
    ids=["window,sp", "pp", "float32"],
)
def test_splash_attention_is_compiled_for_tpus(settings):
    found = compile_recipe(TINY, ["model.num_layers=2", "data.sequence_length=1024", *settings], "v5p:2x2x2")
    note = "attention: splash, because the devices are TPUs (model.attention=auto)"
    assert found.fits and found.plan.notes[0] == note


@on_tpus
def test_the_walk_finds_the_peak_of_a_large_program_for_tpus():
    settings = ["model.scan=true", "model.remat=full", "model.hidden_size=1024", "model.mlp_size=4096"]
    found = compile_recipe(TINY, [*settings, "data.batch_size=256", "data.sequence_length=1024"], "v5p:2x2x2")
    check_walk(found)
    assert any(array.place.startswith("Decoder/DecoderLayer/") for array in found.programs[0].live)


@on_tpus
def test_a_step_that_does_not_fit_a_tpu_is_no_error():
    settings = ["model.scan=true", "model.num_layers=2", "data.batch_size=4096", "data.sequence_length=4096"]
    found = compile_recipe(TINY, settings, "v5e:2x4")
    assert found.fits is False and found.peak > found.plan.topology.chip.memory
    assert "does not fit" in found.to_text()


def test_a_chip_of_a_file_is_compiled_as_its_base():
    base = parse_topology("v5e:2x4")
    missing = importlib.util.find_spec("libtpu") is None
    with pytest.raises(ConfigError, match="libtpu") if missing else nullcontext():
        check_target(replace(base, chip=replace(base.chip, name="mine")))
