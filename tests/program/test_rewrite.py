"""Every rule on one matrix of programs: each kind of body in each kind of body, and on Auto and Explicit axes."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mesh import create_mesh
from flax_mesh.jax_compat import source_line
from flax_mesh.lora.products import evaluate_products
from flax_mesh.lora.weight import Weight, with_factors
from flax_mesh.mpmd.split.widen import call_widened
from flax_mesh.program.program import REMAT, Eqn, Program, bodies, trace
from flax_mesh.program.rewrite import Value, inline, rewrite
from flax_mesh.step.callbacks import CALLBACKS, CallbackErrors, callbacks_in
from tests.program import programs
from tests.program.programs import BODIES, Layer, N, W, X, effect, on_devices, product

pytestmark = pytest.mark.usefixtures("quick_compilation")
A, B = np.random.default_rng(1).normal(size=(2, 2, N, 3)).astype(np.float32) / 2
PAIRS = [(outer, inner) for outer in BODIES for inner in BODIES]


def nested(outer: str, inner: str, layer: Layer = product) -> Layer:
    return BODIES[outer](BODIES[inner](layer))


def all_eqns(eqns: Sequence[Eqn]) -> list[Eqn]:
    return [each for eqn in eqns for each in (eqn, *(e for body in bodies(eqn) for e in all_eqns(body.eqns)))]


# The rules: a program and its arguments -> its outputs, evaluated with the rule. All have the outputs of the program.


def other_base(program: Program, x: Any, w: Any) -> Sequence[Any]:
    """exp as a power of 2, and every other equation as it is."""

    def rule(eqn: Eqn, values: list[Any]) -> list[Any] | None:
        return [jnp.exp2(values[0] * math.log2(math.e))] if eqn.primitive.name == "exp" else None

    return rewrite(program, [x, w], rule)


def with_adapter(program: Program, x: Any, w: Any) -> Sequence[Value]:
    """The weight w - A B, with the factors A and B."""
    weight = with_factors(w - A @ B.swapaxes(1, 2), "w", A, B, ((0, 1, None), (0, 2, None)), 1.0)

    def low_rank(eqn: Eqn, values: Sequence[Any], at: int) -> Any:
        return values[at].low_rank(values[1 - at], at, eqn)

    def refuse(eqn: Eqn, weight: Weight) -> None:
        raise AssertionError(f"{weight.path} is lost in {eqn}")

    return evaluate_products(program, [x, weight], low_rank, refuse)


def widened(program: Program, x: Any, w: Any) -> Sequence[Value]:
    return call_widened(program, [x, w])


RULES = {other_base: "float32", with_adapter: "float32", widened: "bfloat16"}  # -> dtype of program


def results_of(fn: Layer, x: Any, w: Any, rules: Sequence[Any]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A function of x and w: (what `fn` returns, rule -> what its program returns with the rule)."""
    shapes = {dtype: [x.astype(dtype), w.astype(dtype)] for dtype in {*RULES.values()}}
    traced = {rule: trace(fn, *shapes[RULES[rule]])[0] for rule in rules}
    return lambda x, w: (fn(x, w), {rule.__name__: rule(program, x, w)[0] for rule, program in traced.items()})


def check(calls: dict[str, Callable[..., tuple[Any, dict[str, Any]]]], x: Any, w: Any) -> None:
    """Compiles all calls as one program."""
    results = jax.jit(lambda x, w: {name: call(x, w) for name, call in calls.items()})(x, w)
    for name, (want, of_rules) in results.items():
        for rule, have in of_rules.items():
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6, err_msg=f"{name} {rule}")
            assert have.dtype == want.dtype and np.abs(want).max() > 1e-3


@pytest.mark.parametrize("outer", BODIES)
def test_rules_compute_what_the_program_computes(outer: str):
    takes = lambda rule, inner: rule is not with_adapter or "custom" not in outer + inner  # noqa: E731
    rules = {inner: [rule for rule in RULES if takes(rule, inner)] for inner in BODIES}
    check({f"{outer} of {inner}": results_of(nested(outer, inner), X, W, rules[inner]) for inner in BODIES}, X, W)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rules_compute_the_same_on_meshes(axis_type: AxisType):
    """Also the part of a device, which takes no adapter."""
    mesh = create_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
    x, w = (jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in ((X, P("x")), (W, P())))
    split = BODIES["scan"](BODIES["cond"](on_devices(mesh, nested("remat", "while"))))
    with jax.set_mesh(mesh):
        calls = {
            "all": results_of(BODIES["remat"](nested("scan", "cond")), x, w, [*RULES]),
            "split": results_of(split, x, w, [rule for rule in RULES if rule is not with_adapter]),
        }
        check(calls, x, w)


def test_derivatives_of_a_rewritten_program_are_those_of_the_user():
    fn = BODIES["remat"](lambda x, w: nested("scan", "custom_jvp")(x, w) + nested("cond", "custom_vjp")(x, w))
    program, _ = trace(fn, X, W)
    calls = fn, lambda x, w: other_base(program, x, w)[0]
    want, have = jax.jit(lambda x, w: [jax.grad(lambda x: call(x, w).sum())(x) for call in calls])(X, W)  # noqa: B023
    np.testing.assert_allclose(have, want, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in BODIES if "custom" not in name])
def test_bodies_that_a_rule_does_not_touch_stay_the_same_objects(name: str):
    """JAX itself traces functions with custom derivatives again."""
    program, _ = trace(BODIES[name](product), X, W)
    again, _ = trace(lambda *args: rewrite(program, args, touch_nothing, touches=lambda eqn, values: False), X, W)
    before, after = ([body for eqn in each.eqns for body in bodies(eqn)] for each in (program, again))
    assert before and [*map(id, before)] == [*map(id, after)]
    assert inline(again) is again or name == "jit"


def touch_nothing(eqn: Eqn, values: Sequence[Value]) -> Sequence[Value]:
    raise AssertionError(f"the rule must not see {eqn}")


@pytest.mark.parametrize("name", BODIES)
def test_callbacks_in_every_body_record_their_exceptions(name: str):
    program, _ = trace(nested("remat", name, effect), X, W)
    recording = CallbackErrors().recording(program)
    before, after = ([eqn.params["callback"] for eqn in callbacks_in(each.eqns)] for each in (program, recording))
    assert before and len(after) == len(before) and not {*map(id, before)} & {*map(id, after)}
    assert recording.inputs == program.inputs and all(eqn.effects for eqn in callbacks_in(recording.eqns))
    assert any(eqn.effects for eqn in recording.eqns if eqn.primitive.name in (*CALLBACKS, *REMAT))
    plain, _ = trace(BODIES[name](product), X, W)
    assert CallbackErrors().recording(plain) is plain


def test_callbacks_of_a_linear_solve_are_recorded_and_a_warning_names_other_places_of_callbacks():
    called = lambda x: jax.pure_callback(lambda x: x, x, x)  # noqa: E731
    program, _ = trace(lambda x: jax.lax.custom_linear_solve(called, x, lambda f, x: f(x)), X[0])
    recording = CallbackErrors().recording(program)
    before, after = ({id(eqn.params["callback"]) for eqn in callbacks_in(each.eqns)} for each in (program, recording))
    assert before and len(before) == len(after) and not before & after
    program, _ = trace(lambda x: jax.custom_derivatives.linear_call(lambda _, x: called(x), lambda _, x: x, (), x), X)
    with pytest.warns(UserWarning, match=r"linear_call \(.*test_rewrite.py:.*calls a callback.* Call it outside"):
        CallbackErrors().recording(program)


@pytest.mark.parametrize("name", BODIES)
def test_new_equations_have_the_line_of_the_equation_in_their_place(name: str):
    program, _ = trace(nested("remat", name), X, W)
    rewritten, _ = trace(lambda x, w: other_base(program, x, w), X, W)
    old, new = all_eqns(program.eqns), all_eqns(rewritten.eqns)
    places = {source_line(eqn) for eqn in old if eqn.primitive.name == "exp"}
    assert places == {source_line(eqn) for eqn in new if eqn.primitive.name == "exp2"}
    assert {source_line(eqn) for eqn in new} <= {source_line(eqn) for eqn in old}
    assert all(Path(programs.__file__).name in place for place in places)


def test_a_rewritten_program_keeps_shardings_of_jits_platforms_of_branches_and_named_scopes():
    """Otherwise arrays are replicated, kernels of other platforms compile, and profiles lose their names."""
    mesh = create_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.jit(effect, out_shardings=NamedSharding(mesh, P("x")))

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("scope"):
            x = BODIES["scan"](effect)(x, w)
        return jax.lax.platform_dependent(x, w, tpu=effect, default=sharded)

    program, _ = trace(step, X, W)
    (choice,) = [eqn for eqn in CallbackErrors().recording(program).eqns if eqn.params.get("branches_platforms")]
    assert choice.params["branches_platforms"] == (("tpu",), None)
    found = all_eqns(CallbackErrors().recording(program).eqns)
    assert [eqn.params["out_shardings"][0].spec for eqn in found if any(eqn.params.get("out_shardings", ()))]
    assert {str(eqn.source_info.name_stack) for eqn in found if eqn.primitive.name == "scan"} == {"scope"}


@pytest.mark.parametrize("flags", [(False, True), (True, False)])
def test_a_remat_with_one_flag_per_input_takes_values_of_several_arrays(flags: tuple[bool, bool]):
    program, _ = trace(jax.checkpoint(lambda x, w: product(x, w), prevent_cse=flags), X, W)
    jax.eval_shape(lambda x, w: with_adapter(program, x, w), X, W)
    jax.eval_shape(jax.grad(lambda x: other_base(program, x, W)[0].sum()), X)


def test_a_branch_that_returns_either_of_two_equal_operands_returns_the_weight():
    def chosen(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x, jax.lax.cond(x.sum() > 0, lambda a, b: a, lambda a, b: b, w, w))

    program, _ = trace(chosen, X, W)
    jax.eval_shape(lambda x, w: with_adapter(program, x, w), X, W)


@pytest.mark.parametrize("name", ["scan", "while"])
def test_a_loop_that_changes_a_weight_reports_the_use_in_it_first(name: str):
    step = lambda x, w: (x @ w[0], w * 2)  # noqa: E731
    loops = {
        "scan": lambda x, w: jax.lax.scan(lambda c, row: (step(*c), row), (x, w), w)[0],
        "while": lambda x, w: jax.lax.while_loop(lambda c: c[0].sum() < 1, lambda c: step(*c), (x, w)),
    }
    program, _ = trace(loops[name], X, W)
    uses: list[str] = []
    weight, report = Weight(W, None, None, "w", (0, 1, 2)), lambda eqn, weight: uses.append(eqn.primitive.name)
    jax.eval_shape(lambda x: evaluate_products(program, [x, weight], lambda *_: None, report), X)
    assert uses[0] == "mul" and name in uses
