"""The private names of JAX and Orbax that flax_mesh uses: the name of a failing test states which one has moved."""

import ast
import gc
import importlib
import re
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client

from flax_mesh import jax_compat
from flax_mesh.mpmd import chunks
from flax_mesh.mpmd.split import assign, remat
from flax_mesh.mpmd.transport import local_copy
from flax_mesh.program import program
from tests.suite.syntax import PACKAGE, read_imports

PRIVATE = ("jax._src.", "jaxlib.", "jax.interpreters.", "orbax.checkpoint._src.")


def scan_sizes() -> tuple[int, int]:
    """The constants and carries of a scan with one of each."""
    jaxpr = jax.make_jaxpr(lambda w, c, x: jax.lax.scan(lambda c, x: (c * w + x, c), c, x))(1.0, 1.0, jnp.ones(3))
    (eqn,) = (eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan")
    return jax_compat.scan_sizes(eqn)


CLIENT = importlib.import_module("jaxlib._jax").DistributedRuntimeClient
STATE = ("client", "coordinator_address", "num_processes")
VALUES = {  # names -> the result of a use of them, and the expected value
    "jax._src.distributed.global_state": (
        lambda: [getattr(jax_compat.distributed_state(), name) for name in STATE],
        [None, None, 1],
    ),
    "the methods of the client that processes/agree.py calls": (
        lambda: [callable(getattr(CLIENT, method)) for method in jax_compat.STORE_METHODS],
        [True] * 4,
    ),
    "jax._src.xla_bridge.backends_are_initialized": (
        lambda: bool(jax.devices()) and jax_compat.backends_are_initialized(),
        True,
    ),
    "jax_force_dcn_cross_host_transfers": (jax_compat.transfers_over_dcn_are_forced, False),
    "num_consts and num_carry or ft_in of a scan": (scan_sizes, (1, 1)),
    "jaxlib.xla_client.ArrayImpl": (
        lambda: [isinstance(x, xla_client.ArrayImpl) for x in (jnp.ones(2), jax.random.key(0))],
        [True, False],
    ),
}


@pytest.mark.parametrize("names", VALUES)
def test_private_names_have_the_values_that_are_read(names):
    call, value = VALUES[names]
    assert call() == value


def test_jax_src_mesh_has_thread_resources():
    mesh = jax.make_mesh((8,), ("fsdp",))
    assert jax_compat.legacy_mesh() is None
    with pytest.warns(DeprecationWarning), mesh:
        assert jax_compat.legacy_mesh() is mesh
    assert jax_compat.legacy_mesh() is None


def test_jax_src_source_info_util_has_user_frames_and_user_context():
    def double(x):
        return x + x

    eqn = jax.make_jaxpr(double)(1.0).jaxpr.eqns[0]
    here = re.escape(__file__)
    assert re.fullmatch(rf"{here}:\d+ \(.*double\)", jax_compat.source_line(eqn))
    with jax_compat.in_source_of(eqn):
        other = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).jaxpr.eqns[0]
    assert isinstance(jax_compat.source_line(other), str)


def test_clients_have_supports_cross_host_transfers():
    """Clients of GPU and TPU have it, the client of CPU does not; JAX reads the same attribute."""
    source = Path(jax.__file__).parent / "_src" / "dispatch.py"
    assert "supports_cross_host_transfers" in source.read_text()
    assert not jax_compat.supports_cross_host_transfers(jax.devices()[0].client)


def two_layouts() -> tuple[NamedSharding, NamedSharding]:
    meshes = [Mesh(np.array(devices), ("fsdp",)) for devices in (jax.devices()[:4], jax.devices()[4:])]
    first, second = (NamedSharding(mesh, P("fsdp")) for mesh in meshes)
    return first, second


def test_jaxlib_xla_client_has_batched_copy_array_to_devices_with_sharding():
    """Without it pipelines still run, but the host time of a transfer is about ten times as long."""
    here, there = two_layouts()
    assert callable(xla_client.batched_copy_array_to_devices_with_sharding)
    copy, x = jax_compat.device_copy(there), jax.device_put(np.arange(8.0), here)
    assert copy is not None
    assert copy(x).sharding == there and np.array_equal(copy(x), x)


# Tables of names of primitives. A name that JAX does not have has no effect, so nothing else would report it.
TABLES = {
    "JIT": jax_compat.JIT,
    "REMAT": jax_compat.REMAT,
    "RUN_ONCE": assign.RUN_ONCE,
    "STORED": remat.STORED,
    "FREE": remat.FREE,
    "ELEMENTWISE": chunks.ELEMENTWISE,
    "REDUCE": chunks.REDUCE,
    "bodies": (*program.CALLS, program.SCAN, program.WHILE, program.COND, program.SHARD_MAP, program.LINEAR_SOLVE),
    "layouts": (remat.CONSTRAINT, remat.RESHARD),
}
SINCE = {"log2": (0, 11), "one_minus_square": (0, 11)}  # the first version with the primitive; others are older
COMPARED = re.compile(r"(?<!for )\bname (?:==|in) \(?((?:\"\w+\"(?:, )?)+)")  # as in: eqn.primitive.name == "scan"


def names_of_primitives() -> set[str]:
    gc.unfreeze()  # the objects that were imported for the collection of tests
    names = {one.name for one in gc.get_objects() if isinstance(one, core.Primitive)}
    gc.freeze()
    return names


@pytest.mark.parametrize("table", TABLES)
def test_tables_contain_names_of_primitives_only(table):
    have = names_of_primitives()
    assert {name for name in TABLES[table] if name not in have} == {
        name for name in TABLES[table] if jax.__version_info__ < SINCE.get(name, (0,))
    }


def test_names_that_are_compared_with_equations_are_primitives():
    paths = [path for path in PACKAGE.rglob("*.py") if "primitive.name" in path.read_text()]
    found = {name for path in paths for text in COMPARED.findall(path.read_text()) for name in re.findall(r"\w+", text)}
    assert {"div", "dot_general"} <= found <= names_of_primitives()


def test_debug_info_has_with_unknown_names():
    """Without it errors during the evaluation of a program mention a lambda of jax_compat.py."""
    original: Any = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    assert original.with_unknown_names() != original
    info = jax_compat.empty_debug_info()
    assert core.Jaxpr((), (), (), (), debug_info=info).debug_info == info == info.with_unknown_names()


def test_tracer_errors_are_short_in_the_context_and_restored_afterwards():
    tracer = partial_eval.DynamicJaxprTracer
    before, seen = tracer._origin_msg, []

    def message(x):
        with pytest.raises(jax.errors.TracerBoolConversionError) as error:
            bool(x)
        seen.append(str(error.value))
        return x

    first, second = jax_compat.short_tracer_errors(), jax_compat.short_tracer_errors()
    first.__enter__()
    with second:  # as in another thread, which leaves the context first
        jax.eval_shape(lambda x: message(x), jnp.float32(1))
    assert tracer._origin_msg is not before
    first.__exit__(None, None, None)
    assert tracer._origin_msg is before
    jax.eval_shape(lambda x: message(x), jnp.float32(2))
    assert len(seen[0]) < len(seen[1]) and "while tracing" not in seen[0] and "while tracing" in seen[1]


def test_orbax_src_serialization_types_has_transfer_priority_and_default_serialization_status_callback():
    """Without them `checkpoint/orbax.py` cannot limit how much of a state is on the host at a time."""
    types = importlib.import_module("orbax.checkpoint._src.serialization.types")
    callback = jax_compat.deferred_callback()
    assert isinstance(callback, types.DefaultSerializationStatusCallback)
    assert callback.key_priority(()) is types.TransferPriority.ASYNCHRONOUS_DEPRIORITIZED


def abstract(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
    mesh = AbstractMesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


def traced_attention(heads: int = 4) -> Any:
    """The gradient of an attention by cuDNN on a mesh without devices."""

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        y = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
        return y.astype(jnp.float32).sum()

    arguments = abstract((8, 64, 8, 64), "fsdp", None, "tp"), abstract((8, 64, heads, 64), "fsdp", None, "tp")
    with jax_compat.kernels_without_devices():
        return jax.jit(jax.grad(loss, (0, 1))).trace(*arguments)


def test_the_mlir_of_jaxlib_and_its_pass_manager_propagate_shardings():
    """Without them a plan has no shardings of values."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    arguments = abstract((16, 8), "fsdp"), abstract((3, 8, 8), None, None, "tp")
    lowered = jax.jit(f).trace(*arguments).lower(lowering_platforms=("tpu",))
    calls = []
    module = jax_compat.propagated_module(lowered, lambda *given: calls.append(given))
    assert re.search(r'dot_general.*sdy.sharding_per_value<\[<@mesh, \[\{"fsdp"\}, \{"tp"\}\]', str(module))
    assert [given[1] for given in calls] == [module] and calls[0][0].__name__ == "jaxlib.mlir.ir"


def test_cudnn_checks_are_replaced_only_while_attention_is_traced():
    module = importlib.import_module(jax_compat.CUDNN)
    before = [getattr(module, name) for name in jax_compat.CHECKS]
    with jax_compat.kernels_without_devices(), jax_compat.kernels_without_devices():
        assert traced_attention()
        assert [getattr(module, name) for name in jax_compat.CHECKS] != before
    with pytest.raises(ZeroDivisionError), jax_compat.kernels_without_devices():
        raise ZeroDivisionError
    assert [getattr(module, name) for name in jax_compat.CHECKS] == before


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_the_attention_of_cudnn_is_lowered_without_devices(platform, heads):
    """The heads of queries and keys stay split over tp; JAX itself cannot lower it on such a mesh afterwards."""
    lowered = jax_compat.lower_without_devices(traced_attention(heads), platform)
    text = str(jax_compat.propagated_module(lowered, lambda *_: None))
    calls = [line for line in text.splitlines() if f"@{jax_compat.ATTENTION}" in line]
    assert ["forward MaskType.CAUSAL 0" in calls[0], "backward MaskType.CAUSAL 0" in calls[1]] == [True, True]
    assert all('[{"fsdp"}, {}, {"tp"}, {}]' in line for line in calls)
    with pytest.raises(ValueError, match="AbstractMesh"):
        traced_attention(heads).lower(lowering_platforms=(platform,))


def test_the_devices_of_a_run_lower_the_trace_that_its_forecast_has_lowered():
    """JAX keeps for each trace whether it needs devices, and the two share one."""
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("dp")))
    with jax_compat.kernels_without_devices():
        traced = jax.jit(partial(jax.nn.dot_product_attention, implementation="cudnn")).trace(x, x, x)
    assert jax_compat.ATTENTION in jax_compat.lower_without_devices(traced, "cuda", True).as_text()
    assert jax_compat.ATTENTION not in traced.lower(lowering_platforms=("cuda",)).as_text()


# Every use of private names: how it is called.
EQN = jax.make_jaxpr(lambda x: x + 1)(1.0).eqns[0]
CALLS = {
    "propagated_module": lambda: jax_compat.propagated_module(jax.jit(jnp.sin).lower(1.0), lambda ir, _: ir.Location),
    "_attention_module": jax_compat._attention_module,
    "lower_without_devices": lambda: jax_compat.lower_without_devices(traced_attention(), "tpu"),
    "distributed_state": jax_compat.distributed_state,
    "backends_are_initialized": jax_compat.backends_are_initialized,
    "legacy_mesh": jax_compat.legacy_mesh,
    "transfers_over_dcn_are_forced": jax_compat.transfers_over_dcn_are_forced,
    "_runtime_copy": lambda: jax_compat.device_copy(two_layouts()[1]),
    "empty_debug_info": jax_compat.empty_debug_info,
    "scan_sizes": lambda: jax_compat.scan_sizes(EQN),  # of an addition, which has no such parameters
    "source_line": lambda: jax_compat.source_line(EQN),
    "sharding_type_errors": jax_compat.sharding_type_errors,
    "in_source_of": lambda: jax_compat.in_source_of(EQN),
    "_tracer_type": lambda: jax.eval_shape(jax_compat.short_tracer_errors()(lambda x: x), 1.0),
    "linear_primitive": lambda: jax_compat.linear_primitive("negation", *[jnp.negative] * 4),
    "deferred_callback": jax_compat.deferred_callback,
    "reproducible_cpu_options": jax_compat.reproducible_cpu_options,
}
DESCRIBED = {name for use in jax_compat.USES.values() for name in use.names if " " in name}
MUTATIONS = [
    (function, name, how)
    for function, use in jax_compat.USES.items()
    for name in use.names
    for how in ("missing", "changed")
    if name not in DESCRIBED
]


@pytest.fixture(autouse=True)
def uncached():
    cached = jax_compat._runtime_copy, jax_compat.reproducible_cpu_options, jax_compat._warn_once
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def check_problem(function: str) -> None:
    """A use of a private name that is missing or has changed is one error, or one warning and a working fallback."""
    use = jax_compat.USES[function]
    name, fallback = map(re.escape, (use.names[0], use.fallback))
    text = rf"{name}.* missing or has changed: \w*Error: .*{fallback}.*Installed: jax "
    text += rf"{re.escape(metadata.version('jax'))}, flax .*Tested with: jax 0\.10\.2 and 0\.12\.0, flax"
    if not use.fallback:
        with pytest.raises(RuntimeError, match=text):
            CALLS[function]()
        return
    with pytest.warns(RuntimeWarning, match=text) as warned:
        for _ in range(3):
            CALLS[function]()
    assert len(warned) == 1


@pytest.mark.parametrize(("function", "name", "how"), MUTATIONS)
def test_a_name_that_is_missing_or_has_changed_is_reported_with_the_tested_versions(function, name, how, monkeypatch):
    found = jax_compat._find

    def find(wanted: str) -> Any:
        if wanted != name:
            return found(wanted)
        return object() if how == "changed" else found(f"{name}_of_another_release")

    monkeypatch.setattr(jax_compat, "_find", find)
    check_problem(function)


CHANGES: dict[str, tuple[Any, str, Any]] = {  # function -> an object, its attribute and the new value
    "_runtime_copy": (xla_client, "batched_copy_array_to_devices_with_sharding", lambda arrays: arrays),
    "reproducible_cpu_options": (jax_compat, "CPU_OPTIONS", {"xla_cpu_option_of_another_release": ""}),
    "distributed_state": (jax_compat.distributed_state(), "client", object()),  # without the methods of a store
}


@pytest.mark.parametrize("function", [*CHANGES, "scan_sizes"])  # CALLS passes an equation that is not a scan
def test_changed_arguments_options_methods_and_parameters_are_reported(function, monkeypatch):
    if function in CHANGES:
        monkeypatch.setattr(*CHANGES[function])
    check_problem(function)


def test_the_fallbacks_work(monkeypatch):
    def missing(name: str) -> Any:
        raise AttributeError(name)

    monkeypatch.setattr(jax_compat, "_find", missing)
    here, there = two_layouts()
    with pytest.warns(RuntimeWarning):
        assert jax_compat.legacy_mesh() is None and not jax_compat.transfers_over_dcn_are_forced()
        assert jax_compat.source_line(EQN) == "" and jax_compat.sharding_type_errors() == ()
        with jax_compat.short_tracer_errors(), jax_compat.in_source_of(EQN):
            assert np.array_equal(jax.jit(lambda x: x + 1)(1), 2)
        x = jax.device_put(np.arange(8.0), here)
        assert local_copy.mover.__wrapped__(here, there)(x).sharding == there


def test_the_options_of_xla_are_tried_also_in_the_context_of_a_mesh():
    with jax.set_mesh(jax.make_mesh((8,), ("fsdp",))):
        assert jax_compat.reproducible_cpu_options() == jax_compat.CPU_OPTIONS


@pytest.mark.parametrize(("dtype", "name"), [(jnp.bfloat16, "bf16"), (jnp.float16, "f16")])
def test_half_precision_is_stored_in_float32_on_cpus_if_the_table_says_so(dtype, name):
    def products(x, n):
        return jax.lax.fori_loop(0, n, lambda i, y: jnp.tanh(y @ x), x)

    text = jax.jit(products).lower(jnp.ones((64, 64), dtype), 3).compile().as_text()
    assert text is not None
    stored = set(re.findall(r" = (\w+)\[64,64\]\S* dot\(", text))
    assert stored == ({"f32"} if name in jax_compat.float32_on_cpu() else {name})


@pytest.mark.parametrize("name", ["jax._src.distributed.nothing", "jax._src.nothing.nothing", "nothing.nothing"])
def test_a_missing_name_is_not_found(name):
    with pytest.raises((AttributeError, ImportError), match="nothing"):
        jax_compat._find(name)


def test_every_private_name_is_in_the_table_of_uses_and_every_use_is_tried_here():
    assert set(CALLS) == set(jax_compat.USES)
    tree = ast.parse((PACKAGE / "jax_compat.py").read_text())
    used = {name.partition(" ")[0].rpartition(".")[2] for use in jax_compat.USES.values() for name in use.names}
    assert underscore_attributes(tree) - {"_fields"} <= used
    texts = [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    dotted = {text for text in texts if re.fullmatch(r"[\w.]+", text) and f"{text}.".startswith(PRIVATE)}
    names = {name for use in jax_compat.USES.values() for name in use.names}
    assert dotted and dotted - {jax_compat.CUDNN} <= names  # its functions are in the table


# In spite of their underscore; trackio has no other name for the step that its run continues with, and a test calls it.
PUBLIC = {"_replace", "_asdict", "_exit", "_next_step"}
READS = ("getattr", "hasattr")


def underscore_attributes(tree: ast.Module) -> set[str]:
    """Names with one underscore in front, of attributes and getattr, that the file neither defines nor assigns."""
    nodes = list(ast.walk(tree))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in READS]
    read |= {str(node.args[1].value) for node in calls if isinstance(node.args[1], ast.Constant)}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    return {name for name in read - own - PUBLIC if re.match("_[a-z]", name)}


def test_private_names_are_used_only_in_one_file():
    found = set()
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "jax_compat.py"}:
        code = path.read_text()
        own = re.findall(r"\bdef (_\w+)", code) + re.findall(r"^ +self\.(_\w+)(?:: .+)? = ", code, re.MULTILINE)
        possible = {*re.findall(r"[.\"'](_[a-z]\w*)", code)} - {*own, *PUBLIC}
        if not possible and not any(name[:-1] in code for name in PRIVATE):
            continue  # no need to parse it
        tree = ast.parse(code)
        names = [f"{item.name}." for item in read_imports(code)]
        names += [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        found |= {(path.name, name) for name in names if name.startswith(PRIVATE)}
        found |= {(path.name, name) for name in underscore_attributes(tree)}
    assert not found
