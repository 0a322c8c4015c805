"""What a person sees on the terminal when something is wrong: what was found, where, what helps, and no traceback.

A full disk and a locked folder are in test_kills.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conftest import Finished, Project, ScriptedEngine, Server
from gristmill.errors import GristmillError, reported

NOT_SET = "GRISTMILL_TEST_KEY_THAT_NOBODY_SETS"


def told(run: Finished, *parts: str) -> None:
    """The run failed and its output has these parts and help, and no traceback but an engine's own, quoted."""
    assert run.status != 0, run.output
    for part in (*parts, "help:"):
        assert part in run.output
    ours = [line for line in run.output.splitlines() if not line.startswith("    | ")]
    assert not [line for line in ours if "Traceback" in line or "GristmillError" in line]


def run_all(campaigns: dict[str, Path], project: Project, timeout: float = 180) -> dict[str, Finished]:
    """Campaigns in folders of their own at the same time."""
    processes = {}
    for name, campaign in campaigns.items():
        folder = project.root / f"in-{name}"
        folder.mkdir()
        (folder / "requests.jsonl").write_bytes((project.root / "requests.jsonl").read_bytes())
        apart = Project(folder)
        processes[name] = apart.start(campaign)
        project.started.append(processes[name])
    runs = {}
    for name, process in processes.items():
        output, _ = process.communicate(timeout=timeout)
        runs[name] = Finished(process.returncode, output)
    return runs


def test_trouble_with_engines_and_endpoints(project: Project, server: Server, tmp_path: Path) -> None:
    project.requests(range(5))
    server.start(rules=[{"contains": "", "do": "404"}])
    exits = ScriptedEngine(tmp_path / "exits").write(fail="exit")
    absent = ScriptedEngine(tmp_path / "absent").write(path="models/nowhere")
    python = ScriptedEngine(tmp_path / "python").write(python="/opt/vllm/bin/python")
    runs = run_all(
        {
            "exits": project.campaign("exits", registry=exits),
            "absent": project.campaign("absent", registry=absent),
            "python": project.campaign("python", registry=python),
            "model": project.campaign("model", url=server.url, model="another"),
            "down": project.campaign("down", url="http://127.0.0.1:9/v1"),
            "key": project.campaign("key", endpoint={"url": server.url, "api_key_env": NOT_SET}),
        },
        project,
    )
    told(
        runs["exits"],
        "gristmill: the vllm engine did not start: it ended with status 1",
        "last lines of its log:",
        "| (APIServer pid=",
        "ValueError: No available memory for the cache blocks",
        "results/exits/logs/g0000.local-",
        "then run the same command again",
    )
    told(runs["absent"], "gristmill: the model does not exist: models/nowhere", "correct `path` in the model registry")
    told(
        runs["python"],
        "gristmill: the vllm engine did not start: it ended with status 127",
        "/opt/vllm/bin/python",
        "No such file or directory",
    )
    told(runs["model"], "gristmill: the endpoint refuses: HTTP 404", server.url, "curl URL/models lists the names")
    told(runs["down"], "gristmill: nothing answers at the endpoint:", "http://127.0.0.1:9/v1")
    told(runs["key"], f"gristmill: the environment variable {NOT_SET} is not set", f"export {NOT_SET}=")
    for name in runs:
        assert list((project.root / f"in-{name}").glob("results/*/answers/*")) == []


def test_trouble_before_anything_is_run(project: Project) -> None:
    project.requests(range(5))
    project.write("twins.jsonl", '{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n' * 2)
    project.write("empty.jsonl", "")
    url = "http://127.0.0.1:9/v1"
    runs = run_all(
        {
            "nothing": project.campaign("nothing", url=url, input=["data/*.jsonl"]),
            "registry": project.campaign("registry", registry="nowhere.yaml"),
            "name": project.campaign("name", model="smollm2-153m"),
            "twins": project.campaign("twins", url=url, input=[str(project.root / "twins.jsonl")]),
            "empty": project.campaign("empty", url=url, input=[str(project.root / "empty.jsonl")]),
        },
        project,
    )
    told(runs["nothing"], "data/*.jsonl", "where:")
    told(runs["registry"], "the model registry does not exist: nowhere.yaml", "where:")
    told(runs["name"], "model 'smollm2-153m' is not in the registry; it has:")
    told(runs["twins"], "ids must be unique; 1 are not", "'a' at", "twins.jsonl:1", "twins.jsonl:2", "nothing was sent")
    told(runs["empty"], "the inputs have no rows", "empty.jsonl")


@pytest.mark.parametrize("yaml", ["campaign: [", "- a list", "campaign: c\ninput: requests.jsonl\nmodle: m\n"])
def test_a_campaign_file_that_is_none(project: Project, yaml: str) -> None:
    project.requests(range(5))
    run = project.run(project.write("c.yaml", yaml), "-n")
    assert run.status != 0
    assert "Traceback" not in run.output


def test_what_is_wrong_is_said_though_the_log_is_on_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, reported("/dev/full"):
        print("something", file=sys.stderr)
        raise GristmillError("the disk is full", help="free some space")
    assert caught.value.code == 1
    assert capsys.readouterr().err == "something\ngristmill: the disk is full\n  help:  free some space\n"
