"""A recipe of the model of `model.py`, for programs that are compiled and not run."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from flax_mesh import PartitionAxis
from flax_mesh.train import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig
from tests.blockwise.model import RULES, Net, loss_fn


@dataclass(frozen=True)
class NetConfig:
    axes: PartitionAxis = PartitionAxis()  # noqa: RUF009 (a frozen value)


def make_net(config: NetConfig, rngs: nnx.Rngs) -> Net:
    return Net(rngs)


def recipe() -> TrainConfig:
    config: Any = NetConfig()
    return TrainConfig(
        make_model=make_net,
        loss_fn=loss_fn,
        model=config,
        rules=RULES,
        mesh=MeshConfig(shape="dp:1"),
        data=DataConfig(sequence_length=1024, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1, decay_steps=10),
        checkpoint=CheckpointConfig(every=10),
        run=RunConfig(steps=10, folder="runs/net", platform="cpu:8", attention="blockwise"),
    )
