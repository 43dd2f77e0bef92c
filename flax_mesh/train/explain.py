"""`flax-mesh explain`: what a recipe's sharding would be, from its config alone; no devices, nothing allocated."""

from collections.abc import Mapping

from flax import nnx
from jax.sharding import AbstractMesh

from flax_mesh.errors import ConfigError
from flax_mesh.mesh.shape import resolve_dims
from flax_mesh.sharding.explain import Explanation, explain_sharding
from flax_mesh.sharding.rules import Finding
from flax_mesh.train.config import TrainConfig
from flax_mesh.train.setup import check_config, check_on_mesh, make_optimizer, mesh_shape


def explain(config: TrainConfig) -> Explanation:
    """Every array of the recipe's model and optimizer on `mesh.shape`, and all findings.

    With pp > 1 the mesh is that of one group, as if it held the arrays of all stages, and the note says so.
    `run.platform` does not matter, but for `cpu:N` where `mesh.shape` has a -1: N devices then. Raises ConfigError for
    settings that are wrong by themselves; dims that do not divide over the mesh are findings.
    """
    if problems := check_config(config):
        raise ConfigError(problems)
    mesh = abstract_mesh(config)

    def make() -> tuple[nnx.Module, nnx.Optimizer]:
        model = config.make_model(config.model, nnx.Rngs(config.run.seed))
        return model, nnx.Optimizer(model, make_optimizer(config.optimizer), wrt=nnx.Param)

    explanation = explain_sharding(make, mesh, config.rules)
    settings = [_setting_finding(line) for line in check_on_mesh(config, mesh, explanation.axes)]
    return explanation._replace(findings=(*settings, *explanation.findings), note=_note(mesh_shape(config)))


def abstract_mesh(config: TrainConfig) -> AbstractMesh:
    """The mesh of `mesh.shape` as it is written, never shrunk to the devices that are here; of one group, with pp."""
    shape = mesh_shape(config)
    sizes = tuple(shape.values())
    if -1 in sizes:
        platform, _, count = config.run.platform.partition(":")
        if not count:
            raise ConfigError(
                f"mesh.shape={config.mesh.shape} leaves a size to the number of devices, and explain looks at none. "
                f"Give every size, or the number of devices by run.platform=cpu:N (it is {platform})"
            )
        try:
            sizes = resolve_dims(sizes, tuple(shape), int(count), what="mesh.shape")
        except ValueError as error:
            raise ConfigError(str(error)) from error
    of_group = {name: size for name, size in zip(shape, sizes, strict=True) if name != "pp"}
    return AbstractMesh(tuple(of_group.values()), tuple(of_group))


def _note(shape: Mapping[str, int]) -> str:
    if shape["pp"] == 1:
        return ""
    return (
        f"one of {shape['pp']} groups (pp): each holds the arrays of its own stages, bytes are as if this one held all"
    )


def _setting_finding(line: str) -> Finding:
    """A line of `check_on_mesh`, "SETTING is not divisible by N (AXES); REPAIR", as a finding."""
    what, _, repair = line.partition("; ")
    setting, _, problem = what.partition(" is ")
    return Finding(setting, problem, repair[:1].upper() + repair[1:])
