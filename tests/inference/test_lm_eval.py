"""Tasks of lm-eval: scores equal plain forward passes and the model `hf`, on every mesh and in every batch."""

import json
import random
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flax_mesh.cli.main import main
from flax_mesh.errors import ConfigError
from flax_mesh.inference import evaluate_tasks, open_trained, tasks
from flax_mesh.inference.scores import rows_of, score
from flax_mesh.inference.tokenizer import JsonTokenizer, named_token
from flax_mesh.inference.trained import TrainedModel
from tests.data.chat_tokenizers import HEADERS, VOCABULARY
from tests.data.chat_tokenizers import write_tokenizer as write_chat_tokenizer
from tests.inference.small_run import plain_log_probs, write_tokenizer

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]
LENGTH = 16  # of the run
QUESTIONS = [("ab", ["x", "y", "zz"], 0), ("longer than the model", [" one", " two"], 1), ("c", ["ab", "b"], 1)]
DRAW = np.random.default_rng(2)
TEXTS = [DRAW.integers(0, 256, size).tolist() for size in (2, 9, 17, 5, 12)]
TEXTS += [[*TEXTS[1][:-1], 7], TEXTS[1][:6], TEXTS[2]]  # which share rows
COUNTS = [1, 3, 16, 2, 1, 1, 2, 4]


def plain_scores(trained: TrainedModel, texts=TEXTS, counts=COUNTS) -> list[tuple[float, bool]]:
    """Of one text at a time."""
    scores = []
    for text, count in zip(texts, counts, strict=True):
        log_probs = plain_log_probs(trained.model, text, 32)[-count:]
        is_greedy = bool((log_probs.argmax(-1) == text[-count:]).all())
        scores.append((log_probs[np.arange(count), text[-count:]].sum(), is_greedy))
    return scores


def greedy_texts(trained: TrainedModel) -> list[list[int]]:
    """`TEXTS` of which some end in the tokens that a greedy continuation has."""
    changed = [list(text) for text in TEXTS]
    for n in (0, 4, 5):
        changed[n][-1] = int(plain_log_probs(trained.model, changed[n], 32)[-1].argmax())
    return changed


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["fsdp:1", "dp:2,tp:2", "sp:2,fsdp:2"])
def test_log_probabilities_equal_plain_forward_passes_on_every_mesh_and_in_every_batch(run, mesh):
    one = open_trained(run, ["mesh.shape=fsdp:1"])
    trained = one if mesh == "fsdp:1" else open_trained(run, [f"mesh.shape={mesh}"])
    texts = greedy_texts(one)
    expected = plain_scores(one, texts)
    assert {is_greedy for _, is_greedy in expected} == {True, False}
    for batch_size in (1, 3) if mesh != "fsdp:1" else (3,):
        batches: list[int] = []
        scores = score(trained.model, trained.mesh, texts, COUNTS, batch_size, batches.append)
        np.testing.assert_allclose([x for x, _ in scores], [x for x, _ in expected], rtol=2e-5)
        assert [x for _, x in scores] == [x for _, x in expected]
        assert sum(batches) == len(rows_of(texts, COUNTS)) == len(TEXTS) - 3


def test_texts_whose_inputs_begin_other_inputs_share_a_row():
    rows = rows_of([[1, 2, 3], [1, 2, 4], [1, 2], [5, 1, 2, 3], [1, 2, 3, 9]], [1, 1, 1, 2, 2])
    assert [row.inputs for row in rows] == [(5, 1, 2), (1, 2, 3)]
    assert rows[0].picks == [(1, 2, 3), (2, 3, 3)]
    assert sorted(rows[1].picks) == [(0, 2, 2), (1, 3, 0), (1, 3, 4), (1, 4, 1), (2, 9, 4)]


def test_the_first_token_is_the_one_of_the_tokenizer(tmp_path):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path))
    source: Any = SimpleNamespace(files=tmp_path, model=SimpleNamespace(vocab_size=48))
    assert named_token(source, tokenizer, "bos_token") is None
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "hello world"}))
    assert named_token(source, tokenizer, "bos_token") == ("<s>", 1)
    assert named_token(source, tokenizer, "eos_token") == ("</s>", 2)
    with pytest.raises(ConfigError, match="pad_token must be one token with an id below 48, got hello world"):
        named_token(source, tokenizer, "pad_token")


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'lm_eval, which is not installed: pip install "flax-mesh\[eval\]"'):
        evaluate_tasks(None, "any")  # pyright: ignore[reportArgumentType]


def lm_eval() -> Any:
    return pytest.importorskip("lm_eval", reason="comes with the extra eval")


def model_of(trained: TrainedModel, say: Any = print, **options: Any) -> Any:
    lm_eval()
    from flax_mesh.inference.lm import TrainedLM

    return TrainedLM(trained, **{"batch_size": 2, "max_length": None, "say": say} | options)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Three tasks with the same data."""
    lm_eval()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    keys = ("question", "choices", "answer")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in QUESTIONS))
    common = f'dataset_path: json\ndataset_kwargs: {{data_files: "{data}"}}\ntest_split: train\n'
    common += 'doc_to_text: "{{question}}"\n'
    metric = "metric_list: [{metric: %s, aggregation: %s, higher_is_better: true}]\n"
    for name, lines in {
        "own_choice": 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        + 'target_delimiter: ""\n'
        + metric % ("acc", "mean"),
        "own_text": 'output_type: generate_until\ndoc_to_target: "{{choices[answer]}}"\n'
        + "generation_kwargs: {until: ['q'], max_gen_toks: 5, do_sample: false}\n"
        + metric % ("exact_match", "mean"),
        "bad_text": 'output_type: generate_until\ndoc_to_target: "x"\n'
        + "generation_kwargs: {num_beams: 4, penalty_alpha: 0.5, do_sample: true, top_p: 2.0, max_gen_toks: 16}\n"
        + metric % ("exact_match", "mean"),
    }.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{common}{lines}")
    return tmp_path


@pytest.mark.slow
def test_the_score_of_a_task_is_counted_by_hand_lm_eval(run, folder, capsys):
    trained = open_trained(run, ["mesh.shape=dp:2,tp:2"])
    one = open_trained(run, ["mesh.shape=fsdp:1"])
    hits = 0
    for question, choices, answer in QUESTIONS:
        texts = [list((question + choice).encode())[-LENGTH - 1 :] for choice in choices]
        sums = [value for value, _ in plain_scores(one, texts, [len(choice) for choice in choices])]
        hits += sums.index(max(sums)) == answer
    random_states = lambda: (random.getstate(), str(np.random.get_state()))  # noqa: E731
    states, notes = random_states(), []
    options = {"include_path": folder, "output_path": folder / "out", "say": notes.append}
    results: Any = evaluate_tasks(trained, ["own_choice", "own_text"], **options, log_samples=True)
    assert random_states() == states
    assert results["results"]["own_choice"]["acc,none"] == pytest.approx(hits / len(QUESTIONS))
    assert [note.split(" and lose")[0] for note in notes] == [
        "warning: 2 of 7 texts have more than 17 tokens,",
        "warning: 1 of 3 texts have more than 11 tokens,",
    ]
    texts = [sample["resps"][0][0] for sample in results["samples"]["own_text"]]
    cut = [question[-LENGTH + 5 :] for question, *_ in QUESTIONS]
    assert texts == [text.split("q")[0] for text in one.generate(cut, max_tokens=5, stop=["\0"])]
    (file,) = (folder / "out").rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["own_choice"] == results["results"]["own_choice"]
    assert len([*(folder / "out").rglob("samples_*.jsonl")]) == 2
    # The command prints the table of lm-eval, or JSON.
    capsys.readouterr()
    command = ["evaluate", str(run), "--tasks", "own_choice", "--include-path", str(folder), "mesh.shape=fsdp:2"]
    assert main(command) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split("|")[1].strip() == "Tasks" and table[2].startswith("|own_choice|")
    assert main([*command, "--json", "--limit", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["n-samples"]["own_choice"]["effective"] == 2


@pytest.mark.slow
def test_mistakes_are_reported_together_lm_eval(run, folder, capsys, monkeypatch):
    with pytest.raises(ConfigError) as error:
        evaluate_tasks(open_trained(run, ["mesh.shape=fsdp:1"]), "bad_text", include_path=folder)
    lines = [str(line).removeprefix("task bad_text: generation_kwargs: ") for line in error.value.problems]
    assert [line.split(",")[0] for line in lines] == [
        "top_p must be at most 1",
        "num_beams=4 is not supported; use until",
        "penalty_alpha=0.5 is not supported; use until",
        "max_gen_toks must be from 1 to 15",
    ]

    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'org/data' on the Hub")

    with pytest.raises(ConfigError, match="huggingface has no chat template; leave out apply_chat_template, or add"):
        options: Any = {"include_path": folder, "apply_chat_template": True}
        evaluate_tasks(open_trained(run, ["mesh.shape=fsdp:1"]), "own_choice", **options)
    own = partial(lm_eval().tasks.TaskManager, include_defaults=False)  # which need not be indexed
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own)
    with pytest.raises(ConfigError, match="task own_choice is in own_choice and in both; leave out one of them"):
        (folder / "both.yaml").write_text("group: both\ntask: [own_choice, own_text]\n")
        tasks.open_tasks(["own_choice", "both"], folder)
    monkeypatch.setattr("lm_eval.api.task.datasets.load_dataset", unreachable)
    options = ["--tasks", "own_choice", "--include-path", str(folder), "--data", "stdlib", "--limit", "0"]
    options += ["--num-fewshot", "-1"]
    assert main(["evaluate", str(run), *options, "mesh.shape=fsdp:1"]) == 2
    first, few, second, third = capsys.readouterr().err.splitlines()[-4:]
    assert first.startswith("flax-mesh: --limit must be") and second.startswith("flax-mesh: --data is an option for")
    assert few.startswith("flax-mesh: --num-fewshot must be an integer from 0")
    assert "task own_choice cannot be downloaded: Couldn't reach 'org/data' on the Hub; run the command where" in third


@pytest.mark.slow
def test_texts_end_at_their_ends_in_every_batch_lm_eval(run, monkeypatch):
    trained = open_trained(run, ["mesh.shape=fsdp:1"])
    prompts = ["hello", "a", "def main"]
    expected = trained.generate(prompts, stop=["\0"], max_tokens=60)
    end = expected[1][9:11]
    arguments = [(prompt, {"until": [end, "never"], "max_gen_toks": 60, "do_sample": False}) for prompt in prompts]
    for batch_size in (1, 2, 3):
        model = model_of(trained, batch_size=batch_size, max_length=100)
        texts = model.generate_until(requests("generate_until", *arguments))
        assert texts == [text.split(end)[0] for text in expected]
    assert len(texts[1]) <= 9
    sampled = [(prompts[0], {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8, "until": []})]
    assert model.generate_until(requests("generate_until", *sampled)) != [expected[0][:8]]


@cache
def _hf_folder(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="comes with the extra hf")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"bos_token_id": VOCABULARY["<s>"], "eos_token_id": VOCABULARY["</s>"]}
    config = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY),
        num_key_value_heads=2,
        max_position_embeddings=48,
        initializer_range=0.4,
        **sizes,
        **tokens,
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_chat_tokenizer(folder, HEADERS)
    return folder


@pytest.mark.slow
def test_results_equal_the_model_hf_of_lm_eval(tmp_path):
    lm_eval()
    pytest.importorskip("torch", reason="comes with the extra hf")
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    folder = _hf_folder(tmp_path)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)
    ours = model_of(open_trained(folder, ["mesh.shape=dp:2,fsdp:2"]))
    assert (ours.max_length, ours.prefix_token_id, ours.eot_token_id) == (
        48,
        theirs.prefix_token_id,
        theirs.eot_token_id,
    )
    long = "what is longer than the model has positions, twice, and more than that"
    pairs = [
        ("hello ", "world"),
        ("", "abc"),
        (long, " yes"),
        (long, " no"),
        ("<s>hi", " you"),
        ("q:", "a"),
        ("q:", "b"),
    ]
    found, expected = (model.loglikelihood(requests("loglikelihood", *pairs)) for model in (ours, theirs))
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-4)
    assert [x for _, x in found] == [x for _, x in expected]
    rolling = requests("loglikelihood_rolling", (long,), (long[:46],), (long[:47],), ("a",))
    found, expected = (model.loglikelihood_rolling(rolling) for model in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    # Not a letter of a special token, in which `hf` ends a text too.
    options = {"until": ["2", "\n"], "max_gen_toks": 12, "do_sample": False}
    texts = requests("generate_until", *((text, options) for text in ("hello", "q:", long)))
    assert ours.generate_until(texts) == theirs.generate_until(texts)
    messages = [{"role": "user", "content": "hi"}]
    for prompt in (True, False):
        chat = [*messages, *([] if prompt else [{"role": "assistant", "content": "so"}])]
        assert ours.apply_chat_template(chat, prompt) == theirs.apply_chat_template(chat, prompt)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name == theirs.tokenizer_name
