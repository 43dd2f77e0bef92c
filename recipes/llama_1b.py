"""Llama-style models with a billion parameters for GPUs: bf16 compute, float32 master weights, AdamW.

flax-mesh train recipes/llama_1b.py data.source=TOKENS.bin
flax-mesh train recipes/llama_1b.py:llama_3_2_1b data.source=TOKENS.bin

TOKENS.bin contains token ids without a header, little-endian: uint16 for the first, uint32 for the second, which has
more ids than uint16 (`data.bin_dtype`).

The batch size is for one device with 141 GB of memory, without remat; see docs/benchmarks.md. With less memory, reduce
data.batch_size or set model.remat. On N devices, set mesh.shape=fsdp:N and multiply data.batch_size by N.
"""

from flax_mesh.models import DecoderConfig, flops_per_token, make_decoder, next_token_loss, sample
from flax_mesh.train import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig

# XLA options of the training step: overlap copies and collectives with matrix products; store the residual stream in
# bf16, as the model says, instead of float32.
COMPILER_OPTIONS = "xla_gpu_enable_latency_hiding_scheduler=true,xla_allow_excess_precision=false"


def recipe() -> TrainConfig:
    """1.1B parameters, the architecture of TinyLlama (Zhang et al. 2024)."""
    model = DecoderConfig(
        vocab_size=32_000,
        hidden_size=2048,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        head_dim=64,
        mlp_size=5632,
        norm_epsilon=1e-5,
        tied=False,
        dtype="bfloat16",
        attention="cudnn",
        loss_chunk=4096,
    )
    return train_config(model, DataConfig(sequence_length=2048, batch_size=16), "runs/llama_1b")


def llama_3_2_1b() -> TrainConfig:
    """1.24B parameters, the architecture of Llama-3.2-1B (Meta 2024), initialized randomly."""
    model = DecoderConfig(
        vocab_size=128_256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_size=8192,
        norm_epsilon=1e-5,
        rope_theta=500_000.0,
        rope_factor=32.0,
        rope_low_frequency_factor=1.0,
        rope_high_frequency_factor=4.0,
        rope_original_length=8192,
        tied=True,
        dtype="bfloat16",
        attention="cudnn",
        loss_chunk=4096,
    )
    data = DataConfig(sequence_length=4096, batch_size=8, bin_dtype="uint32")
    return train_config(model, data, "runs/llama_3_2_1b")


def train_config(model: DecoderConfig, data: DataConfig, folder: str) -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        sample=sample,
        flops_per_token=flops_per_token,
        model=model,
        mesh=MeshConfig(shape="fsdp:1"),
        data=data,
        optimizer=OptimizerConfig(
            learning_rate=4e-4, end_learning_rate=4e-5, warmup_steps=2000, decay_steps=100_000, weight_decay=0.1
        ),
        checkpoint=CheckpointConfig(every=1000, keep=3),
        run=RunConfig(
            steps=100_000,
            folder=folder,
            platform="gpu",
            eval_every=1000,
            sample_tokens=0,
            compiler_options=COMPILER_OPTIONS,
        ),
    )
