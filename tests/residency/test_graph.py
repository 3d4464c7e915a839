"""The heaviest set of components that may be on the device together, against trying all sets."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from omni_components.residency.graph import peak_bytes

NAMES = "abcdefgh"
PAIRS = [frozenset(pair) for pair in itertools.combinations(NAMES, 2)]


def brute_force(sizes: dict[str, int], edges: set[frozenset[str]]) -> int:
    best = 0
    for count in range(len(sizes) + 1):
        for chosen in itertools.combinations(sizes, count):
            if not any(frozenset(pair) in edges for pair in itertools.combinations(chosen, 2)):
                best = max(best, sum(sizes[name] for name in chosen))
    return best


def rivals_of(edges: set[frozenset[str]]) -> dict[str, list[str]]:
    return {name: [other for other in NAMES if frozenset((name, other)) in edges] for name in NAMES}


@given(
    sizes=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 20)),
    edges=st.sets(st.sampled_from(PAIRS)),
)
def test_the_peak_is_the_heaviest_set_without_a_conflict(
    sizes: dict[str, int], edges: set[frozenset[str]]
) -> None:
    """I8."""
    assert peak_bytes(sizes, rivals_of(edges)) == brute_force(sizes, edges)


def test_conflicts_with_components_that_are_not_there_do_not_count() -> None:
    assert peak_bytes({"a": 3}, {"a": ["b"]}) == 3


def test_nothing_declared_is_nothing_held() -> None:
    assert peak_bytes({}, {}) == 0


def test_all_rivals_of_each_other_hold_the_largest_one() -> None:
    names = [f"part {count}" for count in range(60)]
    sizes = {name: 10 + count for count, name in enumerate(names)}
    assert peak_bytes(sizes, dict.fromkeys(names, names)) == 69


def test_a_large_pipeline_is_counted_in_no_time() -> None:
    """Thirty encoders that share, thirty denoisers that exclude everyone: as pipelines look, only larger."""
    encoders, dits = [f"e{count}" for count in range(30)], [f"d{count}" for count in range(30)]
    sizes = dict.fromkeys(encoders, 3) | dict.fromkeys(dits, 50)
    rivals = dict.fromkeys(encoders, dits) | dict.fromkeys(dits, encoders + dits)
    begin = time.perf_counter()
    assert peak_bytes(sizes, rivals) == 90
    assert time.perf_counter() - begin < 1
