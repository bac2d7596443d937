"""The GitHub action: its commands run with the variables that Actions sets, beside a server in the place of GitHub."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from pytest_magis.outputs.action_steps import LONGEST, base_revision, comment
from pytest_magis.outputs.action_steps import gate as gate_step
from tests.golden.golden import check_golden
from tests.plugin.wheels import git

ISSUES = "/repos/some/nets/issues"
TEST = "import pytest\n@pytest.mark.magis(strategies=['eager'])\ndef test_net(): ...\n"


class Api(ThreadingHTTPServer):
    """Comments of one pull request, as GitHub's API gives, adds and changes them; `refusal` is a status for all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.comments: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.refusal = 0

    def add(self, body: str, kind: str = "Bot", association: str = "NONE") -> dict[str, Any]:
        number = len(self.comments) + 1
        found = {"id": number, "body": body, "html_url": f"https://github.com/some/nets/pull/7#issuecomment-{number}"}
        self.comments.append({**found, "user": {"type": kind}, "author_association": association})
        return self.comments[-1]


class Answer(BaseHTTPRequestHandler):
    server: Api

    def answer(self) -> None:
        path, query = urlsplit(self.path)[2], parse_qs(urlsplit(self.path).query)
        self.server.calls.append(f"{self.command} {path}")
        text = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, found = 200, None
        if self.server.refusal or self.headers["Authorization"] != "Bearer secret":
            status = self.server.refusal or 401
        elif (self.command, path) == ("GET", f"{ISSUES}/7/comments"):
            first = (int(query["page"][0]) - 1) * int(query["per_page"][0])
            found = self.server.comments[first : first + int(query["per_page"][0])]
        elif (self.command, path) == ("POST", f"{ISSUES}/7/comments"):
            status, found = 201, self.server.add(json.loads(text)["body"])
        elif self.command == "PATCH" and path.startswith(f"{ISSUES}/comments/"):
            found = self.server.comments[int(path.rpartition("/")[2]) - 1]
            found["body"] = json.loads(text)["body"]
        else:
            status = 404
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    do_GET = do_POST = do_PATCH = answer  # noqa: N815

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def variables(api: Api, tmp_path: Path) -> dict[str, str]:
    """Variables of a run on a pull request, with those of the action's inputs; the event is `event.json`."""
    folder = tmp_path / "runner"
    folder.mkdir()
    event = {
        "pull_request": {
            "number": 7,
            "head": {"sha": "1" * 40, "repo": {"full_name": "some/nets"}},
            "base": {"sha": "2" * 40, "repo": {"full_name": "some/nets"}},
        }
    }
    (folder / "event.json").write_text(json.dumps(event))
    (folder / "magis-summary.md").write_text("## magis: all 1 cases green\n")
    return {
        "GITHUB_ACTIONS": "true",
        "GITHUB_API_URL": f"http://127.0.0.1:{api.server_port}",
        "GITHUB_EVENT_PATH": str(folder / "event.json"),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_REPOSITORY": "some/nets",
        "GITHUB_RUN_ID": "42",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_SHA": "3" * 40,
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "GITHUB_TOKEN": "secret",
        "GITHUB_WORKSPACE": str(tmp_path),
        "MAGIS_AGAINST": "",
        "MAGIS_ARGS": "",
        "MAGIS_NAME": "",
        "RUNNER_TEMP": str(folder),
    }


def edit_event(variables: dict[str, str], change) -> None:
    path = Path(variables["GITHUB_EVENT_PATH"])
    event = json.loads(path.read_text())
    change(event)
    path.write_text(json.dumps(event))


def run_step(repository: Path, name: str, folder: Path, variables: dict[str, str], **inputs: str):
    """Run the command of a step of action.yml as Actions does, with the inputs given and the defaults of the others."""
    text = (repository / "action.yml").read_text(encoding="utf-8")
    declared, _, steps = text.partition("\n  steps:\n")
    values = {
        f"inputs.{key}": default.strip('"')
        for key, default in re.findall(r"^  ([\w-]+):\n(?:    .*\n)*?    default: (.*)$", declared, re.MULTILINE)
    }
    values |= {f"inputs.{key}": value for key, value in inputs.items()}
    values |= {"runner.temp": variables["RUNNER_TEMP"], "github.token": variables["GITHUB_TOKEN"]}

    def evaluated(text: str) -> str:
        return re.sub(r"\$\{\{ (\S+) \}\}", lambda found: evaluated(values[found[1]]), text)

    (step,) = re.findall(rf"^    - name: {name}\n((?:      .*\n)+)", steps, re.MULTILINE)
    ((one, several),) = re.findall(r"^      run: (?:([^|\n].*)|\|\n((?:        .*\n)+))", step, re.MULTILINE)
    own = {key: evaluated(value) for key, value in re.findall(r"^        ([A-Z_]+): (.*)$", step, re.MULTILINE)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own.pop("NUMBA_CACHE_DIR", None)  # the planner is compiled already, beside its sources
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", one or textwrap.dedent(several)],
        cwd=folder,
        env={**os.environ, **variables, **own, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_pull_request_that_grows_is_red_and_green_once_accepted(gate, repository, api, variables):
    """From the action's commands to the comment, with the command that it shows, on the made-up core."""
    (gate.root / "test_net.py").write_text(TEST)
    (gate.root / "net.py").touch()
    gate.fake(any_case={"held": {"up": 1000, "down": 2000}})
    gate.accept("test_net.py")
    gate.fake(any_case={"held": {"up": 1000, "down": 4000}, "ori_tensor": 1.1})
    variables |= {"GITHUB_WORKSPACE": str(gate.root), "PYTEST_PLUGINS": "pytest_magis.plugin"}

    done = run_step(repository, "Gate", gate.root, variables, args="test_net.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "::error file=net.py,line=7,title=magis%3A%3Atest_net.test_net[eager]::worse: " in done.stdout
    assert "\n* grew at the peak: down +1.95 KiB (" in Path(variables["GITHUB_STEP_SUMMARY"]).read_text()
    kept = f"exit-code=1\nsummary={variables['RUNNER_TEMP']}/magis-summary.md\n"
    assert Path(variables["GITHUB_OUTPUT"]).read_text() == kept
    assert run_step(repository, "Comment", gate.root, variables).stdout == ""
    assert Path(variables["GITHUB_OUTPUT"]).read_text() == f"{kept}comment={api.comments[0]['html_url']}\n"
    check_golden("comment_of_action.md", api.comments[0]["body"])

    (command,) = re.findall(r"^\* accept with: `pytest (.*)`$", api.comments[0]["body"], re.MULTILINE)
    assert gate(*shlex.split(command)).ret == 0
    assert run_step(repository, "Gate", gate.root, variables, args="test_net.py").returncode == 0
    assert run_step(repository, "Comment", gate.root, variables).returncode == 0
    (body,) = (each["body"] for each in api.comments)
    assert body.startswith("<!-- magis -->\n## magis: all 1 cases green\n")
    assert api.calls[-1] == f"PATCH {ISSUES}/comments/1"


def test_it_installs_itself_and_the_users_project(repository, tmp_path, variables):
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text("import sys\nprint(sys.argv[1:])\n")
    there = {**variables, "PYTHONPATH": str(tmp_path), "GITHUB_ACTION_PATH": "/action path"}
    done = run_step(repository, "Install", tmp_path, there, install="-e .[test]")
    assert done.stdout.splitlines() == [
        "['install', 'torch>=2.11', '--index-url', 'https://download.pytorch.org/whl/cpu']",
        "['install', '/action path', 'pytest-xdist', '-e', '.[test]']",
    ]
    done = run_step(repository, "Install", tmp_path, there, package="pytest-magis==0.1", **{"torch-index": ""})
    assert done.stdout == "['install', 'torch>=2.11']\n['install', 'pytest-magis==0.1', 'pytest-xdist']\n"


def test_a_fork_gets_no_comment_and_no_error(api, variables, capsys):
    edit_event(variables, lambda event: event["pull_request"]["head"].update(repo={"full_name": "stranger/nets"}))
    assert comment(variables) == 0
    assert "of a fork" in capsys.readouterr().out
    edit_event(variables, lambda event: event["pull_request"]["head"].update(repo=None))
    assert comment(variables) == 0
    edit_event(variables, lambda event: event.pop("pull_request"))
    assert comment(variables) == 0
    assert api.calls == []


def test_a_token_that_cannot_write_is_a_warning(api, variables, capsys):
    api.refusal = 403
    assert comment(variables) == 0
    line = capsys.readouterr().out
    assert line.startswith("::warning title=magis::no comment was written: HTTP Error 403: ")
    assert 'the permission "pull-requests: write"' in line


def test_its_own_comment_is_found_among_many(api, variables):
    for _ in range(100):
        api.add("words")
    api.add("<!-- magis -->\nof a stranger, who could edit it later", "User")
    api.add("<!-- magis other -->\nof another gate")
    api.add("<!-- magis -->\nof a token of a member", "User", "MEMBER")
    before = [each["body"] for each in api.comments[:-1]]
    text = "".join(f"| row {number} |\n" for number in range(9000))
    Path(variables["RUNNER_TEMP"], "magis-summary.md").write_text(text)
    assert comment(variables) == 0
    assert [each["body"] for each in api.comments[:-1]] == before
    body = api.comments[-1]["body"]
    assert LONGEST - 100 < len(body) < 65_536
    assert re.search(r" \|\n\nThe summary of the run has the rest.\n\n\[Run\]\(https.*/42\) of 1{10}\n$", body)
    assert comment(variables | {"MAGIS_NAME": "third"}) == 0
    assert api.comments[-1]["body"].startswith("<!-- magis third -->\n")
    assert len(api.comments) == 104


def test_the_base_is_the_first_parent_of_the_merge_and_is_fetched(tmp_path, variables, monkeypatch):
    """The checkout is the newest commit alone, as `actions/checkout` makes it."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    git(origin, "init", "--quiet", "--initial-branch=main")
    git(origin, "commit", "--quiet", "--allow-empty", "--message=first\n\nparent 0000")
    git(origin, "checkout", "--quiet", "-b", "change")
    git(origin, "commit", "--quiet", "--allow-empty", "--message=change")
    git(origin, "checkout", "--quiet", "main")
    git(origin, "commit", "--quiet", "--allow-empty", "--message=second")
    git(origin, "merge", "--quiet", "--no-ff", "change", "--message=merge")
    git(origin, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{origin}", str(clone))
    monkeypatch.chdir(clone)
    merge, base = git_says(origin, "rev-parse", "main", "main~1")
    assert base_revision(variables | {"GITHUB_SHA": merge}, clone) == base
    assert base_revision(variables, clone) == "2" * 40  # another commit than the merge was checked out
    assert base_revision(variables | {"MAGIS_AGAINST": "torch==2.12.0"}, clone) == "torch==2.12.0"
    (clone / "baselines").mkdir()
    assert base_revision(variables | {"GITHUB_SHA": merge}, clone) == ""

    program = clone / "python"  # which runs no case
    program.write_text('#!/bin/sh\necho "$@" > arguments\nexit 4\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    asked = {"GITHUB_SHA": merge, "MAGIS_AGAINST": "base", "MAGIS_ARGS": "'test net.py' -n 2"}
    assert gate_step(variables | asked) == 4
    path = Path(variables["RUNNER_TEMP"]) / "magis-summary.md"
    assert (clone / "arguments").read_text() == (
        f"-m pytest test net.py -n 2 --magis-markdown={path} --magis-against={base}\n"
    )
    assert git_says(clone, "cat-file", "-t", base) == ["commit"]
    told = f"## magis: no case ran, pytest's exit code is 4\n\nCompared with {base[:10]}.\n"
    assert path.read_text() == Path(variables["GITHUB_STEP_SUMMARY"]).read_text() == told


def git_says(folder: Path, *words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize(
    ("event", "base"),
    [
        ({"merge_group": {"base_sha": "4" * 40}}, "4" * 40),
        ({"before": "5" * 40}, "5" * 40),
        ({"before": "0" * 40}, ""),
        ({"inputs": None}, ""),
    ],
    ids=["merge queue", "push", "first push", "by hand"],
)
def test_other_events_have_a_base_or_none(tmp_path, variables, event, base):
    Path(variables["GITHUB_EVENT_PATH"]).write_text(json.dumps(event))
    assert base_revision(variables, tmp_path) == base


def test_the_reusable_workflow_hands_on_inputs_that_the_action_has(repository):
    action = (repository / "action.yml").read_text(encoding="utf-8").partition("\noutputs:\n")[0]
    workflow = (repository / ".github" / "workflows" / "gate.yml").read_text(encoding="utf-8")
    page = (repository / "docs" / "github.md").read_text(encoding="utf-8")
    known = re.findall(r"^  ([\w-]+):$", action.partition("\ninputs:\n")[2], re.MULTILINE)
    given = re.findall(r"^          ([\w-]+): \$\{\{ inputs\.\1 \}\}$", workflow, re.MULTILINE)
    assert {*given, "torch-index", "token"} - {"python-version"} == set(known)
    declared = re.findall(r"^      ([\w-]+):\n", workflow.partition("\njobs:\n")[0], re.MULTILINE)
    used = set(re.findall(r"\$\{\{ inputs\.([\w-]+)", workflow))
    assert set(declared) == used
    unquoted = re.compile(r"^ *(?:- )?[\w-]+: (?!['\">|])[^#\n]*(?<!\})(?:: |:$)", re.MULTILINE)  # is no YAML
    assert unquoted.findall(action + workflow) == []
    assert re.findall(r"^\| `([\w-]+)` \|", page.partition("| input |")[2], re.MULTILINE) == known


def test_the_metrics_for_gitlab(gate, repository):
    text = (repository / "docs" / "ci.md").read_text(encoding="utf-8").partition("## On GitLab")[2]
    (command,) = re.findall(r"^    - python -m pytest (.*)$", text, re.MULTILINE)
    (script,) = re.findall(r"^    - \|\n((?:      .*\n)+)", text, re.MULTILINE)
    gate.extend_conftest('\nDEVICES = ("cpu", "sim:h200")\n')
    gate.fake(**{"vit[eager]": {"raise": "no such thing"}})
    assert gate(*shlex.split(command)).ret == 1
    assert (gate.root / "junit.xml").is_file()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-ec", textwrap.dedent(script)], cwd=gate.root, check=True, env={**os.environ, "PATH": path}
    )
    lines = (gate.root / "metrics.txt").read_text().splitlines()
    assert len(lines) == 21
    metric = re.compile(r'magis_peak_bytes\{model="\w+",strategy="\w+",limit="[\d.]*"\} (\d+|NaN)')
    assert all(map(metric.fullmatch, lines))
    assert 'magis_peak_bytes{model="vit",strategy="eager",limit=""} NaN' in lines
