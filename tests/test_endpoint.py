"""An engine's life: when it counts as ready, what is said when it does not start, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from conftest import KEY, Apart, Asking, ScriptedEngine, Server, alive, wait_until
from gristmill import retry
from gristmill.endpoint import AttachedEndpoint, EngineEndpoint
from gristmill.engines import Attachment, Launch
from gristmill.errors import GristmillError
from gristmill.outcomes import AnswerCheck, interpret

CHAT = "/chat/completions"


def endpoint(launch: Launch, tmp_path: Path, start_timeout_s: float = 20, restarts: int = 0) -> EngineEndpoint:
    return EngineEndpoint(launch, CHAT, tmp_path / "logs" / "engine.log", start_timeout_s, restarts)


def started(made: EngineEndpoint) -> None:
    """Start and end an engine."""

    async def use() -> None:
        async with made:
            pass

    asyncio.run(use())


def failure(launch: Launch, tmp_path: Path, start_timeout_s: float = 20) -> str:
    """What is said of an engine that does not start."""
    with pytest.raises(GristmillError) as caught:
        started(endpoint(launch, tmp_path, start_timeout_s))
    message = str(caught.value)
    assert "the vllm engine did not start" in message
    assert str(tmp_path / "logs" / "engine.log") in message
    assert "help:" in message and "model registry" in message.replace("the registry", "model registry")
    return message


# -- ready -----------------------------------------------------------------------------------------------------------


def test_ready_is_a_healthy_engine_that_generates(engine: ScriptedEngine, asking: Asking) -> None:
    engine.write(boot_s=0.5, script={"rules": [{"contains": "ping", "do": "503", "times": 2}]})
    assert len(asking.run(engine.launch(), range(20))) == 20
    assert len(engine.probes()) == 3, "healthy at once, but ready only with an answer"
    assert len(engine.requests()) == 20
    assert engine.probes()[-1]["t"] < min(entry["t"] for entry in engine.requests())
    assert engine.processes() == []


def test_nothing_is_started_when_everything_is_answered(engine: ScriptedEngine, asking: Asking) -> None:
    engine.write()
    asking.run(engine.launch(), range(5))
    asking.run(engine.launch(), range(5))
    assert len(engine.starts()) == 1


def test_a_port_that_is_taken_at_first_is_chosen_again(engine: ScriptedEngine, asking: Asking) -> None:
    engine.write(fail="port_in_use", fail_times=2)
    assert len(asking.run(engine.launch(), range(5))) == 5
    assert len(engine.starts()) == 3


# -- not ready: what was found, the log, and help --------------------------------------------------------------------


def test_a_port_that_stays_taken(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write(fail="port_in_use")
    assert "| (APIServer pid=" in failure(engine.launch(), tmp_path)
    assert len(engine.starts()) == 5


def test_an_engine_that_exits(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write(fail="exit", workers=2)
    message = failure(engine.launch(), tmp_path)
    assert "it ended with status 1 before it was ready" in message
    assert "ValueError: No available memory for the cache blocks" in message
    assert len(engine.starts()) == 1
    assert engine.processes() == [], "its workers are gone, too"


def test_an_engine_that_is_never_ready(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write(fail="never_ready", workers=1)
    message = failure(engine.launch(), tmp_path, start_timeout_s=2)
    assert "it was not ready after 2 s" in message and "HTTP 503" in message
    assert "Application startup complete" in message
    assert engine.processes() == []


def test_an_engine_that_is_healthy_but_never_answers(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write(script={"rules": [{"contains": "ping", "do": "hang"}]})
    began = time.monotonic()
    message = failure(engine.launch(), tmp_path, start_timeout_s=2)
    assert "it gave no answer within 2 s" in message
    assert time.monotonic() - began < 12, "the deadline holds for the first generation, too"


def test_an_engine_that_dies_at_its_first_request(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write(script={"rules": [{"contains": "ping", "do": "die"}]})
    assert "it ended with status 137 at its first request" in failure(engine.launch(), tmp_path)


def test_an_engine_that_refuses_the_first_request(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write(script={"rules": [{"contains": "ping", "do": "400"}]})
    assert "its first answer was 400" in failure(engine.launch(), tmp_path)
    assert engine.processes() == []


def test_a_wrong_model_path(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write()
    message = failure(engine.launch(path=tmp_path / "nowhere"), tmp_path)
    assert f"OSError: {tmp_path}/nowhere is not a valid model path" in message
    assert f"(model path: {tmp_path}/nowhere)" in message


def test_a_missing_executable(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write(python=str(tmp_path / "no-python"))
    message = failure(engine.launch(), tmp_path)
    assert "it ended with status 127" in message
    assert f"{tmp_path}/no-python" in message and "No such file or directory" in message


# -- the key and the environment -------------------------------------------------------------------------------------


def test_the_key_is_seen_by_nobody_else(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in the environment of the engine and in a file of mode 0600, never in argv nor in a log."""
    monkeypatch.setenv("VLLM_PORT", "1234")
    monkeypatch.setenv("PYTHONPATH", "/nobody/must/see/this")
    monkeypatch.setenv("VIRTUAL_ENV", "/nor/this")
    engine.write(workers=1)
    folders: list[Path] = []

    async def look() -> None:
        async with endpoint(engine.launch(), tmp_path) as made:
            key = made.client.api_key
            assert len(key) > 30
            folders.append(made._folder)
            assert stat.S_IMODE(made._folder.stat().st_mode) == 0o700
            files = {path.name for path in made._folder.iterdir() if not path.is_dir()}
            assert files == {"key", "owner", "engine.sock"}, "a Unix socket, no port"
            assert stat.S_IMODE((made._folder / "key").stat().st_mode) == 0o600
            assert (made._folder / "key").read_text() == key
            (pid,) = engine.starts()
            mine = psutil.Process(pid)
            assert mine.net_connections("inet") == []
            environment = mine.environ()
            assert environment["VLLM_API_KEY"] == key
            assert not {"VLLM_PORT", "PYTHONPATH", "VIRTUAL_ENV"} & environment.keys()
            assert len(engine.processes()) == 3, "keeper, engine, worker"
            for process in psutil.process_iter():
                try:
                    assert not any(key in word for word in process.cmdline()), process
                except psutil.NoSuchProcess:
                    continue
            assert (await made.client.models.list()).data[0].id == "m"
            refused = made.client.with_options(api_key="another")
            with pytest.raises(Exception, match="401"):
                await refused.models.list()
            assert key not in made.log.read_text()

    asyncio.run(look())
    assert not folders[0].exists()
    assert engine.processes() == []


def test_keys_of_two_starts_differ(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.write()

    async def key() -> str:
        async with endpoint(engine.launch(), tmp_path) as made:
            return made.client.api_key

    assert asyncio.run(key()) != asyncio.run(key())


def test_an_attached_endpoint_is_left_alone(server: Server) -> None:
    server.start()

    async def use() -> None:
        async with AttachedEndpoint(Attachment(server.url, KEY, "m"), CHAT) as made:
            assert await made.trouble() is None

    asyncio.run(use())
    assert server.process is not None and server.process.poll() is None


# -- death and restart -----------------------------------------------------------------------------------------------


def test_a_killed_engine_is_started_again_and_nothing_is_lost(engine: ScriptedEngine, asking: Asking) -> None:
    engine.write(workers=2, script={"latency_s": 0.01, "rules": [{"contains": "ask 30", "do": "die", "times": 1}]})
    records = asking.run(engine.launch(), range(80))
    assert [record["id"] for record in records] == [str(i) for i in range(80)]
    assert {record["outcome"] for record in records} == {"ok"}
    assert len(engine.starts()) == 2
    assert len(engine.requests()) <= 80 + 8
    assert max(engine.texts().values()) == 2
    assert engine.processes() == []


def test_no_try_is_used_up_while_the_engine_boots_again(engine: ScriptedEngine, asking: Asking) -> None:
    """Requests that wait for their next try when the engine dies must not spend their tries on its start."""
    rules = [{"contains": "ask 40", "do": "die", "times": 1}]
    engine.write(boot_s=1.5, script={"latency_s": 0.02, "seed": 1, "rates": {"500": 0.2}, "rules": rules})
    records = asking.run(engine.launch(), range(120), concurrency=16)
    assert len(records) == 120
    assert len(engine.starts()) == 2
    faults = sum(entry.get("do") == "500" for entry in engine.requests())
    assert len(engine.requests()) <= 120 + faults + 16


def test_an_engine_that_dies_again_and_again_is_given_up(engine: ScriptedEngine, asking: Asking) -> None:
    """Whatever it is asked: it dies after every ten answers."""
    engine.write(workers=1, script={"die_after": 10, "latency_s": 0.02})
    with pytest.raises(GristmillError, match="died once more than it may be restarted") as caught:
        asking.run(engine.launch(), range(300), restarts=2)
    assert 3 <= len(engine.starts()) <= 3 * 5, "three deaths that count, and those that told suspects apart"
    assert 30 <= len(asking.journal()) < 300
    assert "help:  run the same command again" in str(caught.value)
    assert engine.processes() == []


@pytest.mark.parametrize(("concurrency", "killers"), [(1, [5]), (8, [20]), (32, [3, 70])])
def test_the_request_that_kills_the_engine_is_found(
    engine: ScriptedEngine, asking: Asking, concurrency: int, killers: list[int]
) -> None:
    """It becomes an error row; everybody else is answered, and nobody is sent more often than the deaths demand."""
    rules = [{"contains": f"ask K{i}.", "do": "die"} for i in killers]
    engine.write(script={"latency_s": 0.05, "rules": rules})
    ids = [f"K{i}." if i in killers else str(i) for i in range(100)]
    records = asking.run(engine.launch(), ids, concurrency=concurrency, restarts=len(killers))
    guilty = [record for record in records if record["id"].startswith("K")]
    assert [record["outcome"] for record in guilty] == ["error"] * len(killers)
    for record in guilty:
        answer = interpret(record["http_status"], record["raw"], "/chat/completions", AnswerCheck())
        assert (answer.status, answer.error_code) == ("error", "engine_killer")
        assert f"died each of the {record['attempts']} times" in (answer.error_message or "")
    assert [r["outcome"] for r in records if not r["id"].startswith("K")] == ["ok"] * (100 - len(killers))
    most = len(killers) * (2 + math.ceil(math.log2(concurrency)))
    assert len(killers) * 2 <= len(engine.starts()) - 1 <= most
    assert len(engine.requests()) <= 100 + most * concurrency
    assert engine.processes() == []


def test_an_engine_that_is_healthy_while_nothing_completes_is_started_again(
    engine: ScriptedEngine, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request wedges it: /health says 200, no request is answered any more, the tiny generation neither."""
    monkeypatch.setattr(retry, "_STALL_S", 0.5)
    engine.write(script={"latency_s": 0.01, "rules": [{"contains": "ask 30", "do": "wedge", "times": 1}]})
    began = time.monotonic()
    records = asking.run(engine.launch(), range(100))
    assert [record["outcome"] for record in records] == ["ok"] * 100
    assert len(engine.starts()) == 2
    assert len(engine.requests()) <= 100 + 8
    assert time.monotonic() - began < 30


def test_a_long_answer_is_no_stall(engine: ScriptedEngine, asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny generation succeeds, so it is waited for."""
    monkeypatch.setattr(retry, "_STALL_S", 0.3)
    engine.write(script={"rules": [{"contains": "ask 7", "do": "slow", "times": 1}], "slow_s": 2.5})
    assert len(asking.run(engine.launch(), range(10))) == 10
    assert len(engine.starts()) == 1
    assert max(engine.texts().values()) == 1


def test_an_engine_that_does_not_come_back_is_tried_once(engine: ScriptedEngine, asking: Asking) -> None:
    """Each request in flight waits for the restart; when it fails, none of them starts the engine once more."""
    engine.write(script={"rules": [{"contains": "ask 20", "do": "die"}]}, fail=None)
    launch = engine.launch()
    original = EngineEndpoint.revive

    async def broken(self: EngineEndpoint, *, counted: bool = True) -> None:
        engine.write(fail="exit")
        await original(self, counted=counted)

    EngineEndpoint.revive = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(GristmillError, match="did not start"):
            asking.run(launch, range(100), restarts=3)
    finally:
        EngineEndpoint.revive = original  # type: ignore[method-assign]
    assert len(engine.starts()) == 2


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.kill
def test_sigterm_while_the_engine_boots(engine: ScriptedEngine, apart: Apart) -> None:
    engine.write(boot_s=60, workers=2)
    process = apart.start(50, engine=engine)
    wait_until(lambda: len(engine.processes()) == 4, 20, "keeper, engine and workers")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # Slurm sends it twice at times
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "SIGTERM: stopping" in output
    assert "stopped (SIGTERM) while the vllm engine was starting" in output
    assert "Traceback" not in output
    assert time.monotonic() - began < 10, "a booting engine has nothing to drain"
    wait_until(lambda: not engine.processes(), 10, "the end of the engine")


@pytest.mark.kill
def test_sigterm_in_the_middle_drains(engine: ScriptedEngine, apart: Apart, tmp_path: Path) -> None:
    """Admission stops, what is in flight is answered and journalled, the engine ends, the status says failed."""
    engine.write(workers=1, script={"latency_s": 0.2})
    process = apart.start(400, engine=engine)
    wait_until(lambda: len(engine.requests()) >= 20, 20, "requests")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "requests have no answer yet: SIGTERM" in output
    assert "Traceback" not in output
    journalled = sum(path.read_bytes().count(b"\n") for path in (tmp_path / "results/c/journal").glob("*.jsonl"))
    assert journalled == len(engine.requests()) < 100
    assert engine.processes() == []


# -- the keeper ------------------------------------------------------------------------------------------------------

MARK = "GRISTMILL_TEST_MARK"
DEAF = """
import pathlib, signal, subprocess, sys, time
def term(*_):
    pathlib.Path(sys.argv[1], "term").touch()
signal.signal(signal.SIGTERM, term)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1], "up").touch()
while True:
    time.sleep(0.1)
"""
PLAIN = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'up').touch(); time.sleep(600)"
EXITS = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
sys.exit(3)
"""


def kept(code: str, folder: Path, grace: float) -> subprocess.Popen[bytes]:
    """A kept process whose private folder is below `folder`."""
    script = Path(__file__).parents[1] / "workflow" / "lib" / "gristmill" / "keeper.py"
    private = folder / "private"
    private.mkdir()
    command = [sys.executable, "-P", str(script), str(grace), str(private), sys.executable, "-c", code, str(folder)]
    environment = {**os.environ, MARK: str(folder)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)


def of(folder: Path) -> list[psutil.Process]:
    return alive(MARK, str(folder))


@pytest.mark.kill
def test_keeper_when_its_holder_lets_go(tmp_path: Path) -> None:
    """First SIGTERM, SIGKILL after the grace, and no descendant is left, whatever its session."""
    keeper = kept(DEAF, tmp_path, 1.0)
    wait_until((tmp_path / "up").exists, 10)
    assert len(of(tmp_path)) == 3
    keeper.send_signal(signal.SIGTERM)
    keeper.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert keeper.poll() is None and not (tmp_path / "term").exists(), "only the leash ends the engine"
    began = time.monotonic()
    assert keeper.stdin is not None
    keeper.stdin.close()
    assert keeper.wait(10) == 128 + signal.SIGKILL
    assert (tmp_path / "term").exists()
    assert 0.9 < time.monotonic() - began < 5
    assert of(tmp_path) == [] and not (tmp_path / "private").exists()


@pytest.mark.kill
def test_keeper_and_an_engine_that_has_no_handler(tmp_path: Path) -> None:
    """Such as one that still imports: SIGTERM ends it at once, it must not inherit that the keeper ignores it."""
    keeper = kept(PLAIN, tmp_path, 30)
    wait_until((tmp_path / "up").exists, 10)
    assert keeper.stdin is not None
    keeper.stdin.close()
    assert keeper.wait(5) == 128 + signal.SIGTERM
    assert of(tmp_path) == []


@pytest.mark.kill
def test_keeper_of_an_engine_that_exits(tmp_path: Path) -> None:
    keeper = kept(EXITS, tmp_path, 30)
    assert keeper.wait(10) == 3
    assert of(tmp_path) == []
    assert keeper.stdin is not None
    keeper.stdin.close()


@pytest.mark.kill
def test_a_killed_keeper_takes_the_engine_with_it(tmp_path: Path) -> None:
    keeper = kept(PLAIN, tmp_path, 30)
    wait_until((tmp_path / "up").exists, 10)
    keeper.kill()
    keeper.wait()
    wait_until(lambda: not of(tmp_path), 5, "the end of the engine")
    assert keeper.stdin is not None
    keeper.stdin.close()


def test_folders_of_killed_starts_are_swept(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was killed with its keeper left a folder; that of a start which lives, or of nobody known, stays."""
    place = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    me, host = psutil.Process(), os.uname().nodename
    owners = {
        "gristmill-dead": f"{host} 4194305 1.0",
        "gristmill-reused": f"{host} {me.pid} 1.0",
        "gristmill-alive": f"{host} {me.pid} {me.create_time()}",
        "gristmill-elsewhere": "elsewhere 4194305 1.0",
        "gristmill-new": None,
        "other": f"{host} 4194305 1.0",
    }
    for name, owner in owners.items():
        (place / name).mkdir()
        if owner is not None:
            (place / name / "owner").write_text(owner)
    engine.write()

    async def once() -> None:
        async with endpoint(engine.launch(), tmp_path):
            pass

    asyncio.run(once())
    left = {path.name for path in place.iterdir()}
    assert left == {"gristmill-alive", "gristmill-elsewhere", "gristmill-new", "other"}
    shutil.rmtree(place)
