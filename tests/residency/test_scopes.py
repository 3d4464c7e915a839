"""Scopes in one thread: each row of the design's table, over a mover that carries numbers."""

from __future__ import annotations

import pickle
import sys
import warnings

import pytest

from omni_components import (
    BudgetError,
    ResidencyLedger,
    ResidencyWarning,
    ScopeError,
    TransferError,
    UnknownComponentError,
)
from omni_components.residency.book import State
from omni_components.residency.events import Cause, EventKind
from tests.residency.rigs import Rig, component, edges


class Boom(Exception):
    pass


# --- same component, rivals one after the other --------------------------------------------------------------


def test_a_scope_brings_its_component_and_leaves_it_there() -> None:
    """I2: present inside; afterwards it stays until a rival needs the room."""
    rig = Rig()
    with rig.ledger.scope("a"):
        assert rig.present == {"a"}
        rig.sound(a=1)
    assert rig.present == {"a"}
    rig.sound()
    assert rig.moves() == "+a"


def test_same_component_again_is_one_more_pin_and_no_transfer() -> None:
    """I4."""
    rig = Rig()
    with rig.ledger.scope("a"):
        rig.moves()
        with rig.ledger.scope("a"):
            rig.sound(a=2)
        rig.sound(a=1)
    assert rig.moves() == ""


def test_a_rival_is_evicted_before_the_load() -> None:
    """I1, C03."""
    rig = Rig()
    for name in "abba":
        with rig.ledger.scope(name):
            rig.sound(**{name: 1})
    assert rig.moves() == "+a -a +b -b +a"


def test_components_that_do_not_conflict_stay_together() -> None:
    """I1: only rivals leave; I8: the held bytes are theirs."""
    rig = Rig("abc", edges("ab bc"))
    with rig.ledger.scope("a"), rig.ledger.scope("c"):
        assert rig.present == {"a", "c"}
        assert rig.ledger.device_bytes == rig.ledger.predicted_peak == 20
    with rig.ledger.scope("b"):
        rig.sound(b=1)
    assert rig.moves() == "+a +c -a -c +b"


# --- a rival inside an open scope ----------------------------------------------------------------------------


def test_a_nested_rival_is_switched_in_and_the_outer_one_is_back_before_its_body_resumes() -> None:
    """I2, I4."""
    rig = Rig()
    with rig.ledger.scope("a"):
        with pytest.warns(ResidencyWarning), rig.ledger.scope("b"):
            assert rig.present == {"b"}
            rig.sound(a=1, b=1)
        assert rig.present == {"a"}
        rig.sound(a=1)
    assert rig.moves() == "+a -a +b -b +a"


def test_a_pair_of_nested_rivals_is_warned_about_once() -> None:
    rig = Rig()
    with pytest.warns(ResidencyWarning) as caught:
        for _ in range(3):
            with rig.ledger.scope("a"), rig.ledger.scope("b"):
                pass
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "'b' runs inside a scope of its rival 'a'" in text
    assert "two more switches" in text
    assert "Close the outer scope first" in text
    assert caught[0].filename == __file__  # it points at the user's `with`


def test_the_two_orders_of_a_pair_are_two_warnings() -> None:
    rig = Rig()
    with pytest.warns(ResidencyWarning) as caught:
        with rig.ledger.scope("a"), rig.ledger.scope("b"):
            pass
        with rig.ledger.scope("b"), rig.ledger.scope("a"):
            pass
    assert len(caught) == 2


def test_a_warning_that_is_an_error_changes_nothing() -> None:
    """I4, I6: under ``-W error`` the nested scope is refused and the outer one goes on."""
    rig = Rig()
    with rig.ledger.scope("a"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ResidencyWarning), rig.ledger.scope("b"):
                pass
        assert rig.present == {"a"}
        rig.sound(a=1)


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_three_rivals_inside_each_other_come_back_one_by_one() -> None:
    """I2, I4."""
    rig = Rig()
    with rig.ledger.scope("a"):
        with rig.ledger.scope("b"):
            with rig.ledger.scope("c"):
                rig.sound(a=1, b=1, c=1)
            assert rig.present == {"b"}
        assert rig.present == {"a"}
    assert rig.moves() == "+a -a +b -b +c -c +b -b +a"


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_a_rival_brings_back_all_outer_components_it_displaced() -> None:
    """I4: two outer scopes of components that do not conflict, one rival of both."""
    rig = Rig("abx", edges("ax bx"))
    with rig.ledger.scope("a"), rig.ledger.scope("b"):
        with rig.ledger.scope("x"):
            assert rig.present == {"x"}
        assert rig.present == {"a", "b"}
        rig.sound(a=1, b=1)


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_an_outer_component_stays_away_until_the_scope_that_displaced_it_closes() -> None:
    """I2: in ``c``, which does not exclude ``a``, ``a`` is still out: ``b`` between them took its place."""
    rig = Rig("abc", edges("ab bc"))
    with rig.ledger.scope("a"), rig.ledger.scope("b"):
        with rig.ledger.scope("c"):
            assert rig.present == {"c"}
            rig.sound(a=1, b=1, c=1)
        assert rig.present == {"b"}
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_a_displaced_component_can_be_asked_for_again_inside() -> None:
    """I2, I4: a, in it b, in it a."""
    rig = Rig()
    with rig.ledger.scope("a"):
        with rig.ledger.scope("b"):
            with rig.ledger.scope("a"):
                assert rig.present == {"a"}
                rig.sound(a=2, b=1)
            assert rig.present == {"b"}
        assert rig.present == {"a"}


def test_nesting_error_refuses_the_rival_and_says_what_to_do() -> None:
    """I4, I6."""
    rig = Rig(nesting="error")
    with rig.ledger.scope("a"):
        rig.moves()
        with pytest.raises(ScopeError) as caught, rig.ledger.scope("b"):
            pass
        assert rig.moves() == ""
        rig.sound(a=1)
    assert "scope of 'b': its rival 'a' has an open scope here" in str(caught.value)
    assert "nesting='switch'" in str(caught.value)
    with rig.ledger.scope("b"):  # closed meanwhile
        rig.sound(b=1)


def test_nesting_error_allows_what_does_not_conflict() -> None:
    rig = Rig("abc", edges("ab"), nesting="error")
    with rig.ledger.scope("a"), rig.ledger.scope("c"), rig.ledger.scope("a"):
        rig.sound(a=2, c=1)


# --- the body raises ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_a_body_that_raises_releases_its_pin_and_evicts_nothing(kind: type[BaseException]) -> None:
    """I4, C20."""
    rig = Rig()
    error = kind("mine")
    with pytest.raises(kind) as caught, rig.ledger.scope("a"):
        raise error
    assert caught.value is error
    assert rig.present == {"a"}
    assert rig.moves() == "+a"
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_a_nested_body_that_raises_brings_the_outer_component_back() -> None:
    """I2, I4: the exception goes on untouched."""
    rig = Rig()
    with rig.ledger.scope("a"):
        error = Boom()
        with pytest.raises(Boom) as caught, rig.ledger.scope("b"):
            raise error
        assert caught.value is error
        assert caught.value.__context__ is None
        assert rig.present == {"a"}
        rig.sound(a=1)


# --- a move fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_load_that_fails_leaves_everything_on_the_host(when: str) -> None:
    """I6."""
    rig = Rig()
    rig.mover.write("a", 5)
    rig.mover.fail("load", "a", when=when)
    with pytest.raises(TransferError) as caught, rig.ledger.scope("a"):
        pass
    assert caught.value.component == "a"
    assert rig.present == set()
    assert rig.mover.read("a") == 5
    rig.sound()
    with rig.ledger.scope("a"):  # the next request is right
        rig.sound(a=1)


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize("kind", [TransferError, KeyboardInterrupt])
def test_a_nested_load_that_fails_puts_the_suspended_outer_component_back(
    when: str, kind: type[BaseException]
) -> None:
    """I2, I4, I6."""
    rig = Rig()
    with rig.ledger.scope("a"):
        rig.mover.fail("load", "b", when=when, error=kind)
        with pytest.raises(kind), rig.ledger.scope("b"):
            pytest.fail("the body must not run")
        assert rig.present == {"a"}
        rig.sound(a=1)
    rig.sound()


@pytest.mark.parametrize("when", ["before", "inside"])
def test_an_eviction_that_fails_leaves_the_rival_whole_on_the_device(when: str) -> None:
    """I1, I6, I7."""
    rig = Rig()
    with rig.ledger.scope("a"):
        rig.mover.write("a", 7)
    rig.mover.fail("evict", "a", when=when)
    with pytest.raises(TransferError, match="could not be sent home"), rig.ledger.scope("b"):
        pass
    assert rig.present == {"a"}
    assert rig.mover.read("a") == 7
    rig.sound()
    with rig.ledger.scope("b"):
        rig.sound(b=1)
    assert rig.mover.read("a") == 7


def test_one_of_two_evictions_fails_and_the_first_stays_home() -> None:
    """I6: what was sent home is not brought back; nothing is half moved."""
    rig = Rig("abx", edges("ax bx"))
    rig.ledger.load("a")
    rig.ledger.load("b")
    rig.mover.fail("evict", after=1)
    with pytest.raises(TransferError), rig.ledger.scope("x"):
        pass
    assert len(rig.present) == 1
    assert "x" not in rig.present
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_an_outer_component_that_cannot_come_back_is_an_error_for_its_body() -> None:
    """I6: and it comes back with the next scope that closes there."""
    rig = Rig()
    with rig.ledger.scope("a"):
        with pytest.raises(TransferError) as caught, rig.ledger.scope("b"):
            rig.mover.fail("load", "a")
        assert caught.value.component == "a"
        rig.sound(a=1)
        with rig.ledger.scope("b"):
            rig.sound(a=1, b=1)
        assert rig.present == {"a"}
        rig.sound(a=1)
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_what_was_lost_comes_back_after_a_scope_of_the_rival_that_is_still_there() -> None:
    """I2: that scope displaces nobody, for its component is there already; the outer one is missing all the same."""
    rig = Rig()
    with rig.ledger.scope("a"):
        with pytest.raises(TransferError), rig.ledger.scope("b"):
            rig.mover.fail("evict", "b")
        assert rig.present == {"b"}
        with rig.ledger.scope("b"), rig.ledger.scope("a"):
            assert rig.present == {"a"}
        assert rig.present == {"a"}
        rig.sound(a=1)
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_when_both_the_load_and_the_way_back_fail_the_first_error_is_seen_and_tells_of_the_second() -> None:
    """I6."""
    rig = Rig()
    with rig.ledger.scope("a"):
        rig.mover.fail("load", "b")
        rig.mover.fail("load", "a")
        with pytest.raises(TransferError) as caught, rig.ledger.scope("b"):
            pass
        assert caught.value.component == "b"
        if sys.version_info >= (3, 11):
            assert "'a' could not be loaded" in caught.value.__notes__[0]
        rig.sound(a=1)


def test_a_component_that_does_not_fit_is_refused_before_anything_moves() -> None:
    """I6, I8."""
    rig = Rig("ab", device_memory=15)
    rig.ledger.load("a")
    rig.moves()
    with pytest.raises(BudgetError):
        rig.ledger.admit([component("huge", 16)], rig.conflict)
    rig.ledger.admit([component("late", 6, resident=True)], rig.conflict)
    with pytest.raises(BudgetError) as caught, rig.ledger.scope("b"):
        pass
    assert (caught.value.wanted, caught.value.capacity, caught.value.residents) == (10, 15, 6)
    assert rig.moves() == ""


# --- misuse ---------------------------------------------------------------------------------------------------


def test_a_scope_entered_again_while_open_is_refused() -> None:
    """I4."""
    rig = Rig()
    scope = rig.ledger.scope("a")
    with scope:
        with pytest.raises(ScopeError, match="entered before; a scope is single-use"), scope:
            pass
        rig.sound(a=1)
    rig.sound()


def test_a_scope_entered_again_after_it_closed_is_refused() -> None:
    """I4."""
    rig = Rig()
    scope = rig.ledger.scope("a")
    with scope:
        pass
    with pytest.raises(ScopeError, match="Ask for a new scope"), scope:
        pass
    rig.sound()


def test_a_scope_left_before_it_was_entered_is_refused() -> None:
    rig = Rig()
    with pytest.raises(ScopeError, match="it is not open"):
        rig.ledger.scope("a").__exit__(None, None, None)
    rig.sound()


def test_a_scope_left_twice_is_refused() -> None:
    """I4."""
    rig = Rig()
    scope = rig.ledger.scope("a")
    with scope:
        pass
    with pytest.raises(ScopeError, match="it is not open"):
        scope.__exit__(None, None, None)
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
@pytest.mark.parametrize("inner_name", ["a", "b", "c"])
def test_an_outer_scope_left_first_is_refused_and_both_can_still_be_left_in_order(inner_name: str) -> None:
    """I4: state unchanged, whether the inner one is the same, a rival, or neither."""
    rig = Rig("abc", edges("ab"))
    outer, inner = rig.ledger.scope("a"), rig.ledger.scope(inner_name)
    outer.__enter__()
    inner.__enter__()
    before = rig.present
    with pytest.raises(ScopeError) as caught:
        outer.__exit__(None, None, None)
    assert f"scope of 'a': a scope of {inner_name!r} was opened inside it and is still open" in str(
        caught.value
    )
    assert rig.present == before
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    rig.sound()


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    rig = Rig(("reasoner", "generator"))
    with pytest.raises(UnknownComponentError) as caught:
        rig.ledger.scope("reasnor")
    text = str(caught.value)
    assert text.startswith(
        "'reasnor' is not declared by the test; declared: reasoner, generator. Did you mean 'reasoner'"
    )
    assert caught.value.known == ("reasoner", "generator")
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("question", ["load", "state", "pins", "rivals", "size"])
def test_every_question_about_an_unknown_component_is_refused_alike(question: str) -> None:
    with pytest.raises(UnknownComponentError):
        getattr(Rig().ledger, question)("nobody")


def test_a_scope_of_a_component_retired_meanwhile_is_refused() -> None:
    """I4, I6: asked for while it was declared, entered when it no longer is."""
    rig = Rig()
    scope = rig.ledger.scope("a")
    rig.ledger.retire(["a"])
    rig.mover.forget("a")
    with pytest.raises(UnknownComponentError), scope:
        pass
    rig.sound()


def test_the_state_of_a_scope_is_seen_in_its_repr() -> None:
    scope = Rig().ledger.scope("a")
    assert repr(scope) == "<OffloadScope 'a', new>"
    with scope:
        assert repr(scope) == "<OffloadScope 'a', open>"
    assert repr(scope) == "<OffloadScope 'a', closed>"


# --- load and release -----------------------------------------------------------------------------------------


def test_release_sends_all_unpinned_swappable_components_home_and_keeps_the_rest() -> None:
    """I4, C06."""
    rig = Rig("abc", edges("ab"))
    rig.mover.register("r", 3)
    rig.ledger.admit([component("r", 3, resident=True)], rig.conflict)
    for name in "rac":
        rig.ledger.load(name)
    with rig.ledger.scope("a"):
        rig.ledger.release()
        assert rig.present == {"a", "r"}
        rig.sound(a=1)
    rig.ledger.release()
    assert rig.present == {"r"}
    rig.sound()


@pytest.mark.parametrize("steps", ["lrlr", "llrr", "rrll", "rlrl", "lllr", "rrrl"])
def test_load_and_release_are_idempotent_in_any_order(steps: str) -> None:
    """C38, I7: the values stay right, and a repeated step moves nothing."""
    rig = Rig()
    rig.mover.write("a", 42)
    last = ""
    for step in steps:
        rig.moves()
        if step == "l":
            rig.ledger.load("a")
        else:
            rig.ledger.release()
        if step == last:
            assert rig.moves() == ""
        last = step
        assert rig.mover.read("a") == 42
        assert rig.present == ({"a"} if step == "l" else set())
        rig.sound()


def test_load_switches_an_unpinned_rival_out() -> None:
    """I1."""
    rig = Rig()
    rig.ledger.load("a")
    rig.ledger.load("b")
    assert rig.moves() == "+a -a +b"
    rig.sound()


def test_load_inside_a_rivals_scope_is_refused() -> None:
    """I4: a load has no end at which the rival could come back."""
    rig = Rig()
    with rig.ledger.scope("a"):
        with pytest.raises(ScopeError, match="cannot be loaded ahead inside the scope of its rival 'a'"):
            rig.ledger.load("b")
        rig.sound(a=1)


def test_load_of_the_component_in_use_is_nothing() -> None:
    rig = Rig()
    with rig.ledger.scope("a"):
        rig.moves()
        rig.ledger.load("a")
        assert rig.moves() == ""


def test_an_eviction_that_fails_in_release_leaves_the_ledger_true() -> None:
    """I6: and a second release finishes the work."""
    rig = Rig("abc", edges(""))
    for name in "abc":
        rig.ledger.load(name)
    rig.mover.fail("evict", "b")
    with pytest.raises(TransferError):
        rig.ledger.release()
    rig.sound()
    rig.ledger.release()
    assert rig.present == set()
    rig.sound()


# --- declaring ------------------------------------------------------------------------------------------------


def test_a_taken_name_is_refused_and_nothing_is_admitted() -> None:
    from omni_components import OwnershipError

    rig = Rig("ab")
    with pytest.raises(OwnershipError, match="'b' belongs to the test"):
        rig.ledger.admit([component("new"), component("b")], rig.conflict)
    assert [one.name for one in rig.ledger.components] == ["a", "b"]
    assert rig.ledger.rivals("a") == ("b",)


def test_two_new_components_of_one_name_are_refused() -> None:
    """I3: silently, one of them would have no owner."""
    from omni_components import OwnershipError

    rig = Rig("ab")
    with pytest.raises(OwnershipError, match="'x'"):
        rig.ledger.admit([component("x"), component("x")], rig.conflict)
    assert [one.name for one in rig.ledger.components] == ["a", "b"]


def test_retire_brings_components_home_and_forgets_their_conflicts() -> None:
    """I6."""
    rig = Rig("abc")
    rig.ledger.load("a")
    rig.ledger.retire(["a", "c"])
    assert [one.name for one in rig.ledger.components] == ["b"]
    assert rig.ledger.rivals("b") == ()
    assert rig.ledger.device_bytes == 0
    assert rig.moves() == "+a -a"


def test_retire_with_an_open_scope_is_refused_and_changes_nothing() -> None:
    """I4."""
    rig = Rig("abc")
    with rig.ledger.scope("a"):
        with pytest.raises(ScopeError, match="cannot be disabled while it is open"):
            rig.ledger.retire(["b", "a"])
        assert len(rig.ledger.components) == 3
        rig.sound(a=1)


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_retire_of_a_suspended_component_is_refused() -> None:
    """I4: it is on the host, yet its scope is open."""
    rig = Rig("abc")
    with rig.ledger.scope("a"), rig.ledger.scope("b"):
        with pytest.raises(ScopeError):
            rig.ledger.retire(["a"])
        rig.sound(a=1, b=1)


def test_retire_twice_in_one_call_strikes_once() -> None:
    rig = Rig("abc")
    rig.ledger.retire(["a", "a"])
    assert [one.name for one in rig.ledger.components] == ["b", "c"]
    rig.mover.forget("a")
    rig.sound()


# --- what the ledger tells ------------------------------------------------------------------------------------


def test_events_tell_what_moved_why_and_how_much_is_held() -> None:
    """I8."""
    rig = Rig("ab")
    with rig.ledger.scope("a", cause=Cause.HOOK):
        rig.mover.write("a", 1)
    rig.ledger.load("b")
    rig.ledger.release()
    events = [(one.kind, one.component, one.cause, one.bytes, one.device_bytes) for one in rig.ledger.history]
    assert events[2:] == [
        (EventKind.LOAD, "a", Cause.HOOK, 10, 10),
        (EventKind.WRITE_BACK, "a", Cause.MANUAL, 10, 0),
        (EventKind.EVICT, "a", Cause.MANUAL, 0, 0),
        (EventKind.LOAD, "b", Cause.MANUAL, 10, 10),
        (EventKind.EVICT, "b", Cause.RELEASE, 0, 0),
    ]
    assert rig.ledger.history.peak == 10
    assert rig.ledger.history.totals["a"].bytes_out == 10


def test_a_failed_move_is_in_the_history_as_a_rollback() -> None:
    """I6."""
    rig = Rig("ab")
    rig.mover.fail("load", "a")
    with pytest.raises(TransferError):
        rig.ledger.load("a")
    last = list(rig.ledger.history)[-1]
    assert (last.kind, last.component, last.device_bytes) == (EventKind.ROLLBACK, "a", 0)


def test_states_are_told_by_name() -> None:
    rig = Rig("ab")
    rig.ledger.load("a")
    assert (rig.ledger.state("a"), rig.ledger.state("b")) == (State.DEVICE, State.HOST)


def test_a_call_of_the_ledger_from_inside_a_move_is_refused() -> None:
    """I1: a mover that asks for another component would wait for itself for ever."""
    rig = Rig("ab")
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            rig.ledger.release()
        except ScopeError as error:
            problems.append(error)

    rig.mover.pause = ask
    rig.ledger.load("a")
    assert len(problems) == 1
    assert "while this thread moves bytes" in str(problems[0])


def test_two_ledgers_in_one_thread_know_nothing_of_each_other() -> None:
    """I4: each keeps its own stack of open scopes."""
    one, other = Rig("ab"), Rig("ab")
    with one.ledger.scope("a"), other.ledger.scope("b"), one.ledger.scope("a"):
        one.sound(a=2)
        other.sound(b=1)


def test_scope_errors_pickle() -> None:
    rig = Rig("ab")
    with pytest.raises(ScopeError) as caught:
        rig.ledger.scope("a").__exit__(None, None, None)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.component == "a"


def test_a_ledger_needs_no_policy() -> None:
    assert ResidencyLedger(Rig("ab").mover).policy.nesting == "switch"
