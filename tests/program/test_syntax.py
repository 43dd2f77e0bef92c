"""Bodies of equations are opened in flax_mesh/program only: a change of JAX in their parameters is repaired there."""

import ast

from tests.suite.syntax import PACKAGE

# The parameters of scan, while, cond, shard_map, jit, remat and custom derivatives that are bodies or describe them.
PARAMETERS = {
    "jaxpr",
    "call_jaxpr",
    "fun_jaxpr",
    "branches",
    "cond_jaxpr",
    "body_jaxpr",
    "cond_nconsts",
    "body_nconsts",
}
PARAMETERS |= {"num_consts", "num_carry", "ft_in", "length", "reverse", "unroll", "linear", "in_specs", "out_specs"}
PARAMETERS |= {"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd"}
READS = """
eqn.params["jaxpr"]; params["branches"]; op.eqn.params.get("length", 1)
{name: eqn.params[name] for name in ("reverse", "unroll")}
if "call_jaxpr" in eqn.params: pass
from flax_mesh.jax_compat import scan_sizes
params["kernel"]; words["length"]; eqn.params["axes"]; {key: params[key] for key in ("a", "b")}
"""


def reads_of_bodies(code: str) -> list[str]:
    """The expressions that read one of PARAMETERS, and imports of `scan_sizes`."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(code)) if _reads(node)]


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.DictComp):  # a parameter for each name of a tuple
        return "params" in ast.unparse(node.value) and _names_one(node.generators[0].iter)
    if isinstance(node, ast.Subscript):
        return _is_params(node.value) and _names_one(node.slice)
    if isinstance(node, ast.Call):
        return (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and _is_params(node.func.value)
            and (any(map(_names_one, node.args)))
        )
    if isinstance(node, ast.Compare):
        return any(map(_is_params, node.comparators)) and _names_one(node.left)
    return isinstance(node, ast.alias) and node.name == "scan_sizes"


def _names_one(node: ast.expr) -> bool:
    return any(isinstance(x, ast.Constant) and x.value in PARAMETERS for x in ast.walk(node))


def _is_params(node: ast.expr) -> bool:
    return (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) == "params"


def test_the_parameters_of_bodies_are_read_in_program_only():
    assert len(reads_of_bodies(READS)) == 6
    found = {path.relative_to(PACKAGE).as_posix(): reads_of_bodies(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert found["program/program.py"], "the views read them"
    wrong = {path: reads for path, reads in found.items() if reads and not path.startswith(("program/", "jax_compat"))}
    assert not wrong
