"""Files of pairs: their tokens, packed pairs, the reference that is computed once, and rows that cannot be used."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mesh import create_mesh
from flax_mesh.axes import DEFAULT_AXES
from flax_mesh.data import chats
from flax_mesh.data.evaluation import TracedEvaluate
from flax_mesh.data.preferences import FILE, Preferences
from flax_mesh.data.user_batches import UserBatches
from flax_mesh.errors import ConfigError
from flax_mesh.train import ChatConfig, read_preferences
from tests.data.chat_files import config_of
from tests.data.chat_tokenizers import VOCABULARY, StandIn, ids_of, shown

pytest.importorskip("jinja2", reason="of the extra finetune")
pytest.importorskip("grain", reason="of the extra finetune")

Batch = dict[str, np.ndarray]
USER, GOOD, BAD = (
    {"role": role, "content": x} for role, x in (("user", "?"), ("assistant", "Yo"), ("assistant", "No"))
)
PAIRS = [{"prompt": "ab"[: i % 3], "chosen": "c" * (1 + i % 4), "rejected": "d" * (1 + i % 5)} for i in range(12)]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path):
    monkeypatch.setattr(chats, "open_tokenizer", lambda folder, vocab_size: StandIn())
    (tmp_path / "folder").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "folder" / name).touch()


def sums(batch: Batch) -> np.ndarray:
    """A stand-in for a reference: the log-probability of a target is its id, plus a hundredth of its input's id."""
    assert batch.keys() == {"inputs", "targets", "segment_ids"}
    return np.where(batch["targets"] >= 0, batch["targets"] + batch["inputs"] / 100, 0)


def open_sums() -> Callable[[Batch], np.ndarray]:
    return sums


def not_opened() -> Callable[[Batch], np.ndarray]:
    raise AssertionError("the reference is opened")


def read(config: ChatConfig, log_probs: Any = open_sums, key: str = "") -> Preferences:
    folder = Path(config.source).parent
    run, size = str(folder / "run"), len(VOCABULARY)
    return read_preferences(config, str(folder / "folder"), size, log_probs=log_probs, keep_in=run, key=key)


def documents(batch: Batch) -> list[tuple[int, int, str, float]]:
    """(row, segment, tokens with the trained ones in brackets, reference at the last token) of every document."""
    found = []
    for row, ids in enumerate(batch["segment_ids"]):
        for segment in range(1, ids.max() + 1):
            (columns,) = np.nonzero(ids == segment)
            assert (np.diff(columns) == 1).all() and not batch["reference"][row, columns[:-1]].any()
            targets, inputs = batch["targets"][row, columns], batch["inputs"][row, columns]
            following = np.append(inputs[1:], targets[-1])
            assert (targets[targets >= 0] == following[targets >= 0]).all()
            text = shown([inputs[0], *following], [False, *(targets >= 0)])
            found.append((row, segment, text, batch["reference"][row, columns[-1]]))
    return found


CHAT = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[{}<|im_end|>\n]"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a ", "chosen": "b", "rejected": "c"}, ("<s>a [b</s>]", "<s>a [c</s>]")),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, (CHAT.format("Yo"), CHAT.format("No"))),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, (CHAT.format("Yo"), CHAT.format("No"))),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD], "prompt_id": 3},
            tuple(CHAT.format("Yo").replace("[", "").replace("]", "") + CHAT.format(x) for x in ("Yo", "No")),
        ),
    ],
)
def test_the_completions_of_a_pair_are_trained(row, expected, tmp_path):
    batch = next(read(config_of(tmp_path / "a.jsonl", [row], sequence_length=200, batch_size=1)).batches(0))
    found = documents(batch)
    assert [(row, segment, text) for row, segment, text, _ in found[:2]] == [(0, 1, expected[0]), (0, 2, expected[1])]


@pytest.mark.parametrize("packing", [True, False])
def test_pairs_stay_together_with_the_reference_of_each(packing, tmp_path):
    config = config_of(tmp_path / "a.jsonl", PAIRS, packing=packing, held_out=0.01)
    iterator, seen = read(config).batches(0), []
    for batch in itertools.islice(iterator, 12):
        pairs = documents(batch)
        for (row, segment, chosen, first), (other, following, rejected, second) in zip(
            pairs[::2], pairs[1::2], strict=True
        ):
            assert (row, segment % 2, segment + 1) == (other, 1, following)
            seen.append((chosen, rejected))
            for text, reference in ((chosen, first), (rejected, second)):
                prompt, _, answer = text.partition("[")
                targets = ids_of(answer.replace("]", ""))
                inputs = [ids_of(prompt)[-1], *targets[:-1]]
                assert reference == pytest.approx(sum(targets) + sum(inputs) / 100, rel=1e-6)
        assert packing == (batch["segment_ids"].max() > 2)
    wanted = {(f"<s>{x['prompt']}[{x['chosen']}</s>]", f"<s>{x['prompt']}[{x['rejected']}</s>]") for x in PAIRS}
    assert {*seen} == wanted


def test_the_reference_is_computed_for_the_first_batch_of_a_run_and_then_kept(tmp_path):
    config = config_of(tmp_path / "a.jsonl", PAIRS, held_out=0.2)
    batches = UserBatches(lambda: read(config, not_opened).batches(0), 4)
    assert {name: x.shape for name, x in batches.shapes.items()} == dict.fromkeys(
        ("inputs", "targets", "segment_ids", "reference"), (4, 31)
    )
    mesh = create_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    traced = TracedEvaluate(lambda batch: ["weight", "rewards/chosen", *batch], mesh, DEFAULT_AXES, 1)
    names = read(config, not_opened).metrics(traced)
    assert names.keys() == {"rewards_chosen", *batches.shapes} and not (tmp_path / "run").exists()
    first = UserBatches(lambda: read(config).batches(0), 4)
    assert {name: (x.shape, x.dtype) for name, x in first.first.items()} == {
        name: (x.shape, x.dtype) for name, x in first.shapes.items()
    }
    again = UserBatches(lambda: read(config, not_opened).batches(0), 4)
    assert all((again.first[name] == x).all() for name, x in first.first.items())
    assert again.content_hash == first.content_hash
    assert read(config, not_opened).metrics(lambda batch: {"loss": float(batch["reference"].sum()), "weight": 1.0})


@pytest.mark.parametrize("change", ["rows", "key", "parameters", "damage"])
def test_a_reference_of_other_rows_parameters_or_settings_is_not_used(change, tmp_path):
    rows, key, file = PAIRS, "", tmp_path / "run" / FILE
    before = read(config_of(tmp_path / "a.jsonl", rows))
    content = before.hashes().content
    if change == "rows":
        rows = [*rows[:3], rows[3] | {"chosen": "x"}, *rows[4:]]
    elif change == "key":
        key = "other"
    elif change == "parameters":
        os.utime(tmp_path / "folder" / "model.safetensors", ns=(1, 1))
    else:
        file.write_bytes(file.read_bytes()[:-60])
    config = config_of(tmp_path / "a.jsonl", rows)
    with pytest.raises(AssertionError, match="is opened"):
        _ = read(config, not_opened, key).reference
    other = read(config, lambda: lambda batch: 2 * sums(batch), key)
    assert other.hashes().content != content  # so that a run is not resumed with it
    assert not (other.reference == before.reference).all()


def test_a_reference_with_numbers_that_are_not_finite_is_one_line(tmp_path):
    config = config_of(tmp_path / "a.jsonl", PAIRS)
    with pytest.raises(ConfigError, match=r"^the log-probabilities of the reference must be finite, but are not in 12"):
        _ = read(config, lambda: lambda batch: np.nan * sums(batch)).reference
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("chosen", "rejected", "sizes"), [(30, 30, (15, 15)), (2, 60, (4, 27)), (60, 2, (27, 4)), (10, 11, (12, 13))]
)
def test_the_ends_of_a_long_pair_are_cut_off(chosen, rejected, sizes, tmp_path):
    row = {"prompt": "p", "chosen": "c" * chosen, "rejected": "r" * rejected}
    config = config_of(tmp_path / "a.jsonl", [row], batch_size=1, on_long_row="truncate")
    segments = next(read(config).batches(0))["segment_ids"]
    assert tuple((segments == i).sum() for i in (1, 2)) == sizes


FIRST = PAIRS[0]
BAD_ROWS = [
    (
        {"prompt": "a", "completion": "b"},
        "must have 'prompt' and 'chosen' and 'rejected' or 'chosen' and 'rejected', g",
    ),
    ({"chosen": "a", "rejected": "b"}, "without 'prompt', 'chosen' and 'rejected' must be lists of messages"),
    (
        {"chosen": [GOOD], "rejected": [BAD]},
        "'chosen' and 'rejected' must begin with the same messages, and then differ",
    ),
    (
        {"chosen": [USER], "rejected": [USER, BAD]},
        "'chosen' and 'rejected' must begin with the same messages, and then",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' have the same tokens, so that neither"),
    (
        {"prompt": "a", "chosen": "b", "rejected": ""},
        "rejected: 'prompt' and 'rejected' must be text, or lists of mess",
    ),
    (
        {"prompt": "a", "chosen": [GOOD], "rejected": [BAD]},
        "chosen: 'prompt' and 'chosen' must be text, or lists of me",
    ),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": []}, "has no token to train on"),
    (
        {"prompt": [USER], "chosen": [GOOD], "rejected": [3]},
        "rejected: 'prompt' and 'rejected' must be a list of object",
    ),
    (
        {"prompt": "a" * 14, "chosen": "b", "rejected": "c"},
        "has 34 tokens, but at most 33 fit; raise data.sequence_len",
    ),
]


@pytest.mark.parametrize(("row", "problem"), BAD_ROWS)
def test_a_pair_that_cannot_be_used_is_one_line_with_its_place(row, problem, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(config_of(tmp_path / "a.jsonl", [row]), not_opened)
    (line,) = caught.value.problems
    assert line.startswith(f"{tmp_path / 'a.jsonl'}, row 1: {problem}")


def test_all_tokens_cannot_be_trained_and_all_rows_have_the_first_format(tmp_path):
    with pytest.raises(ConfigError, match=r"^data.train_on=all must be assistant or last: "):
        read(config_of(tmp_path / "a.jsonl", PAIRS, train_on="all"))
    rows = [*PAIRS, {"chosen": [USER, GOOD], "rejected": [USER, BAD]}]
    with pytest.raises(ConfigError, match=r"row 13: has no 'prompt', which the first row has"):
        read(config_of(tmp_path / "a.jsonl", rows))
