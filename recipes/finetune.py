"""Fine-tune a model of the Hugging Face hub on chats, prompts with completions, or texts: see docs/finetune.md.

flax-mesh train recipes/finetune.py checkpoint.start_from=FOLDER data.source=CHATS.jsonl
"""

from functools import cache

from flax_mesh.models import DecoderConfig, flops_per_token, make_decoder, next_token_loss, pretrained_config
from flax_mesh.train import ChatConfig, CheckpointConfig, OptimizerConfig, RunConfig, TrainConfig, read_chats


def recipe() -> TrainConfig:
    read = cache(read_chats)  # for both functions below
    chats = lambda config: read(config.data, config.checkpoint.start_from, config.model.vocab_size)  # noqa: E731
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        flops_per_token=flops_per_token,
        model=DecoderConfig(dtype="bfloat16", remat="full", scan=True, loss_chunk=2048),  # the folder has the sizes
        model_from=pretrained_config,
        data=ChatConfig(source="chats.jsonl", sequence_length=2048, batch_size=16),
        make_batches=lambda config: chats(config).batches(config.run.seed),
        eval_fns={"held_out": lambda config, evaluate: chats(config).metrics(evaluate)},
        optimizer=OptimizerConfig(
            learning_rate=2e-5, end_learning_rate=2e-6, warmup_steps=20, decay_steps=1000, weight_decay=0.0
        ),
        checkpoint=CheckpointConfig(every=200),
        run=RunConfig(steps=1000, folder="runs/finetune", eval_every=100),
    )
