"""The recipe of the run folder `run`: a decoder of few numbers on a pipeline of two groups. Any version can load it."""

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        model=DecoderConfig(
            vocab_size=32,
            hidden_size=8,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            head_dim=4,
            mlp_size=16,
            tied=True,
        ),
        mesh=MeshConfig(shape="pp:2,fsdp:2,tp:2"),
        data=DataConfig(source="tokens.npy", sequence_length=16, batch_size=8, held_out=0.2, eval_batches=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=20),
        checkpoint=CheckpointConfig(every=2, keep=2),
        run=RunConfig(steps=6, folder="run", platform="cpu:8", eval_every=2, sample_tokens=0),
    )
