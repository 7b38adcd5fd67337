"""Hints on PostgreSQL: sent coalesced, heard at once, and known to be dead when they are."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import servers
from contract.builders import new
from proxy import Proxy
from tenure.errors import JobError
from tenure.job import Receipt
from tenure.stores.postgres import PostgresStore, notices
from tenure.stores.postgres.database import Database, to_uuid_text
from tenure.wakeups.postgres import PostgresWakeup


@pytest.fixture
def opened(database: str) -> Iterator[Callable[..., Database]]:
    """A Database on this test's own database, closed afterwards."""
    made: list[Database] = []

    def make(url: str = database) -> Database:
        made.append(Database(url, timeout=3.0))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def db(opened: Callable[..., Database]) -> Database:
    return opened()


@pytest.fixture
def listening() -> Iterator[Callable[..., PostgresWakeup]]:
    """`listening(url)`: a wake-up that has connected and said "look" for it."""
    made: list[PostgresWakeup] = []

    def make(url: str, *, up: bool = True, **options: bool) -> PostgresWakeup:
        wakeup = PostgresWakeup(url, "tenure", **options)
        made.append(wakeup)
        if up:
            assert wakeup.wait(5.0)
            assert wakeup.healthy()
        return wakeup

    yield make
    for each in made:
        each.close()


def notify(url: str, queue: str = "default") -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_notify('tenure', %s)", [queue])


def until(look: Callable[[], bool], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- hearing --------------------------------------------------------------------------------------


def test_it_wakes_within_milliseconds(
    database: str, listening: Callable[..., PostgresWakeup]
) -> None:
    wakeup = listening(database)
    assert wakeup.describe() == "hints: LISTEN tenure"
    assert not wakeup.wait(0.1)  # said once, not for ever

    delays = []
    with psycopg.connect(database, autocommit=True) as sender:
        for _ in range(20):
            sent: list[float] = []

            def send(sent: list[float] = sent) -> None:
                sent.append(time.monotonic())
                sender.execute("SELECT pg_notify('tenure', 'default')")

            timer = threading.Timer(0.02, send)
            timer.start()
            assert wakeup.wait(5.0)
            delays.append(time.monotonic() - sent[0])
            timer.join()

    assert sorted(delays)[10] < 0.05


def test_what_was_said_between_two_waits_is_heard_once(
    database: str, listening: Callable[..., PostgresWakeup]
) -> None:
    wakeup = listening(database)
    with psycopg.connect(database) as sender:  # one commit: all five arrive together
        sender.execute("SELECT pg_notify('tenure', n::text) FROM generate_series(1, 5) n")

    assert wakeup.wait(5.0)
    assert not wakeup.wait(0.1)


def test_an_interrupt_ends_the_wait(
    database: str, listening: Callable[..., PostgresWakeup]
) -> None:
    wakeup = listening(database)
    timer = threading.Timer(0.1, wakeup.interrupt)
    timer.start()
    began = time.monotonic()

    assert not wakeup.wait(10.0)
    assert 0.05 < time.monotonic() - began < 2.0
    timer.join()
    wakeup.interrupt()  # before the wait
    assert not wakeup.wait(10.0)
    assert time.monotonic() - began < 3.0


@pytest.mark.timed
def test_the_time_of_a_wait_is_kept(
    database: str, listening: Callable[..., PostgresWakeup]
) -> None:
    wakeup = listening(database)
    began = time.monotonic()
    assert not wakeup.wait(0.2)
    assert 0.19 < time.monotonic() - began < 0.5


# -- when it is down ------------------------------------------------------------------------------


def test_a_killed_listener_comes_back_and_says_look(
    database: str, postgres: servers.Databases, listening: Callable[..., PostgresWakeup]
) -> None:
    wakeup = listening(database)
    killed = postgres.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE application_name = 'tenure listener' AND datname = %s",
        [database.rpartition("/")[2]],
    )
    assert killed == [(True,)]

    assert wakeup.wait(5.0)  # gone: look, and poll from now on
    assert not wakeup.healthy()
    assert wakeup.wait(5.0)  # listening again, and something may have been missed
    assert wakeup.healthy()
    notify(database)
    assert wakeup.wait(5.0)


@pytest.mark.timed
def test_a_server_that_is_away(
    database: str, proxy: Proxy, listening: Callable[..., PostgresWakeup]
) -> None:
    secret = proxy.url(database).replace("tenure@", "tenure:geheim@")
    wakeup = listening(secret)
    proxy.refuse()
    assert wakeup.wait(5.0)  # whoever polls at the slow pace looks now, and then more often
    assert not wakeup.healthy()
    began = time.monotonic()
    assert not wakeup.wait(0.3)
    assert time.monotonic() - began < 0.6
    assert wakeup.describe().startswith("hints: down, polling every 1 s, because ")
    assert "refused" in wakeup.describe()
    assert "geheim" not in wakeup.describe()

    proxy.heal()
    assert wakeup.wait(10.0)
    assert wakeup.healthy()


@pytest.mark.timed
def test_a_half_open_connection_is_found_by_its_probe(
    database: str,
    proxy: Proxy,
    listening: Callable[..., PostgresWakeup],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PostgresWakeup, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr("tenure.wakeups.postgres.ANSWER_SECONDS", 0.3)
    wakeup = listening(proxy.url(database))
    assert not wakeup.wait(0.5)  # several probes, all answered
    assert wakeup.healthy()

    proxy.black_hole("tenure listener")
    assert wakeup.wait(5.0)
    assert not wakeup.healthy()
    assert "did not answer" in wakeup.describe()
    threading.Timer(0.05, wakeup.interrupt).start()
    began = time.monotonic()
    assert not wakeup.wait(5.0)  # also while it tries to connect
    assert time.monotonic() - began < 1.0

    proxy.heal(closed=True)
    assert wakeup.wait(10.0)


def test_a_session_that_stopped_listening_is_found_by_its_probe(
    database: str, listening: Callable[..., PostgresWakeup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresWakeup, "PROBE_SECONDS", 0.2)
    wakeup = listening(database)
    session = wakeup._session
    assert session is not None
    session.ask("UNLISTEN *; SELECT 1")
    until(lambda: not wakeup.wait(0.02) and not wakeup.healthy(), within=5.0)

    assert "does not listen" in wakeup.describe()
    assert wakeup.wait(5.0)


def test_a_pooler_in_transaction_mode_is_no_listener(
    database: str,
    pgbouncer: servers.Pgbouncer,
    listening: Callable[..., PostgresWakeup],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tenure.wakeups.postgres.ANSWER_SECONDS", 0.5)
    wakeup = listening(pgbouncer.url(database.rpartition("/")[2]), up=False)
    assert not wakeup.wait(0.9)

    assert not wakeup.healthy()
    assert "TENURE_LISTEN_URL" in wakeup.describe()


def test_a_pooler_in_session_mode_is_one(
    database: str, postgres: servers.Databases, listening: Callable[..., PostgresWakeup]
) -> None:
    bouncer = servers.require(
        lambda: servers.Pgbouncer(postgres, settings={"pool_mode": "session"})
    )
    with bouncer:
        wakeup = listening(bouncer.url(database.rpartition("/")[2]))
        notify(database)
        assert wakeup.wait(5.0)
        wakeup.close()


def test_several_hosts(database: str, listening: Callable[..., PostgresWakeup]) -> None:
    port = database.rpartition(":")[2].partition("/")[0]
    several = database.replace(f"127.0.0.1:{port}", f"127.0.0.1:1,127.0.0.1:{port}")
    wakeup = listening(several, up=False)
    assert wakeup.wait(5.0)


def test_a_name_with_addresses_that_nobody_listens_on(
    database: str, listening: Callable[..., PostgresWakeup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(host: str, *_more: object, **_named: object) -> list[Any]:
        assert host == "db.example"
        return [(socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 0)), (2, 1, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    listening(database.replace("127.0.0.1", "db.example"))


def test_a_name_server_that_does_not_answer_delays_nobody(
    database: str, listening: Callable[..., PostgresWakeup], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, asked = threading.Event(), threading.Event()

    def look_up(*_any: object, **_named: object) -> list[Any]:
        asked.set()
        assert answered.wait(30)
        return [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    wakeup = listening(database.replace("127.0.0.1", "db.example"), up=False)
    began = time.monotonic()
    assert not wakeup.wait(0.1)
    assert asked.is_set()
    threading.Timer(0.05, wakeup.interrupt).start()
    assert not wakeup.wait(10.0)
    assert time.monotonic() - began < 2.0
    answered.set()
    assert wakeup.wait(5.0)
    assert wakeup.healthy()


def test_a_name_that_is_none(
    listening: Callable[..., PostgresWakeup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_any: object, **_named: object) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    wakeup = listening("postgresql://me:hush@db.example/absent", up=False)
    until(lambda: not wakeup.wait(0.02) and "looked up" in wakeup.describe(), within=5.0)
    assert wakeup.describe() == (
        "hints: down, polling every 1 s, because the name 'db.example' cannot be looked up: "
        "[Errno -2] Name or service not known"
    )


def test_switched_off(database: str, listening: Callable[..., PostgresWakeup]) -> None:
    wakeup = listening("postgresql://127.0.0.1:1/absent", up=False, enabled=False)
    assert not wakeup.wait(0.05)
    assert not wakeup.healthy()
    assert wakeup.describe() == "hints: off (TENURE_NOTIFY=0), polling"
    threading.Timer(0.05, wakeup.interrupt).start()
    began = time.monotonic()
    assert not wakeup.wait(10.0)
    assert time.monotonic() - began < 2.0


def test_closing_ends_a_wait_in_another_thread(
    database: str, listening: Callable[..., PostgresWakeup]
) -> None:
    wakeup = listening(database)
    thread = threading.Thread(target=wakeup.wait, args=(30.0,))
    thread.start()
    wakeup.close()
    thread.join(5.0)
    assert not thread.is_alive()
    wakeup.close()
    wakeup.interrupt()
    assert not wakeup.wait(5.0)


def test_a_forked_child_listens_by_itself(
    database: str, listening: Callable[..., PostgresWakeup]
) -> None:
    wakeup = listening(database)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if wakeup.wait(5.0) and wakeup.healthy() else 2
            wakeup.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    notify(database)
    assert wakeup.wait(5.0)
    assert wakeup.healthy()


# -- sending --------------------------------------------------------------------------------------


class Ear:
    """Counts what a listener hears."""

    def __init__(self, url: str, channel: str = "tenure") -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(f'LISTEN "{channel}"')

    def hear(self, seconds: float, stop_after: int | None = None) -> list[str]:
        found = self.connection.notifies(timeout=seconds, stop_after=stop_after)
        return [each.payload for each in found]


@pytest.fixture
def ear(database: str) -> Iterator[Ear]:
    ear = Ear(database)
    yield ear
    ear.connection.close()


@pytest.fixture
def sender(db: Database) -> Iterator[notices.Notices]:
    sender = notices.Notices(db)
    yield sender
    sender.close()


@pytest.mark.timed
def test_the_first_hint_goes_at_once_and_the_rest_together(
    sender: notices.Notices, ear: Ear
) -> None:
    sender.hint(["warm"])
    assert ear.hear(5.0, stop_after=1) == ["warm"]
    sender.hint(["default"])
    began = time.monotonic()
    assert ear.hear(5.0, stop_after=1) == ["default"]
    assert time.monotonic() - began < 0.1

    began, hints = time.monotonic(), 0
    while time.monotonic() < began + 0.3:
        sender.hint(["default", "mail"])
        hints += 1
        time.sleep(0.0005)
    assert sender.flush(5.0)
    heard = ear.hear(0.2)

    assert hints > 100
    assert 5 < sum("default" in each.split(",") for each in heard) <= 32
    assert sender.describe()["failed"] == 0


def test_many_queues_fit_into_few_payloads(sender: notices.Notices, ear: Ear) -> None:
    queues = {f"{'q' * 100}{n}" for n in range(500)}
    sender.hint(queues)
    assert sender.flush(5.0)
    heard = ear.hear(0.2)

    assert {queue for each in heard for queue in each.split(",")} == queues
    assert max(map(len, heard)) <= 7_900
    assert len(heard) < 10


def test_a_transaction_of_somebody_else_is_watched(
    sender: notices.Notices, ear: Ear, database: str
) -> None:
    with psycopg.connect(database) as theirs:
        theirs.execute("SELECT 1")
        sender.watch(theirs, ["committed"])
        assert ear.hear(0.2) == []
        theirs.commit()
        assert ear.hear(1.0, stop_after=1) == ["committed"]

        theirs.execute("SELECT 1")
        sender.watch(theirs, ["rolled back"])
        theirs.rollback()  # nobody can tell, and a hint too many does no harm
        assert ear.hear(1.0, stop_after=1) == ["rolled back"]

        theirs.execute("SELECT 1")
        sender.watch(theirs, ["closed"])
    assert ear.hear(1.0, stop_after=1) == ["closed"]
    assert sender.describe()["watched"] == 0


async def test_an_async_transaction_is_watched(
    sender: notices.Notices, ear: Ear, database: str
) -> None:
    connection = await psycopg.AsyncConnection.connect(database)
    await connection.execute("SELECT 1")
    sender.watch(connection, ["committed"])
    assert ear.hear(0.1) == []
    await connection.commit()
    assert ear.hear(1.0, stop_after=1) == ["committed"]
    await connection.close()


def test_hints_that_cannot_be_sent_are_nobodys_problem(
    opened: Callable[..., Database], proxy: Proxy, database: str, ear: Ear
) -> None:
    sender = notices.Notices(opened(proxy.url(database)))
    proxy.refuse()
    sender.hint(["default"])
    assert not sender.flush(0.3)
    assert sender.describe()["failed"] > 0
    proxy.heal(closed=True)
    assert ear.hear(5.0, stop_after=1) == ["default"]
    sender.close()

    sender.hint(["again"])
    assert ear.hear(5.0, stop_after=1) == ["again"]
    sender.close()


@pytest.fixture
def store(make_database: Callable[..., str]) -> Iterator[PostgresStore]:
    made = PostgresStore(make_database(migrated=True))
    yield made
    made.close()


def backends(store: PostgresStore) -> dict[int, str]:
    """What we are connected with: process number -> name."""
    rows = store.database.run(
        "SELECT pid, application_name FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'tenure%'"
    )
    return dict(rows)


def test_the_first_hint_goes_with_the_job_itself(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other connection and no thread are needed for it; the next one, when it is time again,
    is everybody's."""
    monkeypatch.setattr(notices, "EVERY_SECONDS", 1.0)
    ear = Ear(store.database.url)
    try:
        store.enqueue([new()])

        (first,) = ear.connection.notifies(timeout=5.0, stop_after=1)
        assert (first.payload, backends(store)) == ("default", {first.pid: "tenure"})
        for _ in range(3):
            store.enqueue([new()])
        (second,) = ear.connection.notifies(timeout=5.0, stop_after=1)
        assert backends(store)[second.pid] == "tenure notices"
        assert ear.hear(0.2) == []
    finally:
        ear.connection.close()


def log_ends(store: PostgresStore) -> tuple[int, int]:
    """The end of the server's log, and of what a crash leaves of it."""
    start = "'0/0'::pg_lsn"
    ((end, on_disk),) = store.database.run(
        f"SELECT (pg_current_wal_insert_lsn() - {start})::bigint,"
        f" (pg_current_wal_flush_lsn() - {start})::bigint"
    )
    return int(end), int(on_disk)


def test_what_was_acknowledged_is_on_disk(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction that stores the job and sends its hint waits for no disk; the call does.
    The server itself writes to its log now and then, so not every look finds it empty."""
    monkeypatch.setattr(notices, "EVERY_SECONDS", 0.0)
    store.enqueue([new()])
    found = []
    for _ in range(10):
        store.enqueue([new()])
        end, on_disk = log_ends(store)
        found.append(end == on_disk)

    assert found.count(True) >= 8


def test_a_second_try_that_finds_the_first_is_on_disk(store: PostgresStore) -> None:
    """Whoever stored it may have died before that was on disk."""
    unsafe = 0
    for _ in range(10):
        job = new()
        with psycopg.connect(store.database.url, autocommit=True) as other:
            other.execute("SET synchronous_commit = off")
            other.execute(
                "SELECT tenure.enqueue(jsonb_build_array(jsonb_build_object("
                "'id', %s::text, 'type', 'send')))",
                [to_uuid_text(job.id)],
            )
            end, on_disk = log_ends(store)
            unsafe += on_disk < end
            store.enqueue([job], retry=True)
        assert log_ends(store)[1] >= end

    assert unsafe  # there was something to put there


def test_a_hint_that_fails_is_no_failed_enqueue(store: PostgresStore) -> None:
    """The server's queue of notifications is full, say: the job is stored, and stored once."""
    ((text,),) = store.database.run(
        "SELECT pg_get_functiondef('tenure.enqueue_job_and_hint'::regproc)"
    )
    broken = re.sub(r"pg_notify\(channel, in_queue\)", "1 / 0 * length(channel)", text)
    assert broken != text
    store.database.run(broken)
    job = new()

    assert store.enqueue([job]) == [Receipt(job.id, False, "queued")]

    assert store.totals().jobs["queued"] == 1
    assert [event.kind for event in store.events(job_id=job.id).events] == ["job.enqueued"]


def test_a_job_that_is_stored_already_is_refused_with_its_hint_too(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to find out by a second try what such an error means."""
    monkeypatch.setattr(notices, "EVERY_SECONDS", 0.0)
    job = new()
    store.enqueue([job])

    with pytest.raises(JobError, match="stored already"):
        store.enqueue([job])

    assert [event.kind for event in store.events(job_id=job.id).events] == ["job.enqueued"]


def test_switched_off_it_does_nothing(db: Database, ear: Ear) -> None:
    sender = notices.Notices(db, enabled=False)
    sender.hint(["default"])
    sender.watch(ear.connection, ["default"])
    assert sender.flush(0.0)
    sender.close()
    assert ear.hear(0.1) == []


def test_a_short_program_still_sends_its_hint(database: str, ear: Ear) -> None:
    program = """
import sys
from tenure.stores.postgres.database import Database
from tenure.stores.postgres.notices import Notices
notices = Notices(Database(sys.argv[1]))
notices.hint(["default"])
"""
    for url in (database, "postgresql://127.0.0.1:1/absent"):  # one that is away delays nobody
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", program, url],
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert time.monotonic() - began < 5.0
    assert ear.hear(1.0) == ["default"]


def test_a_forked_child_has_its_own_thread(sender: notices.Notices, ear: Ear) -> None:
    sender.hint(["parent"])
    assert ear.hear(5.0, stop_after=1) == ["parent"]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sender.hint(["child"])
            code = 0 if sender.flush(5.0) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ear.hear(5.0, stop_after=1) == ["child"]
    sender.hint(["parent"])
    assert ear.hear(5.0, stop_after=1) == ["parent"]
    assert sender.describe()["failed"] == 0
