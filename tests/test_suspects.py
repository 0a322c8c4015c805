"""The request that kills the engine is found by halves; nobody else is accused."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gristmill.suspects import Suspects


@given(st.integers(1, 200), st.data())
def test_the_one_that_kills_is_found_in_as_many_deaths_as_there_are_halves(count: int, data: st.DataObject) -> None:
    killer = data.draw(st.integers(0, count - 1))
    room = data.draw(st.integers(1, count))
    suspects: Suspects[int] = Suspects()
    assert suspects.died(range(count)) is None
    deaths, left = 0, set(range(count))
    while killer in left:
        assert suspects, "as long as it is not found"
        trial = [item for item in sorted(left) if suspects.may_be_admitted(item)][:room]
        assert trial
        if killer not in trial:
            for item in trial:
                suspects.cleared(item)
                left.remove(item)
            continue
        before = len(suspects)
        found = suspects.died(trial)
        deaths += 1
        if found is not None:
            assert found == killer
            left.remove(found)
        else:
            assert len(suspects) < before
    assert deaths <= math.ceil(math.log2(count)) + 1
    assert not suspects and suspects.may_be_admitted(-1), "the others go on as before"


def test_others_wait_while_there_are_suspects() -> None:
    suspects: Suspects[str] = Suspects()
    assert suspects.may_be_admitted("anybody")
    suspects.died(["old", "new"])
    assert [who for who in ("old", "new", "another") if suspects.may_be_admitted(who)] == ["new"]
    suspects.cleared("new")
    assert [who for who in ("old", "new", "another") if suspects.may_be_admitted(who)] == ["old"]
    suspects.cleared("old")
    assert suspects.may_be_admitted("another")


def test_a_death_with_none_of_the_trial_in_flight_accuses_nobody() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.died(["a", "b"])
    assert suspects.died([]) is None
    assert len(suspects) == 2
    assert suspects.died([]) is None, "an idle engine's death"
    empty: Suspects[str] = Suspects()
    assert empty.died([]) is None and not empty
