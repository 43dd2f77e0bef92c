"""recipes/dpo.py: its loss against the formulas in float64, and runs that start at log 2 and resume bit for bit."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh.checkpoint import DECODER_NAMES, huggingface_config, save_safetensors
from flax_mesh.data import chats
from flax_mesh.errors import ConfigError
from flax_mesh.models import DecoderConfig, make_decoder
from flax_mesh.train import TrainConfig, apply_overrides, load_recipe
from tests.data.chat_files import write_rows
from tests.data.chat_tokenizers import VOCABULARY, StandIn
from tests.train.support.runs import rows_of, run

pytest.importorskip("jinja2", reason="of the extra finetune")
pytest.importorskip("grain", reason="of the extra finetune")

RECIPE = str(Path(__file__).parents[2] / "recipes" / "dpo.py")
SIZES: Any = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_size": 24}
SMALL = DecoderConfig(vocab_size=len(VOCABULARY), **SIZES)


def batch_of_pairs() -> dict[str, np.ndarray]:
    """Two rows with 2 pairs and 1 pair, and padding. The first token of each document is a prompt."""
    rng = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 0], [1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0]], np.int32)
    inputs, targets = rng.integers(0, SMALL.vocab_size, (2, *segments.shape)).astype(np.int32)
    begins = np.diff(segments, axis=1, prepend=0) != 0
    ends = (np.diff(segments, axis=1, append=0) != 0) & (segments > 0)
    targets[(begins & ~ends) | (segments == 0)] = -1
    reference = np.where(ends, rng.normal(-10, 3, segments.shape), 0).astype(np.float32)
    return {"inputs": inputs, "targets": targets, "segment_ids": segments, "reference": reference}


def by_hand(logits: np.ndarray, batch: dict[str, np.ndarray], beta: float, smoothing: float, ipo: bool) -> dict:
    """Sums over pairs of the formulas of DPO and IPO as TRL states them, in float64, a document at a time."""
    logits = logits.astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def document(row: int, segment: int) -> tuple[float, float, int]:
        columns = np.flatnonzero((batch["segment_ids"][row] == segment) & (batch["targets"][row] >= 0))
        all_columns = np.flatnonzero(batch["segment_ids"][row] == segment)
        own = log_probs[row, columns, batch["targets"][row, columns]].sum()
        return own, float(batch["reference"][row, all_columns].sum()), len(columns)

    sums: dict[str, float] = {}
    for row, segment in ((0, 1), (0, 3), (1, 1)):
        (chosen, ref_chosen, n), (rejected, ref_rejected, m) = document(row, segment), document(row, segment + 1)
        ratios = chosen - ref_chosen, rejected - ref_rejected
        h = beta * (ratios[0] - ratios[1])
        loss = (1 - smoothing) * math.log1p(math.exp(-h)) + smoothing * math.log1p(math.exp(h))
        loss = (ratios[0] / n - ratios[1] / m - 1 / (2 * beta)) ** 2 if ipo else loss
        found = {"loss": loss, "weight": 1, "logps/chosen": chosen, "logps/rejected": rejected}
        found |= {f"rewards/{name}": beta * x for name, x in zip(("chosen", "rejected"), ratios, strict=True)}
        found |= {"rewards/margins": h, "rewards/accuracies": float(h > 0)}
        sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
    return sums


def test_losses_and_metrics_equal_the_formulas():
    model, batch = make_decoder(replace(SMALL, logit_softcap=20.0), nnx.Rngs(0)), batch_of_pairs()
    loss_fn: Any = load_recipe(RECIPE).loss_fn
    cases = [replace(loss_fn, beta=0.3), replace(loss_fn, label_smoothing=0.2), replace(loss_fn, type="ipo", beta=0.5)]

    @nnx.jit
    def compute(model: Any, batch: Any) -> Any:
        logits = model(batch["inputs"], segment_ids=batch["segment_ids"])
        return logits, [case(model, batch) for case in cases]

    logits, results = compute(model, batch)
    swapped = batch | {"reference": batch["reference"][::-1].copy()}  # of the other row
    for case, (loss, weight, metrics) in zip(cases, results, strict=True):
        flat = {f"{kind}/{name}": x for kind, group in metrics.items() for name, x in group.items()}
        flat = {name: float(x) for name, x in (flat | {"loss": loss, "weight": weight}).items()}
        options = case.beta, case.label_smoothing, case.type == "ipo"
        wanted = by_hand(np.asarray(logits), batch, *options)
        assert flat == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        assert flat["loss"] != pytest.approx(by_hand(np.asarray(logits), swapped, *options)["loss"], rel=1e-3)


# --- the numbers of TRL ---

# (type, beta) -> loss, rewards of chosen and rejected, accuracies, margins: means over the pairs, of TRL 1.16.0 on CPU.
OF_TRL = {
    ("sigmoid", 0.3): [1.119526982, -0.5482930541, -1.719636440, 1 / 3, 1.171343565],
    ("ipo", 0.5): [54.77653503, -0.9138216972, -2.866060495, 1 / 3, 1.952238679],
}


class Logits:
    """A model with fixed logits (B, S, V): hidden states that are the logits, and weights that are the identity."""

    config = SMALL

    def __init__(self, logits: np.ndarray):
        self.logits = jnp.asarray(logits)

    def hidden(self, tokens: Any, *, segment_ids: Any) -> tuple[Any, ...]:
        return self.logits, jnp.eye(SMALL.vocab_size), {}


def example_of_trl() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    batch = batch_of_pairs()
    return np.random.default_rng(1).normal(0, 2, (*batch["targets"].shape, SMALL.vocab_size)).astype(np.float32), batch


def test_losses_equal_the_recorded_ones_of_trl():
    logits, batch = example_of_trl()
    loss_fn: Any = load_recipe(RECIPE).loss_fn
    for (kind, beta), wanted in OF_TRL.items():
        loss, weight, metrics = replace(loss_fn, type=kind, beta=beta)(Logits(logits), batch)
        names = ("chosen", "rejected", "accuracies", "margins")
        sums = [float(x) for x in (loss, *(metrics["rewards"][name] for name in names))]
        assert [x / float(weight) for x in sums] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind, beta", OF_TRL)
def test_the_recorded_numbers_are_those_of_trl(kind, beta):
    """With its own code, called on the log-probabilities of the same logits."""
    dpo, torch = pytest.importorskip("trl.trainer.dpo_trainer"), pytest.importorskip("torch")
    logits, batch = example_of_trl()
    log_probs = torch.log_softmax(torch.from_numpy(logits), -1)
    documents = [(0, 1), (0, 3), (1, 1), (0, 2), (0, 4), (1, 2)]  # (row, segment): all chosen, then all rejected
    completion, logps = torch.zeros(6, 13, dtype=torch.long), torch.zeros(6, 12)
    reference = []
    for n, (row, segment) in enumerate(documents):
        for column in np.flatnonzero(batch["segment_ids"][row] == segment):
            if (target := batch["targets"][row, column]) >= 0:
                completion[n, column + 1] = 1
                logps[n, column] = log_probs[row, column, target]
        reference.append(float(batch["reference"][row][batch["segment_ids"][row] == segment].sum()))
    others = {"entropy": logps, "mean_logits": logps, "is_top1": logps > 0}
    outputs = SimpleNamespace(log_probs=logps, **others)
    trainer = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        precompute_ref_logps=True, ld_alpha=None, f_divergence_type="reverse_kl", beta=beta, loss_types=[kind],
        loss_weights=[1.0], use_weighting=False, aux_loss_enabled=False, label_smoothing=0.0,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"input_ids": torch.zeros_like(completion), "attention_mask": completion, "completion_mask": completion}
    inputs |= {"ref_chosen_logps": torch.tensor(reference[:3]), "ref_rejected_logps": torch.tensor(reference[3:])}
    loss = dpo.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    names = ("chosen", "rejected", "accuracies", "margins")
    rewards = [float(trainer._metrics["train"][f"rewards/{name}"][0]) for name in names]
    assert [float(loss), *rewards] == pytest.approx(OF_TRL[kind, beta], rel=1e-5)


def test_settings_of_the_loss_are_checked():
    config = load_recipe(RECIPE)
    changed: Any = apply_overrides(config, ["loss_fn.type=ipo", "loss_fn.beta=0.2"]).loss_fn
    assert (changed.type, changed.beta, changed.label_smoothing) == ("ipo", 0.2, 0.0)
    with pytest.raises(ConfigError, match=r"loss_fn.type.*: the loss ipo has no label smoothing"):
        apply_overrides(config, ["loss_fn.type=ipo", "loss_fn.label_smoothing=0.1"])
    with pytest.raises(ConfigError, match=r"^loss_fn.betta is not a setting; did you mean loss_fn.beta\?"):
        apply_overrides(config, ["loss_fn.betta=1"])
    with pytest.raises(ConfigError) as caught:
        run(apply_overrides(config, ["loss_fn.beta=0", "loss_fn.type=kto"]))
    assert [str(line).partition(",")[0] for line in caught.value.problems] == [
        "loss_fn.beta must be above 0",
        "loss_fn.type must be one of sigmoid",
    ]


# --- runs ---


def config_of(tmp_path: Path, name: str, *words: str) -> TrainConfig:
    folder = tmp_path / "hf"
    if not folder.exists():
        parameters = nnx.state(make_decoder(SMALL, nnx.Rngs(0)))
        save_safetensors(folder, parameters, DECODER_NAMES["llama"], config=huggingface_config(vars(SMALL)))
    pairs = [{"prompt": "a" * (i % 7), "chosen": "yes"[: 1 + i % 3], "rejected": "no" * (1 + i % 2)} for i in range(40)]
    settings = [f"data.source={write_rows(tmp_path / 'pairs.jsonl', pairs)}", "data.sequence_length=32"]
    settings += ["data.batch_size=8", "run.steps=4", "run.eval_every=4", "checkpoint.every=2", "model.dtype=float32"]
    settings += ["run.platform=auto", "optimizer.warmup_steps=0", "optimizer.learning_rate=0.01"]
    settings += ["pipeline.num_microbatches=2", f"checkpoint.start_from={folder}", f"run.folder={tmp_path / name}"]
    return apply_overrides(load_recipe(RECIPE), [*settings, *words])


@pytest.mark.slow
def test_runs_start_at_log_2_agree_on_all_meshes_and_resume_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(chats, "open_tokenizer", lambda folder, vocab_size: StandIn())
    meshes = {"whole": "fsdp:2,sp:2", "pipeline": "pp:2,fsdp:2"}
    rows = {name: run(config_of(tmp_path, name, f"mesh.shape={shape}")).rows for name, shape in meshes.items()}
    first, last = rows["whole"][0], rows["whole"][-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(first["rewards/margins"]) < 1e-6
    assert last["loss"] < 0.6 and last["held_out/rewards_margins"] > 0.1
    for row, other in zip(rows["whole"], rows["pipeline"], strict=True):
        for name in ("loss", "rewards/margins", "logps/chosen", "weight"):
            assert other[name] == pytest.approx(row[name], rel=1e-5, abs=1e-6)
    run(config_of(tmp_path, "killed", "mesh.shape=fsdp:2,sp:2"), kill_at=3)
    file = tmp_path / "killed" / "reference.npz"
    before = file.stat().st_mtime_ns
    run(config_of(tmp_path, "killed", "mesh.shape=fsdp:2,sp:2"))
    whole, killed = (rows_of(tmp_path / name) for name in ("whole", "killed"))
    assert [x["loss"] for x in killed] == [x["loss"] for x in whole] and file.stat().st_mtime_ns == before
    assert killed[-1]["held_out/loss"] == whole[-1]["held_out/loss"]
    with np.load(file) as arrays:  # a mistake: the reference of other rows
        np.savez(file.with_name("other.npz"), key=arrays["key"], reference=arrays["reference"][::-1])
    file.with_name("other.npz").replace(file)
    config = config_of(tmp_path, "killed", "mesh.shape=fsdp:2,sp:2")
    with pytest.raises(ConfigError, match=r"rows of data.source: 40 rows -> "):
        run(replace(config, run=replace(config.run, steps=6)))
