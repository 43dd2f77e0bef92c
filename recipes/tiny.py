"""A decoder with a million parameters, trained on the source code of Python's standard library.

Takes minutes on the CPU of a laptop:

flax-mesh train recipes/tiny.py
"""

from flax_mesh.models import DecoderConfig, flops_per_token, make_decoder, next_token_loss, sample
from flax_mesh.train import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        sample=sample,
        flops_per_token=flops_per_token,
        model=DecoderConfig(
            vocab_size=256, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, mlp_size=384
        ),
        mesh=MeshConfig(shape="dp:2,fsdp:2,tp:2"),
        data=DataConfig(source="stdlib", sequence_length=128, batch_size=16),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, end_learning_rate=3e-4, warmup_steps=20, decay_steps=150, weight_decay=0.1
        ),
        checkpoint=CheckpointConfig(every=50, keep=3),
        run=RunConfig(steps=150, folder="runs/tiny", platform="cpu:8", eval_every=50, sample_tokens=120),
    )
