"""What a thread that has ended leaves behind, and who is told."""

from __future__ import annotations

from tests.residency.rigs import Actor, Rig


def test_a_release_sends_home_what_a_thread_that_has_died_held() -> None:
    """I4: a release looks for itself; nobody asked for the pins before."""
    rig = Rig("a")
    Actor().begin(lambda: rig.ledger.scope("a").__enter__()).end()
    rig.ledger.release()
    assert rig.present == set()
    rig.sound()


def test_a_component_that_a_thread_that_has_died_held_can_be_retired() -> None:
    """I4."""
    rig = Rig("ab")
    Actor().begin(lambda: rig.ledger.scope("a").__enter__()).end()
    rig.ledger.retire(["a"])
    assert [one.name for one in rig.ledger.components] == ["b"]
    rig.mover.forget("a")
    rig.sound()
