"""Mutated files of checkpoints and of safetensors folders, seeded: every command prints lines and returns a documented
code. The checksums of the checkpoints are rewritten after the mutation, so that they do not end the test early."""

import copy
import json
import random
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.checksums import write_checksums
from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE, FINDINGS
from flax_mesh.errors import ConfigError
from flax_mesh.train.metadata import check_resume, layout_changes, run_metadata
from flax_mesh.train.metrics import StepCheck
from tests.checkpoint.small_decoder import QWEN, RECIPE, program_of
from tests.train.bigram import write_text

pytestmark = pytest.mark.usefixtures("on_cpu")

CODES = (DONE, BAD_INPUT, FINDINGS)


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


VALUES = (
    *(None, True, False, 0, -1, 10**400, -(10**30), 1e308, -1.5, float("nan"), float("inf"), "", "x", "9" * 5000),
    *("\x1b[31m\n\u202e", "../../etc/passwd", "/dev/zero", [], [[]], [1, "a", None], {}, {"": {}}, nested(400)),
)


def mutated_json(value, rng: random.Random):
    """`value` with one node replaced, removed or repeated."""
    value = copy.deepcopy(value)
    nodes = list(containers(value))
    if not nodes:
        return rng.choice(VALUES)
    node = rng.choice(nodes)
    key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    kind = rng.random()
    if kind < 0.7:
        node[key] = rng.choice(VALUES)
    elif kind < 0.85:
        del node[key]
    elif isinstance(node, dict):
        node[f"{key}{rng.choice(['', ' ', '/x', '.x'])}2"] = node[key]
    else:
        node.append(node[key])
    return value


def containers(value):
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    at, kind = rng.randrange(len(data)), rng.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.randbytes(rng.randrange(1, 20)) + data[at:]
    changed = bytearray(data)
    changed[at] = rng.randrange(256)
    return bytes(changed)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A mutation of a file of JSON, or of any bytes."""
    if rng.random() < 0.25:
        return mutated_bytes(data, rng)
    if rng.random() < 0.1:
        deep = rng.choice([900, 5000, 200_000])
        return b'{"a":' * deep + b"1" + b"}" * deep
    try:
        value = json.loads(data)
    except ValueError:
        return mutated_bytes(data, rng)
    return json.dumps(mutated_json(value, rng)).encode()


def run(command, *argv) -> int:
    """The exit code, after the check of what is printed."""
    code, out, err = command(*argv)
    assert code in CODES, argv
    assert all(line.startswith("flax-mesh: ") for line in err.splitlines()), err
    assert bool(err) == (code == BAD_INPUT or (code == FINDINGS and not out)), (code, out, err)
    assert all(char.isprintable() or char == "\n" for char in out + err)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_mutated_metadata(command, saved, tmp_path, seed):
    rng = random.Random(seed)
    step = Path(shutil.copytree(saved / "checkpoints" / "5", tmp_path / "c" / "5"))
    file = step / "metadata" / "metadata"
    data = file.read_bytes()
    for _ in range(25):
        file.write_bytes(mutated(data, rng))
        write_checksums(step)
        for argv in (["list"], ["inspect"], ["inspect", "--json"], ["verify"], ["diff", saved], ["diff", RECIPE]):
            run(command, argv[0], tmp_path / "c", *argv[1:])


@pytest.mark.slow
def test_a_run_resumes_from_mutated_metadata_or_refuses_it(saved, tmp_path):
    """The parts of a resumed run that read the metadata, without its compilation."""
    rng, config = random.Random(7), program_of().config
    step = Path(shutil.copytree(saved / "checkpoints" / "5", tmp_path / "5"))
    file, refused = step / "metadata" / "metadata", 0
    data = file.read_bytes()
    now = run_metadata(step)
    for _ in range(200):
        file.write_bytes(mutated(data, rng))
        try:
            record = run_metadata(step)
            StepCheck(config.run, record).limits(8)
            assert all(isinstance(line, str) for line in layout_changes(record, now))
            [str(change) for change in check_resume(record, now, config, allow_changes=True)]
            check_resume(record, now, config, allow_changes=False)
        except ConfigError as error:
            refused += 1
            assert len(str(error)) < 10_000
    assert 20 < refused < 180


@pytest.mark.slow
def test_a_run_does_not_resume_from_a_checkpoint_of_the_python_interface(capsys, tmp_path):
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        checkpointer.save(1, nnx.State({"model": {"w": jnp.ones(3)}}))
    argv = ["train", RECIPE, f"data.source={write_text(tmp_path)}", "model.vocab_size=256", "run.sample_tokens=0"]
    assert main([*argv, f"run.folder={tmp_path / 'run'}"]) == BAD_INPUT
    _, err = capsys.readouterr()
    assert err.startswith(f"flax-mesh: {tmp_path}/run/checkpoints/1 was not saved by a run"), err
    assert "checkpoint.start_from=" in err and err.count("\n") == 1


# An exception of tensorstore that nothing awaits; the command line suppresses its message (cli/main.py).
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_mutated_index_files(command, saved, tmp_path, seed):
    rng = random.Random(100 + seed)
    step = Path(shutil.copytree(saved / "checkpoints" / "5", tmp_path / "c" / "5"))
    names = [path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file() and "/d/" not in str(path)]
    assert {"state/_METADATA", "state/_sharding", "state/manifest.ocdbt", "checksums.json", "step"} <= set(names)
    for number in range(40):
        name = rng.choice(names)
        before = (step / name).read_bytes()
        (step / name).write_bytes(mutated(before, rng) if before else b"x")
        if name != "checksums.json":
            write_checksums(step)
        for argv in (["list", "--quick"], ["inspect"], ["verify"]):
            run(command, argv[0], tmp_path / "c", *argv[1:])
        if number % 4 == 0:
            run(command, "export", tmp_path / "c", tmp_path / "out", "--to", "orbax")
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (step / name).write_bytes(before)
        write_checksums(step)
    assert run(command, "verify", tmp_path / "c") == DONE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_mutated_folders_of_safetensors(command, tmp_path, name):
    rng = random.Random(name)
    folder = Path(shutil.copytree(QWEN, tmp_path / "hf"))
    if name.endswith("index.json"):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        names = header_of((folder / "a.safetensors").read_bytes())[1].keys() - {"__metadata__"}
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}))
    data = (folder / name).read_bytes()
    codes = set()
    for _ in range(70):
        (folder / name).write_bytes(mutated_header(data, rng) if name == "model.safetensors" else mutated(data, rng))
        codes.add(run(command, "import", folder, tmp_path / "out"))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert FINDINGS in codes and len(codes) > 1


def header_of(data: bytes) -> tuple[int, dict]:
    size = int.from_bytes(data[:8], "little")
    return size, json.loads(data[8 : 8 + size])


def mutated_header(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.choice([0, 1, 2**32, 2**63, len(data)]).to_bytes(8, "little") + data[8:]
    size, _ = header_of(data)
    header = mutated(data[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def test_commands_on_what_is_no_checkpoint(command, tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "state").write_text("x")
    (tmp_path / "8").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    bad = [
        tmp_path / "8",
        tmp_path / "notes.txt",
        tmp_path / "empty",
        "/dev/null",
        "/proc/self",
        "",
        "x" * 5000,
        "a\0b",
    ]
    for path in [*bad, tmp_path, tmp_path / "7"]:
        for argv in (["list", path], ["inspect", path], ["verify", path], ["diff", path, path], ["diff", path, RECIPE]):
            assert run(command, *argv) in ((BAD_INPUT,) if path in bad else (BAD_INPUT, FINDINGS, DONE)), argv
        for argv in (["export", path, tmp_path / "out", "--to", "orbax"], ["import", path, tmp_path / "out"]):
            assert run(command, *argv) in (BAD_INPUT, FINDINGS), argv


def test_a_checkpoint_of_plain_orbax_is_inspected(command, tmp_path):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as plain:
        plain.save(tmp_path / "5", {"w": jnp.ones(3)})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as plain:
        items = {"state": ocp.args.StandardSave({"w": jnp.ones(3)})}
        plain.save(tmp_path / "6", args=ocp.args.Composite(**items))
    assert run(command, "inspect", tmp_path / "6") == DONE
    assert run(command, "inspect", tmp_path / "5") in (BAD_INPUT, FINDINGS)
    assert run(command, "verify", tmp_path / "6") == FINDINGS


def test_a_checkpoint_of_the_python_interface_has_no_settings(command, tmp_path):
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, nnx.State({"model": {"w": jnp.ones(3)}}), {"note": 1})
    assert json.loads(command("inspect", tmp_path / "c", "--json")[1])["config"] == {}
    assert "run.steps" not in command("inspect", tmp_path / "c")[1]
    assert run(command, "diff", tmp_path / "c", RECIPE) == FINDINGS
