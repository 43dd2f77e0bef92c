"""Models of images and vectors: convolutions with batch norm, patches, skips, two towers, diffusion, autoencoders."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.mpmd.zoo.base import WIDTH, Case, images, label_loss, squared_loss, vectors
from tests.mpmd.zoo.variables import Layer


class ConvBlock(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        # No bias before a norm: its gradient would consist of rounding errors.
        self.conv1 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.bn2 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        y = jax.nn.relu(self.bn1(self.conv1(x)))
        return jax.nn.relu(x + self.bn2(self.conv2(y)))


class ConvNet(nnx.Module):
    """A residual network. The batch statistics of stem and blocks are variables that change."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.stem_norm = nnx.BatchNorm(8, rngs=rngs)
        self.blocks = nnx.List([ConvBlock(8, rngs) for _ in range(4)])
        self.classifier = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, image):
        x = jax.nn.relu(self.stem_norm(self.stem(image)))
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.classifier(x.mean((1, 2)))


class EncoderBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, use_bias=False, decode=False, dropout_rate=0.1, deterministic=False, rngs=rngs
        )
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs),
            nnx.gelu,
            nnx.Dropout(0.1, rngs=rngs),
            nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.positions = nnx.Param(0.02 * rngs.params.normal((1, 5, WIDTH)))
        self.encoder = nnx.List([EncoderBlock(rngs) for _ in range(4)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, image):
        x = self.patches(image)
        x = x.reshape(x.shape[0], -1, WIDTH)
        token = jnp.broadcast_to(self.class_token[...], (x.shape[0], 1, WIDTH))
        x = jnp.concatenate([token, x], axis=1) + self.positions
        for block in self.encoder:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Dense(nnx.Module):
    """Every layer uses the outputs of all previous layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH * (i + 1), WIDTH, rngs=rngs) for i in range(5)])
        self.out = nnx.Linear(6 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        found = [x]
        for layer in self.layers:
            found.append(jax.nn.relu(layer(jnp.concatenate(found, -1))))
        return self.out(jnp.concatenate(found, -1))


class TwoTowers(nnx.Module):
    """Two lists side by side, a learned temperature, and a loss over all pairs of the microbatch."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.left = nnx.List([Layer(rngs) for _ in range(3)])
        self.right = nnx.List([Layer(rngs) for _ in range(3)])
        self.temperature = nnx.Param(jnp.asarray(1.0))

    def __call__(self, x, y):
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
        unit = lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True)  # noqa: E731
        return jnp.exp(self.temperature[...]) * unit(x) @ unit(y).T


def pair_loss(model, batch):
    """Returns only a scalar, the mean over the microbatch."""
    logits = model(batch["x"], batch["y"])
    return -(jnp.diagonal(jax.nn.log_softmax(logits)) + jnp.diagonal(jax.nn.log_softmax(logits.T))).mean() / 2


class Modulated(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.modulate = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, condition):
        shift, scale, gate = jnp.split(self.modulate(jax.nn.silu(condition)), 3, -1)
        return x + gate * jnp.tanh(self.linear(x * (1 + scale) + shift))


class Diffusion(nnx.Module):
    """All blocks use a condition with separate parameters. Input and target use the same noise."""

    def __init__(self):
        rngs = nnx.Rngs(0, noise=1)
        self.rngs = rngs
        self.time = nnx.Sequential(nnx.Linear(8, WIDTH, rngs=rngs), nnx.silu, nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.blocks = nnx.List([Modulated(rngs) for _ in range(4)])
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, time):
        waves = time[:, None] * 2.0 ** jnp.arange(4)
        condition = self.time(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1))
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)

    def loss(self, x):
        time = self.rngs.noise.uniform((x.shape[0],))
        noise = self.rngs.noise.normal(x.shape)
        mixed = jnp.sqrt(1 - time)[:, None] * x + jnp.sqrt(time)[:, None] * noise
        errors = jnp.sum((self(mixed, time) - noise) ** 2, -1)
        return errors.sum(), x.shape[0], {"late": jnp.sum(errors * (time > 0.5))}


CASES = [
    Case("conv_batch_norm", ConvNet, label_loss, images, layers="blocks"),
    Case("vision_transformer", VisionTransformer, label_loss, images, layers="encoder"),
    Case("dense_skips", Dense, squared_loss, vectors),
    Case("two_towers", TwoTowers, pair_loss, vectors, layers=("left", "right")),
    Case("diffusion", Diffusion, lambda model, batch: model.loss(batch["x"]), vectors, layers="blocks"),
]
