"""Whether plans rank the layouts of a model as they are measured: `python -m tests.benchmarks plan --ranking`.

The devices are calibrated first. Then the steps of all layouts run interleaved, and the median CPU time of each, over
the number of cores, is compared with the busy seconds of its plan. Virtual devices share the cores, so the process
computes while any of them does: the idle seconds of a pipeline, its bubble, are no CPU time.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_mesh.hardware import Chip
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.plan import plan
from flax_mesh.plan.results import Time
from flax_mesh.plan.topology import topology_of_devices
from flax_mesh.recipe.program import batch_sharding
from flax_mesh.train import DataConfig, MeshConfig, PipelineConfig, TrainConfig, build_program

MODEL = DecoderConfig(vocab_size=2048, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=8, mlp_size=768)
DATA = DataConfig(sequence_length=128, batch_size=32)
# Every axis alone and the usual mixtures: (mesh.shape, model.remat)
LAYOUTS = (("dp:8", "none"), ("fsdp:8", "none"), ("fsdp:8", "full"), ("tp:8", "none"), ("fsdp:4,tp:2", "none"))
LAYOUTS += (("dp:2,fsdp:2,tp:2", "none"), ("fsdp:2,sp:4", "none"), ("pp:2,fsdp:4", "none"))


class Ranked(NamedTuple):
    layout: str
    predicted: float  # seconds in which a device is busy
    measured: float  # seconds of CPU time, over the number of cores


def config_of(shape: str, remat: str, model: DecoderConfig = MODEL, data: DataConfig = DATA) -> TrainConfig:
    parts: Any = {"mesh": MeshConfig(shape), "pipeline": PipelineConfig(num_microbatches=8 if "pp" in shape else 1)}
    return TrainConfig(make_decoder, next_token_loss, replace(model, remat=remat), data=data, **parts)


class Running:
    """A layout whose step is compiled and has run once."""

    def __init__(self, config: TrainConfig):
        self.program = build_program(config)
        shape = config.data.batch_size, config.data.sequence_length
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
        batch = {"inputs": tokens, "targets": tokens}
        self.batch: Any = batch
        if self.program.pipeline is None:
            self.batch = jax.device_put(batch, batch_sharding(self.program.mesh, self.program.rules.axes))
        self.state = self.program.init()
        self.seconds: list[float] = []
        self.run()
        self.seconds.clear()

    def run(self) -> None:
        start = time.process_time()
        self.state, metrics = self.program.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.process_time() - start)


def rank(chip: Chip, configs: Mapping[str, TrainConfig], rounds: int = 9) -> list[Ranked]:
    topology = topology_of_devices(jax.devices(), chip)
    predicted = {name: busy_seconds(plan(config, topology).time) for name, config in configs.items()}
    running = {name: Running(config) for name, config in configs.items()}
    for _ in range(rounds):
        for one in running.values():
            one.run()
    cores = len(os.sched_getaffinity(0))
    return [Ranked(name, predicted[name], median(one.seconds) / cores) for name, one in running.items()]


def busy_seconds(time: Time) -> float:
    """Seconds of a step without the bubble."""
    return time.seconds * (1 - time.bubble)


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The correlation of the ranks; equal values have the mean of their ranks."""
    from scipy.stats import rankdata  # here, since its import takes a second and tests of other things import this file

    return float(np.corrcoef(rankdata(xs), rankdata(ys))[0, 1])
