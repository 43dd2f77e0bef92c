"""Rows of Parquet files and datasets: the same as the rows of JSON lines."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from flax_mesh.data import chats, sources
from flax_mesh.data.preferences import _encoded
from flax_mesh.errors import ConfigError
from flax_mesh.recipe.overrides import read_overrides
from flax_mesh.train import ChatConfig
from tests.data.chat_files import config_of, read
from tests.data.chat_tokenizers import StandIn
from tests.train.support.llama import config_of as run_of

CALL = {"role": "assistant", "content": "So", "tool_calls": [{"function": {"name": "add", "arguments": "1"}}]}
ROWS: list[Any] = [
    {"messages": [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": f"{i + 1}."}], "id": i}
    for i in range(300)
]
ROWS[1] = {"messages": [ROWS[1]["messages"][0], CALL, ROWS[1]["messages"][1]], "id": 1}  # a key that others lack
COMMIT = "c" * 40


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """rows.parquet, and the dataset org/rows in the cache, of which the split `few` has two rows."""
    for package in ("grain", "jinja2", "datasets"):
        pytest.importorskip(package, reason="of the extra finetune")
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(chats, "open_tokenizer", lambda folder, vocab_size: StandIn())
    monkeypatch.setattr(chats, "OPEN_ROWS", 8)
    repository = tmp_path / "cache" / "datasets--org--rows"
    (folder := repository / "snapshots" / COMMIT / "data").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for path, rows in {"train": ROWS, "few": ROWS[:2]}.items():
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{path}-00000-of-00001.parquet")
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    return tmp_path


@pytest.mark.slow
def test_rows_of_parquet_files_and_datasets_are_those_of_json_lines(written):
    lines = read(config_of(written / "rows.jsonl", ROWS, sequence_length=255))
    expected, batches = lines.hashes(), list(itertools.islice(lines.batches(3), 6))
    for source in (str(written / "rows.parquet"), "org/rows", f"org/rows@{COMMIT}"):
        found = read(ChatConfig(source=source, sequence_length=255, batch_size=4))
        assert found.hashes() == expected
        first = found.batches(3)
        assert f"{source}: 300 rows of messages, the chat template renders no 'tool_calls': 1 row" in first.description
        for _ in range(3):
            next(first)
        second = found.batches(3)
        second.set_state(json.loads(json.dumps(first.get_state())))
        for batch in batches[3:]:
            assert all((x == batch[name]).all() for name, x in next(second).items())
    assert len(read(ChatConfig(source="org/rows", split="few", sequence_length=255, batch_size=1)).rows) == 2


@pytest.mark.slow
def test_pairs_of_parquet_files_are_those_of_json_lines(written):
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    pairs = [{"prompt": f"{i}", "chosen": f"{i}.", "rejected": f"{i}!"} for i in range(5)]
    parquet.write_table(pa.Table.from_pylist(pairs), written / "pairs.parquet")
    config = config_of(written / "pairs.jsonl", pairs)
    found = [
        chats.read_rows(ChatConfig(source=str(written / name)), "folder", 100, _encoded)[0]
        for name in ("pairs.parquet", "pairs.jsonl")
    ]
    assert str(found[0]) == str(found[1]) and len(found[0]) == 5 and config.source.endswith("pairs.jsonl")


@pytest.mark.slow
def test_a_parquet_file_or_dataset_that_cannot_be_read_is_one_line(written, monkeypatch):
    (written / "damaged.parquet").write_bytes(b"PAR1 no table")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"source": str(written / "damaged.parquet")}, "damaged.parquet cannot be read: Parquet "),
        (
            {"source": "org/rows", "split": "tset"},
            "data.source=org/rows data.split=tset cannot be read: Bad split: tset",
        ),
        ({"source": "org/rows", "subset": "none"}, "data.subset=none data.split=train cannot be read: BuilderConfig "),
        ({"source": "org/gone"}, "as a dataset of the Hugging Face hub it is not in the cache"),
        ({"source": "org/gone"}, "download the dataset with: hf download org/gone --repo-type dataset"),
        ({"source": str(written / "rows.parquet"), "split": "few"}, "data.split is for datasets, but data.source="),
    ]
    for settings, problem in cases:
        with pytest.raises(ConfigError) as caught:
            read(ChatConfig(**settings))
        (line,) = caught.value.lines
        assert problem in line, line
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rows.parquet requires the package pyarrow.*flax-mesh\[finetune\]"):
        read(ChatConfig(source=str(written / "rows.parquet")))


@pytest.mark.slow
def test_a_run_records_the_commit_of_its_dataset(written):
    from dataclasses import replace

    config = replace(run_of("fsdp:1", f"run.folder={written / 'run'}"), data=ChatConfig())
    assert read_overrides(config, ["data.source=org/rows"])[0].data.source == f"org/rows@{COMMIT}"
    assert read_overrides(config, ["data.source=rows.jsonl"])[0].data.source == "rows.jsonl"
