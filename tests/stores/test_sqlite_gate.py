"""The gate: one for all names of a file, for everybody who may write it, and for nobody else."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crash.harness import environment, eventually
from tenure import errors
from tenure.stores.sqlite import SqliteStore
from tenure.stores.sqlite.gate import gate_mode

from .sqlite_files import NOBODY, as_user, jobs, needs_root, program, python, shared_folder

Open = Callable[..., SqliteStore]
GROUP = 4242

HOLDER = """
import sys
from tenure.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
with store.file.write():
    print("inside", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def open_store() -> Iterator[Open]:
    opened: list[SqliteStore] = []

    def open_store(path: object, **options: Any) -> SqliteStore:
        opened.append(SqliteStore(str(path), **({"busy_timeout": 0.3} | options)))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def gate_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-tenure.lock")


def hold_with(path: Path, flags: int, kind: int) -> None:
    """As a user who would stop all writers."""
    handle = os.open(gate_of(path), flags)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    finally:
        os.close(handle)


# -- one gate a file ---------------------------------------------------------------------------


def names_of(path: Path) -> dict[str, str]:
    """Other ways to say it; the working directory of the test is its folder."""
    folder = path.parent
    (folder / "inner").mkdir()
    (folder / "link.db").symlink_to(path.name)
    (folder / "links").symlink_to(folder, target_is_directory=True)
    return {
        "relative": path.name,
        "dots": f"inner/../{path.name}",
        "symbolic link": "link.db",
        "linked directory": str(folder / "links" / path.name),
        "link in a linked directory": "links/link.db",
    }


def test_all_names_of_a_file_lead_to_one_gate(
    tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.db"
    open_store(path).migrate()
    monkeypatch.chdir(tmp_path)
    names = names_of(path)
    with program(HOLDER, path):
        for name in names.values():
            with pytest.raises(errors.StoreBusy, match="Another process has been writing"):
                open_store(name).enqueue(jobs(1))

    for name in names.values():
        open_store(name).enqueue(jobs(1))
    assert open_store(path).totals().jobs["queued"] == len(names)
    gates = sorted(found.name for found in tmp_path.rglob("*-tenure.lock"))
    assert gates == ["jobs.db-tenure.lock"]


def test_the_log_is_watched_and_emptied_by_any_name(tmp_path: Path, open_store: Open) -> None:
    path, link = tmp_path / "jobs.db", tmp_path / "link.db"
    open_store(path).migrate()
    link.symlink_to(path)
    store = open_store(link)
    for _ in range(15):
        store.enqueue(jobs(200, size=8_000))

    assert os.path.getsize(f"{path}-wal") < 20_000_000


def test_a_gate_that_somebody_deleted_is_noticed(tmp_path: Path, open_store: Open) -> None:
    """Else those who have it open and those who make a new one would not wait for each other."""
    path = tmp_path / "jobs.db"
    store = open_store(path)
    store.enqueue(jobs(1))
    gate_of(path).unlink()

    def made_anew() -> bool:
        store.enqueue(jobs(1))
        return gate_of(path).exists()

    eventually(made_anew, what="a gate where it was")
    with store.file.write(), pytest.raises(BlockingIOError):
        hold_with(path, os.O_RDWR, fcntl.LOCK_EX)


def test_threads_of_one_process_wait_for_each_other_too(tmp_path: Path, open_store: Open) -> None:
    store = open_store(tmp_path / "jobs.db", busy_timeout=30)
    store.migrate()
    inside, overlaps, failures = [0], [0], []

    def write() -> None:
        try:
            for _ in range(50):
                with store.file.write():
                    inside[0] += 1
                    overlaps[0] += inside[0] > 1
                    inside[0] -= 1
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert overlaps == [0]


# -- whose it is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "gate"),
    [
        (0o600, 0o600),
        (0o640, 0o600),
        (0o644, 0o600),
        (0o660, 0o660),
        (0o664, 0o660),
        (0o666, 0o666),
        (0o602, 0o606),
        (0o444, 0o600),
    ],
)
def test_who_may_write_the_database_may_lock_its_gate(
    tmp_path: Path, open_store: Open, database: int, gate: int
) -> None:
    assert gate_mode(database) == gate
    path = tmp_path / "jobs.db"
    path.touch()
    path.chmod(database | 0o200)
    before = os.umask(0o077)
    try:
        open_store(path).enqueue(jobs(1))
    finally:
        os.umask(before)

    assert mode_of(gate_of(path)) == gate_mode(database | 0o200)


def test_a_gate_follows_a_database_that_was_opened_to_a_group(
    tmp_path: Path, open_store: Open
) -> None:
    path = tmp_path / "jobs.db"
    open_store(path).enqueue(jobs(1))
    path.chmod(0o660)
    assert mode_of(gate_of(path)) == 0o600
    assert [f.check for f in open_store(path).inspect() if f.level != "ok"][-1:] == ["gate"]

    open_store(path).enqueue(jobs(1))

    assert mode_of(gate_of(path)) == 0o660
    assert "gate" not in {finding.check for finding in open_store(path).inspect()}


@needs_root
def test_the_gate_belongs_to_the_owner_of_the_database(folder: Path, open_store: Open) -> None:
    path = folder / "jobs.db"
    path.touch()
    os.chown(path, NOBODY, GROUP)
    folder.chmod(0o777)
    open_store(path).enqueue(jobs(1))  # by root

    gate = gate_of(path).stat()
    assert (gate.st_uid, gate.st_gid) == (NOBODY, GROUP)
    assert as_user(lambda: len(open_store(path).enqueue(jobs(1)))) == 1


@needs_root
@pytest.mark.parametrize("first", ["owner", "member"])
def test_a_file_shared_by_a_group(folder: Path, open_store: Open, first: str) -> None:
    """Two users, one group, 0660, and whoever comes first makes the gate, by a strict umask."""
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2770)  # new files are the group's
    path = folder / "jobs.db"
    made = open_store(path)
    made.migrate()
    made.close()
    os.chown(path, NOBODY, GROUP)
    path.chmod(0o660)
    gate_of(path).unlink()

    def enqueue() -> int:
        os.umask(0o077)
        store = SqliteStore(str(path), busy_timeout=2)
        try:
            return len(store.enqueue(jobs(1)))
        finally:
            store.close()

    users = [NOBODY, NOBODY - 1] if first == "owner" else [NOBODY - 1, NOBODY]
    for uid in users:
        assert as_user(enqueue, uid=uid, groups=(GROUP,)) == 1
    assert mode_of(gate_of(path)) == 0o660
    assert gate_of(path).stat().st_gid == GROUP
    assert open_store(path).totals().jobs["queued"] == 2


@needs_root
@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_reader_cannot_hold_the_gate_shut(folder: Path, open_store: Open, mode: int) -> None:
    """flock needs a handle and no right to write: so there is none to be had."""
    path = folder / "jobs.db"
    store = open_store(path)
    store.enqueue(jobs(1))
    path.chmod(mode)
    os.chown(path, 0, GROUP)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            with pytest.raises(PermissionError):
                as_user(lambda: hold_with(path, flags, kind), groups=(GROUP,))  # noqa: B023
    handle = as_user(lambda: os.open(gate_of(path), os.O_PATH))  # names it, and cannot lock it
    assert handle >= 0

    assert store.enqueue(jobs(1))


@needs_root
def test_who_may_only_read_can_look(folder: Path, open_store: Open) -> None:
    path = folder / "jobs.db"
    store = open_store(path)
    store.enqueue(jobs(3))

    def look() -> int:
        return SqliteStore(str(path)).totals().jobs["queued"]

    def write() -> None:
        SqliteStore(str(path)).enqueue(jobs(1))

    assert as_user(look) == 3
    with pytest.raises(errors.StoreUnavailable, match="may not write"):
        as_user(write)


@needs_root
def test_a_gate_of_somebody_else_is_named_with_the_remedy(folder: Path, open_store: Open) -> None:
    path = folder / "jobs.db"
    open_store(path).enqueue(jobs(1))
    for name in folder.iterdir():
        name.chmod(0o666)
    folder.chmod(0o777)
    gate_of(path).chmod(0o600)

    with pytest.raises(errors.StoreUnavailable, match=r"tenure\.lock cannot be opened.*chmod"):
        as_user(lambda: SqliteStore(str(path)).enqueue(jobs(1)))


def test_a_link_in_place_of_the_gate_leads_nowhere(tmp_path: Path, open_store: Open) -> None:
    """In a directory that others can write to, it would have us make or change their choice of
    file."""
    path, victim = tmp_path / "jobs.db", tmp_path / "victim"
    victim.touch()
    victim.chmod(0o640)
    path.touch()
    path.chmod(0o666)
    gate_of(path).symlink_to(victim)
    with pytest.raises(errors.StoreUnavailable, match=r"tenure\.lock cannot be opened"):
        open_store(path).enqueue(jobs(1))

    gate_of(path).unlink()
    os.link(victim, gate_of(path))
    open_store(path).enqueue(jobs(1))
    assert mode_of(victim) == 0o640


# -- when a process ends -----------------------------------------------------------------------


def test_a_killed_holder_leaves_the_gate_open(tmp_path: Path, open_store: Open) -> None:
    path = tmp_path / "jobs.db"
    store = open_store(path)
    store.migrate()
    with program(HOLDER, path), pytest.raises(errors.StoreBusy):
        store.enqueue(jobs(1))
    assert store.enqueue(jobs(1))


FORKS_INSIDE = """
import os, signal, sys
from tenure.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
store.migrate()
block = store.file.lend(60.0) if sys.argv[2] == "lent" else store.file.write()
block.__enter__()
child = os.fork()
if child == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.close(1), os.close(2)
    signal.pause()
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
block.__exit__(None, None, None)
"""


@pytest.mark.parametrize("how", ["lent", "written"])
@pytest.mark.parametrize("end", ["killed", "ended"])
def test_a_forked_child_does_not_keep_the_gate(
    tmp_path: Path, open_store: Open, how: str, end: str
) -> None:
    """It has copies of its parent's handles, and may live for long."""
    path = tmp_path / "jobs.db"
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKS_INSIDE, str(path), how, end],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.wait(30)
        os.kill(child, 0)
        assert open_store(path).enqueue(jobs(1))
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_many_processes_open_a_new_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    said = python(
        """
        import os, sys
        from tenure.ids import new_ids
        from tenure.job import NewJob, Terms
        from tenure.stores.sqlite import SqliteStore

        terms = Terms("noop", "default", 5, "default", 5, 300_000, 1000)
        reading, writing = os.pipe()
        for _ in range(64):
            if os.fork() == 0:
                os.close(writing)
                os.read(reading, 1)  # until all are there
                code = 1
                try:
                    store = SqliteStore(sys.argv[1], busy_timeout=60)
                    store.enqueue([NewJob(id, terms, "{}") for id in new_ids(1)])
                    store.close()
                    code = 0
                finally:
                    os._exit(code)
        os.close(reading), os.close(writing)
        print([os.wait()[1] for _ in range(64)].count(0))
        """,
        path,
    )
    store = SqliteStore(str(path))
    queued = store.totals().jobs["queued"]
    store.close()

    assert (said, queued) == ("64\n", 64)
