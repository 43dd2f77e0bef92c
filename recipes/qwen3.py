"""Qwen3-30B-A3B (Qwen Team 2025): 128 experts of which 8 are used per token, initialized randomly.

The settings are for one host with 8 devices. For a host and for a pod:

flax-mesh plan recipes/qwen3.py --topology h200:1x8
flax-mesh plan recipes/qwen3.py mesh.shape=fsdp:16,ep:4 data.batch_size=256 --topology v5p:4x4x4

The same settings after `flax-mesh train` run them: data.source=TOKENS.bin names token ids without a header, uint32.
"""

from flax_mesh import PartitionAxis
from flax_mesh.models import DecoderConfig, flops_per_token, make_decoder, next_token_loss, sample
from flax_mesh.train import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig


def qwen3_30b_a3b() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        sample=sample,
        flops_per_token=flops_per_token,
        model=DecoderConfig(
            vocab_size=151_936,
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            mlp_size=768,
            num_experts=128,
            experts_per_token=8,
            load_balance_loss=0.001,
            qk_norm=True,
            rope_theta=1_000_000.0,
            norm_epsilon=1e-6,
            tied=False,
            dtype="bfloat16",
            remat="full",
            scan=True,
            loss_chunk=2048,
            # The batch is split over ep too; otherwise the devices along ep would repeat the computation of attention.
            axes=PartitionAxis(batch_axis=("fsdp", "dp", "ep"), hidden_state_axis=None),
        ),
        mesh=MeshConfig(shape="fsdp:2,ep:4"),
        data=DataConfig(sequence_length=4096, batch_size=8, bin_dtype="uint32"),
        optimizer=OptimizerConfig(
            learning_rate=3e-4, end_learning_rate=3e-5, warmup_steps=2000, decay_steps=100_000, weight_decay=0.1
        ),
        checkpoint=CheckpointConfig(every=1000, keep=3),
        run=RunConfig(steps=100_000, folder="runs/qwen3_30b_a3b", eval_every=1000, sample_tokens=0),
    )


recipe = qwen3_30b_a3b
