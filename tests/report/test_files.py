"""Files that are whole at every moment."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from magis.cost.profile_store import load
from magis.errors import MagisError, UsageError
from magis.frontends.plan_files import read_plan
from magis.report import check_writable, read_results, write_text_atomically
from pytest_magis.baseline_files import read_baseline


def names(path):
    return sorted(found.name for found in path.iterdir())


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "file.txt"
    write_text_atomically(path, "one\n")
    path.chmod(0o640)
    write_text_atomically(path, "zwei ä\n")
    assert path.read_bytes() == "zwei ä\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["file.txt"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "target.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "there" / "target.txt")
    check_writable(tmp_path / "link.txt")
    write_text_atomically(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "there" / "target.txt").read_text() == "new"
    assert names(tmp_path / "there") == ["target.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("directory", "it is a directory"),
        ("missing/file.txt", "no such directory"),
        ("plain/file.txt", "not a directory"),
        ("/dev/full", "it is not a regular file"),
        ("pipe", "it is not a regular file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_places_that_cannot_be_written(tmp_path, name, message):
    (tmp_path / "directory").mkdir()
    (tmp_path / "plain").write_text("")
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    for attempt in (check_writable, lambda path: write_text_atomically(path, "text")):
        with pytest.raises(UsageError, match="cannot write") as caught:
            attempt(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=message):
        check_writable(tmp_path / name)
    assert names(tmp_path) == before


def test_an_interrupt_keeps_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


WRITER = """
import os, sys, time
from pathlib import Path
from magis.report import write_text_atomically

def waits(_descriptor):
    print("half", flush=True)
    sys.stdin.readline()

os.fsync = waits
write_text_atomically(Path(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture
def half_written(tmp_path):
    """Processes that have written half of what they write to the file, and wait for a line."""
    with ExitStack() as stack:

        def start(text):
            command = [sys.executable, "-c", WRITER, tmp_path / "file.txt", text]
            process = stack.enter_context(Popen(command, stdin=PIPE, stdout=PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout.readline() == "half\n"
            return process

        yield start


@pytest.mark.parametrize("look", [check_writable, lambda path: write_text_atomically(path, "mine")])
def test_what_a_killed_writer_left_goes_with_the_next_run(tmp_path, half_written, look):
    """And nothing that a live one writes, nor what looks alike."""
    others = {".file.txt.tmp", ".file.txt.123.tmp", ".other.txt.0123abcd.tmp", ".file.txt.json.0123abcd.tmp"}
    for name in others:
        (tmp_path / name).write_text("")
    dead, alive = half_written("dead"), half_written("alive")
    assert len(names(tmp_path)) == len(others) + 2
    dead.kill()
    dead.wait()
    assert len(names(tmp_path)) == len(others) + 2
    look(tmp_path / "file.txt")
    left = set(names(tmp_path)) - others - {"file.txt"}
    assert len(left) == 1
    assert (tmp_path / left.pop()).read_text() == "alive"
    alive.communicate("go on\n", timeout=300)
    assert (tmp_path / "file.txt").read_text() == "alive"
    assert set(names(tmp_path)) == others | {"file.txt"}


READERS = {
    "plan": read_plan,
    "profile": load,
    "results": read_results,
    "baseline": lambda path: read_baseline(path, "net", "cpu"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "directory", "of 8 GiB"])
def test_what_has_no_end_within_reach_is_not_read(tmp_path, reader, kind):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 8 << 30)
    with pytest.raises(MagisError, match=r"it has more than|it is not a regular file") as caught:
        READERS[reader](path)
    assert "\n" not in str(caught.value)
