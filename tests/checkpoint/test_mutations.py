"""Untrusted files: every command prints lines of printable characters and returns a documented code.

The mutations are seeded. The checksums are rewritten after each one, so that they do not end the test early."""

import json
import random
import shutil
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.checksums import write_checksums
from flax_mesh.checkpoint.read import finite, plain
from flax_mesh.cli.common import BAD_INPUT, DONE, FINDINGS
from flax_mesh.errors import ConfigError
from flax_mesh.recipe.saved import run_metadata
from flax_mesh.train.metadata import check_resume, layout_changes
from flax_mesh.train.metrics import StepCheck
from tests.checkpoint.small_decoder import QWEN, RECIPE, program_of

pytestmark = pytest.mark.usefixtures("on_cpu")

CODES = (DONE, BAD_INPUT, FINDINGS)
VALUES = (
    *(None, True, False, 0, -1, 10**400, -(10**30), 1e308, -1.5, float("nan"), float("inf"), "", "x", "9" * 5000),
    *("\x1b[31m\n\u202e", "../../etc/passwd", "/dev/zero", [], [[]], [1, "a", None], {}, {"": {}}),
    json.loads("[" * 400 + "]" * 400),
)
SECTIONS = ("config", "mesh", "axes", "rules", "layout", "data", "metrics", "versions", "recipe", "sharding")


def containers(value):
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def mutated_json(value, rng: random.Random):
    """`value` with one node replaced, removed or repeated, in place."""
    if not (nodes := list(containers(value))):
        return rng.choice(VALUES)
    node = rng.choice(nodes)
    key, kind = rng.choice(list(node) if isinstance(node, dict) else range(len(node))), rng.random()
    if kind < 0.7:
        node[key] = rng.choice(VALUES)
    elif kind < 0.85:
        del node[key]
    elif isinstance(node, dict):
        node[f"{key}{rng.choice(['', ' ', '/x', '.x'])}2"] = node[key]
    else:
        node.append(node[key])
    return value


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    inserted = rng.randbytes(rng.randrange(1, 20))
    return rng.choice([data[:at], data[:at] + inserted + data[at:], data[:at] + inserted[:1] + data[at + 1 :]])


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A mutation of a file of JSON, or of any bytes."""
    kind = rng.random()
    if kind < 0.25:
        return mutated_bytes(data, rng)
    if kind < 0.32:
        deep = rng.choice([900, 5000, 200_000])
        return b'{"a":' * deep + b"1" + b"}" * deep
    try:
        return json.dumps(mutated_json(json.loads(data), rng)).encode()
    except ValueError:
        return mutated_bytes(data, rng)


def is_printable(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def run(command, *argv) -> int:
    """The exit code, after the check of the printed lines."""
    code, out, err = command(*argv)
    assert code in CODES, argv
    assert all(line.startswith("flax-mesh: ") for line in err.splitlines()), err
    assert bool(err) == (code == BAD_INPUT or (code == FINDINGS and not out)), (code, out, err)
    assert is_printable(out + err), argv
    return code


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "count"), [(0, 4), (1, 60)])
def test_mutated_metadata(command, saved, tmp_path, seed, count):
    rng = random.Random(seed)
    step = Path(shutil.copytree(saved / "checkpoints" / "5", tmp_path / "c" / "5"))
    file = step / "metadata" / "metadata"
    data = file.read_bytes()
    for number in range(count):
        odd = json.dumps(json.loads(data) | {name: rng.choice(VALUES) for name in SECTIONS}).encode()
        file.write_bytes(mutated(data, rng) if number % 2 else odd)
        write_checksums(step)
        for argv in (["list", "--quick"], ["inspect"], ["diff", saved if number % 5 < 4 else RECIPE, "--json"]):
            run(command, argv[0], tmp_path / "c", *argv[1:])


@pytest.mark.slow
def test_a_run_resumes_from_mutated_metadata_or_refuses_it(saved, tmp_path):
    """The parts of a resumed run that read the metadata, without its compilation."""
    rng, config = random.Random(7), program_of().recipe.config
    step = Path(shutil.copytree(saved / "checkpoints" / "5", tmp_path / "5"))
    file, refused, now = step / "metadata" / "metadata", 0, run_metadata(step)
    data = file.read_bytes()
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


# An exception of tensorstore that nothing awaits; the command line suppresses its message (cli/main.py).
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_mutated_index_files(command, saved, tmp_path):
    rng = random.Random(100)
    step = Path(shutil.copytree(saved / "checkpoints" / "5", tmp_path / "c" / "5"))
    names = [path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file() and "/d/" not in str(path)]
    assert {"state/_METADATA", "state/_sharding", "state/manifest.ocdbt", "checksums.json", "step"} <= set(names)
    for number in range(80):
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
    data = (folder / "model.safetensors").read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    if name.endswith("index.json"):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        names = json.loads(header).keys() - {"__metadata__"}
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}))
    before, codes = (folder / name).read_bytes(), set()
    for _ in range(70):
        if name == "model.safetensors":
            changed = mutated(header, rng)
            size = rng.choice([0, 1, 2**32, 2**63, len(data)]) if rng.random() < 0.1 else len(changed)
            (folder / name).write_bytes(size.to_bytes(8, "little") + changed + data[8 + len(header) :])
        else:
            (folder / name).write_bytes(mutated(before, rng))
        codes.add(run(command, "import", folder, tmp_path / "out"))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert FINDINGS in codes and len(codes) > 1


def test_commands_on_folders_that_are_not_checkpoints(command, tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "state").write_text("x")
    (tmp_path / "8").write_text("x")
    (tmp_path / "empty").mkdir()
    bad = [tmp_path / "8", tmp_path / "empty", "/dev/null", "/proc/self", "", "x" * 5000, "a\0b"]
    for path in [*bad, tmp_path, tmp_path / "7"]:
        for argv in (["list", path], ["inspect", path], ["verify", path], ["diff", path, path], ["diff", path, RECIPE]):
            assert run(command, *argv) in ((BAD_INPUT,) if path in bad else (BAD_INPUT, FINDINGS, DONE)), argv
        for argv in (["export", path, tmp_path / "out", "--to", "orbax"], ["import", path, tmp_path / "out"]):
            assert run(command, *argv) in (BAD_INPUT, FINDINGS), argv


def test_checkpoints_that_no_run_has_saved_are_inspected(command, tmp_path):
    with ocp.StandardCheckpointer() as plain:
        plain.save(tmp_path / "5", {"w": jnp.ones(3)})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as plain:
        items = {"state": ocp.args.StandardSave({"w": jnp.ones(3)})}
        plain.save(tmp_path / "6", args=ocp.args.Composite(**items))
    assert run(command, "inspect", tmp_path / "6") == DONE
    assert run(command, "inspect", tmp_path / "5") in (BAD_INPUT, FINDINGS)
    assert run(command, "verify", tmp_path / "6") == FINDINGS
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, nnx.State({"model": {"w": jnp.ones(3)}}), {"note": 1})
    assert json.loads(command("inspect", tmp_path / "c", "--json")[1])["config"] == {}
    assert "run.steps" not in command("inspect", tmp_path / "c")[1]
    assert run(command, "diff", tmp_path / "c", RECIPE) == FINDINGS


@pytest.mark.slow
def test_control_characters_in_a_checkpoint_are_never_printed(command, tmp_path):
    evil = "a\x1b[31m\r\n\x07\u202e\x9b../../x"
    metadata = {
        "recipe": evil,
        "config": {evil: evil, "n": 1},
        "mesh": {"axis_names": [evil, "b"], "shape": [2, "x"]},
        "axes": evil,
        "rules": [[evil, [evil]], 5],
        "layout": {f"model/{evil}": evil},
        "metrics": {"loss": 10**400, "eval_loss": evil, evil: float("inf")},
        "data": {"description": evil},
        "versions": [evil],
    }
    for name, value in (("one", 1.0), ("two", 2.0)):
        with Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(1, nnx.State({"model": {evil.replace("/", ":"): value * jnp.ones(3)}}), metadata)
    one, two = tmp_path / "one", tmp_path / "two"
    diffs = (["diff", one, two, "--values"], ["diff", one, RECIPE])
    for argv in (["list", one], ["inspect", one], ["verify", one], *diffs):
        for more in ([], ["--json"]):
            assert run(command, *argv, *more) in (DONE, FINDINGS), argv
    assert "a\\x1b[31m" in command("inspect", one)[1]
    _, _, err = command("reshard", one, tmp_path / "out", RECIPE)
    assert "only in the checkpoint" in err and is_printable(err)


@given(st.text())
def test_plain_escapes_only_unprintable_characters(text):
    assert plain(text).isprintable()
    assert plain(text) == text or not text.isprintable()


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(json_like)
def test_finite_is_portable_json(value):
    assert json.loads(json.dumps(finite(value), allow_nan=False)) == finite(value)
