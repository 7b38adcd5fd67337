"""Boards: nobody else's files, nothing in them trusted, and gone only when their owner is."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.harness import environment
from tenure.engine import board
from tenure.engine.board import HEADER, SLOT, Board, inherited_board, make_board
from tenure.ids import new_id

WORKER = "host:1:01M7KEAHTM9FMYWY7GGN18QHD5"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def made() -> Iterator[Board]:
    found = make_board(WORKER, 1, 3)
    yield found
    found.close()


def own(temporary: Path) -> Path:
    return temporary / f"tenure-{os.geteuid()}"


def owner_that_dies(temporary: Path, slots: int = 3) -> list[str]:
    """A process that makes a board, starts its first two jobs, ends the second, and is killed."""
    program = textwrap.dedent(f"""
        import os, sys, signal
        from tenure.engine.board import make_board
        from tenure.ids import new_id
        board = make_board({WORKER!r}, 1, {slots})
        ids = [new_id() for _ in range(3)]
        for slot, id in enumerate(ids):
            board.assign(slot, id)
        board.start(0, 5.0)
        board.start(1, 5.0)
        board.end(1)
        print(*ids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    variables = environment() | {"TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def test_a_file_of_our_own_for_ourselves_alone(made: Board, temporary: Path) -> None:
    (path,) = own(temporary).iterdir()
    assert made.path == str(path)
    assert (own(temporary).stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert path.stat().st_size == HEADER + 3 * SLOT
    assert path.stat().st_blocks * 512 >= path.stat().st_size  # every page was allocated
    made.close()
    assert list(own(temporary).iterdir()) == []


def test_both_sides_see_what_the_other_writes(made: Board) -> None:
    child = inherited_board(made.lend())
    made.assign(2, new_id())
    assert made.started(2) == 0
    assert child.start(2, 7.5)
    assert made.started(2) == 7.5
    made.halt()
    assert not child.start(1, 8.0)  # marked first, then refused
    assert made.started(1) == 8.0
    child.end(1)
    assert made.started(1) == -1
    child.go_on()
    assert not made.halted
    child.beat(9.0)
    made.pulse(10.0, 40.0, partial=False)
    child.leave()
    assert (made.last_beat(), child.last_pulse(), made.left) == (9.0, (10.0, 40.0), True)
    child.disown()
    child.beat(99.0)
    assert made.last_beat() == 9.0


@pytest.mark.parametrize("hostile", ["a link", "a file", "open to others", "another user's"])
def test_whatever_lies_where_our_directory_should_be(temporary: Path, hostile: str) -> None:
    place = own(temporary)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if hostile == "a link":
        place.symlink_to(elsewhere)
    elif hostile == "a file":
        place.write_text("")
    else:
        place.mkdir(mode=0o700)
        if hostile == "open to others":
            place.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(place, 54_321, 54_321)
        else:
            pytest.skip("only root can give a directory away")
    made = make_board(WORKER, 1, 3)

    assert made.path is None
    assert str(place) in made.excuse
    child = inherited_board(made.lend())  # it works, and rescuers know nothing
    child.start(1, 5.0)
    assert made.started(1) == 5.0
    assert board.started_in(WORKER) is None
    made.close()
    assert list(elsewhere.iterdir()) == []


def test_a_name_that_is_taken(temporary: Path, made: Board) -> None:
    again = make_board(WORKER, 1, 3)

    assert again.path is None
    assert os.path.exists(str(made.path))
    again.close()
    assert os.path.exists(str(made.path))


def test_what_had_started_in_a_dead_worker(temporary: Path) -> None:
    started, _ended, _waiting = owner_that_dies(temporary)

    assert board.started_in(WORKER) == {started}
    assert board.started_in("host:1:01M7KEAHTM9FMYWY7GGN18QHD6") is None
    board.remove_boards(WORKER)
    assert board.started_in(WORKER) is None


def test_boards_that_nobody_finds_make_the_others_incomplete(made: Board) -> None:
    made.pulse(1.0, 2.0, partial=True)

    assert board.started_in(WORKER) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"tenure-1",
        b"nonsense" * 100,
        b"tenure-1" + b"\xff" * 500,
        b"\0" * (HEADER + SLOT),
    ],
)
def test_garbage_is_no_board_or_an_empty_one(temporary: Path, content: bytes) -> None:
    make_board(WORKER, 1, 3).close()
    (own(temporary) / "01M7KEAHTM9FMYWY7GGN18QHD5-1.board").write_bytes(content)

    assert board.started_in(WORKER) in (None, frozenset())


def test_ids_are_checked(temporary: Path, made: Board) -> None:
    good = new_id()
    names = (good.encode(), b"'; DROP TABLE jobs; --\0\0\0\0", b"\xff" * 26)
    with open(str(made.path), "r+b") as file:
        file.seek(HEADER)
        for name in names:
            file.write(struct.pack("26s6xd", name, 5.0))

    assert board.started_in(WORKER) == {good}


def test_things_that_are_no_files_hold_nobody_up(temporary: Path) -> None:
    make_board(WORKER, 1, 3).close()
    directory = own(temporary)
    os.mkfifo(directory / "01M7KEAHTM9FMYWY7GGN18QHD5-1.board")
    (directory / "01M7KEAHTM9FMYWY7GGN18QHD5-2.board").mkdir()
    (directory / "01M7KEAHTM9FMYWY7GGN18QHD5-3.board").symlink_to("/etc/passwd")
    with (directory / "01M7KEAHTM9FMYWY7GGN18QHD5-4.board").open("wb") as large:
        large.truncate(1 << 40)

    assert board.started_in(WORKER) is None
    board.remove_boards(WORKER)
    board.remove_forgotten_boards(0)
    assert os.path.exists("/etc/passwd")


def test_only_a_dead_owners_board_is_removed(temporary: Path, made: Board) -> None:
    """Writes through memory do not move its time: a worker of last year may be at work."""
    os.utime(str(made.path), (0, 0))
    board.remove_boards(WORKER)
    board.remove_forgotten_boards(86_400)
    assert os.path.exists(str(made.path))
    child = inherited_board(made.lend())
    path = made.path
    made.close()
    owner_that_dies(temporary)  # under the same name
    board.remove_forgotten_boards(86_400)
    assert os.path.exists(str(path))  # somebody may still want to read it
    os.utime(str(path), (0, 0))
    board.remove_forgotten_boards(86_400)
    assert not os.path.exists(str(path))
    assert child.start(0, 1.0)  # its memory is its own as long as it looks


def test_a_board_in_use_says_so(made: Board) -> None:
    os.utime(str(made.path), (0, 0))
    made.touch()

    assert time.time() - os.stat(str(made.path)).st_mtime < 60


def test_a_start_costs_next_to_nothing(made: Board) -> None:
    """The price of a job's start and of its look at our mark: bounded, with a busy machine in mind
    (measured: 0.2 us together)."""
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            made.start(1, 5.0)
        best = min(best, (time.perf_counter() - began) / 1000)

    print(f"{best * 1e6:.2f} us")
    assert best < 2e-6
