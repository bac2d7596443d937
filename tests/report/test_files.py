"""Files that are whole at every moment."""

from __future__ import annotations

import os

import pytest

from magis.errors import UsageError
from magis.report import check_writable, write_text_atomically


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


def test_a_new_file_gets_the_usual_permissions(tmp_path):
    (tmp_path / "usual").write_text("")
    write_text_atomically(tmp_path / "file.txt", "")
    assert (tmp_path / "file.txt").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "target.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "there" / "target.txt")
    check_writable(tmp_path / "link.txt")
    write_text_atomically(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "there" / "target.txt").read_text() == "new"
    assert names(tmp_path / "there") == ["target.txt"]


def test_long_names_leave_room_for_the_temporary_file(tmp_path):
    path = tmp_path / ("x" * 250)
    check_writable(path)
    write_text_atomically(path, "text")
    assert names(tmp_path) == [path.name]


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


def test_checking_leaves_no_trace(tmp_path):
    check_writable(tmp_path / "file.txt")
    assert names(tmp_path) == []
