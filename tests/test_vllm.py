"""Real vLLM on the CPU, through its own engine entry: real mails in, complete tables out, nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from openai import NotFoundError, OpenAI

from conftest import PROJECT, Project, wait_until
from slurm_cluster import Cluster

pytestmark = pytest.mark.vllm

CACHE = Path(os.environ.get("GRISTMILL_TEST_CACHE", PROJECT / ".cache"))


def _prepare(*command: str, made: Path | None = None) -> None:
    """Run a script that fetches things; where the network does not have them the test is skipped, but never in CI."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # the other part of the suite may do the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made is not None and made.exists():
            return
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode == 0:
        return
    message = f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The folder that tests/vllm/make_env.py makes."""
    folder = CACHE / "vllm"
    _prepare(str(PROJECT / "tests" / "vllm" / "make_env.py"), str(folder))
    return folder


@pytest.fixture(scope="session")
def mails() -> list[str]:
    """Sixty real mails, a JSON line each."""
    path = CACHE / "mails-60.jsonl"
    _prepare(str(PROJECT / "tests" / "fetch_mails.py"), str(path), "60", made=path)
    return path.read_text(encoding="utf-8").split("\n")[:60]


@pytest.fixture
def campaign_folder(project: Project, vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A folder with a registry that serves the small model by vLLM; afterwards no process of it may be left."""
    flags = "{dtype: bfloat16, enforce-eager: true, block-size: 32, max-model-len: 2048}"
    project.write(
        "models.yaml",
        f"models:\n  smollm2:\n    engine: vllm\n    path: {vllm}/model\n"
        f"    python: {vllm}/python\n    args: {flags}\n",
    )
    yield project
    assert not _vllm_processes(vllm, project)


def _vllm_processes(vllm: Path, project: Project) -> list[psutil.Process]:
    """Processes of a project's engine: those that have the venv's libraries mapped, whatever they call themselves."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(project.root) and any(str(vllm) in m.path for m in process.memory_maps()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def test_real_mails_as_documents_with_the_engine_core_killed(
    campaign_folder: Project, vllm: Path, mails: list[str]
) -> None:
    project = campaign_folder
    project.write("mails.jsonl", "\n".join(mails) + "\n")
    project.write("mail.j2", "Is this mail spam or ham?\n\n{{ text[:700] }}\n\nAnswer spam or ham:")
    campaign = project.campaign(
        "mails",
        input=["mails.jsonl"],
        documents={"keep": ["label"]},
        prompt="mail.j2",
        answer={"labels": ["spam", "ham"]},
        gold={"column": "label"},
        model="smollm2",
        registry="models.yaml",
        sampling={"temperature": 0, "max_tokens": 8},
        endpoint={"concurrency": 8},
        shard_size=25,
    )
    process = project.start(campaign)
    wait_until(lambda: len(project.journal("mails")) >= 10, 300, "the tenth answer")
    core = next(
        p for p in _vllm_processes(vllm, project) if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name()
    )
    core.kill()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "starting it again" in output
    rows = project.table("mails")
    assert [row["id"] for row in rows] == [json.loads(mail)["id"] for mail in mails]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["label"] for row in rows} <= {"spam", "ham"}
    assert [row["input_label"] for row in rows] == [json.loads(mail)["label"] for mail in mails]
    assert all(row["prompt_tokens"] > 20 and row["completion_tokens"] > 0 for row in rows)
    assert set(Counter(record["id"] for record in project.journal("mails")).values()) == {1}
    again = project.run(campaign)
    assert again.status == 0 and "Nothing to be done" in again.output


def test_requests_json_of_real_mails_on_slurm(
    on_slurm: Project, cluster: Cluster, campaign_folder: Project, mails: list[str]
) -> None:
    """The job of the group starts vLLM on its node."""
    project = campaign_folder
    before = cluster.next_job
    requests = []
    for mail in map(json.loads, mails[:20]):
        messages = [
            {"role": "system", "content": "Sum up the mail in one sentence."},
            {"role": "user", "content": mail["text"][:700]},
        ]
        requests.append(
            {"id": mail["id"], "model": "smollm2", "messages": messages, "max_tokens": 12, "temperature": 0}
        )
    # One that is longer than the context: refused by the engine, a row all the same.
    requests[7]["messages"][1]["content"] = "word " * 5000
    project.write("requests.json", json.dumps({"requests": requests}, indent=1))
    campaign = project.campaign(
        "sums",
        input=["requests.json"],
        model="smollm2",
        registry="models.yaml",
        limits={"max_error_share": 1},
        endpoint={"gpus": 0},
        resources={"mem_mb": 8000, "cpus_per_task": 2},
    )
    run = project.run(campaign, timeout=400)
    assert run.status == 0, run.output
    assert cluster.jobs(before, "account", "state", "ncpus", "reqmem") == [("proj", "COMPLETED", "2", "8000M")]
    rows = project.table("sums")
    assert [row["id"] for row in rows] == [request["id"] for request in requests]
    assert rows[7]["status"] == "error" and rows[7]["error_code"] == "too_long"
    rest = rows[:7] + rows[8:]
    assert all(row["answer"] and row["finish_reason"] in ("length", "stop") for row in rest)
    assert {row["status"] for row in rest} <= {"ok", "invalid"}
    errors = [json.loads(line) for line in (project.results("sums") / "errors.jsonl").read_text().splitlines()]
    assert [error["id"] for error in errors] == [row["id"] for row in rows if row["status"] != "ok"]


TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}


def test_a_shared_endpoint_on_slurm(
    on_slurm: Project, cluster: Cluster, campaign_folder: Project, vllm: Path, mails: list[str]
) -> None:
    """One load of the model for two campaigns, curl and the OpenAI SDK; nobody without the key; nothing left."""
    project = campaign_folder
    command = [sys.executable, "-m", "gristmill.cli", "endpoint"]
    env = {**os.environ, **cluster.environment, "XDG_STATE_HOME": str(project.root)}
    slurm = ["account=proj", "qos=normal", "partition=cpu", "time=10", "mem=8000", "cpus-per-task=2"]
    words = ["start", "--model", "smollm2", "--gpus", "0", "--outdir", "E", "--share", "--registry", "models.yaml"]
    words += [part for option in slurm for part in ("--slurm", option)]
    words += ["--arg", "enable-auto-tool-choice", "--arg", "tool-call-parser=hermes"]
    started = subprocess.run([*command, *words], cwd=project.root, env=env, capture_output=True, text=True, timeout=400)
    assert started.returncode == 0, started.stderr
    made = json.loads(started.stdout)
    key = (project.root / "E" / "key").read_text().strip()

    project.profile = PROJECT / "profiles" / "local"
    runs = []
    for name, part in (("first", mails[:12]), ("second", mails[12:24])):
        requests = []
        for mail in map(json.loads, part):
            message = {"role": "user", "content": f"Spam or ham?\n\n{mail['text'][:300]}"}
            requests.append({"id": mail["id"], "messages": [message], "max_tokens": 4})
        project.write(f"{name}.jsonl", "".join(json.dumps(request) + "\n" for request in requests))
        endpoint = {"sidecar": "E", "concurrency": 4}
        keys = {"input": [f"{name}.jsonl"], "model": "smollm2", "limits": {"max_error_share": 1}}
        runs.append(project.start(project.campaign(name, endpoint=endpoint, **keys), "--nolock"))

    chat = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    line = next(line for line in started.stderr.splitlines() if line.startswith("curl "))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"], done
    assert key not in line
    for header in ([], ["-H", "Authorization: Bearer wrong"]):
        words = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{made['url']}/models", *header]
        assert subprocess.run(words, capture_output=True, text=True).stdout == "401"

    with OpenAI(base_url=made["url"], api_key=key, max_retries=0) as client:
        stream = client.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        tools = {**chat, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "clock"}}}
        called = (
            client.chat.completions.create(**{**tools, "max_tokens": 128, "temperature": 0})
            .choices[0]
            .message.tool_calls
        )
        assert called[0].function.name == "clock"
        assert client.responses.create(model="smollm2", input="Hello", max_output_tokens=16).output
        with pytest.raises(NotFoundError) as refused:  # this model makes none: the engine's own words
            client.embeddings.create(model="smollm2", input="Hello")
        assert refused.value.status_code == 404
    root = made["url"].removesuffix("/v1")
    asked = json.dumps({"model": "smollm2", "max_tokens": 4, "messages": chat["messages"]}).encode()
    request = urllib.request.Request(
        f"{root}/v1/messages", asked, {"x-api-key": key, "content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.loads(response.read())["content"][0]["text"]

    for run in runs:
        output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output
    assert len(project.table("first")) == len(project.table("second")) == 12
    log = (project.root / "E" / "engine.log").read_text()
    assert log.count("Application startup complete") == 1
    assert key not in log
    stopped = subprocess.run(
        [*command, "stop", "--job", made["job_id"]], cwd=project.root, env=env, capture_output=True
    )
    assert stopped.returncode == 0, stopped.stderr
    assert not cluster.queue()
