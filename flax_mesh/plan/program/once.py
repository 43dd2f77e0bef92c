"""Loops of one trip, which XLA removes after it has decided the collectives of their bodies.

A loop over stacks of one block of layers, or over the only chunk of a short sequence, stores no stacks: the operations
of its body belong to the block around it, and a slice or an update of a whole array is that array.
"""

from collections.abc import Hashable, Sequence

from flax_mesh.plan.program.collectives import Exchange
from flax_mesh.plan.program.program import Array, Block, Operation
from flax_mesh.plan.program.read import key_of

WHOLE = {"dynamic_slice": 0, "dynamic_update_slice": 1}  # the operand that the result is, if it is a whole array


def remove_single_trips(block: Block, exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Changes the block in place. Returns its collectives with the arrays that are left."""
    same: dict[int, Array] = {}
    dropped = _flatten(block, same)

    def kept(array: Array) -> Array:
        while id(array) in same:
            array = same[id(array)]
        return array

    blocks = [block, *(body for operation in block.walk() for body in operation.bodies)]
    for each in blocks:
        seen: dict[Hashable, Operation] = {}
        for operation in each.operations:
            operation.inputs = tuple(map(kept, operation.inputs))
            first = seen.setdefault(key_of(operation), operation)
            if (x := _before_reshapes(operation)) is not None:
                same[id(operation.outputs[0])] = x
            elif first is not operation:
                same |= {id(name): x for name, x in zip(operation.outputs, first.outputs, strict=True)}
        each.results = tuple(map(kept, each.results))
    del dropped  # held so far: ids of arrays are keys
    return [x._replace(array=kept(x.array)) if x.array is not None else x for x in exchanges]


def _before_reshapes(operation: Operation) -> Array | None:
    """The array that a reshape gives its shape back: a layer of a stack of one."""
    if operation.kind != "reshape":
        return None
    (x,), (out,) = operation.inputs, operation.outputs
    if x.producer is None or x.producer.kind != "reshape":
        return None
    (first,) = x.producer.inputs
    return first if (first.shape, first.spec) == (out.shape, out.spec) else None


def _flatten(block: Block, same: dict[int, Array]) -> list[Operation]:
    """Moves the bodies of loops of one trip into the block. Returns the operations that it drops.

    `same` gets the arrays that have a second name, by the id of the first one."""
    operations, dropped = list[Operation](), list[Operation]()
    for operation in block.operations:
        for body in operation.bodies:
            dropped += _flatten(body, same)
        if operation.kind != "while" or operation.times != 1 or not operation.times_known:
            operations.append(operation)
            continue
        (body,) = operation.bodies
        dropped.append(operation)
        same |= {id(name): x for name, x in zip(body.arguments, operation.inputs, strict=True)}
        for inner in body.operations:
            whole = inner.inputs[WHOLE[inner.kind]] if inner.kind in WHOLE else None
            if whole is not None and inner.inputs[0].shape == whole.shape == inner.outputs[0].shape:
                same[id(inner.outputs[0])] = whole
                dropped.append(inner)
            else:
                operations.append(inner)
        same |= {id(name): x for name, x in zip(operation.outputs, body.results, strict=True)}
    block.operations[:] = operations
    return dropped
