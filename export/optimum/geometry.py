"""What a traced graph computes of shapes and positions alone: masks, position tables, shapes to reshape to.

Traced masks and shapes speak of a cache as long as what it holds. In the graph contract it has ``capacity`` slots, of
which ``cache_lengths`` are in use, and slot and position are the same. So each value that is computed of shapes alone
and meets the model's own values must be one of these kinds, or the graph is refused:

  stable     longer for a longer cache, and otherwise the same (ALiBi slopes times slots; what ``position_ids`` give);
  shape      whole numbers, each the same for every cache or a multiple of its length;
  mask       [1, heads or 1, R, T] with one value for slots that a row sees and one for the others, where rows see all
             slots up to their own or a window of them: it is computed from ``cache_lengths`` instead;
  positions  a row for each row of the pass, which its position alone decides (rotary tables of families whose trace has
             no ``position_ids``): it is looked up in a table of all positions.

Which it is, is seen by running the graph over empty caches of several lengths, not by how the nodes look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.optimum.trace import Pass, Trace

# Inputs of traces and of the graph contract that say nothing of the text.
_ROOTS = ("attention_mask", "position_ids", "cache_lengths", "logit_rows")
_ROWS = 4  # of the passes that are run to see


class _AtLength(NamedTuple):
    """A value over a cache of this length, the rows of the pass included."""

    value: NDArray[Any]
    length: int


@dataclass(frozen=True)
class Mask:
    """``seen`` and ``hidden`` are the two values; ``window`` is 0 where a row sees all slots up to its own."""

    window: int
    seen: NDArray[Any]
    hidden: NDArray[Any]


@dataclass(frozen=True)
class Geometry:
    """``constant`` values depend on no input, ``values`` on nothing but shapes, positions and the attention mask."""

    constant: frozenset[ir.Value]
    values: frozenset[ir.Value]  # the constant ones among them
    frontier: tuple[ir.Value, ...]  # of ``values``, those that are not constant and meet the model's own

    def computes(self, node: ir.Node) -> bool:
        """Whether a node takes nothing of the model's own."""
        return all(value is None or value in self.values for value in node.inputs)


def find_geometry(graph: ir.Graph) -> Geometry:
    constant = set(graph.initializers.values())
    values = constant | {value for value in graph.inputs if value.name in _ROOTS}
    frontier: dict[ir.Value, None] = {}
    for node in graph:
        inputs = {value for value in node.inputs if value is not None}
        if inputs <= constant:
            constant.update(node.outputs)
        if node.op_type == "Shape" or inputs <= values:
            values.update(node.outputs)
        else:
            frontier.update((value, None) for value in node.inputs if value in values and value not in constant)
    return Geometry(frozenset(constant), frozenset(values), tuple(frontier))


@dataclass(frozen=True)
class Kinds:
    """The values of the frontier that are masks or positions, these with the table ``[1, ..., 1, length, ...]``."""

    masks: dict[ir.Value, Mask]
    positions: dict[ir.Value, NDArray[Any]]


def find_kinds(trace: Trace, geometry: Geometry, length: int) -> Kinds:
    """What each value of the frontier is; those that are not in the answer are stable or shapes.

    Args:
        length: of the longest sequence, at least 12: a window is seen where it is smaller.

    Raises:
        OutriderError: one is of no kind; the message names the node that computes it.
    """
    passes = [Pass(3, _ROWS), Pass(length - _ROWS, _ROWS), Pass(7, 2)]
    names = [str(value.name) for value in geometry.frontier]
    *runs, moved = trace.values(names, [*passes, Pass(3, _ROWS, last_position=length - 1)])
    masks, others = {}, {}
    for value, name in zip(geometry.frontier, names, strict=True):
        found = [run[name] for run in runs]
        if not _of_own_rows(found[0], moved[name]):
            raise OutriderError(f"node {_node_of(value)} makes of a row's position what depends on the other rows' too")
        short, long = (_AtLength(found[index], passes[index].past + _ROWS) for index in range(2))
        if _stable(short, long) or _shape(short, long):
            continue
        if mask := _mask(found, passes):
            masks[value] = mask
        else:
            others[value] = found
    return Kinds(masks, _tables(trace, others, passes, length))


def _tables(
    trace: Trace, others: dict[ir.Value, list[NDArray[Any]]], passes: Sequence[Pass], length: int
) -> dict[ir.Value, NDArray[Any]]:
    """What all positions give for values that are to be of that kind."""
    for value, found in others.items():
        if found[0].shape != found[1].shape:
            raise _refusal(value)
    # The graph that gives these alone is small, so that it can run over all positions at once.
    names = [str(value.name) for value in others]
    whole = trace.values(names, [Pass(0, length)])[0] if names else {}
    tables = {value: whole[name] for value, name in zip(others, names, strict=True)}
    for value, table in tables.items():
        if not _positions(others[value], passes, table, length):
            raise _refusal(value)
    return tables


def _refusal(value: ir.Value) -> OutriderError:
    return OutriderError(
        f"node {_node_of(value)} depends on the length of the cache, and is neither a causal mask nor a table of slots "
        "or positions"
    )


def _node_of(value: ir.Value) -> str | None:
    node = value.producer()
    return node.name if node is not None else value.name


def _of_own_rows(array: NDArray[Any], moved: NDArray[Any]) -> bool:
    """Whether nothing but the last row, whose position has changed, is another."""
    if array.shape != moved.shape:
        return False
    changed = array != moved
    axes = [axis for axis, size in enumerate(array.shape) if size == _ROWS]
    return not changed.any() or any(not changed.take(range(_ROWS - 1), axis).any() for axis in axes)


def _stable(short: _AtLength, long: _AtLength) -> bool:
    (first, first_length), (second, second_length) = short, long
    if first.ndim != second.ndim:
        return False
    sizes = zip(first.shape, second.shape, strict=True)
    if any(a != b and (a, b) != (first_length, second_length) for a, b in sizes):
        return False
    return np.array_equal(second[tuple(slice(size) for size in first.shape)], first)


def _shape(short: _AtLength, long: _AtLength) -> bool:
    (first, first_length), (second, second_length) = short, long
    if first.dtype != np.int64 or first.shape != second.shape or first.ndim > 1:
        return False
    return bool(np.all((first == second) | (first * second_length == second * first_length)))


def _positions(found: Sequence[NDArray[Any]], passes: Sequence[Pass], table: NDArray[Any], length: int) -> bool:
    axis = rows_axis(table)
    if axis is None or table.shape[axis] != length:
        return False
    parts = (table.take(range(past, past + rows), axis) for past, rows, _ in passes)
    return all(np.array_equal(array, part) for array, part in zip(found, parts, strict=True))


def rows_axis(table: NDArray[Any]) -> int | None:
    """The first axis that is not 1, where it is not the batch's."""
    return next((axis for axis, size in enumerate(table.shape) if axis and size > 1), None)


def _mask(found: Sequence[NDArray[Any]], passes: Sequence[Pass]) -> Mask | None:
    by_pass = list(zip(found, passes, strict=True))
    if any(array.ndim != 4 or array.shape[2:] != (rows, past + rows) for array, (past, rows, _) in by_pass):
        return None
    longest = found[1][0, 0]
    seen = longest[-1, -1]  # a row sees itself
    others = np.unique(longest[longest != seen])
    if len(others) != 1:
        return None
    count = int((longest[-1] == seen).sum())
    window = count if count < longest.shape[1] else 0
    for array, (past, rows, _) in by_pass:
        slot, position = np.arange(past + rows), past + np.arange(rows)[:, None]
        visible = (slot <= position) & (slot > position - window if window else True)
        if not np.array_equal(array, np.broadcast_to(np.where(visible, seen, others[0]), array.shape)):
            return None
    return Mask(window, seen, others[0])
