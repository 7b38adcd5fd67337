"""Every command on PostgreSQL, as a role that owns nothing: what an operator really runs.

The tables belong to the server's own user; all but `migrate` runs as a role that was granted what
`tenure migrate --grant` grants, and with a password in the URL that must never be seen.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from contract.builders import new
from proxy import Proxy
from servers import Databases, Pgbouncer
from tenure.store import Prune
from tenure.stores.postgres import PostgresStore

from .conftest import SECRET, SHOP, Cli, Ran, Stage, enlist, populate
from .test_usage import READING

PASSWORD = "correct-horse"
DAY_MS = 86_400_000


class PostgresCli(Cli):
    """`tenure …` with a database server in the environment, as a deployment has it."""

    def __init__(self, home: Path, url: str) -> None:
        super().__init__(home)
        self.url = url
        app = SHOP.replace('tenure.App("sqlite:///jobs.db")', "tenure.App()")
        (home / "shop.py").write_text(app, "utf-8")

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(**{"TENURE_URL": self.url, **more})

    def __call__(self, *args: str, stdin: str = "", **environment: str) -> Ran:
        ran = super().__call__(*args, stdin=stdin, **environment)
        assert PASSWORD not in ran.out + ran.err
        return ran


@pytest.fixture(scope="module")
def role(postgres: Databases) -> Iterator[str]:
    name = f"tenure_{secrets.token_hex(4)}"
    postgres.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
    yield name
    postgres.execute(f"DROP ROLE {name}")


def as_role(url: str, role: str) -> str:
    return f"postgresql://{role}:{PASSWORD}@{url.partition('@')[2]}"


@pytest.fixture(scope="module")
def populated(
    postgres: Databases, role: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """A database with one job in every state, made once; and their ids."""
    name = postgres.create_database()
    home = tmp_path_factory.mktemp("postgres")
    owner = PostgresCli(home, postgres.url(name))
    ran = owner("migrate", "--grant", role)
    assert (
        ran.out
        == f"applied 0001_initial\napplied 0002_promises\ngranted {role} what a worker needs\n"
    ), ran.err
    yield name, populate(PostgresCli(home, as_role(postgres.url(name), role)))
    postgres.drop_database(name)


@pytest.fixture
def stage(
    postgres: Databases, populated: tuple[str, dict[str, str]], role: str, tmp_path: Path
) -> Iterator[Stage]:
    template, ids = populated
    name = postgres.create_database(template=template)
    url = as_role(postgres.url(name), role)
    store = PostgresStore(url)
    yield Stage(PostgresCli(tmp_path, url), ids, store)
    store.close()
    postgres.drop_database(name)


@pytest.fixture
def empty(database: str, tmp_path: Path) -> PostgresCli:
    """A database without tables, and who may make them."""
    return PostgresCli(tmp_path, database)


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


# -- reading --------------------------------------------------------------------------------------


def test_jobs(stage: Stage) -> None:
    def found(*args: str) -> list[str]:
        ids = {id: name for name, id in stage.ids.items()}
        return [ids[job["id"]] for job in stage.tenure.shop("jobs", "--json", *args).objects]

    assert found() == sorted(stage.ids, key=stage.ids.__getitem__, reverse=True)
    assert found("--status", "queued") == ["queued", "later", "retried"]
    assert found("--status", "cancelled", "--org", "acme") == ["cancelled"]
    assert found("--key", "welcome:7") == ["completed"]
    assert found("--queue", "q:deadletter") == ["dead_letter", "failed"]
    assert found("--limit", "1") == ["queued"]
    assert SECRET not in stage.tenure.shop("jobs").out
    assert SECRET in stage.tenure.shop("jobs", "--payload").out
    assert "ValueError" in stage.tenure.shop("jobs", "--dead").out


def test_one_job_and_why(stage: Stage) -> None:
    def why(name: str) -> str:
        return str(stage.tenure.shop("job", stage[name], "--json").object["why"])

    completed = stage.tenure.shop("job", stage["completed"])
    assert completed.out.startswith(f"send_email {stage['completed']} completed\nIt finished at ")
    trail = [line.split()[2] for line in completed.out.splitlines() if " job." in line]
    assert trail == ["job.enqueued", "job.started", "job.succeeded"]
    assert why("retried").startswith("It is retried at ")
    assert why("later").startswith("It is not due until ")
    assert why("failed").startswith("It failed for good at ")
    assert why("queued").startswith("No live worker: ")
    able = enlist(stage.store)
    assert "1 live worker serves it." in why("queued")
    stage.store.claim(able, [("default", 1)])
    assert why("queued").startswith("It is running on worker host:4711:")
    uuid = stage.tenure.shop("job", stage["queued"], "--json").object["uuid"]
    assert stage.tenure.shop("job", uuid, "--json").object["id"] == stage["queued"]
    assert stage.tenure.shop("job", "01M7GEX6W23EXZBGJQ83K1S2QG").code == 1


def test_watching_ends_with_the_job(stage: Stage) -> None:
    arguments = ("-A", "shop", "job", stage["queued"], "--watch", "--json")
    with stage.tenure.started(*arguments) as watching:
        assert watching.stdout is not None
        assert '"status": "queued"' in watching.stdout.readline()
        stage.tenure.shop("cancel", stage["queued"])
        assert '"status": "cancelled"' in watching.stdout.readline()
        assert watching.wait(20) == 1


def test_queues_stats_events(stage: Stage) -> None:
    queues = {queue["name"]: queue for queue in stage.tenure.shop("queues", "--json").objects}
    assert (queues["default"]["ready"], queues["default"]["dead"]) == (1, 2)

    stats = stage.tenure.shop("stats", "--json").object
    assert stats["jobs"]["completed"] == 1
    assert stats["last_hour"]["outcomes"]["completed"] == 1
    assert "workers  0 live" in stage.tenure.shop("stats").out

    events = stage.tenure.shop("events", "--json").objects
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    assert {"job.enqueued", "job.deadlettered"} <= {event["kind"] for event in events}
    assert SECRET not in json.dumps(events)
    of_one = stage.tenure.shop("events", stage["failed"], "--json").objects
    assert [event["kind"] for event in of_one] == ["job.enqueued", "job.started", "job.failed"]


def test_following_events_waits_for_who_commits_late_and_says_so(
    stage: Stage, postgres: Databases
) -> None:
    """A caller's transaction that has enqueued: what is after it in the trail comes after it."""
    where = postgres.url(psycopg.conninfo.conninfo_to_dict(stage.store.database.url)["dbname"])
    stage.store.prune(Prune(completed=86_400, dead=86_400, events=86_400))  # notes where it stands
    slow, quick = new(), new()
    with psycopg.connect(where, application_name="billing") as caller:
        stage.store.enqueue_on(caller, [slow])
        stage.store.enqueue([quick])
        look = stage.tenure.shop("events", "--limit", "2")
        assert f"pid {caller.info.backend_pid}" in look.err
        assert quick.id not in look.out
        with stage.tenure.started("-A", "shop", "events", "--follow", "--json") as following:
            assert following.stdout is not None
            lines = map(json.loads, following.stdout)
            before = list(itertools.takewhile(lambda line: line["kind"] != "events.held", lines))
            assert not {slow.id, quick.id} & {event["job_id"] for event in before}
            caller.commit()
            after = [next(lines), next(lines)]
            following.terminate()
            assert f"pid {caller.info.backend_pid} 'billing'" in following.communicate()[1]
    assert [event["job_id"] for event in after] == [slow.id, quick.id]
    numbers = [event["seq"] for event in before + after]
    assert len(before) > 2
    assert numbers == sorted(set(numbers))


def test_a_trail_that_is_held_up_is_not_an_empty_one(empty: PostgresCli) -> None:
    empty("migrate")
    store = PostgresStore(empty.url)
    try:
        store.enqueue([new()])
        with psycopg.connect(empty.url) as caller:
            store.enqueue_on(caller, [new()])
            look, pid = empty("events"), caller.info.backend_pid
    finally:
        store.close()

    assert look.out == ""
    assert f"pid {pid}" in look.err


# -- operating ------------------------------------------------------------------------------------


def test_cancel_replay_discard(stage: Stage) -> None:
    assert stage.tenure.shop("cancel", stage["queued"], "--reason", "no").out == "cancelled 1 job\n"
    again = stage.tenure.shop("cancel", stage["queued"])
    assert (again.code, "only queued and running jobs" in again.err) == (1, True)
    edited = stage.tenure.shop("replay", stage["failed"], "--payload", '{"how": "dead"}')
    assert (edited.code, stage.status(stage["failed"])) == (0, "queued")
    assert stage.tenure.shop("discard", "--queue", "q:deadletter").out == "discarded 1 job\n"
    assert stage.status(stage["dead_letter"]) == "cancelled"
    dry = stage.tenure.shop("cancel", "--type", "report", "--dry-run", "--json").object
    assert (dry["count"], stage.status(stage["later"])) == (1, "queued")


def test_pause_and_resume(stage: Stage) -> None:
    assert stage.tenure.shop("queues", "pause", "default", "--reason", "look").code == 0
    assert "because: look" in stage.tenure.shop("job", stage["queued"]).out
    assert stage.tenure.shop("queues", "resume", "default").out == "resumed q:default\n"


def test_enqueue_and_work(stage: Stage) -> None:
    put = stage.tenure.shop("enqueue", "send_email", '{"to": "x"}', "--key", "k", "--json").object
    again = stage.tenure.shop("enqueue", "send_email", '{"to": "y"}', "--key", "k", "--json").object
    assert (again["id"], again["duplicate"]) == (put["id"], True)

    drained = stage.tenure.shop("worker", "--drain")

    assert drained.code == 0
    assert "started: jobs from " in drained.err
    assert drained.out.startswith("2 completed in ")
    assert stage.status(put["id"]) == stage.status(stage["queued"]) == "completed"


def test_retention_needs_no_rights_on_tables(stage: Stage) -> None:
    """Partitions come and go by functions that have their owner's rights."""
    now = int(time.time() * 1000)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(stage.tenure.url, "DROP TABLE tenure.events_other")  # type: ignore[attr-defined]
    rows = stage.store.database.rows  # type: ignore[attr-defined]
    assert rows("add_partitions", {"now": now - 30 * DAY_MS}) == [(10,)]

    stage.store.prune(Prune(completed=86_400, dead=86_400, events=86_400))
    left = rows("add_partitions", {"now": now - 30 * DAY_MS})
    stage.store.prune(Prune(completed=0, dead=0, events=0), now_ms=now + 10 * DAY_MS)

    assert left == [(10,)], "the old days were dropped, and could be made again"
    found = stage.store.totals().jobs
    assert found["completed"] == found["failed"] == 0


# -- migrate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_without_tables_a_command_says_tenure_migrate(
    empty: PostgresCli, command: list[str]
) -> None:
    ran = empty(*command)

    assert ran.code == 1
    assert "tenure migrate" in ran.out + ran.err
    assert not execute(empty.url, "SELECT 1 FROM pg_namespace WHERE nspname = 'tenure'")


def test_migrate(empty: PostgresCli) -> None:
    printed = empty("migrate", "--sql").out
    assert empty("migrate", "--sql", "--reverse").out == "-- nothing to take back\n"
    assert not execute(empty.url, "SELECT 1 FROM pg_namespace WHERE nspname = 'tenure'")
    assert empty("migrate", "--json").object == {"applied": ["0001_initial", "0002_promises"]}
    assert empty("migrate").out == "up to date\n"
    assert empty("migrate", "--sql").out == "-- up to date: nothing is pending\n"

    execute(empty.url, empty("migrate", "--sql", "--reverse").out)
    assert not execute(empty.url, "SELECT 1 FROM pg_namespace WHERE nspname = 'tenure'")
    execute(empty.url, printed)
    assert empty("migrate").out == "up to date\n"
    assert empty("jobs").out == "no jobs\n"


def test_what_is_printed_grants_too(empty: PostgresCli, role: str) -> None:
    script = empty("migrate", "--sql", "--grant", role).out

    execute(empty.url, script)

    worker = PostgresCli(empty.home, as_role(empty.url, role))
    assert worker.shop("enqueue", "report").code == 0
    assert worker.shop("worker", "--drain").out.startswith("1 completed")
    assert worker("migrate").out == "up to date\n"
    refused = worker("migrate", "--set", "keep_events=1h")
    assert refused.code == 1
    assert "for the role that owns the tables" in refused.err
    assert "GRANT" not in refused.err, "a right on `settings` would end the owner's floors"


def test_without_a_server_the_whole_script_is_printed(tmp_path: Path) -> None:
    nowhere = PostgresCli(tmp_path, f"postgresql://ada:{PASSWORD}@127.0.0.1:1/jobs")

    ran = nowhere("migrate", "--sql")

    assert ran.code == 0
    assert ran.out.startswith("-- migration 0001_initial\nBEGIN;\n")
    assert "note: the script from nothing, because the database could not be asked" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reverse"], "tenure migrate --sql --reverse"),
        (["--sql", "--reverse", "--grant", "x"], "not both"),
        (["--grant", "public"], "is no role"),
        (["--grant", "nobody_here"], "has no role 'nobody_here'"),
    ],
)
def test_wrong_usage_changes_nothing(
    empty: PostgresCli, arguments: list[str], message: str
) -> None:
    ran = empty("migrate", *arguments)

    assert (ran.code, ran.out, message in ran.err) == (2, "", True)
    assert not execute(empty.url, "SELECT 1 FROM pg_namespace WHERE nspname = 'tenure'")


def test_what_sqlite_does_not_have(tenure: Cli) -> None:
    assert (
        tenure("migrate", "--grant", "x").code == tenure("migrate", "--sql", "--reverse").code == 2
    )


# -- doctor ---------------------------------------------------------------------------------------


def findings(ran: Ran) -> dict[str, tuple[str, str]]:
    found = {finding["check"]: (finding["level"], finding["message"]) for finding in ran.objects}
    assert ran.code == any(finding["level"] == "problem" for finding in ran.objects)
    return found


def test_doctor(stage: Stage) -> None:
    found = findings(stage.tenure.shop("doctor", "--json"))

    assert found["schema"] == ("ok", "version 2 of 2, up to date")
    assert found["role"][0] == found["partitions"][0] == found["vacuum"][0] == "ok"
    assert found["hints"] == ("ok", "LISTEN tenure")
    assert found["workers"] == ("problem", "no live worker, and 1 job due")
    assert found["backlog"][1].endswith("q:default")
    assert found["dead letters"] == ("warning", "2 dead jobs")
    off = findings(stage.tenure.shop("doctor", "--json", TENURE_NOTIFY="0"))
    assert off["hints"][1] == "off (TENURE_NOTIFY=0), polling"


def test_doctor_without_tables(empty: PostgresCli) -> None:
    ran = empty("doctor")

    assert ran.code == 1
    assert "✗ schema: no tables in schema tenure\n    → tenure migrate\n" in ran.out


def test_doctor_through_a_pooler(
    stage: Stage, pgbouncer: Pgbouncer, postgres: Databases, role: str
) -> None:
    name = stage.tenure.url.rpartition("/")[2]  # type: ignore[attr-defined]
    through = pgbouncer.url(name)

    deaf = findings(stage.tenure("doctor", "--json", TENURE_URL=through))
    hears = findings(
        stage.tenure("doctor", "--json", TENURE_URL=through, TENURE_LISTEN_URL=postgres.url(name))
    )
    elsewhere = findings(
        stage.tenure("doctor", "--json", TENURE_URL=through, TENURE_LISTEN_URL=postgres.url())
    )

    assert "in transaction mode" in deaf["pooler"][1]
    assert deaf["hints"][0] == "warning"
    assert "down, polling every 1 s, because a pooler" in deaf["hints"][1]
    assert hears["hints"] == ("ok", "LISTEN tenure")
    assert "did not arrive within 2 s" in elsewhere["hints"][1]


def test_the_place_is_shown_without_the_user(
    make_database: Callable[..., str], tmp_path: Path
) -> None:
    server = PostgresCli(tmp_path, make_database(migrated=True))

    ran = server.shop("worker", "--drain")

    assert ran.code == 0
    assert f"jobs from {server.url.partition('@')[2]}, " in ran.err


# -- ids and answers that are not whole -----------------------------------------------------------


def test_the_beginning_of_an_id(stage: Stage) -> None:
    short = stage["completed"][:16]
    assert stage.tenure.shop("job", short, "--json").object["id"] == stage["completed"]

    ran = stage.tenure.shop("cancel", stage["queued"][:6])
    assert ran.code == 2
    assert f"  {stage['queued']}  report queued\n" in ran.err
    assert stage.status(stage["queued"]) == "queued"


def test_an_enqueue_without_an_answer_says_what_a_second_one_may_do(
    stage: Stage, proxy: Proxy
) -> None:
    def enqueue(*more: str) -> str:
        for _ in range(100):  # every try of it
            proxy.lose_reply(
                lambda message: message[:1] == b"B" and b"tenure.enqueue_job" in message
            )
        url = proxy.url(stage.tenure.environment()["TENURE_URL"])
        slow = {"TENURE_URL": url, "TENURE_BUSY_TIMEOUT": "2"}
        ran = stage.tenure.shop("enqueue", "report", *more, **slow)
        assert ran.code == 1
        return ran.err

    assert "the same command once more may make a second one" in enqueue()
    assert "with the same --key, makes no second one." in enqueue("--key", "k")
