"""Which request kills the engine: found by halves among those that were in flight when it died."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Suspects(Generic[T]):
    """The requests that were in flight at an engine's death, until they are answered or one is found guilty.

    While there are any, only those of the present trial may be admitted: first the newer half of them, then, as it is
    answered, half of the rest; after another death half of the trial. So every death halves them, and with n in flight
    the one that kills the engine is known after about log2(n) more deaths. It was in flight in each of them.
    """

    def __init__(self) -> None:
        self._suspects: list[T] = []
        self._trial: set[T] = set()

    def __len__(self) -> int:
        return len(self._suspects)

    def may_be_admitted(self, item: T) -> bool:
        """Whether a request may be sent now."""
        return not self._suspects or item in self._trial

    def died(self, in_flight: Sequence[T]) -> T | None:
        """The engine died with these in flight, in the order of their admission; gives the guilty one when it is known.

        Whoever is no longer suspected may be admitted once the others are through.
        """
        if self._suspects:
            guilty = [item for item in in_flight if item in self._trial]
            if len(guilty) == 1:
                self._suspects, self._trial = [], set()
                return guilty[0]
            self._suspects = guilty or self._suspects
        else:
            self._suspects = list(in_flight)
        self._begin()
        return None

    def cleared(self, item: T) -> None:
        """A request was answered, or given up: it is not the one, or will not be sent again."""
        if self._suspects and item in self._trial:
            self._trial.discard(item)
            self._suspects.remove(item)
            if not self._trial:
                self._begin()

    def _begin(self) -> None:
        self._trial = set(self._suspects[len(self._suspects) // 2 :])
