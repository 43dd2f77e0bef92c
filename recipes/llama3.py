"""Llama 3.1 with 8, 70 and 405 billion parameters (Dubey et al. 2024), initialized randomly.

The batch is for one host with 8 devices, and all devices are in fsdp. Only the 8B model fits a host; plan the others
for a pod:

flax-mesh plan recipes/llama3.py --topology v5p:2x2x2
flax-mesh plan recipes/llama3.py mesh.shape=fsdp:64 data.batch_size=256 --topology v5p:4x4x4
flax-mesh plan recipes/llama3.py data.batch_size=16 --topology h100:1x8
flax-mesh plan recipes/llama3.py:llama3_70b mesh.shape=fsdp:32,tp:4 data.batch_size=64 --topology v5p:4x4x8
flax-mesh plan recipes/llama3.py:llama3_70b mesh.shape=fsdp:128 data.batch_size=256 --topology h100:16x8
flax-mesh plan recipes/llama3.py:llama3_405b mesh.shape=dp:2,fsdp:512,tp:8 data.batch_size=1024 --topology v5p:16x16x16*2

The same settings after `flax-mesh train` run them: data.source=TOKENS.bin names token ids without a header, uint32.
"""  # noqa: E501 (commands in one line)

from flax_mesh.models import DecoderConfig, flops_per_token, make_decoder, next_token_loss, sample
from flax_mesh.train import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig


def llama3_8b() -> TrainConfig:
    return train_config(decoder(4096, 32, num_heads=32, mlp_size=14336), 8, "runs/llama3_8b")


def llama3_70b() -> TrainConfig:
    return train_config(decoder(8192, 80, num_heads=64, mlp_size=28672), 8, "runs/llama3_70b")


def llama3_405b() -> TrainConfig:
    return train_config(decoder(16384, 126, num_heads=128, mlp_size=53248), 8, "runs/llama3_405b")


recipe = llama3_8b


def decoder(hidden_size: int, num_layers: int, num_heads: int, mlp_size: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128_256,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=mlp_size,
        norm_epsilon=1e-5,
        rope_theta=500_000.0,
        rope_factor=8.0,
        rope_low_frequency_factor=1.0,
        rope_high_frequency_factor=4.0,
        rope_original_length=8192,
        tied=False,
        dtype="bfloat16",
        remat="full",
        scan=True,
        loss_chunk=2048,
    )


def train_config(model: DecoderConfig, batch_size: int, folder: str) -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        sample=sample,
        flops_per_token=flops_per_token,
        model=model,
        data=DataConfig(sequence_length=8192, batch_size=batch_size, bin_dtype="uint32"),
        optimizer=OptimizerConfig(
            learning_rate=3e-4, end_learning_rate=3e-5, warmup_steps=2000, decay_steps=100_000, weight_decay=0.1
        ),
        checkpoint=CheckpointConfig(every=1000, keep=3),
        run=RunConfig(steps=100_000, folder=folder, eval_every=1000, sample_tokens=0),
    )
