"""Train a model on the probabilities of a teacher, on chats, prompts with completions, or texts. See docs/finetune.md.

flax-mesh train recipes/distill.py checkpoint.start_from=FOLDER loss_fn.teacher=TEACHER data.source=CHATS.jsonl
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from flax import nnx

import flax_mesh as fm
from flax_mesh.checkpoint import decoder_config_from_hf, read_config
from flax_mesh.models import DecoderConfig, distillation_loss, flops_per_token, make_decoder, pretrained_config
from flax_mesh.train import ChatConfig, CheckpointConfig, OptimizerConfig, RunConfig, TrainConfig, read_chats

COMPUTED_AS = ("dtype", "attention", "scan", "axes")  # settings of the student that the teacher has too


@dataclass(frozen=True)
class Distillation:
    """The loss (1 - alpha) temperature^2 KL + alpha cross-entropy; see `distillation_loss`. Its fields are settings.

    Attributes:
        teacher: The folder or the hub id of the teacher, a decoder of any family and size with the same tokenizer.
        direction: "forward", KL(teacher, student), which covers all that the teacher does; or "reverse",
            KL(student, teacher), which prefers what it does most.
        temperature: Divides the logits of both in the KL divergence.
        alpha: The weight of the cross-entropy of the tokens of the data.
    """

    teacher: str = field(default="", metadata={"of_hub": "model"})
    direction: str = field(default="forward", metadata={"one_of": ("forward", "reverse")})
    temperature: float = field(default=1.0, metadata={"above": 0})
    alpha: float = field(default=0.0, metadata={"at_least": 0, "below": 1})

    def __call__(self, model, batch):
        options = {"direction": self.direction, "temperature": self.temperature, "alpha": self.alpha}
        return distillation_loss(model, model.teacher, batch, **options)


def teacher(config):
    """The teacher without its parameters, and their folder; for `flax-mesh explain` without one, as the student."""
    folder, student = config.loss_fn.teacher, config.model
    if not folder:
        return lambda: make_decoder(student, nnx.Rngs(0)), folder
    if Path(folder, "checkpoints").is_dir():
        raise fm.ConfigError(
            f"loss_fn.teacher={folder} is the folder of a run; export it, and name the export: "
            f"flax-mesh checkpoint export {folder} OUT --to safetensors"
        )
    settings = decoder_config_from_hf(read_config(folder))
    settings |= {name: getattr(student, name) for name in COMPUTED_AS} | {"param_dtype": student.dtype}
    model = DecoderConfig(**settings)
    if model.vocab_size != student.vocab_size:
        raise fm.ConfigError(
            f"the teacher {folder} has a vocabulary of {model.vocab_size} tokens, and the student one of "
            f"{student.vocab_size}; both must have the same tokenizer, so choose another teacher"
        )
    return lambda: make_decoder(model, nnx.Rngs(0)), folder


def recipe() -> TrainConfig:
    read = cache(read_chats)  # for both functions below

    def chats(config):
        if not config.loss_fn.teacher:
            raise fm.ConfigError("loss_fn.teacher is empty; name the folder of the teacher, or its id of the hub")
        return read(config.data, config.checkpoint.start_from or config.loss_fn.teacher, config.model.vocab_size)

    return TrainConfig(
        make_model=make_decoder,
        loss_fn=Distillation(),
        flops_per_token=flops_per_token,
        model=DecoderConfig(dtype="bfloat16", remat="full", scan=True, loss_chunk=2048),  # the folder has the sizes
        model_from=pretrained_config,
        constants={"teacher": teacher},
        data=ChatConfig(source="chats.jsonl", sequence_length=2048, batch_size=16),
        make_batches=lambda config: chats(config).batches(config.run.seed),
        eval_fns={"held_out": lambda config, evaluate: chats(config).metrics(evaluate)},
        optimizer=OptimizerConfig(
            learning_rate=2e-5, end_learning_rate=2e-6, warmup_steps=20, decay_steps=1000, weight_decay=0.0
        ),
        checkpoint=CheckpointConfig(every=200),
        run=RunConfig(steps=1000, folder="runs/distill", eval_every=100),
    )
