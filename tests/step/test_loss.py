"""The forms of a loss function's result: which forms are accepted, their meanings, and which forms are refused."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh.mpmd import split_stages
from flax_mesh.step.loss import is_sum_over_rows
from flax_mesh.train import make_eval_step, make_train_step
from tests.step.net import Net, batch, make, run, start

pytestmark = pytest.mark.usefixtures("quick_unless_slow")


def parts(model, b):
    """Sum of the losses, their number, and the number of errors that are small: no gradient, but of the model."""
    error = jnp.mean((model(b["x"]) - 1.0) ** 2, axis=-1)
    return jnp.sum(error), len(error), jnp.sum(error < 1.5)


def test_a_loss_is_a_sum_over_rows_if_it_returns_sums_of_a_model_without_state():
    total = lambda model, b: (model.layers[1](model.layers[0](b["x"])).sum(), len(b["x"]))  # noqa: E731
    forms = [total, lambda m, b: (*total(m, b), {}), lambda m, b: total(m, b)[0], lambda m, b: (total(m, b)[0], {})]
    counts = lambda m, b: (m(b["x"]).sum(), len(b["x"]))  # noqa: E731
    drops = lambda m, b: (m.drop(b["x"]).sum(), len(b["x"]))  # noqa: E731
    kinds = [*((form, 0.5) for form in forms), (counts, 0.0), (drops, 0.5), (drops, 0.0)]
    found = [is_sum_over_rows(form, make(rate=rate), batch()) for form, rate in kinds]
    assert found == [True, True, False, False, False, False, True]


@pytest.mark.slow
def test_every_accepted_form_gives_the_same_mean():
    def mean(model, b):
        total, count, small = parts(model, b)
        return total / count, small / count

    forms = {
        "loss": lambda m, b: mean(m, b)[0],
        "loss, metrics": lambda m, b: (mean(m, b)[0], {"small": mean(m, b)[1], "more": {"half": mean(m, b)[1] / 2}}),
        "sum, weight": lambda m, b: parts(m, b)[:2],
        "sum, weight, metrics": lambda m, b: (
            *parts(m, b)[:2],
            {"small": parts(m, b)[2], "more": {"half": parts(m, b)[2] / 2}},
        ),
    }
    rows = {name: run(form, start(make()), [batch()], num_microbatches=2)[1][0] for name, form in forms.items()}
    for name, row in rows.items():
        assert row["weight"] == (16 if "weight" in name else 2)
        np.testing.assert_allclose(row["loss"], rows["loss"]["loss"], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(row["grad_norm"], rows["loss"]["grad_norm"], rtol=1e-5, err_msg=name)
        assert row.keys() - {"loss", "grad_norm", "weight"} == ({"small", "more/half"} if "metrics" in name else set())
        if "metrics" in name:
            assert 0 < row["small"] < 1
            np.testing.assert_allclose(row["small"], 2 * row["more/half"])
    small = parts(make()()[0], batch())[2] / 16
    np.testing.assert_allclose(rows["loss, metrics"]["small"], small, rtol=1e-6)


@functools.cache
def initial_state():
    return start(make())


REFUSED = {
    "a tuple of one": (lambda loss: (loss,), r"It returned \(f32\[\],\)"),
    "an empty tuple": (lambda loss: (), r"It returned \(\)"),
    "four parts": (lambda loss: (loss, 1.0, {}, {}), r"It returned \(f32\[\], float, \{\}, \{\}\)"),
    "None": (lambda loss: None, "It returned None"),
    "a dict": (lambda loss: {"loss": loss}, r"It returned \{'loss': f32\[\]\}"),
    "a list": (lambda loss: [loss, 1.0], "It returned list"),
    "an array": (lambda loss: jnp.ones(3) * loss, r"It returned f32\[3\]"),
    "an array of weights": (lambda loss: (loss, jnp.ones(3)), r"It returned \(f32\[\], f32\[3\]\)"),
    "pairs": (lambda loss: (loss, 1.0, [("a", loss)]), r"It returned \(f32\[\], float, list\)"),
    "a complex loss": (lambda loss: loss * 1j, r"It returned c64\[\]"),
    "text": (lambda loss: (loss, {"a": 1, "b": {"c": "no"}}), r"It returned \(f32\[\], \{'a': int, 'b': \{'c': str"),
    "taken names": (lambda loss: (loss, 1.0, {"loss": 1, "weight": 1}), "'loss' is a metric of the step, 'weight'"),
    "equal names": (lambda loss: (loss, {"a/b": loss, "a": {"b": loss}}), "'a/b' occurs twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_form_is_refused_in_one_line(name):
    result, message = REFUSED[name]
    for call in (lambda loss_fn: run(loss_fn, initial_state(), [batch()]), evaluate):
        with pytest.raises(ValueError, match=message) as caught:
            call(lambda model, b: result(jnp.sum(model(b["x"]))))
        text = str(caught.value)
        assert "\n" not in text
        assert "names" in name or "loss_fn must return loss, (loss, metrics), (loss_sum, weight) or" in text


def evaluate(loss_fn):
    make_eval_step(loss_fn, initial_state())(initial_state(), batch())


def split(loss_fn):
    split_stages(loss_fn, lambda: Net(nnx.Rngs(0)), batch(), num_stages=2)


def train(loss_fn):
    run(loss_fn, start(make()), [batch()])


WEIGHTS = {
    "accuracy": lambda model, b: parts(model, b)[2] / 16,
    "a parameter": lambda model, b: model.layers[0].bias[0],
    "behind stop_gradient": lambda model, b: jax.lax.stop_gradient(parts(model, b)[0]),
    "in a jitted function": lambda model, b: jax.jit(lambda x: (jnp.sum(x > 0), 1))(model(b["x"]))[0],
    "carried by a scan": lambda model, b: jax.lax.scan(lambda c, y: (c + jnp.sum(y > 0), None), 0, model(b["x"]))[0],
    "a number of iterations": lambda model, b: (
        lambda y: jax.lax.while_loop(lambda c: c[0] < y, lambda c: (c[0] + 1, c[1] + 1), (jnp.float32(0), 1.0))[1]
    )(model(b["x"]).max()),
}


@pytest.mark.parametrize(
    ("name", "call"), [*((name, train) for name in WEIGHTS), ("accuracy", evaluate), ("accuracy", split)]
)
def test_a_weight_that_depends_on_a_parameter_is_refused(name, call):
    with pytest.raises(ValueError, match="weight that loss_fn returns must not depend on trained parameters"):
        call(lambda model, b: (jnp.mean(model(b["x"]) ** 2), WEIGHTS[name](model, b)))


@pytest.mark.parametrize("call", [train, split])
def test_a_loss_that_depends_on_no_trained_parameter_is_refused(call):
    text = r"depends on none of layers/\{0\.\.\d\}/bias.*Use them in loss_fn"
    for total in (lambda model, b: jnp.sum(b["x"]), lambda model, b: jnp.sum(b["x"] + jnp.zeros_like(model(b["x"])))):
        with pytest.raises(ValueError, match=text):
            call(total)


def errors_of(model, b):
    """The errors of the batch, as a function of the model."""
    return b["e"] + 0.0 * model(b["x"]).mean(-1)


MEAN = {
    "the loss": lambda e, w: (e * w).sum() / w.sum(),
    "a metric": lambda e, w: (e.mean(), {"n": w.mean(), "masked": (e * w).sum() / w.sum()}),
    "with the weight 1": lambda e, w: ((e * w).sum() / w.sum(), 1.0),
    "at least 1": lambda e, w: (e * w).sum() / jnp.maximum(w.sum(), 1.0) + 0.1,
    "mean(where=)": lambda e, w: jnp.mean(e, where=w > 0),
    "average": lambda e, w: jnp.average(e, weights=w),
    "a reciprocal": lambda e, w: (e * w).sum() * (1 / w.sum()),
    "jnp.reciprocal": lambda e, w: (e * w).sum() * jnp.reciprocal(w.sum()),
    "if there are any": lambda e, w: jnp.where(w.sum() > 0, (e * w).sum() / w.sum(), 0.0),
    "a branch": lambda e, w: jax.lax.cond(w.any(), lambda e: e.sum() / w.sum(), lambda e: 0.0 * e.sum(), e),
    "a jitted function": lambda e, w: 2 * jax.jit(lambda e, w: (e * w).sum() / w.sum())(e, w),
}
SUMS = {
    "sums": lambda e, w: ((e * w).sum(), w.sum(), {"a": (e * w).sum()}),
    "a mean times the weight": lambda e, w: ((e * w).sum() / w.sum() * w.sum(), w.sum()),
    "a static number": lambda e, w: ((e * w).sum() / w.size, {"a": e.mean()}),
    "a number of the parameters": lambda e, w: e.sum() / jnp.maximum((e > 1).sum(), 1),
    "before the last reduction": lambda e, w: (e / w.sum()).sum(),
}


def step_trace(loss_fn, b, count=2):
    make_train_step(loss_fn, initial_state(), num_microbatches=count).eval_shape(initial_state(), b)


CALLS = {
    "evaluation": lambda loss_fn, b: make_eval_step(loss_fn, initial_state()).eval_shape(initial_state(), b),
    "step": step_trace,
    "one part": lambda loss_fn, b: step_trace(loss_fn, b, count=1),
    "stages": lambda loss_fn, b: split_stages(loss_fn, lambda: Net(nnx.Rngs(0)), b, num_stages=2, num_microbatches=2),
}
ROWS = batch(8, live=np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32))
ROWS["e"] = np.array([1.5527] * 4 + [1.8391] + [9.0] * 3, np.float32)
REPORTED = [("evaluation", name) for name in (*MEAN, *SUMS)]
REPORTED += [(call, name) for call in ("step", "one part", "stages") for name in ("the loss", "a metric", "sums")]


def with_form(name):
    return lambda model, b: (MEAN | SUMS)[name](errors_of(model, b), b["w"])


@pytest.mark.parametrize(("call", "name"), REPORTED)
def test_a_mean_of_means_is_reported_with_its_line(call, name):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        CALLS[call](with_form(name), ROWS)
    assert len(said) == (name in MEAN and call != "one part")
    if said:
        what, line = "masked" if name == "a metric" else "loss", r"test_loss.py:\d+ \(.*lambda.*\)"
        text = rf"depends on the batch: '{what}' in .*{line}.*Return the sum and the number"
        assert re.search(text, str(said[0].message))


def loss_and_count(y, w):
    """A loss and a weight from one loop over the rows, as chunked losses compute them."""

    def add(carry, row):
        y, w = row
        return (carry[0] + jnp.sum((y - 1.0) ** 2) * w, carry[1] + w), None

    return jax.lax.scan(jax.checkpoint(add), (jnp.float32(0), jnp.float32(0)), (y, w))[0]


SAFE = {
    "a scan": loss_and_count,
    "a jitted function": jax.jit(lambda y, w: (jnp.sum(y), jnp.sum(w))),
    "a remat": jax.checkpoint(lambda y, w: (jnp.sum(y), jnp.sum(w))),
    "the shape of the scores": lambda y, w: (jnp.sum(y), jnp.ones_like(y).sum()),
}


def test_a_weight_computed_beside_the_loss_is_accepted():
    def loss_fn(model, b):
        results = [fn(model(b["x"]), b["w"]) for fn in SAFE.values()]
        return tuple(map(sum, zip(*results, strict=True)))

    train(loss_fn)
    evaluate(loss_fn)
    split(loss_fn)
