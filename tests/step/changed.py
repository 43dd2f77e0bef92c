"""Models whose forward pass changes their trained parameters."""

import jax
import jax.numpy as jnp
from flax import nnx


class Clipped(nnx.Module):
    """A residual layer that clips its kernel before it uses it."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        kernel = self.linear.kernel
        kernel[...] = jnp.clip(kernel[...], -0.2, 0.2)
        return x + jnp.tanh(self.linear(x))


class Decayed(Clipped):
    """A residual layer that changes its bias after it has used it, by its activations, behind a cond and a remat."""

    def __call__(self, x):
        y = nnx.remat(lambda linear, x: jnp.tanh(linear(x)))(self.linear, x)
        bias = self.linear.bias
        assert bias is not None
        bias[...] = 0.9 * bias[...] + 0.1 * y.mean(range(y.ndim - 1))
        return x + y


class Normed(nnx.Module):
    """nnx.WeightNorm stores the normalized kernel in its layer."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.normed = nnx.WeightNorm(nnx.Linear(width, width, rngs=rngs), use_scale=False, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.normed(x))


class Unchanged(Clipped):
    """A residual layer without a change, beside layers with one."""

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    """A list of such layers between two projections."""

    def __init__(self, rngs: nnx.Rngs, kinds=(Clipped, Decayed, Normed, Unchanged)):
        self.first, self.last = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.layers = nnx.List([kind(8, rngs) for kind in kinds])

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Stack(Net):
    """Clipped layers as one scanned stack, with a remat in the scan."""

    def __init__(self, rngs: nnx.Rngs, kind=Clipped, depth: int = 4):
        super().__init__(rngs, ())
        self.layers = nnx.vmap(lambda key: kind(8, nnx.Rngs(key)))(jax.random.split(rngs.params(), depth))

    def __call__(self, x):
        run = nnx.scan(nnx.remat(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.last(run(self.first(x), self.layers))


def loss_fn(model, batch):
    error = jnp.sum((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(error * batch["w"]), jnp.sum(batch["w"]), {"large": jnp.sum(error > 1.0)}


def make_batch(rows: int, seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    x, y = (jax.random.normal(key, (rows, 8)) for key in keys[:2])
    return {"x": x, "y": y, "w": jax.random.uniform(keys[2], (rows,))}
