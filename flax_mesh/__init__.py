"""Sharding rules, pipelines, checkpoints and training for Flax NNX models. Importing it has no side effects.

A name is imported when it is used, so that `flax-mesh --help` does not import JAX. `__init__.pyi` has the same names.
"""

from importlib import import_module as _import_module

from flax_mesh.text import version_of as _version_of

_NAMES = {
    "axes": "PartitionAxis",
    "blockwise.transform": "blockwise_attention",
    "errors": "CheckpointCorruptedError ConfigError SaveError ShardingError",
    "mesh.context": """
        NoMeshError current_mesh get_axes_size_in_mesh get_incontext_mesh get_mesh_axis_names get_mesh_axis_size
        get_submesh_device_index names_in_current_mesh
    """,
    "mesh.create": "calculate_host_mesh_shape cpu_context create_cpu_mesh create_mesh force_cpu parse_mesh_from_string",
    "mesh.device_mesh": "create_device_mesh create_hybrid_device_mesh",
    "mesh.slices": "SlowNetworkWarning",
    "sharding.abstract": "abstract_state init_model init_state partition_rules partitioned",
    "sharding.constrain": "constrain with_sharding_constraint",
    "sharding.gather": "gather",
    "sharding.legacy": """
        create_pattern_based_partition_spec extract_sharding_structure extract_shardings
        get_names_from_partition_spec get_partition_spec get_shardings_with_structure
    """,
    "sharding.report.account": "analyze_sharding_strategy",
    "sharding.report.explain": "explain_sharding",
    "sharding.report.report": "ShardingReport",
    "sharding.rules": "PartitionRules match_partition_rules",
    "sharding.transfer": "make_shard_and_gather_fns reshard shard",
    "step.state": "init_train_state",
    "step.step": "make_train_step",
    "tree": "named_leaves",
}
_MODULES = {name: f"flax_mesh.{module}" for module, names in _NAMES.items() for name in names.split()}
_FOLDERS = ("mesh", "sharding")  # these have further public names
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version_of("flax-mesh")
    if name in _FOLDERS:
        return _import_module(f"flax_mesh.{name}")
    if name in _MODULES:
        value = globals()[name] = getattr(_import_module(_MODULES[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
