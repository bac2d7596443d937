"""`--magis-against`: two revisions of a project in one run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from magis.errors import UsageError
from magis.extensions.versions import checkout, environment_of, scratch_folder
from magis.extensions.versions.environments import releases
from magis.extensions.versions.gate_run import COMPARED_WITH
from pytest_magis import flags
from pytest_magis.against import strays
from tests.plugin.wheels import NETWORK, git, offer, wheel_of

# the made-up core reads figures from fake.json, which is part of each revision
TEST = "import pytest\n@pytest.mark.magis(memory_ratios=[0.8])\ndef test_net(): ...\n"


@pytest.fixture
def history(gate):
    """A repository: its first revision is called old."""
    (gate.root / "test_memory.py").write_text(TEST)
    (gate.root / ".gitignore").write_text("calls.txt\n__pycache__/\n.pytest_cache/\nrunpytest-*\nstd*\n")
    git(gate.root, "init", "--quiet")
    commit(gate)
    git(gate.root, "tag", "old")
    return gate


SLOW = """
import os, pathlib, time
if "MAGIS_COMPARED_WITH" in os.environ and "QUICK" not in os.environ:
    pathlib.Path("measuring").touch()
    time.sleep(600)
"""
"""In front of a conftest.py: a revision that takes long."""


def commit(gate, *more):
    git(gate.root, "add", ".")
    git(gate.root, "commit", "--quiet", "--message=more", *more)


def worktrees(root):
    listed = subprocess.run(["git", "worktree", "list"], cwd=root, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def lines(result, start):
    return [line for line in result.outlines if line.startswith(start)]


def test_the_same_is_green_and_leaves_nothing_behind(history, workers):
    before = history.files()
    result = history("--magis-against=old", "--magis-models=bert", "test_memory.py", workers=workers)
    result.assert_outcomes(passed=5)
    after = history.files()
    assert set(after) - set(before) == {"calls.txt", "results.csv"}
    assert len(worktrees(history.root)) == 1


def test_inside_a_hook_of_git_the_index_stays(history, monkeypatch):
    (history.root / "more.txt").write_text("staged")
    git(history.root, "add", "more.txt")
    index = history.root / ".git" / "index"
    before = index.read_bytes()
    monkeypatch.setenv("GIT_DIR", str(index.parent))
    monkeypatch.setenv("GIT_INDEX_FILE", str(index))
    history("--magis-against=old").assert_outcomes(passed=2)
    assert index.read_bytes() == before


def test_more_memory_than_the_revision_is_red(history, workers):
    history.fake(any_case={"ori_tensor": 1.1, "ori_peak": 1.1})
    result = history("--magis-against=old", workers=workers)
    result.assert_outcomes(failed=2)
    assert lines(result, "worse: original tensor bytes")
    assert lines(result, "compared with old, measured in this run")
    assert not lines(result, "accept")
    commit(history)
    history("--magis-against=HEAD", workers=workers).assert_outcomes(passed=2)
    history.fake()
    assert lines(history("--magis-against", "HEAD"), "test_memory.test_net[eager]: better: original tensor bytes")


def test_what_the_revision_has_not_passes_and_says_so(history):
    (history.root / "test_new.py").write_text(TEST.replace("test_net", "test_other"))
    for arguments in ((), ("test_new.py",)):
        result = history("--magis-against=old", *arguments)
        assert result.ret == 0
        assert lines(result, "test_new.test_other[eager]: nothing to compare with: old has no such case")


def test_bad_input_is_one_line(history):
    assert "there is no such revision" in history.refuses("--magis-against=nowhere", "--magis-models=bert")
    assert "leave out --magis-update" in history.refuses("--magis-against=old", "--magis-update=new")
    assert "--magis-budget: '0'" in history.refuses("--magis-against=old", "--magis-budget=0")
    (history.root / "conftest.py").write_text(
        (history.root / "conftest.py").read_text() + "\nraise ValueError('old')\n"
    )
    commit(history)
    git(history.root, "revert", "--no-edit", "HEAD")
    message = history.refuses("--magis-against=HEAD^", "--magis-models=bert")
    assert "the run of HEAD^ ended with exit code 4: E ValueError: old" in message


def test_outside_of_a_repository(gate):
    assert "not a git repository" in gate.refuses("--magis-against=old", "--magis-models=bert")


def test_in_a_shallow_clone(history, tmp_path_factory, monkeypatch):
    commit_more = ("commit", "--quiet", "--allow-empty", "--message=more")
    git(history.root, *commit_more)
    folder = tmp_path_factory.mktemp("shallow")
    git(folder, "clone", "--quiet", "--depth=1", "--no-tags", history.root.as_uri(), "clone")
    monkeypatch.chdir(folder / "clone")
    history.root = folder / "clone"
    message = history.refuses("--magis-against=old", f"--rootdir={history.root}")
    assert "there is no such revision: old; the clone is shallow: fetch its history" in message


def test_ctrl_c_in_a_checkout_leaves_nothing_and_is_not_swallowed(history, tmp_path):
    """The filter runs while git writes the files of the checkout."""
    slow = f"kill -INT {os.getpid()}; sleep 1; cat"
    git(history.root, "config", "filter.slow.smudge", slow)
    (history.root / ".gitattributes").write_text("fake.json filter=slow\n")
    history.fake()
    commit(history)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), checkout(history.root, "HEAD", tmp_path / "checkout"):
            pytest.fail("git went on")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "checkout").exists()
    assert len(worktrees(history.root)) == 1
    assert not any((history.root / ".git").glob("worktrees/*"))


def alive(marker):
    """The processes that were told this name: the run, its child, the child's children."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if (
                marker.encode() in place.read_bytes()
                and "Z" not in (place.parent / "stat").read_text().split(")")[1][:3]
            ):
                found.append(int(place.parent.name))
    return found


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("command", ["gate", "bisect"])
def test_whatever_ends_a_comparison_nothing_of_it_stays(history, tmp_path, command, sent):
    """The signal reaches the run alone, while its child measures; what SIGKILL leaves goes with the next run."""
    (history.root / "conftest.py").write_text(f"{SLOW}{(history.root / 'conftest.py').read_text()}")
    commit(history)
    commit(history, "--allow-empty")
    words = {
        "gate": ["pytest", "-p", "pytest_magis.plugin", "--magis-against=HEAD", "--magis-models=bert"],
        "bisect": ["magis", "bisect", "HEAD^", "HEAD", "--", "-p", "pytest_magis.plugin", "--magis-models=bert"],
    }
    marker = f"{tmp_path.name}-{command}-{sent}"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = os.environ | {"TMPDIR": str(temporary), "MARKER": marker}
    before = history.files()
    arguments = [sys.executable, "-m", *words[command]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(arguments, cwd=history.root, env=variables, start_new_session=True, **quiet)
    wait_until(lambda: any(temporary.glob("*/checkout/measuring")))
    assert len(alive(marker)) >= 2
    process.send_signal(sent)
    process.wait(120)
    wait_until(lambda: not alive(marker))
    if sent == signal.SIGKILL:
        assert len(worktrees(history.root)) == 2
        variables["QUICK"] = "1"
        subprocess.run(arguments, cwd=history.root, env=variables, timeout=300, check=False, **quiet)
    assert not list(temporary.glob("magis-*"))
    assert len(worktrees(history.root)) == 1
    assert not any((history.root / ".git").glob("worktrees/*"))
    assert set(history.files()) - set(before) <= {"calls.txt", "results.csv"}


def wait_until(holds):
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to that")


def test_worktrees_of_others_and_of_runs_that_go_on_stay(history, tmp_path):
    git(history.root, "worktree", "add", "--quiet", "--detach", str(tmp_path / "mine"), "HEAD")
    shutil.rmtree(tmp_path / "mine")  # on a disk that is not mounted, say
    with scratch_folder() as first, checkout(history.root, "HEAD", first / "checkout"):
        with scratch_folder() as second, checkout(history.root, "HEAD", second / "checkout"):
            assert len(worktrees(history.root)) == 4
        assert (first / "checkout" / "test_memory.py").is_file()
        assert len(worktrees(history.root)) == 3
    assert len(worktrees(history.root)) == 2


def test_code_of_the_wrong_checkout_is_refused(history):
    """As an editable installation hands it out."""
    elsewhere = f"import sys\nsys.path.insert(0, {str(history.root / 'lib')!r})\nimport net_of_mine\n"
    (history.root / "lib").mkdir()
    (history.root / "lib" / "net_of_mine.py").write_text("")
    (history.root / "test_memory.py").write_text(elsewhere + TEST)
    commit(history)
    message = history.refuses("--magis-against=HEAD")
    assert "net_of_mine.py, which is not of that revision" in message


def test_only_the_code_of_a_checkout_strays(tmp_path):
    class Module:
        def __init__(self, file):
            self.__file__ = str(file)

    inside, venv = tmp_path / "net.py", tmp_path / ".venv"
    modules = {"a": Module(inside), "b": Module("/usr/lib/x.py"), "c": Module(venv / "lib" / "y.py"), "d": object()}
    assert list(strays(modules, tmp_path, venv)) == [str(inside)]


def test_other_releases_are_compared_with_and_what_the_run_writes_is_its_own(gate, monkeypatch, tmp_path_factory):
    gate.use_real_core()
    offer(tmp_path_factory.mktemp("wheels"), monkeypatch, v1_0=64)
    (gate.root / "test_memory.py").write_text(NETWORK)
    before = gate.files()
    tables = []
    for _ in range(2):
        result = gate(
            "--magis-against=net-width==1.0", "--magis-report=report.html", "--magis-csv=all.csv", "test_memory.py"
        )
        result.assert_outcomes(failed=1)
        assert lines(result, "worse: original tensor bytes")
        assert lines(result, "grew at the peak: 1 +")
        assert lines(result, "compared with net-width==1.0, measured in this run")
        tables.append(lines(result, "test_memory.test_net "))
    written = {
        name for name in set(gate.files()) - set(before) if not name.startswith(".")
    }  # what rustup leaves in a home
    assert written == {"report.html", "all.csv"}
    assert tables[0] == tables[1] != []
    refused = gate("--magis-against=net-width==3", "test_memory.py")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in refused.errlines if line.startswith("ERROR: --magis-against: No matching distribution")]


def test_the_name_that_an_idle_plugin_needs_is_the_one_of_the_library():
    assert flags.COMPARED_WITH == COMPARED_WITH


# Environments of other releases


def width_of(python):
    program = "import net_width; print(net_width.INNER)"
    return int(subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout)


def test_an_environment_is_kept_until_another_package_is_installed(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, v1_0=64)
    said = []
    made = [environment_of(["net-width==1.0"], said.append, tmp_path) for _ in range(2)]
    assert made[0] == made[1]
    assert made[0].is_relative_to(tmp_path / "environments")
    assert len(said) == 1
    here = tmp_path / "installed"
    here.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    for release in ("1.0", "2.0"):
        (here / "other.dist-info").mkdir(exist_ok=True)
        (here / "other.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: other\nVersion: {release}\n")
        made.append(environment_of(["net-width==1.0"], said.append, tmp_path))
    assert len(set(made)) == 3
    assert len(said) == 3


def test_what_an_address_names_is_installed_anew_in_every_run(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch)
    found = []
    for run, inner in (("first", 64), ("second", 96)):
        wheel = wheel_of(tmp_path, "1.0", inner)
        python = environment_of([f"net-width @ {wheel.as_uri()}"], lambda _text: None, tmp_path / run)
        assert python.is_relative_to(tmp_path / run)
        found.append(width_of(python))
    assert found == [64, 96]
    assert not (tmp_path / "environments").exists()


def test_an_address_is_installed_where_the_same_version_is(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, v1_0=64)
    here = environment_of(["net-width==1.0"], lambda _text: None, tmp_path)
    (tmp_path / "other").mkdir()
    wheel = wheel_of(tmp_path / "other", "1.0", 96)
    program = "from pathlib import Path; from magis.extensions.versions import environment_of as of\n"
    program += f"print(of(['net-width @ {wheel.as_uri()}'], lambda _: None, Path({str(tmp_path)!r})))"
    done = subprocess.run([here, "-c", program], capture_output=True, text=True, check=True)
    assert (width_of(here), width_of(done.stdout.strip())) == (64, 96)


def test_pre_releases_and_local_builds_are_no_releases(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, v1_0=1, v1_5rc1=1, v2_0=1, v2_1=1, v3_0=1, **{"v2_0+cpu": 1, "v2_1_dev1": 1})
    names = ["net-width==1.0", "net-width==2.0", "net-width==2.1"]
    assert releases(names[0], names[-1]) == names
    assert releases("net-width==2.1", "net-width==1.5rc1") == ["net-width==2.1", "net-width==2.0", "net-width==1.5rc1"]
    with pytest.raises(UsageError, match="No matching distribution found for nothing-such"):
        releases("nothing-such==1.0", "nothing-such==2.0")
