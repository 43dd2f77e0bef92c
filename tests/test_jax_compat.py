"""The private names of JAX and Orbax that flax_mesh uses: the name of a failing test states which one has moved."""

import ast
import importlib
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client

from flax_mesh import jax_compat
from tests.test_layering import PACKAGE, read_imports

PRIVATE = ("jax._src", "jaxlib", "jax.interpreters", "orbax.checkpoint._src")


def test_jax_src_distributed_global_state_has_client_coordinator_address_num_processes():
    state = jax_compat.distributed_state()
    assert (state.client, state.coordinator_address, state.num_processes) == (None, None, 1)


@pytest.mark.parametrize("method", ["key_value_set", "blocking_key_value_get", "key_value_try_get", "key_value_delete"])
def test_the_client_of_jax_distributed_has(method):
    """The methods that `processes/store.py` calls."""
    assert callable(getattr(importlib.import_module("jaxlib._jax").DistributedRuntimeClient, method))


def test_jax_src_xla_bridge_has_backends_are_initialized():
    jax.devices()
    assert jax_compat.backends_are_initialized() is True


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


def test_ambiguous_shardings_raise_the_error_that_is_caught():
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    rows = jax.ShapeDtypeStruct((2, 2), "float32", sharding=NamedSharding(mesh, P("dp")))
    with pytest.raises(jax_compat.sharding_type_errors(), match="ambiguous"):
        jax.eval_shape(lambda x: x.T @ x, rows)


def test_the_flag_jax_force_dcn_cross_host_transfers_can_be_read():
    assert jax.config.read("jax_force_dcn_cross_host_transfers") is False
    assert not jax_compat.transfers_over_dcn_are_forced()


def test_clients_have_supports_cross_host_transfers():
    """Clients of GPU and TPU have it, that of CPU does not; JAX reads the same attribute."""
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


def test_jaxlib_xla_client_has_array_impl_and_array_copy_semantics():
    assert isinstance(jnp.ones(2), xla_client.ArrayImpl)
    assert not isinstance(jax.random.key(0), xla_client.ArrayImpl)
    assert xla_client.ArrayCopySemantics.REUSE_INPUT is not None


def test_shardings_have_internal_device_list():
    here, _ = two_layouts()
    devices = here._internal_device_list  # pyright: ignore[reportAttributeAccessIssue]
    assert list(devices.addressable_device_list) == jax.devices()[:4]


def test_debug_info_has_with_unknown_names():
    """Without it errors during the evaluation of a program mention a lambda of jax_compat.py."""
    original: Any = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    assert original.with_unknown_names() != original
    info = jax_compat.empty_debug_info()
    assert core.Jaxpr((), (), (), (), debug_info=info).debug_info == info == info.with_unknown_names()


def test_scans_have_num_consts_and_num_carry_or_ft_in():
    jaxpr = jax.make_jaxpr(lambda w, c, x: jax.lax.scan(lambda c, x: (c * w + x, c), c, x))(1.0, 1.0, jnp.ones(3))
    (eqn,) = (eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan")
    assert jax_compat.scan_sizes(eqn) == (1, 1)


def test_jax_interpreters_partial_eval_dynamic_jaxpr_tracer_has_origin_msg():
    """Without it the time of tracing grows quadratically with the number of layers."""
    assert "_origin_msg" in vars(partial_eval.DynamicJaxprTracer)


def test_tracer_errors_are_short_in_the_context_and_restored_afterwards():
    tracer = partial_eval.DynamicJaxprTracer
    before, seen, inside = tracer._origin_msg, [], threading.Event()

    def message(x):
        with pytest.raises(jax.errors.TracerBoolConversionError) as error:
            bool(x)
        seen.append(str(error.value))
        return x

    def other_thread():
        with jax_compat.short_tracer_errors():
            inside.set()
            done.wait(10)

    done = threading.Event()
    thread = threading.Thread(target=other_thread)
    with jax_compat.short_tracer_errors():
        thread.start()
        assert inside.wait(10)
        jax.eval_shape(lambda x: message(x), jnp.float32(1))
    assert tracer._origin_msg is not before  # the other thread is still in the context
    done.set()
    thread.join()
    assert tracer._origin_msg is before
    jax.eval_shape(lambda x: message(x), jnp.float32(2))
    assert len(seen[0]) < len(seen[1]) and "while tracing" not in seen[0] and "while tracing" in seen[1]


def test_without_a_private_name_a_use_falls_back_or_reports_the_missing_name(monkeypatch):
    monkeypatch.setattr(jax_compat, "_optional", lambda name: None)
    _, there = two_layouts()
    assert jax_compat.legacy_mesh() is None and jax_compat.device_copy(there) is None
    with jax_compat.short_tracer_errors():
        assert np.array_equal(jax.jit(lambda x: x + 1)(1), 2)
    for use, name in (
        (jax_compat.distributed_state, "jax._src.distributed.global_state"),
        (jax_compat.backends_are_initialized, "jax._src.xla_bridge.backends_are_initialized"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(f"has no {name}, ") + ".*tested with JAX 0.10.2 and 0.12.0"):
            use()


@pytest.mark.parametrize("name", ["jax._src.distributed.nothing", "jax._src.nothing.nothing", "nothing.nothing"])
def test_a_missing_name_is_none(name):
    assert jax_compat._optional(name) is None


def test_orbax_src_serialization_types_has_transfer_priority_and_default_serialization_status_callback():
    """Without them `checkpoint/orbax.py` cannot limit how much of a state is on the host at a time."""
    from orbax.checkpoint._src.serialization import types

    callback = importlib.import_module("flax_mesh.checkpoint.orbax").deferred()
    assert isinstance(callback, types.DefaultSerializationStatusCallback)
    assert callback.key_priority(()) is types.TransferPriority.ASYNCHRONOUS_DEPRIORITIZED


def private_uses(path: Path, own: set[str]) -> list[str]:
    """Private names of JAX that the file uses: imports, and underscore attributes that are not defined in `own`."""
    tree = ast.parse(path.read_text())
    names = [item.name for item in read_imports(path.read_text())]
    found = [name for name in names if f"{name}.".startswith(tuple(f"{prefix}." for prefix in PRIVATE))]
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        elif isinstance(node, ast.Constant) and str(node.value).startswith(tuple(f"{prefix}." for prefix in PRIVATE)):
            found.append(str(node.value))
        if isinstance(name, str) and re.match("_[a-z]", name) and name not in own:
            found.append(name)
    return found


def own_names(paths: list[Path]) -> set[str]:
    """Names that the files define (functions, fields, attributes of `self`), and underscore methods of namedtuples."""
    found = {"_replace", "_asdict", "_exit"}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def test_private_names_are_used_only_in_one_file_for_jax_and_one_for_orbax():
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "jax_compat.py"]
    assert len(paths) > 50
    own = own_names(paths)
    found = [f"{path.relative_to(PACKAGE)}: {name}" for path in paths for name in private_uses(path, own)]
    assert found == ["checkpoint/orbax.py: orbax.checkpoint._src.serialization.types"]


def test_private_uses_are_detected(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        "import jax\nfrom jaxlib import xla_client\nfrom jax._src import core\nfrom jax.interpreters import pxla\n"
        "class A:\n    def f(self, x):\n        self._own = x._shards\n        return getattr(x, '_npy'), self._own\n"
        "name = 'jax._src.mesh'\n"
    )
    found = private_uses(file, own_names([file]))
    assert sorted(found) == sorted(
        ["jaxlib.xla_client", "jax._src.core", "jax.interpreters.pxla", "_shards", "_npy", "jax._src.mesh"]
    )
    assert private_uses(PACKAGE / "jax_compat.py", set())
