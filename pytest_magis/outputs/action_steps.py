"""Steps of the GitHub action (`action.yml`), each a command: `python -m pytest_magis.outputs.action_steps gate`.

A step reads the environment variables of GitHub Actions, and those that `action.yml` sets from its inputs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.request import Request, urlopen

from magis.printable import printable

Variables: TypeAlias = Mapping[str, str]

LONGEST = 65_000
"""Maximum number of characters of a comment; GitHub refuses more than 65,536."""
PAGE = 100
"""Number of comments that GitHub returns at once, at most."""
WRITERS = ("OWNER", "MEMBER", "COLLABORATOR")
"""Associations of authors, besides bots, whose comment is taken for the action's own; others might edit it later."""


def gate(variables: Variables) -> int:
    """Run pytest, add to the job's summary what the run found, and set the step's outputs; return pytest's exit code.

    The summary is kept in a file for `comment`.
    """
    base = base_revision(variables, Path.cwd())
    is_commit = re.fullmatch("[0-9a-f]{40}", base) is not None
    if is_commit and _git("cat-file", "-e", f"{base}^{{commit}}").returncode:
        _git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", base)  # where it fails, pytest's run says so
    path = _summary_file(variables)
    path.unlink(missing_ok=True)
    words = [*shlex.split(variables["MAGIS_ARGS"]), f"--magis-markdown={path}"]
    if base:
        words.append(f"--magis-against={base}")
    code = subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
    text = f"## magis: no case ran, pytest's exit code is {code}\n"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    text += f"\nCompared with {(base[:10] if is_commit else base) or 'the stored baselines'}.\n"
    path.write_text(text, encoding="utf-8")
    _append(variables["GITHUB_STEP_SUMMARY"], text)
    _append(variables["GITHUB_OUTPUT"], f"exit-code={code}\nsummary={path}\n")
    return code


def base_revision(variables: Variables, folder: Path) -> str:
    """Return what the run is compared with, as for --magis-against; "" for the stored baselines.

    On a pull request Actions checks out its merge with the base, whose first parent is the base; the event's own base
    is older where the base branch has moved since.
    """
    asked = variables["MAGIS_AGAINST"]
    if asked == "baselines" or (not asked and (folder / "baselines").is_dir()):
        return ""
    if asked not in ("", "base"):
        return asked
    event = _event(variables)
    known = (event.get("pull_request") or {}).get("base", {}).get("sha", "")
    if known and _git("rev-parse", "HEAD").stdout.strip() == variables["GITHUB_SHA"]:
        head = _git("cat-file", "commit", "HEAD").stdout.partition("\n\n")[0]  # names parents that were not fetched
        parents = re.findall(r"^parent (\w+)$", head, re.MULTILINE)
        known = parents[0] if len(parents) == 2 else known
    known = known or event.get("merge_group", {}).get("base_sha") or event.get("before") or ""
    return str(known) if str(known).strip("0") else ""  # zeros: the first push of a branch


def comment(variables: Variables) -> int:
    """Write the summary into the pull request's comment, made by an earlier run or now, and set the step's output.

    A pull request of a fork has a token that cannot write, and gets no comment. A refusal of GitHub is a warning.
    """
    request = _event(variables).get("pull_request")
    if request is None:
        sys.stdout.write("no comment: the run is not of a pull request\n")
        return 0
    head, base = (request[side]["repo"] or {} for side in ("head", "base"))  # None: the fork was deleted
    if head.get("full_name") != base.get("full_name"):
        sys.stdout.write("no comment: the pull request is of a fork; the job's summary has the table\n")
        return 0
    name = " ".join(variables["MAGIS_NAME"].split())
    marker = f"<!-- magis {name} -->" if name else "<!-- magis -->"
    run = f"{variables['GITHUB_SERVER_URL']}/{variables['GITHUB_REPOSITORY']}/actions/runs/{variables['GITHUB_RUN_ID']}"
    text = f"{marker}\n{_summary_file(variables).read_text(encoding='utf-8')}"
    if len(text) > LONGEST:
        text = f"{text[: text.rindex(chr(10), 0, LONGEST)]}\n\nThe summary of the run has the rest.\n"
    text += f"\n[Run]({run}) of {request['head']['sha'][:10]}\n"
    try:
        written = write_comment(variables, request["number"], marker, text)
    except (OSError, ValueError) as error:  # no answer, a refusal, or one that is no JSON
        way_out = 'a job that comments needs the permission "pull-requests: write"'
        sys.stdout.write(f"::warning title=magis::no comment was written: {printable(error)}; {way_out}\n")
        return 0
    _append(variables["GITHUB_OUTPUT"], f"comment={written}\n")
    return 0


def write_comment(variables: Variables, number: int, marker: str, text: str) -> str:
    """Replace the text of a pull request's comment that begins with ``marker``, or add one; return its address.

    Raises OSError or ValueError where GitHub does not do that.
    """
    issues = f"{variables['GITHUB_API_URL']}/repos/{variables['GITHUB_REPOSITORY']}/issues"
    token, body = variables["GITHUB_TOKEN"], {"body": text}
    for known in _comments(f"{issues}/{number}/comments", token):
        is_bot = (known["user"] or {}).get("type") == "Bot"  # None: the user was deleted
        if (is_bot or known["author_association"] in WRITERS) and (known["body"] or "").startswith(marker):
            return str(_ask(token, "PATCH", f"{issues}/comments/{known['id']}", body)["html_url"])
    return str(_ask(token, "POST", f"{issues}/{number}/comments", body)["html_url"])


def _comments(address: str, token: str) -> Iterator[dict[str, Any]]:
    page = 1
    while found := _ask(token, "GET", f"{address}?per_page={PAGE}&page={page}"):
        yield from found
        if len(found) < PAGE:
            return
        page += 1


def _ask(token: str, method: str, address: str, body: object = None) -> Any:
    """Call GitHub's API, and return its answer."""
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"}
    data = None if body is None else json.dumps(body).encode()
    asked = Request(address, data, headers, method=method)  # noqa: S310  (the address is the runner's own)
    with urlopen(asked, timeout=30) as answer:  # noqa: S310
        return json.load(answer)


def _event(variables: Variables) -> dict[str, Any]:
    """Return what started the workflow, as GitHub describes it."""
    found: dict[str, Any] = json.loads(Path(variables["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    return found


def _summary_file(variables: Variables) -> Path:
    return Path(variables["RUNNER_TEMP"]) / "magis-summary.md"


def _append(path: str, text: str) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(text)


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False)


STEPS = {"gate": gate, "comment": comment}

if __name__ == "__main__":
    sys.exit(STEPS[sys.argv[1]](os.environ))
