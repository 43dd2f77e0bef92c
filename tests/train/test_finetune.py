"""A model of transformers is fine-tuned and given back: transformers and PEFT compute the same as this library."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from flax_mesh.checkpoint.orbax import stored_arrays
from flax_mesh.inference import open_trained
from flax_mesh.train import apply_overrides, load_recipe
from flax_mesh.train.export import export
from tests.data.chat_tokenizers import VOCABULARY
from tests.train.support.finetune import SETTINGS, write_chats, write_llama
from tests.train.support.runs import run

RECIPE = Path(__file__).parents[2] / "recipes" / "finetune.py"
ADAPTERS = ("lora.rank=4", "lora.alpha=8", "lora.modules=attention/.*kernel|mlp/.*kernel")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT calls it
@pytest.mark.parametrize(
    ("shape", "settings"),
    [("fsdp:2,tp:2", ADAPTERS), ("pp:2,fsdp:2", ADAPTERS), ("pp:2,fsdp:2", ()), ("fsdp:2,tp:2", ())],
    ids=["adapters", "adapters in a pipeline", "pipeline", "all parameters"],
)
def test_a_model_of_transformers_is_fine_tuned_and_given_back(shape, settings, tmp_path):
    torch = pytest.importorskip("torch", reason="comes with the extra hf")
    transformers = pytest.importorskip("transformers", reason="comes with the extra hf")
    peft = pytest.importorskip("peft", reason="comes with the extra hf")
    base, folder, merged, adapters = (tmp_path / name for name in ("base", "run", "merged", "adapters"))
    write_llama(base)
    write_chats(tmp_path / "chats.jsonl")
    given = [f"checkpoint.start_from={base}", f"data.source={tmp_path / 'chats.jsonl'}", f"run.folder={folder}"]
    overrides = [*SETTINGS, *settings, *given, f"mesh.shape={shape}", "run.platform=auto", "run.steps=30"]
    ran = run(apply_overrides(load_recipe(str(RECIPE)), overrides))
    assert ran.losses[30] < ran.losses[1] - 0.2
    frozen = [x for x in stored_arrays(folder / "checkpoints/30") if x.startswith("model/") and "_lora_" not in x]
    assert not frozen if settings else frozen

    tokens = np.random.default_rng(0).integers(0, len(VOCABULARY), (2, 20))
    ours = np.asarray(open_trained(folder, ["mesh.shape=fsdp:2"]).model(jnp.asarray(tokens)))
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        before = load(base)(torch.from_numpy(tokens)).logits.numpy()
        export(str(folder), str(merged), "safetensors", None, None)
        found = [load(merged)(torch.from_numpy(tokens)).logits.numpy()]
        exact = load(merged).double()(torch.from_numpy(tokens)).logits.numpy()
        if settings:
            export(str(folder), str(adapters), "peft", None, None)
            found.append(peft.PeftModel.from_pretrained(load(base), adapters)(torch.from_numpy(tokens)).logits.numpy())
    assert np.abs(before - ours).max() > 0.1
    # A token whose activations nearly cancel has large rounding errors in float32, in PyTorch too.
    rounding = 1e-5 * np.abs(exact).max() + 2 * np.abs(found[0] - exact).max()
    assert rounding < 3e-4
    for logits in (exact, *found):
        np.testing.assert_allclose(logits, ours, atol=rounding)
    text = transformers.AutoTokenizer.from_pretrained(merged).apply_chat_template(
        [{"role": "user", "content": "1 + 1"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
