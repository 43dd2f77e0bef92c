"""A vision transformer that learns in which of 8 columns of noise a bar is: flax-mesh train recipes/vit.py"""

import numpy as np
import optax
from flax import nnx

from flax_mesh.train import DataConfig, OptimizerConfig, RunConfig, TrainConfig, array_batches, mean_metrics


class Vit(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, width, (4, 4), strides=4, rngs=rngs)
        self.positions, self.layers = nnx.Param(rngs.normal((4, 4, width))), nnx.List([])
        for _ in range(4):
            attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
            mlp = nnx.Linear(width, 4 * width, rngs=rngs), nnx.gelu, nnx.Linear(4 * width, width, rngs=rngs)
            self.layers.append(nnx.Sequential(nnx.LayerNorm(width, rngs=rngs), attention, *mlp))
        self.head = nnx.Linear(width, 8, rngs=rngs)

    def loss(self, batch):
        x = (self.patches(batch["images"]) + self.positions).reshape(len(batch["images"]), 16, -1)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x.mean(1))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.sum(), losses.size, {"accuracy": (logits.argmax(-1) == batch["labels"]).sum()}


def recipe() -> TrainConfig:
    labels, noise = np.arange(4096) % 8, np.random.default_rng(0).normal(size=(4096, 16, 16, 1))
    images = (noise + (np.arange(16) // 2 == labels[:, None, None])[..., None]).astype(np.float32)
    train, test = ({"images": images[rows], "labels": labels[rows]} for rows in (slice(256, None), slice(256)))
    batches = lambda config: array_batches(train, batch_size=config.data.batch_size, seed=config.run.seed)  # noqa: E731
    adam = OptimizerConfig(learning_rate=1e-3, warmup_steps=20, decay_steps=150)
    data, run = DataConfig(batch_size=32), RunConfig(steps=150, eval_every=50, folder="runs/vit", platform="cpu:8")
    evals = {"held_out": lambda config, evaluate: mean_metrics(evaluate, [test])}
    return TrainConfig(
        Vit, Vit.loss, 64, data=data, optimizer=adam, run=run, rules="fsdp", make_batches=batches, eval_fns=evals
    )
