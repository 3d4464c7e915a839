"""The conflict graph: who excludes whom, and how much can be on the device at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def peak_bytes(sizes: Mapping[str, int], rivals: Mapping[str, Iterable[str]]) -> int:
    """Bytes of the heaviest set of components of which no two conflict.

    That is the maximum weight independent set of the conflict graph, by branch and bound over its connected
    parts; conflicts are dense in practice, so few sets survive.

    Args:
        sizes: Bytes per component.
        rivals: The components each one conflicts with.
    """
    adjacent = {name: set(rivals.get(name, ())) & set(sizes) for name in sizes}
    total, unseen = 0, set(sizes)
    while unseen:
        island = _reachable(next(iter(unseen)), adjacent)
        unseen -= island
        total += _heaviest(sorted(island, key=lambda name: -sizes[name]), sizes, adjacent, 0)
    return total


def peak_with_one_arriving(sizes: Mapping[str, int], rivals: Mapping[str, Iterable[str]]) -> int:
    """Bytes of the heaviest such set and one component more, which may be a rival of those in it."""

    def alone(name: str) -> dict[str, list[str]]:
        return {
            one: [] if one == name else [other for other in rivals[one] if other != name] for one in sizes
        }

    return max((peak_bytes(sizes, alone(name)) for name in sizes), default=0)


def _reachable(start: str, adjacent: Mapping[str, set[str]]) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        fresh = adjacent[todo.pop()] - seen
        seen |= fresh
        todo += fresh
    return seen


def _heaviest(
    names: list[str], sizes: Mapping[str, int], adjacent: Mapping[str, set[str]], floor: int
) -> int:
    """Best total from ``names`` (heaviest first), or anything <= ``floor`` if that cannot be beaten."""
    free = [name for name in names if not adjacent[name] & set(names)]
    base, names = sum(sizes[name] for name in free), [name for name in names if name not in free]
    if not names or base + sum(sizes[name] for name in names) <= floor:
        return base
    head, rest = names[0], names[1:]
    without_rivals = [name for name in rest if name not in adjacent[head]]
    taken = base + sizes[head] + _heaviest(without_rivals, sizes, adjacent, floor - base - sizes[head])
    left = base + _heaviest(rest, sizes, adjacent, max(floor, taken) - base)
    return max(taken, left)
