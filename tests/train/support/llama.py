"""A folder of Hugging Face, and the config of runs that start from it."""

from pathlib import Path

from flax_mesh.checkpoint.hf.decoders import decoder_config_from_hf, read_config
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import DataConfig, MeshConfig, RunConfig, TrainConfig, apply_overrides

LLAMA = Path(__file__).parents[2] / "checkpoint" / "hf" / "data" / "llama3"


def config_of(shape, *settings):
    config = TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        model=DecoderConfig(**decoder_config_from_hf(read_config(LLAMA))),
        mesh=MeshConfig(shape),
        data=DataConfig(sequence_length=8, batch_size=8),
        run=RunConfig(platform="auto", steps=1, eval_every=0, sample_tokens=0),
    )
    return apply_overrides(config, ["pipeline.num_microbatches=2", *settings])
