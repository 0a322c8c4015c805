"""What a campaign may cost: counted over all attempts, projected early, and never passed by much."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import KEY, Asking, Project, ScriptedEngine, Server
from gristmill.campaign import Limits
from gristmill.engines import Attachment
from gristmill.errors import GristmillError
from gristmill.limits import Meter, Spent, projection, reached
from gristmill.telemetry import Snapshot, Telemetry

NOW = 1_800_000_000.0
SPENT = Spent(gpu_hours=2.0, requests=500, tokens=9000, answered=400)


def limits(**keys: Any) -> Limits:
    return Limits.model_validate(keys)


def at(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(NOW + seconds)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, None),
        ({"gpu_hours": 2.5, "requests": 501, "tokens": 9001, "deadline": at(10)}, None),
        ({"gpu_hours": 2}, "limits.gpu_hours is reached: 2 of 2"),
        ({"requests": 500}, "limits.requests is reached: 500 of 500"),
        ({"tokens": 8000}, "limits.tokens is reached: 9,000 of 8,000"),
    ],
)
def test_what_is_reached(keys: dict[str, Any], why: str | None) -> None:
    assert reached(limits(**keys), SPENT, NOW) == why


def test_the_deadline_is_local_time_unless_it_says_otherwise() -> None:
    told = reached(limits(deadline=at(-60)), SPENT, NOW)
    assert told is not None and told.startswith("limits.deadline has come: 2027-01-15")
    with_zone = limits(deadline="2027-01-15T08:00:00Z").deadline
    assert with_zone is not None and with_zone.timestamp() == NOW
    assert reached(limits(deadline="2027-01-15T08:00:01+00:00"), SPENT, NOW) is None


def test_the_projection_comes_after_two_percent_and_says_where_it_will_stop() -> None:
    given = limits(gpu_hours=100, tokens=45_000, requests=10**6, deadline=at(3600))
    assert projection(given, SPENT, 20_001, 1.0, NOW) == [], "400 of 20,001 rows are less than 2 %"
    assert projection(given, SPENT, 20_000, 5.0, NOW) == [
        "limits.gpu_hours: the whole campaign needs about 100 of 100: enough",
        "limits.requests: the whole campaign needs about 25,000 of 1,000,000: enough",
        "limits.tokens: the whole campaign needs about 450,000 of 45,000: it will stop at 10% of the rows",
        "limits.deadline: about 1:05:20 are needed and 1:00:00 are left: too little",
    ]
    assert projection(limits(), SPENT, 1000, 5.0, NOW) == []


def test_a_meter_counts_all_other_attempts(tmp_path: Path) -> None:
    for name, requests in (("g0000.local-1", 30), ("g0001.local-2", 50), ("own", 7)):
        telemetry = Telemetry(tmp_path / f"{name}.jsonl")
        for sent in (1, requests):
            telemetry.write(Snapshot(time.time(), "g", 100, 100, sent=sent, gpu_s=36 * sent))
        telemetry.close()
    with (tmp_path / "g0001.local-2.jsonl").open("ab") as file:
        file.write(b'{"at": 1, "group": "torn')
    own = Snapshot(time.time(), "g", 100, 100, sent=10)
    assert Meter(limits(requests=91), tmp_path, "own", 100).reached(own) is None
    assert Meter(limits(requests=90), tmp_path, "own", 100).reached(own) == "limits.requests is reached: 90 of 90"
    assert Meter(limits(gpu_hours=0.7), tmp_path, "own", 100).reached(own) == "limits.gpu_hours is reached: 0.8 of 0.7"
    assert Meter(limits(requests=90), tmp_path, "own", 100).why_not(9, 0) is None
    assert Meter(limits(requests=90), tmp_path, "own", 100).why_not(10, 0) is not None


def test_exactly_so_many_requests_are_sent_and_a_rerun_goes_on(server: Server, asking: Asking) -> None:
    server.start(latency_s=0.01)
    target = Attachment(server.url, KEY, "m")
    with pytest.raises(
        GristmillError, match=r"60 of 100 requests have no answer yet: limits.requests is reached"
    ) as told:
        asking.run(target, range(100), limits=limits(requests=40))
    assert "raise the limit in the campaign" in str(told.value)
    assert len(server.requests()) == len(asking.journal()) == 40
    with pytest.raises(GristmillError, match=r"limits.requests is reached: 40 of 40; nothing was sent"):
        asking.run(target, range(100), limits=limits(requests=40))
    assert len(server.requests()) == 40
    assert len(asking.run(target, range(100), limits=limits(requests=100))) == 100
    assert len(server.requests()) == 100


def test_no_engine_is_started_once_a_limit_is_reached(engine: ScriptedEngine, asking: Asking) -> None:
    engine.write()
    with pytest.raises(GristmillError, match="nothing was sent"):
        asking.run(engine.launch(), range(10), limits=limits(deadline="2020-01-01"))
    assert engine.starts() == []


def test_tokens_stop_it_and_everything_that_was_answered_is_kept(server: Server, asking: Asking) -> None:
    """Within a look of the limit, a second or less, and with what was in flight then."""
    server.start(latency_s=0.05)
    with pytest.raises(GristmillError, match=r"limits.tokens is reached"):
        asking.run(Attachment(server.url, KEY, "m"), range(2000), limits=limits(tokens=500))
    assert len(server.requests()) == len(asking.journal())
    assert 50 < len(asking.journal()) < 1000


def test_in_a_campaign(project: Project, server: Server) -> None:
    """A deadline as YAML has it, and the way on."""
    server.start(latency_s=0.01)
    project.requests(range(30))
    run = project.run(project.campaign(url=server.url, limits={"requests": 20, "deadline": datetime.date(2099, 1, 1)}))
    assert run.status != 0
    assert "limits.requests is reached: 20 of 20" in run.output
    assert "raise the limit in the campaign (or remove it) and run the same command again" in run.output
    assert "limits.requests: the whole campaign needs about 30 of 20: it will stop at 67% of the rows" in run.output
    assert run.output.count("Traceback") == 0
    finished = project.run(project.campaign(url=server.url))
    assert finished.status == 0, finished.output
    assert len(server.requests()) == 30
