"""A full disk, missing rights, a foreign journal, many handles: said, survived, nothing lost."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tenure import errors
from tenure.stores.sqlite import SqliteStore

from .sqlite_files import as_user, jobs, needs_root, python, shared_folder

# -- rights ------------------------------------------------------------------------------------


def enqueue(path: Path) -> int:
    return len(SqliteStore(str(path), busy_timeout=1).enqueue(jobs(1)))


def count(path: Path) -> int:
    return SqliteStore(str(path), busy_timeout=1).totals().jobs["queued"]


@needs_root
@pytest.mark.parametrize(
    ("file", "folder", "in_use", "reads", "writes"),
    [
        (0o666, 0o777, False, True, True),
        (0o666, 0o555, True, True, True),  # the logs are there
        (0o666, 0o555, False, False, False),  # and here none can be made
        (0o444, 0o777, True, True, False),
        (0o644, 0o755, True, True, False),
        (0o644, 0o755, False, False, False),
    ],
)
def test_what_another_user_can_do(
    file: int, folder: int, in_use: bool, reads: bool, writes: bool
) -> None:
    with shared_folder() as place:
        path = place / "jobs.db"
        store = SqliteStore(str(path))
        store.enqueue(jobs(1))
        for name in place.iterdir():
            name.chmod(file)
        if not in_use:
            store.close()
        place.chmod(folder)
        for call, works in ((count, reads), (enqueue, writes)):
            if works:
                assert as_user(lambda: call(path)) == 1  # noqa: B023
            else:
                with pytest.raises(errors.StoreUnavailable, match="may not write"):
                    as_user(lambda: call(path))  # noqa: B023
        store.close()


# -- a full disk -------------------------------------------------------------------------------

FULL = r"""
import ctypes, json, os, resource, sys
from tenure.ids import new_ids
from tenure.job import NewJob, Terms
from tenure.stores.sqlite import SqliteStore
from tenure.outcome import Completed, Ended
from tenure.engine import machine

folder, how = sys.argv[1], sys.argv[2]
if how == "disk":
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None) or libc.mount(
        b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=3m"
    ):
        print(json.dumps({"cannot": os.strerror(ctypes.get_errno())}), flush=True)
        os._exit(0)

def limit(room):
    if how == "disk":
        if room:
            os.unlink(folder + "/ballast")
        else:
            ballast = os.open(folder + "/ballast", os.O_WRONLY | os.O_CREAT)
            try:
                while os.write(ballast, b"x" * 4096):
                    pass
            except OSError:
                os.close(ballast)
    else:
        most = resource.RLIM_INFINITY if room else 200_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

terms = Terms("noop", "default", 5, "default", 5, 300_000, 1000)
def jobs():
    return [NewJob(id, terms, '{"text":"%s"}' % ("x" * 20_000)) for id in new_ids(1)]

store = SqliteStore(folder + "/jobs.db")
worker = store.register(machine.identify(machine.new_worker_id(), 3600, {}))
stored = [store.enqueue(jobs())[0].id]
claimed = store.claim(worker, [("default", 1)]).jobs
limit(room=False)
said, refused = [], 0
for _ in range(200):
    try:
        stored.append(store.enqueue(jobs())[0].id)
    except Exception as error:
        refused += 1
        said.append(f"{type(error).__name__}: {error}")
try:
    held = store.finish(worker, [Ended(j.id, j.lease_no, 0, Completed("1")) for j in claimed])
except Exception as error:
    held = f"{type(error).__name__}"
readable = store.totals().jobs["queued"] + store.totals().jobs["in_progress"]
limit(room=True)
verdict = store.finish(worker, [Ended(j.id, j.lease_no, 0, Completed("1")) for j in claimed])
stored.append(store.enqueue(jobs())[0].id)
found = [id for id in stored if store.get(id) is not None]
with store.file.read() as db:
    whole = db.execute("PRAGMA integrity_check").fetchone()[0]
print(json.dumps({"said": sorted(set(said)), "refused": refused, "held": held, "verdict": verdict,
                  "stored": len(stored), "found": len(found), "whole": whole}))
"""


@pytest.mark.parametrize("how", [pytest.param("disk", marks=needs_root), "limit"])
def test_nothing_is_lost_on_a_full_disk(tmp_path: Path, how: str) -> None:
    """What was acknowledged is there, what was refused says why, and room is all it takes."""
    said: dict[str, Any] = json.loads(python(FULL, tmp_path, how))
    if "cannot" in said:
        pytest.skip(f"no file system of its own to fill: {said['cannot']}")

    assert said["refused"] > 100
    (message,) = said["said"]
    assert message.startswith("StoreUnavailable:")
    assert ("is full" if how == "disk" else "ulimit") in message
    assert "Nothing was changed" in message
    assert said["held"] in ("StoreUnavailable", ["accepted"])
    assert said["verdict"] == (["accepted"] if said["held"] == "StoreUnavailable" else ["repeated"])
    assert (said["found"], said["whole"]) == (said["stored"], "ok")


# -- a journal that is no log ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["DELETE", "TRUNCATE", "PERSIST"])
def test_a_file_that_somebody_took_out_of_wal_mode(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "jobs.db"
    store = SqliteStore(str(path))
    store.enqueue(jobs(1))
    store.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute(f"PRAGMA journal_mode={mode}").fetchone() == (mode.lower(),)
    store.enqueue(jobs(1))

    with store.file.read() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store.totals().jobs["queued"] == 2
    store.close()


def test_a_file_in_use_cannot_be_taken_out_of_wal_mode(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = SqliteStore(str(path))
    store.enqueue(jobs(1))
    with (
        closing(sqlite3.connect(path, timeout=0.1)) as db,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        db.execute("PRAGMA journal_mode=DELETE")
    store.enqueue(jobs(1))
    store.close()


def test_a_copy_made_by_vacuum_into_is_used_in_wal_mode(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "jobs.db"))
    store.enqueue(jobs(5))
    with store.file.read() as db:
        db.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))
    store.close()
    copy = SqliteStore(str(tmp_path / "copy.db"))
    copy.enqueue(jobs(1))

    findings = {finding.check: finding.level for finding in copy.inspect()}
    assert findings["integrity"] == "ok"
    assert copy.totals().jobs["queued"] == 6
    with copy.file.read() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    copy.close()


# -- many handles ------------------------------------------------------------------------------

MANY = """
import os, resource, sys, threading
import tenure
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
app = tenure.App("sqlite:///" + sys.argv[1])

@app.task
def double(n: int) -> int:
    return 2 * n

with app.worker():
    print(app.result(double.enqueue(21).id, timeout=20))
"""


def test_a_program_with_more_than_1024_handles(tmp_path: Path) -> None:
    assert python(MANY, tmp_path / "jobs.db") == "42\n"


# -- hard links --------------------------------------------------------------------------------


def test_doctor_tells_of_a_second_name(tmp_path: Path) -> None:
    """SQLite finds a log by the name of its file: two names, two logs, one damaged file."""
    store = SqliteStore(str(tmp_path / "jobs.db"))
    store.enqueue(jobs(1))
    problems: Callable[[], list[str]] = lambda: [  # noqa: E731
        finding.check for finding in store.inspect() if finding.level == "problem"
    ]
    assert problems() == []
    os.link(tmp_path / "jobs.db", tmp_path / "second.db")
    assert problems() == ["names"]
    store.close()
