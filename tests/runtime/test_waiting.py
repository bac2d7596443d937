"""What Linux counts of threads that wait for a core."""

from __future__ import annotations

from pathlib import Path

import pytest

from magis.runtime.timing import longest_wait, waits


def counted(folder: Path, **threads: str) -> dict[str, int]:
    for name, text in threads.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "schedstat").write_text(text)
    return waits(folder)


def test_the_second_number_of_every_thread_is_its_wait(tmp_path: Path) -> None:
    before = counted(tmp_path, main="100 20 3\n", worker="90 5000 7\n")
    assert before == {"main": 20, "worker": 5000}
    after = counted(tmp_path, main="200 50 4\n", worker="95 5010 8\n", late="1 35 1\n")
    assert longest_wait(before, after) == 35
    assert longest_wait({}, {}) == 0


@pytest.mark.parametrize("text", ["", "100\n", "a b c\n"])
def test_what_is_not_counted_is_left_out(tmp_path: Path, text: str) -> None:
    assert counted(tmp_path, main=text, worker="1 2 3") == {"worker": 2}
    (tmp_path / "ended").mkdir()
    assert "ended" not in waits(tmp_path)
    assert waits(tmp_path / "nowhere") == {}
