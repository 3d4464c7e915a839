"""Which component comes next: as declared, or as it was the last time.

Learning looks at loads only: fifty calls of a component that is there are one stay, and the end of a request is
no step, so that after the last component of one request the first one of the next is expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Context = tuple[str | None, ...]


class Order:
    """Guesses the next load.

    Args:
        declared: The names in their order, which begins again at its end; empty to learn it.
    """

    def __init__(self, declared: Iterable[str] = ()) -> None:
        self._declared = tuple(declared)
        self._came: tuple[str | None, str | None] = (None, None)  # the two that came last
        # What followed, and whether it is what had followed before: after a surprise nothing is guessed
        # until the same has come twice, since a wrong guess takes the link from a right load.
        self._followed: dict[Context, tuple[str, bool]] = {}

    @classmethod
    def of(cls, prefetch: bool | Sequence[str]) -> Order | None:
        """As the policy says; ``None``: nobody is expected."""
        if isinstance(prefetch, bool):
            return cls() if prefetch else None
        return cls(prefetch)

    def note(self, name: str) -> None:
        """A component was loaded."""
        for context in self._contexts():
            before, _ = self._followed.get(context, (name, True))
            self._followed[context] = (name, before == name)
        self._came = (self._came[1], name)

    def guesses(self) -> tuple[str, ...]:
        """Who may come next, the likeliest first; those that are there need not come."""
        last = self._came[1]
        if self._declared:
            if last not in self._declared:
                return ()  # outside the order
            place = self._declared.index(last)
            return self._declared[place + 1 :] + self._declared[:place]
        for context in self._contexts():
            if context in self._followed:
                name, sure = self._followed[context]
                return (name,) if sure else ()
        return ()

    def _contexts(self) -> tuple[Context, Context]:
        """The two last ones tell more than the last one: a, b, a, c."""
        return self._came, self._came[1:]
