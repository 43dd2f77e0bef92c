"""The recipe of the tests of `flax-mesh checkpoint`: a decoder of few numbers on eight devices."""

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import DataConfig, MeshConfig, RunConfig, TrainConfig


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        model=DecoderConfig(
            vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, mlp_size=32
        ),
        mesh=MeshConfig(shape="dp:2,fsdp:2,tp:2"),
        data=DataConfig(sequence_length=32, batch_size=8),
        run=RunConfig(steps=12, platform="cpu:8"),
    )
