"""A run folder of the first version, whose settings and checkpoints have old names, resumes bit for bit.

tests/train/first_version was created by commit 6591be0 with JAX 0.10.2 on x86-64, restricted to one instruction set
(xla_cpu_max_isa=SSE4_2) so that any x86-64 computes the same bits. `run.tar.xz` is the folder of

    flax-mesh train recipe.py pipeline.microbatches=2 pipeline.residuals=lean \
        run.compiler_options=xla_cpu_max_isa=SSE4_2 run.steps=4

after one bit in the middle of step 4 was flipped and the same command with run.steps=6 checkpoint.keep=1 resumed from
step 2. `expected.json` contains the rows and the state of the command with run.steps=10 in another folder without
interruption: the rows after step 6, and for every array of step 10 the start of its SHA-256.
"""

import json
import re
import shutil
import tarfile
from hashlib import sha256
from pathlib import Path

import jax
import numpy as np
import pytest

from flax_mesh.checkpoint.read import read_record, read_tree
from flax_mesh.cli import main
from flax_mesh.cli.common import DONE, FINDINGS
from flax_mesh.data.run_data import TEXT
from flax_mesh.errors import ConfigError
from flax_mesh.train import apply_overrides, load_recipe
from flax_mesh.train.export import read_values
from flax_mesh.train.warm_start import check_start_settings, find_start

DATA = Path(__file__).parent / "first_version"
EXPECTED = json.loads((DATA / "expected.json").read_text())
OLD = {"pipeline.microbatches=2", "pipeline.virtual=none", "pipeline.residuals=lean"}
CURRENT = {"pipeline.num_microbatches=2", "pipeline.num_virtual_stages=none", "pipeline.remat=cheap"}


def instructions() -> str:
    """A short hash of the instruction sets of this processor, among which the libraries below XLA choose."""
    path = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return sha256(" ".join(sorted(flags[1].split())).encode()).hexdigest()[:16] if flags else "unknown"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A copy of the folder in the current directory: the paths in its settings are relative."""
    if jax.default_backend() != "cpu":
        pytest.skip("the run was on CPU devices")
    for name in ("recipe.py", "tokens.npy"):
        shutil.copy(DATA / name, tmp_path)
    with tarfile.open(DATA / "run.tar.xz") as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later; the default of 3.14
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.mark.slow
def test_a_run_of_the_first_version_resumes_bit_for_bit(folder, capsys):
    old_rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(row)["step"] for row in old_rows] == [1, 2, 3, 4, 3, 4, 5, 6]  # it was killed after step 4
    assert set((folder / "config.txt").read_text().splitlines()) >= OLD
    (folder / "checkpoints" / "6").rename(folder / "checkpoints" / "9")
    assert main(["train", "recipe.py", f"@{folder / 'config.txt'}"]) == FINDINGS
    assert "none is valid" in capsys.readouterr().err
    (folder / "checkpoints" / "9").rename(folder / "checkpoints" / "6")
    assert main(["train", "recipe.py", f"@{folder / 'config.txt'}", "run.steps=10"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert "run: found run at step 6; resuming, 4 steps to go" in lines
    changed = [line.removeprefix("changed since the checkpoint: ") for line in lines if "changed since" in line]
    assert sorted(changed) == ["run.attention: as_written -> auto", "run.steps: 6 -> 10"]
    assert set((folder / "config.txt").read_text().splitlines()) >= CURRENT
    step = folder / "checkpoints" / "10"
    saved = read_record(step)
    assert saved["config"].items() >= dict(line.split("=") for line in CURRENT).items()
    assert not any("residuals" in key for key in saved["config"])

    text = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert text[:6] == old_rows[:2] + old_rows[4:]
    rows = [json.loads(line) for line in text[6:]]
    rows = [{name: row[name] for name in expected} for row, expected in zip(rows, EXPECTED["rows"], strict=True)]
    for row, expected in zip(rows, EXPECTED["rows"], strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    here, there = [jax.__version__, instructions()], [EXPECTED["jax"], EXPECTED["instructions"]]
    if here != there:
        pytest.skip(f"resumed; bits cannot be compared between the versions and processors {here} and {there}")
    assert rows == EXPECTED["rows"]
    values = read_values(step, read_tree(step, saved))
    assert {path: sha256(np.asarray(x).tobytes()).hexdigest()[:16] for path, x in values} == EXPECTED["state"]


def test_a_new_run_that_starts_from_it_needs_its_settings_of_the_model(folder):
    start, config = find_start(str(folder)), load_recipe("recipe.py")
    assert [str(change) for change in check_start_settings(start, config, TEXT, allow_changes=False)] == [
        "model.attention: xla -> auto"  # the default is another one, which computes the same
    ]
    with pytest.raises(ConfigError, match=r"model\.norm_epsilon: .* -> 0\.1"):
        check_start_settings(start, apply_overrides(config, ["model.norm_epsilon=0.1"]), TEXT, allow_changes=False)


def test_its_settings_and_its_checkpoint_are_printed_compared_and_resharded_under_the_current_names(folder, capsys):
    config = f"@{folder / 'config.txt'}"
    assert main(["train", "recipe.py", config, "--print-config"]) == DONE
    printed = set(capsys.readouterr().out.splitlines())
    assert printed >= CURRENT and not printed & OLD
    assert main(["checkpoint", "diff", str(folder), "recipe.py", *sorted(CURRENT), "--json"]) == FINDINGS
    found = json.loads(capsys.readouterr().out)["differences"]
    settings = {one["name"] for one in found if one["section"] == "settings"}
    assert settings == {
        "checkpoint.keep",
        "checkpoint.on_failure",  # its default is another one, as below
        "run.compiler_options",
        "model.attention",
        "run.attention",
    }  # its default is another one
    settings = ("pipeline.num_microbatches=2", "pipeline.residuals=lean", "mesh.shape=fsdp:4,tp:2")
    assert main(["checkpoint", "reshard", str(folder), "resharded", "recipe.py", *settings]) == DONE
    capsys.readouterr()
    assert main(["checkpoint", "inspect", str(folder)]) == DONE
    shown = set(capsys.readouterr().out.split())
    assert shown >= CURRENT and not shown & OLD
    saved = read_record(folder.parent / "resharded" / "6")["config"]
    assert saved.items() >= dict(line.split("=") for line in CURRENT).items()
    assert not any("residuals" in key for key in saved)
