"""What an endpoint does wrong, and what becomes of it: answers for all, and never a storm of requests."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import KEY, Asking, Server
from gristmill import retry
from gristmill.engines import Attachment
from gristmill.errors import GristmillError


def attached(server: Server, key: str = KEY) -> Attachment:
    return Attachment(server.url, key, "m")


def faults(server: Server) -> int:
    return sum(1 for entry in server.requests() if "do" in entry)


TRANSIENT = ["500", "502", "503", "429", "408", "drop", "truncated", "html200", "error200", "null_choices"]


def test_every_kind_of_fault_is_asked_again_once(server: Server, asking: Asking) -> None:
    """One request in four, all kinds: a request is sent once more for every fault, and no more often."""
    server.start(rates={kind: 0.025 for kind in TRANSIENT}, seed=3)
    records = asking.run(attached(server), range(300), concurrency=16)
    assert [record["id"] for record in records] == [str(i) for i in range(300)]
    assert {record["outcome"] for record in records} == {"ok"}
    assert {entry["do"] for entry in server.requests() if "do" in entry} == set(TRANSIENT), "every kind took place"
    assert len(server.requests()) == asking.sent == 300 + faults(server)
    assert sum(record["attempts"] for record in records) == asking.sent


def test_slow_answers_are_waited_for(server: Server, asking: Asking) -> None:
    server.start(rates={"slow": 0.1}, slow_s=0.7)
    records = asking.run(attached(server), range(60), concurrency=16)
    assert len(records) == len(server.requests()) == 60
    assert max(record["timings"]["latency_s"] for record in records) >= 0.7


def test_an_endpoint_at_capacity_is_not_stormed(server: Server, asking: Asking) -> None:
    server.start(capacity=4, latency_s=0.02)
    records = asking.run(attached(server), range(100), concurrency=8)
    assert {record["outcome"] for record in records} == {"ok"}
    assert asking.sent == 100 + sum(entry.get("do") == "capacity" for entry in server.requests())


def test_retry_after_is_kept(server: Server, asking: Asking) -> None:
    server.start(rules=[{"contains": "ask 1", "do": "429", "times": 2}], retry_after=1)
    asking.run(attached(server), [0, 1, 2])
    times = [entry["t"] for entry in server.requests() if entry["text"] == "ask 1"]
    assert len(times) == 3
    assert times[1] - times[0] >= 1 and times[2] - times[1] >= 1


def test_without_retry_after_the_waits_grow() -> None:
    busy = retry.Transient("HTTP 429", busy=True)
    longest = [max(retry.delay(busy, tries, 0) or 0 for _ in range(300)) for tries in (1, 3, 5, 9)]
    assert longest[0] <= 1 < longest[1] <= 4 < longest[2] <= 16 < longest[3] <= retry.MAX_DELAY_S
    assert retry.delay(busy, 9, retry.MAX_BUSY_S + 1) is None
    assert retry.delay(retry.Transient("HTTP 500"), retry.MAX_TRIES, 0) is None


def test_a_request_without_an_answer_is_timed_out_and_asked_again(
    server: Server, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_FLOOR_S", 0.5)
    monkeypatch.setattr(retry, "_FIRST_S_PER_TOKEN", 0.01)
    server.start(rules=[{"contains": "ask 7", "do": "hang", "times": 1}])
    records = asking.run(attached(server), range(30))
    assert len(records) == 30
    assert records[7]["attempts"] == 2
    assert asking.sent == 31


@pytest.mark.parametrize(("concurrency", "poison"), [(1, [0]), (4, [0, 1, 2, 3]), (4, [5, 50, 59])])
def test_a_request_that_always_fails_does_not_stop_the_others(
    server: Server, asking: Asking, concurrency: int, poison: list[int]
) -> None:
    """Wherever it stands, and however few are in flight: else a rerun would never get past it."""
    server.start(rules=[{"contains": f"ask P{i}", "do": "500"} for i in poison])
    ids = [f"P{i}" if i in poison else str(i) for i in range(60)]
    with pytest.raises(GristmillError) as caught:
        asking.run(attached(server), ids, concurrency=concurrency)
    message = str(caught.value)
    assert f"{len(poison)} of 60 requests have no answer yet" in message
    for i in poison:
        assert f"'P{i}': HTTP 500: Scripted error 500" in message
        assert server.texts()[f"ask P{i}"] == retry.MAX_TRIES
    assert sorted(asking.journal()) == sorted(id for id in ids if not id.startswith("P")), "nothing for the failed"
    assert len(server.requests()) == 60 + len(poison) * (retry.MAX_TRIES - 1)
    assert not asking.output.exists(), "no answers of a group that is not complete"


def test_once_it_answers_a_rerun_asks_only_what_is_missing(server: Server, asking: Asking) -> None:
    server.start(rules=[{"contains": "ask 3", "do": "500", "times": retry.MAX_TRIES}])
    with pytest.raises(GristmillError):
        asking.run(attached(server), range(3, 20))
    sent = len(server.requests())
    records = asking.run(attached(server), range(3, 20))
    assert [entry["text"] for entry in server.requests()[sent:]] == ["ask 3"]
    assert [record["id"] for record in records] == [str(i) for i in range(3, 20)]


def test_too_long_is_the_rows_error_without_a_retry(server: Server, asking: Asking) -> None:
    server.start(rules=[{"contains": "ask 5", "do": "too_long"}])
    records = asking.run(attached(server), range(10))
    assert records[5]["outcome"] == "error"
    assert "maximum context length" in records[5]["raw"]
    assert server.texts()["ask 5"] == 1
    assert asking.sent == 10


def test_a_wrong_key_stops_at_once(server: Server, asking: Asking) -> None:
    server.start()
    with pytest.raises(GristmillError, match="HTTP 401") as caught:
        asking.run(attached(server, "wrong"), range(10))
    assert "api_key_env" in str(caught.value)
    assert server.requests() == []


def test_a_key_that_is_refused_in_the_middle_stops_at_once(server: Server, asking: Asking) -> None:
    server.start(rules=[{"contains": "ask 50", "do": "401"}], latency_s=0.01)
    with pytest.raises(GristmillError, match="refused the key"):
        asking.run(attached(server), range(200))
    assert len(server.requests()) <= 51 + 8
    assert len(asking.journal()) >= 43, "what was in flight was finished and kept"


def test_nothing_listens_at_the_endpoint(asking: Asking) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    began = time.monotonic()
    with pytest.raises(GristmillError, match="nothing answers at the endpoint") as caught:
        asking.run(Attachment(url, KEY, "m"), range(10))
    assert url in str(caught.value) and "help:" in str(caught.value)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("trouble", ["500", "503", "429", "drop"])
def test_one_hiccup_at_the_start_is_no_reason_to_stop(server: Server, asking: Asking, trouble: str) -> None:
    server.start(rules=[{"contains": "ping", "do": trouble, "times": 1}])
    assert len(asking.run(attached(server), range(5))) == 5


def test_an_endpoint_that_dies_for_good_is_given_up_without_a_storm(server: Server, asking: Asking) -> None:
    server.start(die_after=40, latency_s=0.01)
    with pytest.raises(GristmillError, match="the endpoint answers nothing any more") as caught:
        asking.run(attached(server), range(300))
    answered = len(asking.journal())
    assert 32 <= answered <= 40
    assert asking.sent <= answered + 8 * retry.MAX_TRIES
    assert f"{300 - answered} of 300 requests have no answer yet" in str(caught.value)
    assert "run the same command again" in str(caught.value)


@pytest.mark.parametrize("status", ["500", "404"])
def test_an_endpoint_that_fails_every_request_is_given_up(server: Server, asking: Asking, status: str) -> None:
    """Its tiny generation succeeds, so single requests are blamed first, but not for ever."""
    server.start(rates={status: 1.0})
    if status == "404":  # a refusal is each row's own outcome; the share of errors stops the run later
        assert {record["outcome"] for record in asking.run(attached(server), range(150))} == {"error"}
        assert asking.sent == 150
        return
    with pytest.raises(GristmillError, match="answers nothing but tiny generations: HTTP 500"):
        asking.run(attached(server), range(1000))
    assert asking.sent <= retry.Breaker.most * (retry.Breaker.after + 8)
    assert asking.journal() == []


def test_a_full_journal_stops_the_group_and_says_so(
    server: Server, asking: Asking, tmp_path: Path, small_disk: Any
) -> None:
    server.start()
    small_disk(tmp_path / "results" / "c" / "journal", 24)
    with pytest.raises(GristmillError, match="the disk is full") as caught:
        asking.run(attached(server), range(200))
    kept = len(asking.journal())
    assert 10 < kept < 60
    assert len(server.requests()) <= kept + 2 * 8
    assert "results/c/journal/g0000." in str(caught.value) and "df -h" in str(caught.value)
