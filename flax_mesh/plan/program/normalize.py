"""Converts a StableHLO module to the form in which XLA propagates shardings, because they depend on it.

Calls are inlined, values that a loop does not change are used directly in its body, operations that only move dims of
size 1 become reshapes, and operations are ordered from the results back.
"""

import re
from collections.abc import Callable

from jax.extend.mlir import ir

Op = ir.Operation | ir.OpView
MOVES = ("stablehlo.broadcast_in_dim", "stablehlo.transpose")


def normalize(_: object, module: ir.Module) -> None:
    """Changes the module in place."""
    main = _inline(module)
    for loop in _matching(main, "stablehlo.while".__eq__):
        _free_invariants(loop, main)
    for operation in _matching(main, lambda name: name.startswith("chlo.") or name in MOVES):
        _replace(operation)
    _order(main)


def _order(operation: Op) -> None:
    """Order the operations of every block as XLA does: from the results back, operands first, in their order.

    Operations that no result depends on are erased.
    """
    for region in operation.regions:
        for block in region.blocks:
            *_, last = block.operations
            placed: set[Op] = set()
            stack: list[tuple[Op, bool]] = [(last.operation, False)]
            while stack:
                item, ready = stack.pop()
                if ready:
                    if item != last.operation:
                        item.move_before(last.operation)
                    continue
                if item in placed:
                    continue
                placed.add(item)
                stack.append((item, True))
                owners = [value.owner for value in _operands(item)]
                inside = [o for o in owners if not isinstance(o, ir.Block) and o.parent == operation]
                stack += [(owner, False) for owner in reversed(inside)]
            for item in reversed(list(block.operations)):
                if item.operation not in placed:
                    item.operation.erase()
                else:
                    _order(item.operation)


def _operands(operation: Op) -> list[ir.Value]:
    """Operands of an operation and of the operations inside of it."""
    operands = list(operation.operands)
    for region in operation.regions:
        for block in region.blocks:
            for item in block.operations:
                operands += _operands(item.operation)
    return operands


def _replace(operation: ir.Operation) -> None:
    """Replace broadcasts and transposes that move only dims of size 1 by reshapes, and unary functions of CHLO.

    Shardy has no rule for the latter. A function of StableHLO stands for them, with their name in its attribute `chlo`.
    """
    if len(operation.operands) != 1 or len(operation.results) != 1:
        return
    (value,), (result,) = operation.operands, operation.results
    attributes: dict[str, ir.Attribute] = {}
    if operation.name in MOVES:
        before, after = ([size for size in array.type.shape if size > 1] for array in (value, result))
        dims = re.findall(r"\d+", str(operation.attributes["permutation"])) if operation.name == MOVES[1] else []
        order = [int(d) for d in dims[1:] if value.type.shape[int(d)] > 1]  # the first number is from i64
        if before != after or order != sorted(order) or not value.type.shape:
            return
        name = "stablehlo.reshape"
    else:
        name, attributes["chlo"] = "stablehlo.tanh", ir.StringAttr.get(operation.name.partition(".")[2])
    new = ir.Operation.create(
        name,
        results=[result.type],
        operands=[value],
        attributes=attributes,
        loc=operation.location,
        ip=ir.InsertionPoint(operation),
    )
    result.replace_all_uses_with(new.results[0])
    operation.erase()


def _inline(module: ir.Module) -> ir.Operation:
    """Replace calls by the bodies of their functions, as XLA does before the pass: shardings then pass through them.

    Returns the function that is left.
    """
    functions = {
        ir.StringAttr(f.attributes["sym_name"]).value: f
        for f in module.body.operations
        if f.operation.name == "func.func"
    }
    calls = _matching(functions["main"].operation, "func.call".__eq__)
    while calls:
        call = calls.pop()
        copy = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value].operation.clone()
        *body, last = copy.regions[0].blocks[0].operations
        for argument, operand in zip(copy.regions[0].blocks[0].arguments, call.operands, strict=True):
            argument.replace_all_uses_with(operand)
        for item in body:
            item.operation.move_before(call)
            calls += [item.operation] if item.operation.name == "func.call" else []
            calls += _matching(item.operation, "func.call".__eq__)
        for result, value in zip(call.results, last.operands, strict=True):
            result.replace_all_uses_with(value)
        call.erase()
        copy.erase()
    for name, function in functions.items():
        if name != "main":
            function.operation.erase()
    return functions["main"].operation


def _free_invariants(loop: ir.Operation, main: ir.Operation) -> None:
    """Use values that a loop does not change directly in its body, as XLA does before the pass.

    A value with a sharding gets an open constraint, so that the body may choose another one. Otherwise the residuals
    could get the sharding of a stack of weights instead of the sharding of the batch.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    *_, last = body.operations
    returned, mesh = list(last.operation.operands), None
    for index, (init, argument) in enumerate(zip(list(loop.operands), body.arguments, strict=True)):
        if returned[index] != argument:
            continue
        sharding = _sharding_text(init, main)
        if mesh := re.match(r".*<(@\w+), \[", sharding):
            dims = ", ".join(["{?}"] * len(init.type.shape))
            constraint = ir.Attribute.parse(f"#sdy.sharding<{mesh[1]}, [{dims}]>")
            new = ir.Operation.create(
                "sdy.sharding_constraint",
                results=[init.type],
                operands=[init],
                attributes={"sharding": constraint},
                loc=loop.location,
                ip=ir.InsertionPoint(loop),
            )
            used = new.results[0]
        else:
            used = init
        argument.replace_all_uses_with(used)
        condition.arguments[index].replace_all_uses_with(used)
        loop.results[index].replace_all_uses_with(init)


def _sharding_text(value: ir.Value, main: ir.Operation) -> str:
    """The sharding that a value has before propagation, or ""."""
    block = main.regions[0].blocks[0]
    if value.owner == block:
        if "arg_attrs" not in main.attributes:
            return ""
        text = str(ir.ArrayAttr(main.attributes["arg_attrs"])[ir.BlockArgument(value).arg_number])
        return text[text.find("sdy.sharding") :] if "sdy.sharding" in text else ""
    attributes = getattr(value.owner, "attributes", {})
    names = [name for name in ("sharding", "sdy.sharding") if name in attributes]
    return str(attributes[names[0]]) if names else ""


def _matching(operation: ir.Operation, wanted: Callable[[str], bool]) -> list[ir.Operation]:
    """The operations inside of `operation` whose names are `wanted`, at any depth."""
    matches = []
    for region in operation.regions:
        for block in region.blocks:
            for item in block.operations:
                matches += [item.operation] if wanted(item.operation.name) else []
                matches += _matching(item.operation, wanted)
    return matches
