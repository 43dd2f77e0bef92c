"""An encoder-decoder that learns to reverse 4 to 12 tokens: flax-mesh train recipes/encoder_decoder.py"""

import numpy as np
import optax
from flax import nnx

from flax_mesh.train import DataConfig, OptimizerConfig, RunConfig, TrainConfig, array_batches, mean_metrics


class Net(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed, self.positions = nnx.Embed(32, width, rngs=rngs), nnx.Embed(12, width, rngs=rngs)
        layers = [nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs) for _ in range(6)]
        self.layers = nnx.List(layers)  # 2 of the encoder, then pairs of the decoder: itself, the encoder

    def loss(self, batch):
        source, inputs, targets = (batch[name] for name in ("source", "inputs", "targets"))
        memory, x = (self.embed(tokens) + self.positions.embedding for tokens in (source, inputs))
        for attend in self.layers[:2]:
            memory = memory + attend(memory, mask=nnx.make_attention_mask(source > 0, source > 0))
        for attend, cross in zip(self.layers[2::2], self.layers[3::2], strict=True):
            x = x + attend(x, mask=nnx.make_causal_mask(inputs))
            x = x + cross(x, memory, mask=nnx.make_attention_mask(inputs >= 0, source > 0))
        logits, is_token = self.embed.attend(x), targets > 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * is_token
        return losses.sum(), is_token.sum(), {"accuracy": ((logits.argmax(-1) == targets) & is_token).sum()}


def recipe() -> TrainConfig:
    lengths, tokens = (np.random.default_rng(0).integers(*kind) for kind in ((4, 13, (4096, 1)), (2, 32, (4096, 12))))
    source = np.where(np.arange(12) < 12 - lengths, 0, tokens)  # 0 is padding, 1 begins the sequence
    arrays = {"source": source, "inputs": np.insert(source[:, :0:-1], 0, 1, axis=1), "targets": source[:, ::-1]}
    train, test = ({name: x[rows] for name, x in arrays.items()} for rows in (slice(256, None), slice(256)))
    batches = lambda config: array_batches(train, batch_size=config.data.batch_size, seed=config.run.seed)  # noqa: E731
    evals = {"held_out": lambda config, evaluate: mean_metrics(evaluate, [test])}
    data, adam = DataConfig(batch_size=64), OptimizerConfig(learning_rate=3e-3, warmup_steps=20, decay_steps=300)
    run = RunConfig(steps=300, folder="runs/encoder_decoder", platform="cpu:8")
    return TrainConfig(
        Net, Net.loss, 64, data=data, optimizer=adam, run=run, rules="fsdp", make_batches=batches, eval_fns=evals
    )
