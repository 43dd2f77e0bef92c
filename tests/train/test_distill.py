"""recipes/distill.py: its loss against the formulas in float64; runs agree on all meshes and resume bit for bit."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from flax_mesh import PartitionAxis, create_mesh
from flax_mesh.checkpoint import DECODER_NAMES, Checkpointer, huggingface_config, save_safetensors
from flax_mesh.data import chats
from flax_mesh.errors import ConfigError
from flax_mesh.models import DecoderConfig, distillation_loss, make_decoder
from flax_mesh.models.cross_entropy import distillation
from flax_mesh.models.ops.divergence import Divergence
from flax_mesh.recipe import local_target, resolve
from flax_mesh.recipe.program import train_program
from flax_mesh.train import TrainConfig, apply_overrides, build_program, load_recipe
from flax_mesh.tree import named_leaves
from tests.data.chat_files import write_rows
from tests.data.chat_tokenizers import StandIn
from tests.train.support.runs import rows_of, run

RECIPE = str(Path(__file__).parents[2] / "recipes" / "distill.py")
AXES = PartitionAxis(hidden_state_axis=None)
SIZES: Any = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 24}
STUDENT = DecoderConfig(vocab_size=116, **SIZES)  # the stand-in's vocabulary has 115 tokens
TEACHER = replace(STUDENT, hidden_size=32, num_layers=3, qk_norm=True)  # a Qwen 3
Arrays = tuple[np.ndarray, ...]


def example() -> tuple[Arrays, Arrays, np.ndarray]:
    """Hidden states and output weights of a student and of a teacher with another width, and targets."""
    rng = np.random.default_rng(0)
    x, w, teacher_x, teacher_w = (rng.normal(size=size) for size in ((4, 6, 8), (8, 32), (4, 6, 5), (5, 32)))
    return (x, w), (teacher_x, 2 * teacher_w), rng.integers(-1, 32, (4, 6)).astype(np.int32)


def by_hand(student: Arrays, teacher: Arrays, targets: np.ndarray, loss: Divergence, caps: tuple[float, float]) -> Any:
    """(sums of loss, cross-entropy and scaled divergence), gradients of x and w, in float64, token by token."""
    (x, w), t, sums = student, loss.temperature, np.zeros(3)
    dx, dw = np.zeros_like(x), np.zeros_like(w)

    def softmax(z: np.ndarray) -> np.ndarray:
        return np.exp(z - z.max()) / np.exp(z - z.max()).sum()

    for at in np.argwhere(targets >= 0):
        at = tuple(at)
        z, other = caps[0] * np.tanh(x[at] @ w / caps[0]), caps[1] * np.tanh(teacher[0][at] @ teacher[1] / caps[1])
        q, p, plain = softmax(z / t), softmax(other / t), softmax(z)
        if loss.direction == "forward":
            divergence, d = t**2 * (p * np.log(p / q)).sum(), t * (q - p)
        else:
            kl = (q * np.log(q / p)).sum()
            divergence, d = t**2 * kl, t * q * (np.log(q / p) - kl)
        entropy, hit = -np.log(plain[targets[at]]), np.eye(len(z))[targets[at]]
        d = (loss.alpha * (plain - hit) + (1 - loss.alpha) * d) * (1 - (z / caps[0]) ** 2)
        sums += [loss.alpha * entropy + (1 - loss.alpha) * divergence, entropy, divergence]
        dx[at] = w @ d
        dw += np.outer(x[at], d)
    return sums, dx, dw


def computed(student: Arrays, teacher: Arrays, targets: np.ndarray, loss: Divergence, caps: Any, chunk: int) -> Any:
    (student, teacher) = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (student, teacher))
    options: Any = {"divergence": loss, "cap": caps[0], "teacher_cap": caps[1], "axes": AXES, "chunk": chunk}

    @jax.jit
    def sums(student: Any, teacher: Any, targets: Any) -> Any:
        results = distillation(student[0], student[1], targets, teacher=teacher, **options)
        return results[0], results

    (_, results), grads = jax.value_and_grad(sums, has_aux=True)(student, teacher, jnp.asarray(targets))
    return results, *grads


CASES = [Divergence("forward", 1.0, 0.0), Divergence("forward", 2.5, 0.3), Divergence("reverse", 2.0, 0.2)]


@pytest.mark.parametrize("loss", CASES, ids=str)
def test_loss_and_gradients_equal_the_formulas(loss):
    arrays, caps = example(), (20.0, 30.0)
    wanted = by_hand(*arrays, loss, caps)
    for chunk in (0, 5):
        for have, want in zip(computed(*arrays, loss, caps, chunk), wanted, strict=True):
            np.testing.assert_allclose(np.array(have), want, rtol=2e-5, atol=2e-5)
    other = "reverse" if loss.direction == "forward" else "forward"
    mistakes = [loss._replace(direction=other), loss._replace(temperature=1.5)]
    for mistake in mistakes:
        assert by_hand(*arrays, mistake, caps)[0][0] != pytest.approx(wanted[0][0], rel=1e-2)


def test_chunks_on_a_mesh_have_the_same_loss_and_gradients():
    arrays, caps = example(), (20.0, 30.0)
    with jax.set_mesh(create_mesh("dp:2,sp:2,tp:2")):
        for have, want in zip(computed(*arrays, CASES[2], caps, 2), by_hand(*arrays, CASES[2], caps), strict=True):
            np.testing.assert_allclose(np.array(have), want, rtol=2e-5, atol=2e-5)


def test_another_vocabulary_or_direction_is_refused():
    model, teacher = (nnx.eval_shape(lambda c=c: make_decoder(c, nnx.Rngs(0))) for c in (STUDENT, DecoderConfig()))
    tokens: Any = jnp.zeros((1, 4), int)
    with pytest.raises(ConfigError, match=r"got 'up'\n.* must have the same vocabulary, got 116 and 256 tokens"):
        distillation_loss(model, teacher, {"inputs": tokens, "targets": tokens}, direction="up")
    wrong: dict[str, Any] = {"temperature": 0.0, "alpha": 1.5}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"^{name}.* must be .*, got {value}$"):
            distillation_loss(model, model, {"inputs": tokens, "targets": tokens}, **{name: value})


# --- runs ---


def save(folder: Path, config: DecoderConfig, family: str, seed: int) -> Path:
    if not folder.exists():
        parameters, settings = nnx.state(make_decoder(config, nnx.Rngs(seed))), huggingface_config(vars(config))
        save_safetensors(folder, parameters, DECODER_NAMES[family], config=settings)
    return folder


def config_of(tmp_path: Path, name: str, changes: dict[str, object]) -> TrainConfig:
    rows = [{"prompt": "a" * (i % 7), "completion": "yes no"[: 1 + i % 5]} for i in range(60)]
    settings: dict[str, object] = {
        "checkpoint.start_from": save(tmp_path / "student", STUDENT, "llama", 0),
        "loss_fn.teacher": save(tmp_path / "teacher", TEACHER, "qwen3", 1),
        "data.source": write_rows(tmp_path / "rows.jsonl", rows),
        "run.folder": tmp_path / name,
    }
    settings |= {"data.sequence_length": 32, "data.batch_size": 8, "pipeline.num_microbatches": 2, "run.steps": 4}
    settings |= {"run.eval_every": 4, "checkpoint.every": 2, "model.dtype": "float32", "run.platform": "auto"}
    settings |= {"optimizer.warmup_steps": 0, "optimizer.learning_rate": 0.01, "loss_fn.alpha": 0.25}
    return apply_overrides(load_recipe(RECIPE), [f"{key}={value}" for key, value in (settings | changes).items()])


@pytest.fixture
def stand_in(monkeypatch):
    pytest.importorskip("grain", reason="of the extra finetune")
    monkeypatch.setattr(chats, "open_tokenizer", lambda folder, vocab_size: StandIn())


def test_the_teacher_is_a_constant_in_the_layout_of_the_rules(tmp_path, stand_in):
    """With adapters, in another dtype, and with a filter of paths that the teacher has too."""
    for rank, dtype, wrt in ((2, "bfloat16", nnx.Param), (0, "float32", nnx.PathContains("mlp"))):
        config = config_of(tmp_path, "run", {"mesh.shape": "fsdp:4,tp:2", "lora.rank": rank, "model.dtype": dtype})
        config = replace(config, wrt=wrt)
        recipe = resolve(config, local_target(config.mesh, config.run.platform))
        leaves = dict(named_leaves(train_program(recipe).layout.to_nnx()))
        of_teacher = {path: x for path, x in leaves.items() if "teacher" in path}
        assert all(path.startswith("model/teacher/") and "lora" not in path for path in of_teacher)
        kernel = of_teacher["model/teacher/layers/mlp/up/kernel"]
        assert kernel.shape == (3, 32, 24) and kernel.sharding.spec == P(None, "fsdp", "tp")
        assert any("lora" in path for path in leaves) == (rank > 0)
        assert {str(x.dtype) for x in of_teacher.values()} == {dtype}


def test_teachers_that_cannot_be_used_are_refused(tmp_path, stand_in):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    wrong = {
        "": "loss_fn.teacher is empty",
        tmp_path / "gone": "constants.*gone is not a local folder",
        tmp_path / "run": "is the folder of a run; export it",
        save(tmp_path / "other", replace(TEACHER, vocab_size=128), "qwen3", 1): "a vocabulary of 128 tokens, and",
    }
    for folder, text in wrong.items():
        with pytest.raises(ConfigError, match=text):
            build_program(config_of(tmp_path, "new", {"loss_fn.teacher": folder, "mesh.shape": "fsdp:1"}))


@pytest.mark.slow
def test_runs_agree_on_all_meshes_resume_bit_for_bit_and_save_no_teacher(tmp_path, stand_in):
    meshes = {"whole": "fsdp:2,tp:2", "one": "fsdp:1", "pipeline": "pp:2,fsdp:2"}
    rows = {name: run(config_of(tmp_path, name, {"mesh.shape": shape})).rows for name, shape in meshes.items()}
    for name in ("one", "pipeline"):
        for row, other in zip(rows["whole"], rows[name], strict=True):
            for metric in ("loss", "kl", "grad_norm", "weight"):
                assert other[metric] == pytest.approx(row[metric], rel=1e-5)
        assert rows[name][-1]["held_out/kl"] == pytest.approx(rows["whole"][-1]["held_out/kl"], rel=1e-5)
    assert rows["whole"][-1]["kl"] < 0.8 * rows["whole"][0]["kl"]
    with Checkpointer(tmp_path / "whole" / "checkpoints") as checkpointer:
        assert not [path for path in checkpointer.arrays(4) if "teacher" in path]

    def killed(**changes: object) -> TrainConfig:
        settings = {"mesh.shape": "fsdp:2,tp:2", **{key.replace("__", "."): x for key, x in changes.items()}}
        return config_of(tmp_path, "killed", settings)

    run(killed(), kill_at=3)
    other = save(tmp_path / "teacher 2", TEACHER, "qwen3", 2)
    with pytest.raises(ConfigError, match=r"loss_fn.teacher: .*\n  files of constants\['teacher'\]: "):
        run(killed(loss_fn__teacher=other))
    for folder in (other, save(tmp_path / "copy", TEACHER, "qwen3", 1)):  # a mistake: other files in the same folder
        shutil.copy(folder / "model.safetensors", tmp_path / "teacher" / "model.safetensors")
        if folder == other:
            with pytest.raises(ConfigError, match=r"\n  files of constants\['teacher'\]: .*changes the result"):
                run(killed())
    run(killed())
    whole, resumed = (rows_of(tmp_path / name) for name in ("whole", "killed"))
    assert [x["loss"] for x in resumed] == [x["loss"] for x in whole]
    assert resumed[-1]["held_out/loss"] == whole[-1]["held_out/loss"]
