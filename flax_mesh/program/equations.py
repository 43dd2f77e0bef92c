"""The bodies of equations: the only place that reads which parameters of an equation are programs, and their inputs.

The name of its primitive tells which view fits an equation:

    names                             view                a body is evaluated
    JIT, REMAT, CUSTOM, SHARD_MAP     body(eqn)           once, on all inputs
    SCAN                              scan_parts(eqn)     once per row of the scanned inputs
    WHILE                             while_parts(eqn)    while its test holds
    COND                              branches(eqn)       once, one of them, on the inputs after the index

Other equations have bodies too, such as the sum of a scatter and the kernel of a Pallas call; `bodies` finds them all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

from flax_mesh.jax_compat import JIT as JIT
from flax_mesh.jax_compat import REMAT as REMAT
from flax_mesh.jax_compat import scan_sizes
from flax_mesh.program.program import Eqn, Program, program_of
from flax_mesh.program.program import bodies as bodies

CUSTOM = ("custom_jvp_call", "custom_vjp_call")  # functions with a derivative that the user defines
CALLS = (*JIT, *REMAT, *CUSTOM)  # of which the results are the outputs of the body for the same inputs
SCAN, WHILE, COND, SHARD_MAP = "scan", "while", "cond", "shard_map"

T = TypeVar("T")


class ScanOptions(TypedDict):
    length: int
    reverse: bool
    unroll: int


class Scan(NamedTuple):
    """A loop over rows: the body maps constants, carry and a row of every scanned input to carry and stacked rows."""

    body: Program
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int

    @property
    def options(self) -> ScanOptions:
        """Arguments of `jax.lax.scan`."""
        return ScanOptions(length=self.length, reverse=self.reverse, unroll=self.unroll)

    def inputs(self, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """(constants, carry, scanned inputs) of one value per input of the equation or of the body."""
        start_rows = self.num_consts + self.num_carry
        return [*values[: self.num_consts]], [*values[self.num_consts : start_rows]], [*values[start_rows:]]

    def outputs(self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        """(carry, stacked outputs) of one value per output of the equation or of the body."""
        return [*values[: self.num_carry]], [*values[self.num_carry :]]


class While(NamedTuple):
    """A loop: `test` and `body` have constants of their own, and the same carry; the outputs are the carry."""

    test: Program
    body: Program
    num_of_test: int
    num_of_body: int

    def inputs(self, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """(constants of the test, constants of the body, carry) of one value per input of the equation."""
        start = self.num_of_test + self.num_of_body
        return [*values[: self.num_of_test]], [*values[self.num_of_test : start]], [*values[start:]]


def scan_parts(eqn: Eqn) -> Scan:
    params = eqn.params
    return Scan(program_of(params["jaxpr"]), *scan_sizes(eqn), params["length"], params["reverse"], params["unroll"])


def while_parts(eqn: Eqn) -> While:
    params = eqn.params
    test, body = program_of(params["cond_jaxpr"]), program_of(params["body_jaxpr"])
    return While(test, body, params["cond_nconsts"], params["body_nconsts"])


def branches(eqn: Eqn) -> list[Program]:
    """The branches of a cond. Its first input is the index of one of them, the others are the inputs of each."""
    return [program_of(branch) for branch in eqn.params["branches"]]


def body(eqn: Eqn) -> Program:
    """The body of an equation whose name is in JIT, REMAT, CUSTOM, or SHARD_MAP (with the values of one device)."""
    return program_of(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


def shard_map_options(eqn: Eqn) -> Mapping[str, Any]:
    """Arguments of `jax.shard_map`."""
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    return options | {"axis_names": eqn.params["newly_manual_axes"]}
