"""Texts kept in a folder: what was written or nothing, whatever happens to the files, within the bounds."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from magis.errors import MagisError
from magis.report.text_store import Bounds, Kept

TEXT = "figures\n" + "".join(f"line {number}\n" for number in range(2000))


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "deep" / "cache")


def read(text: str) -> str:
    if text != TEXT:
        raise MagisError("another text")
    return text


def save_thrice(kept: Kept) -> None:
    for number in range(3):
        assert kept.load(f"plan-{number}", read) is None
        kept.save(f"plan-{number}", TEXT)


def only_file(kept: Kept) -> Path:
    (path,) = kept.folder.iterdir()
    return path


def test_what_was_saved_is_loaded(kept: Kept) -> None:
    assert kept.load("plan-1", read) is None
    kept.save("plan-1", TEXT)
    assert kept.load("plan-1", read) == TEXT
    kept.drop("plan-1")
    assert kept.load("plan-1", read) is None


def damages(path: Path, content: bytes) -> dict[str, Callable[[], object]]:
    """Ways to damage a file, each done by calling it."""

    def pipe() -> None:
        path.unlink()
        os.mkfifo(path)

    def folder() -> None:
        path.unlink()
        path.mkdir()

    def link() -> None:
        path.unlink()
        path.symlink_to("/dev/zero")

    return {
        "empty": lambda: path.write_bytes(b""),
        "cut off": lambda: path.write_bytes(content[: len(content) // 2]),
        "one bit": lambda: path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]),
        "longer": lambda: path.write_bytes(content + b"more"),
        "another version": lambda: path.write_bytes(content.replace(b"magis kept 1", b"magis kept 2")),
        "no text": lambda: path.write_bytes(b"\xff\xfe" + content),
        "pickle": lambda: path.write_bytes(b"cos\nsystem\n(S'true'\ntR."),
        "pipe": pipe,
        "folder": folder,
        "link to a device": link,
    }


@pytest.mark.parametrize("damage", damages(Path(), b"0123456789"))
def test_a_damaged_file_is_one_warning_and_made_again(kept: Kept, damage: str) -> None:
    kept.save("plan-1", TEXT)
    path = only_file(kept)
    damages(path, path.read_bytes())[damage]()
    with pytest.warns(RuntimeWarning, match="is not used, and made again") as said:
        assert kept.load("plan-1", read) is None
    assert len(said) == 1
    assert kept.load("plan-1", read) is None  # gone: nothing more is said
    kept.save("plan-1", TEXT)
    assert kept.load("plan-1", read) == TEXT
    assert not path.is_symlink()


def test_bytes_are_bounded_and_the_newest_stays(tmp_path: Path) -> None:
    kept = Kept(tmp_path, Bounds(total_bytes=len(TEXT) + 500))
    for number in range(4):
        kept.save(f"plan-{number}", TEXT)
        os.utime(tmp_path / f"plan-{number}.txt", (number, number))
    kept.save("plan-4", TEXT)
    assert [path.stem for path in tmp_path.iterdir()] == ["plan-4"]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    dead, alive = tmp_path / ".plan-1.txt.0000000a.tmp", tmp_path / ".plan-1.txt.0000000b.tmp"
    dead.write_text("half")
    with alive.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # as its writer does
        Kept(tmp_path).save("plan-2", TEXT)
        assert not dead.exists()
        assert alive.exists()


def test_a_full_disk_is_one_warning_and_leaves_nothing(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left on device") as said:
        save_thrice(kept)
    assert len(said) == 1
    assert list(kept.folder.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from magis.report.text_store import Bounds, Kept
kept = Kept(Path(sys.argv[1]), Bounds(entries=4))
text = "figures\\n" + "".join(f"line {number}\\n" for number in range(2000))
kept.save("plan-0", text)
print("ready", flush=True)
while True:
    for number in range(8):
        kept.save(f"plan-{number}", text)
"""


def test_killed_writers_leave_whole_texts_or_none(tmp_path: Path, repository: Path) -> None:
    """Two processes at once, killed at random moments; each has saved a text by then, however slow the disk is."""
    kept, moments = Kept(tmp_path), random.Random(0)
    for _ in range(3):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=repository, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(moments.random() / 10)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [kept.load(f"plan-{number}", read) for number in range(8)]
    assert any(found)
    assert set(found) <= {TEXT, None}
