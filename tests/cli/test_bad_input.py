"""One invalid command for each kind of mistake: the exit code, one short error without a traceback, no changed file.

A line of `COMMANDS` and of `SLOW_COMMANDS` has the exit code, the command, and a text that the error must contain.
Words in braces are files of `write_files`. Most of the slow commands trace a step. Further tables are in
tests/test_fields.py and tests/recipe/test_mistakes.py for settings, in tests/recipe/test_load.py for recipes, and in
tests/checkpoint/test_command.py for `flax-mesh checkpoint`.
"""

import json
import re
import shlex
import shutil
import stat
from pathlib import Path

import jax
import numpy as np
import pytest

from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, output_problems
from flax_mesh.cli.main import COMMANDS as SUBCOMMANDS
from flax_mesh.cli.train import trace_problems
from tests.inference.small_run import TOKENS, save_run

VALID_RECIPE = """
import dataclasses
from tests.checkpoint.small_decoder import recipe as other


def recipe():
    config = other()
    model, data = dataclasses.replace(config.model, num_layers=2), dataclasses.replace(config.data, source={tokens!r})
    return dataclasses.replace(config, model=model, data=data)
"""
COMMANDS = """
2 | | COMMAND
2 | nope | nope
2 | checkpoint | required: WHAT; see flax-mesh checkpoint --help
2 | checkpoint list | required: DIR; see flax-mesh checkpoint list --help
2 | checkpoint list / --bogus | unknown option: --bogus; see flax-mesh --help
2 | checkpoint list / more | unexpected arguments: more
2 | train | RECIPE
2 | train {recipe} nonsense | nonsense
2 | train {recipe} run.stps=1 | did you mean run.steps
2 | train {recipe} run.steps=1 run.steps=2 | set twice
2 | train {recipe} -x run.steps=3 | unknown option: -x
2 | train {recipe} @{nothing} | cannot be read
2 | train {recipe} @{binary} | UTF-8
2 | train {text} | not a Python file
2 | train {recipe}:nope | nope
2 | train {recipe} --step-timeout 0 | must be more than 0 seconds, got 0
2 | train {recipe} --step-timeout nan | must be more than 0 seconds
2 | train {recipe} --process 2/2@127.0.0.1:4000 | with I in 0..N-1
2 | train {recipe} --process 0/1@127.0.0.1:65536 | must have a port
2 | train {recipe} --devices-per-process 0 | cpu:0 has no devices
2 | train {recipe} --trace {recipe} | --trace must name a file that the command uses for nothing else
2 | train {recipe} --trace '' | --trace must name a file
2 | train {recipe} run.folder=/dev/null/run | run.folder=/dev/null/run cannot be written (Not a directory)
2 | train {recipe} run.compiler_options=no_such_option_of_xla=1 | is refused
2 | train {recipe} optimizer.groups=". frozen" | nothing would be trained
2 | train {recipe} mesh.shape=dp:3 | not to 8, the number of devices
2 | train {recipe} mesh.shape=dp:2,foo:4 | unknown axis 'foo': the axes are pp, dp, fsdp, ep, tp, sp
2 | train {recipe} mesh.shape=pp:2,dp:4 data.batch_size=16 pipeline.schedule=1f1c | did you mean 1f1b?
2 | train {recipe} mesh.shape=pp:2,dp:4 pipeline.num_microbatches=4 data.batch_size=16 pipeline.cut=9 | pipeline.cut
2 | train {recipe} run.folder={no_files} checkpoint.start_from={hf_header} | its header should have
2 | generate {run} | there is no prompt
2 | generate {no_files} --prompt a | no checkpoint
2 | generate {long} --prompt a | is too long for a path
2 | generate {run} --prompt a | no tokenizer
2 | generate {run} --system a | --system is the first message of --chat; pass --chat too
2 | generate {run} --chat --prompt a --json | --chat reads standard input; remove --prompt, --json
2 | generate {run} --prompts {binary} | UTF-8
2 | generate {run} --prompt a --cache-length 0 | --cache-length must be an integer
3 | generate {damaged} --prompt a | damaged within bytes
3 | generate {deep} --prompt a | metadata/metadata: 200000 bytes
2 | generate {hf_list} --prompt a | must be a JSON object
2 | generate {hf_huge} --prompt a | no safetensors files
2 | generate {run} --prompts {text} --out {text} | uses for nothing else, got
2 | generate {run} --prompt a --out {run}/checkpoints/3/out.jsonl | is in the model
2 | generate {run} --prompt a --out '' | --out must name a file, got an empty text; name one, or leave out --out
2 | evaluate {run} --data {no_files} | text files
2 | evaluate {run} --data {matrix} | 1-D array
2 | evaluate {run} --data {floats} | of float64
2 | evaluate {run} --data {odd} | require a multiple of 2
2 | evaluate {run} --data {text} | no tokenizer
2 | evaluate {run} --data {tokens} --max-tokens 1 | 1 token
2 | launch -n 0 -- train {recipe} | -n must be at least 1
2 | launch -n 2 -- explain {recipe} | launch runs only the command train
2 | launch -n 2 --devices-per-process 0 -- train {recipe} | --devices-per-process must be at least 1
2 | explain {recipe} --html {long} | is too long for a path
2 | explain {recipe} --html ./recipe.py | got ./recipe.py, which is the recipe
2 | explain {recipe} --html '' | --html must name a file
2 | explain {recipe} model.rope_theta=nan | model.rope_theta
2 | explain {recipe} mesh.shape=fsdp:-1 run.platform=gpu | set the number of devices by run.platform=cpu:N
2 | explain {recipe} mesh.shape=fsdp:-1,tp:3 run.platform=cpu:8 | does not divide 8
2 | explain {recipe} --json --html {out} | not allowed with argument
2 | explain {recipe} --html {tokens} | which is data.source=
2 | explain {recipe} --html {nothing}/x.html | cannot be written
2 | plan {recipe} --topology nope:8 | unknown chip
2 | plan {recipe} --topology v5p:0x4x4 | at least 1
2 | plan {recipe} --topology cpu:99999999999 | at most 2,147,483,647 devices
2 | plan {recipe} --topology cpu:8 data.batch_size=3 | data.batch_size=3 is not divisible by 4
2 | plan {recipe} --topology cpu:8 run.hardware={nothing} | no such file
2 | plan {recipe} --topology cpu:8 --compile --limit nan | positive number of seconds
2 | plan {recipe} --topology cpu:3 --compile | Sizes must multiply to 3
2 | plan {recipe} mesh.shape=fsdp:3 run.platform=cpu:8 | mesh.shape=fsdp:3: axis_dims fsdp:3
2 | plan --calibrate {nothing}/x.toml | cannot be written
2 | plan --calibrate '' | --calibrate must name a file
2 | plan --calibrate {no_files} | cannot be written
2 | plan --calibrate {out} run.platform=npu | of the settings only run.platform
2 | plan --calibrate {out} run.steps=1 | run.steps=1
2 | plan --calibrate {out} run.platform=cpu:0 | cpu:0
2 | plan --calibrate {out} {recipe} | no RECIPE
2 | plan --calibrate {out} --topology v5p:2x2x2 | leave out --topology
2 | plan --calibrate {out} --json | not allowed
2 | plan --calibrate {out} --compile | --calibrate measures the devices that are here; leave out
2 | plan | RECIPE
2 | plan {recipe} --plans 3 | --plans requires --search CHIPS
2 | plan {recipe} --limit 3 | --limit requires --compile
2 | plan {recipe} --compile | --compile requires --topology T, such as cpu:8
2 | plan {recipe} --search v5e:4 --compile | --search makes plans only
2 | plan {recipe} --search v5e:4 --topology v5e:2x2 | leave out --topology
2 | plan {recipe} --search v5e:3 | no slice of v5e has 3 chips
2 | plan {recipe} --search v5e:4 --plans 0 | plans must be at least 1, got 0
2 | plan {recipe} --search v5e:4 mesh.shape=fsdp:8 | mesh.shape
2 | mesh nope --platform cpu:8 | malformed
2 | mesh dp:2,dp:4 --platform cpu:8 | duplicate axis 'dp'
2 | mesh dp:8 --platform cpu:8 --svg {nothing}/x.svg | cannot be written
2 | mesh dp:8 --platform cpu:8 --svg '' | --svg must name a file
2 | schedule 1f1b --stages 2 --microbatches 4 --svg {out}.x --out {out}.x | which is --svg
2 | schedule 1f1b --stages 2 --microbatches 4 --svg '' --out '' | --svg must name a file
2 | schedule interleaved-1f1b --stages 4 --microbatches 6 | a multiple of 4, got 6
2 | schedule zb-v --stages 2 --microbatches 4 --virtual 3 | zb-v has 2 stages per group
2 | schedule search --stages 2 --microbatches 4 --seconds inf | seconds must be more than 0 and finite
3 | checkpoint list {damaged} | step 3: damaged
3 | checkpoint inspect {not_json} | metadata cannot be read
3 | checkpoint verify {no_metadata} | metadata/metadata: missing
3 | checkpoint verify {damaged} | 1 of 1 checkpoint damaged
3 | checkpoint diff {run} {truncated} | metadata cannot be read
3 | checkpoint export {damaged} {out} --to orbax | damaged within bytes
2 | checkpoint export {run} {run}/checkpoints/9 --to orbax | must not be a step beside
2 | checkpoint export {run} '' --to orbax | the output folder must have a name
2 | checkpoint import {nothing} {out} | not a local folder
3 | checkpoint import {hf_text} {out} | not valid JSON
3 | checkpoint import {hf_deep} {out} | maximum recursion depth
2 | checkpoint import {hf_unknown} {out} | gpt_nope
2 | checkpoint import {hf_types} {out} | hidden_size must be of type int
3 | checkpoint import {hf_header} {out} | its header should have
"""
SLOW_COMMANDS = """
2 | train {recipe} --trace {out} | only a pipeline can be traced
2 | train {recipe} run.folder={text} | must be a folder, found a file
3 | train {recipe} run.folder={truncated} | none is valid
3 | train {recipe} run.folder={run} model.hidden_size=32 | metadata was not written by a run
2 | checkpoint reshard {run} {out} {recipe} model.hidden_size=32 | does not match
2 | train {recipe} data.source={no_files}/*.txt | no file in
2 | train {recipe} data.sequence_length=1000000000 | one window requires 1000000001
2 | plan {recipe} --topology h200:1x8 --compile | H100
2 | checkpoint reshard {run} {text}/x {recipe_of_run} | cannot be written
3 | checkpoint reshard {damaged} {out} {recipe} | damaged within bytes
"""


def read(table: str) -> list[tuple[int, str, str]]:
    """(exit code, command, text of the error) of the lines of a table."""
    lines = [[part.strip() for part in line.split("|")] for line in table.strip().splitlines()]
    return [(int(code), command, text) for code, command, text in lines]


def write_recipe(root: Path) -> Path:
    """Write a valid recipe and its tokens."""
    np.save(root / "tokens.npy", np.arange(16384, dtype=np.int32) % 32)
    path = root / "recipe.py"
    path.write_text(VALID_RECIPE.format(tokens=str(root / "tokens.npy")))
    return path


def write_files(root: Path, run: Path) -> None:
    """Write the files that the commands name. `run` is a run folder in `root`, whose copies are damaged."""
    deep = "[" * 100_000 + "]" * 100_000
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 32, "rms_norm_eps": 1e-5}
    files: dict[str, str | bytes] = {
        "text": "some text\n" * 10,
        "binary": b"\xff\xfe\x00",
        "odd.bin": b"\0" * 4097,
        "hf_text/config.json": "not json",
        "hf_list/config.json": "[1, 2]",
        "hf_deep/config.json": deep,
        "hf_unknown/config.json": json.dumps({**config, "model_type": "gpt_nope"}),
        "hf_types/config.json": json.dumps({**config, "hidden_size": "many"}),
        "hf_huge/config.json": json.dumps({**config, "num_hidden_layers": 10**30}),
        "hf_header/config.json": json.dumps(config),
        "hf_header/model.safetensors": b"\xff" * 8 + b"{}",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (root / "no_files").mkdir()
    np.save(root / "matrix.npy", np.zeros((4, 4), np.int32))
    np.save(root / "floats.npy", np.zeros(4))
    metadata = {"truncated": b'{"config": {', "deep": deep.encode(), "not_json": b"\xff\0"}
    for name in ("damaged", "no_metadata", *metadata):
        shutil.copytree(run, root / name)
        for step in (root / name / "checkpoints").iterdir():
            if name == "damaged":
                _flip_a_bit(max(step.rglob("*"), key=lambda path: path.stat().st_size * path.is_file()))
            elif name == "no_metadata":
                (step / "metadata" / "metadata").unlink()
            else:
                (step / "metadata" / "metadata").write_bytes(metadata[name])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


MOST_LINES, LONGEST_LINE = 30, 1000
INVALID = [pytest.param(*case, id=case[1]) for case in read(COMMANDS)]
INVALID += [pytest.param(*case, id=case[1], marks=pytest.mark.slow) for case in read(SLOW_COMMANDS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Name -> path of the files that the commands name, among them the folder of a run."""
    if jax.default_backend() != "cpu":
        pytest.skip("the recipe requires CPU devices")
    root = tmp_path_factory.mktemp("files")
    write_recipe(root)
    run = root / "run"
    save_run(run, description=TOKENS)
    write_files(root, run)
    named = {path.stem: str(path) for path in root.iterdir() if path.name != "__pycache__"}
    named["recipe_of_run"] = str(Path(__file__).parents[1] / "inference/small_run.py")
    missing = {"out": str(root / "out"), "nothing": str(root / "nothing"), "long": str(root / ("x/" * 2500))}
    return named | missing | {"root": str(root)}


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Relative path -> (size, time of the last change) of every file below `folder`, (0, 0) for a folder."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    stats = {name: path.lstat() for name, path in found.items()}
    return {n: (0, 0) if stat.S_ISDIR(s.st_mode) else (s.st_size, s.st_mtime_ns) for n, s in stats.items()}


@pytest.fixture(scope="module")
def listed(files) -> dict[str, tuple[int, int]]:
    return listing(Path(files["root"]))


@pytest.mark.parametrize(("code", "command", "text"), INVALID)
def test_an_invalid_command_ends_with_one_short_error_and_changes_no_file(
    files, listed, code, command, text, capfd, monkeypatch
):
    root = Path(files["root"])
    monkeypatch.chdir(root)
    argv = [re.sub(r"\{(\w+)\}", lambda name: files[name[1]], word) for word in shlex.split(command)]
    got = main(argv)
    out, err = capfd.readouterr()
    assert "Traceback" not in err, err
    assert got == code, err or out
    assert text and text in (err or out)  # `checkpoint list` and `verify` print damage on standard output
    assert err or code != BAD_INPUT
    assert not out or code != BAD_INPUT or argv[0] == "train", out
    lines = err.splitlines()
    longest = LONGEST_LINE + max(map(len, argv), default=0)
    assert all(line.startswith("flax-mesh: ") and len(line) < longest for line in lines), err
    assert len(lines) <= (1 if argv[:1] == ["plan"] else MOST_LINES)
    assert listing(root) == listed


def test_every_subcommand_has_invalid_commands_and_every_file_is_in_one(files):
    invalid = [command for _, command, _ in read(COMMANDS + SLOW_COMMANDS.lstrip())]
    assert len(set(invalid)) == len(invalid)
    assert {command.partition(" ")[0] for command in invalid} > SUBCOMMANDS.keys()
    assert set(re.findall(r"\{(\w+)\}", " ".join(invalid))) == files.keys() - {"root"}


def test_an_output_is_no_file_that_is_read_also_through_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hub").mkdir()
    for name in ("read.txt", "hub/read.json", "trace.svg"):
        Path(name).write_text("")
    Path("link").symlink_to("hub")
    Path("soft").symlink_to("read.txt")
    Path("hard").hardlink_to("read.txt")
    files = {"--prompts read.txt": "read.txt", "the model hub": "hub", "@settings": "trace.svg"}
    for name in ("read.txt", "./hub/../read.txt", str(tmp_path / "read.txt"), "soft", "hard"):
        (line,) = output_problems("--out", name, files)
        assert f", got {name}, which is --prompts read.txt; use another file" in line
    for name in ("hub/read.json", "link/new.json", "hub/new/x.json"):
        (line,) = output_problems("--out", name, files)
        assert f", got {name}, which is in the model hub; use another file" in line
    for name in ("other.txt", "hub.json", "no/such/folder"):
        assert output_problems("--out", name, files) == []
    assert len(trace_problems("trace.json", files)) == 1 and not trace_problems("other.json", files)
