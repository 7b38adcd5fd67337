"""enqueue, cancel, replay, discard, queues pause, migrate, doctor: what changes things."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing

import pytest

from contract.builders import put_many
from tenure.store import Filter

from .conftest import SECRET, Cli, Stage, enlist

ABSENT = "01M7GEX6W23EXZBGJQ83K1S2QG"


# -- enqueue ----------------------------------------------------------------------------------


def test_enqueue_prints_the_receipt(tenure: Cli) -> None:
    ran = tenure.shop("enqueue", "send_email", '{"to": "a@b.c"}', "--delay", "5m", "--queue", "q:x")

    assert ran.code == 0
    assert ran.out.startswith("enqueued 01")
    assert ran.out.endswith("(send_email on q:x, due in 5 min)\n")


def test_enqueue_options(tenure: Cli) -> None:
    ran = tenure.shop(
        "enqueue", "report", "-", "--json", "--at", "2035-01-31T09:00:00+01:00", "--priority", "2",
        "--queue", "exports", "--key", "k", "--org", "acme", stdin='{"pages": 3}',
    )  # fmt: skip
    receipt = ran.object
    job = tenure.shop("job", receipt["id"], "--json", "--payload").object

    assert receipt == {"id": job["id"], "duplicate": False, "status": "queued"}
    assert job["scheduled_at"] == "2035-01-31T08:00:00.000Z"
    assert (job["priority"], job["queue"], job["key"]) == (2, "exports", "k")
    assert (job["org"], job["payload"]) == ("acme", {"pages": 3})


def test_a_key_seen_before(stage: Stage) -> None:
    ran = stage.tenure.shop("enqueue", "send_email", '{"to": "x"}', "--key", "welcome:7")

    assert ran.code == 0
    assert f"belongs to job {stage['completed']} (completed)" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["send_email", '{"to": 7}'], "argument to: expected str, got int"),
        (["send_email", '{"too": "x"}'], "too"),
        (["send_emial", "{}"], "Did you mean 'send_email'?"),
        (["report", "{"], "the arguments are not JSON"),
        (["report", "[1]"], "must be a JSON object"),
        (["report", "--at", "tomorrow"], "is not a time such as"),
        (["report", "--at", "2035-01-31T09:00:00"], "must say its time zone"),
        (["report", "--delay", "soon"], "is not a delay"),
        (["report", "--priority", "11"], "priority must be 1 (first) to 10"),
        (["report", "--delay", "1", "--at", "2035-01-31T09:00:00Z"], "not both"),
    ],
)
def test_a_job_that_cannot_be(tenure: Cli, arguments: list[str], message: str) -> None:
    ran = tenure.shop("enqueue", *arguments)

    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


# -- cancel, replay, discard ------------------------------------------------------------------


def test_cancel(stage: Stage) -> None:
    ran = stage.tenure.shop("cancel", stage["queued"], stage["later"], "--reason", "not needed")

    assert (ran.code, ran.out) == (0, "cancelled 2 jobs\n")
    job = stage.tenure.shop("job", stage["queued"], "--json").object
    assert (job["status"], job["error"]) == ("cancelled", "not needed")
    last = job["events"][-1]
    assert (last["kind"], last["actor"]["type"]) == ("job.cancelled", "user")


def test_cancelling_a_running_job_asks_it_to_stop(stage: Stage) -> None:
    (job,) = stage.store.claim(enlist(stage.store), [("default", 1)]).jobs

    ran = stage.tenure.shop("cancel", job.id)

    assert (ran.code, ran.out.startswith("asked 1 running job to stop")) == (0, True)
    assert stage.status(job.id) == "in_progress"


def test_what_cannot_be_done_is_said_for_each_id(stage: Stage) -> None:
    ran = stage.tenure.shop("cancel", stage["completed"], ABSENT, stage["queued"])

    assert (ran.code, ran.out) == (1, "cancelled 1 job\n")
    assert f"job {stage['completed']} is completed: only queued and running" in ran.err
    assert f"there is no job {ABSENT}" in ran.err

    again = stage.tenure.shop("cancel", stage["queued"], "--json")
    assert again.code == 1
    assert again.object == {"id": stage["queued"], "outcome": "cancelled", "changed": False}


def test_replay(stage: Stage) -> None:
    ran = stage.tenure.shop("replay", stage["failed"], "--json")
    assert ran.object == {"id": stage["failed"], "outcome": "queued", "changed": True}
    assert stage.status(stage["failed"]) == "queued"

    again = stage.tenure.shop("replay", stage["failed"])
    assert (again.code, again.out) == (1, "")
    assert "is queued: only dead jobs can be replayed" in again.err


def test_edit_and_replay(stage: Stage) -> None:
    edit = ["replay", stage["failed"], "--payload"]

    unchecked = stage.tenure(*edit, "{}", "--url", "sqlite:///jobs.db")
    assert (unchecked.code, "--payload needs your app" in unchecked.err) == (2, True)
    wrong = stage.tenure.shop(*edit, '{"how": 7}')
    assert (wrong.code, stage.status(stage["failed"])) == (2, "failed")

    assert stage.tenure.shop(*edit, '{"how": "dead"}').code == 0
    job = stage.tenure.shop("job", stage["failed"], "--json", "--payload").object
    assert (job["status"], job["payload"]) == ("queued", {"how": "dead"})


def test_discard_by_filter(stage: Stage) -> None:
    ran = stage.tenure.shop("discard", "--queue", "q:deadletter", "--reason", "old")

    assert (ran.code, ran.out) == (0, "discarded 2 jobs\n")
    assert stage.status(stage["failed"]) == "cancelled"
    assert stage.tenure.shop("discard", "--type", "fragile").out == (
        "no job matches; nothing was changed\n"
    )


def test_filters_choose(stage: Stage) -> None:
    assert stage.tenure.shop("cancel", "--type", "report").out == "cancelled 2 jobs\n"
    assert stage.status(stage["retried"]) == "queued"
    assert stage.tenure.shop("replay", "--status", "failed").out == "replayed 1 job\n"
    assert stage.status(stage["dead_letter"]) == "dead_letter"
    # The view of dead jobs must not read as "every queue" to a command about live ones.
    assert stage.tenure.shop("cancel", "--queue", "q:deadletter").code == 2
    assert stage.status(stage["retried"]) == "queued"


def test_another_orgs_job_is_absent(stage: Stage) -> None:
    ran = stage.tenure.shop("cancel", stage["queued"], "--org", "acme")

    assert (ran.code, ran.err) == (1, f"tenure: there is no job {stage['queued']}\n")
    assert stage.status(stage["queued"]) == "queued"


@pytest.mark.parametrize(
    "command",
    [
        ["cancel", "--status", "queued"],
        ["replay", "--queue", "deadletter"],
        ["discard", "--type", "fragile"],
    ],
    ids=" ".join,
)
def test_a_dry_run_changes_nothing(stage: Stage, command: list[str]) -> None:
    def everything() -> tuple[object, ...]:
        return stage.store.find(Filter()).jobs, stage.store.events(), stage.store.queues(now_ms=0)

    before = everything()
    ran = stage.tenure.shop(*command, "--dry-run")
    seen = stage.tenure.shop(*command, "--dry-run", "--json").object

    assert ran.code == 0
    assert ran.out.startswith(f"would {command[0]} {seen['count']} jobs; nothing was changed\n")
    assert seen["count"] == len(seen["ids"]) >= 2
    assert all(id in ran.out for id in seen["ids"])
    assert everything() == before


def test_many_at_once(tenure: Cli) -> None:
    code = (
        "import shop; shop.app.enqueue_many([shop.report.job(n) for n in range(1200)]); "
        "shop.app.close()"
    )
    import subprocess

    subprocess.run(
        [tenure.command()[0], "-c", code], cwd=tenure.home, env=tenure.environment(), check=True
    )
    assert "… and 1,190 more" in tenure.shop("cancel", "--type", "report", "--dry-run").out
    assert tenure.shop("cancel", "--type", "report").out == "cancelled 1,200 jobs\n"


# -- queues -----------------------------------------------------------------------------------


def test_pause_and_resume(stage: Stage) -> None:
    ran = stage.tenure.shop("queues", "pause", "q:default", "--reason", "mail is down")
    assert (ran.code, ran.out.startswith("paused q:default")) == (0, True)
    assert ": mail is down" in stage.tenure.shop("queues").out
    assert "because: mail is down" in stage.tenure.shop("job", stage["queued"]).out

    assert stage.tenure.shop("queues", "resume", "default").out == "resumed q:default\n"
    assert stage.tenure.shop("queues", "resume", "default").out == "q:default was not paused\n"
    assert stage.tenure.shop("queues", "pause", "default", "--json").object == {
        "name": "default",
        "paused": True,
    }


def test_queues_that_are_not_there(stage: Stage) -> None:
    assert "is the name right?" in stage.tenure.shop("queues", "pause", "defualt").err
    ran = stage.tenure.shop("queues", "resume", "nope")
    assert (ran.code, "there is no queue q:nope" in ran.err) == (2, True)
    assert stage.tenure.shop("queues", "pause", "deadletter").code == 2


# -- migrate ----------------------------------------------------------------------------------


def test_migrate(tenure: Cli) -> None:
    first = tenure.shop("migrate", "--json")
    assert first.object["applied"][0] == "0001_initial"
    assert tenure.shop("migrate").out == "up to date\n"
    assert tenure.shop("migrate", "--sql").out.startswith("-- up to date")


def test_the_printed_sql_is_the_migration(tenure: Cli) -> None:
    ran = tenure("migrate", "--sql", "--url", "sqlite:///new.db")
    assert ran.code == 0
    assert not (tenure.home / "new.db").exists()

    with closing(sqlite3.connect(tenure.home / "new.db", isolation_level=None)) as db:
        db.executescript(ran.out)

    assert tenure("migrate", "--url", "sqlite:///new.db").out == "up to date\n"
    assert tenure("jobs", "--url", "sqlite:///new.db").out == "no jobs\n"


# -- doctor -----------------------------------------------------------------------------------


def findings(stage: Stage, *args: str, **environment: str) -> dict[str, tuple[str, str]]:
    ran = stage.tenure("doctor", "--json", *args, **environment)
    found = {finding["check"]: (finding["level"], finding["message"]) for finding in ran.objects}
    problems = any(level == "problem" for level, _ in found.values())
    assert ran.code == (1 if problems else 0)
    return found


def test_doctor_finds_what_is_wrong(stage: Stage) -> None:
    found = findings(stage, "-A", "shop")

    assert found["schema"][0] == found["integrity"][0] == found["hints"][0] == "ok"
    assert found["workers"] == ("problem", "no live worker, and 1 job due")
    assert found["dead letters"] == ("warning", "2 dead jobs")
    assert "types" not in found

    stage.store.pause("default", actor=_somebody(), reason="a look")
    enlist(stage.store, queues=["critical"])
    found = findings(
        stage, "-A", "shop", TENURE_LEASE_SECONDS="25", TENURE_LEASE_RENEW_SECONDS="10"
    )
    assert found["workers"][0] == "ok"
    assert found["settings"][0] == "warning"
    assert found["queues"] == (
        "warning",
        "q:default is paused by user:max with 1 due job because: a look",
    )


def test_doctor_says_where_it_stopped_counting(stage: Stage) -> None:
    put_many(stage.store, 10_100, type="report")
    _, due = findings(stage, "-A", "shop")["workers"]

    enlist(stage.store, queues=["critical"])
    _, unserved = findings(stage, "-A", "shop")["queues"]

    stage.store.pause("default", actor=_somebody(), reason="")
    _, paused = findings(stage, "-A", "shop")["queues"]

    assert due == "no live worker, and 10,000+ jobs due"
    assert unserved == "no live worker serves q:default with 10,000+ due jobs"
    assert paused == "q:default is paused by user:max with 10,000+ due jobs"


def test_doctor_finds_types_nobody_has(stage: Stage) -> None:
    enlist(stage.store, types=["send_email"])
    found = findings(stage, "--url", "sqlite:///jobs.db")
    assert found["types"] == ("problem", "queued jobs of types no live worker knows: report (2)")

    (stage.tenure.home / "tiny.py").write_text("import tenure\napp = tenure.App()\n")
    found = findings(stage, "-A", "tiny", "--url", "sqlite:///jobs.db")
    assert found["types"][1].startswith("queued jobs of types this app does not have: ")


def test_doctor_finds_workers_that_died_with_jobs(stage: Stage) -> None:
    gone = enlist(stage.store)
    stage.store.claim(gone, [("default", 1)])
    with closing(sqlite3.connect(stage.tenure.home / "jobs.db")) as db, db:
        db.execute("UPDATE tenure_workers SET seen_at = seen_at - 3600000 WHERE no = ?", [gone.no])

    found = findings(stage, "-A", "shop")

    level, message = found["leases"]
    assert (level, message.endswith("is gone and still holds 1 job")) == ("problem", True)


def test_doctor_finds_old_jobs(stage: Stage) -> None:
    with closing(sqlite3.connect(stage.tenure.home / "jobs.db")) as db, db:
        db.execute("UPDATE tenure_jobs SET ready_at = ready_at - 7300000 WHERE status = 'queued'")

    level, message = findings(stage, "-A", "shop")["backlog"]

    assert level == "problem"
    assert "has been waiting for 2 h" in message


def test_doctor_finds_jobs_that_stand_nowhere_and_the_remedy_works(stage: Stage) -> None:
    with closing(sqlite3.connect(stage.tenure.home / "jobs.db")) as db, db:
        taken = db.execute("DELETE FROM tenure_due").rowcount
        taken += db.execute("DELETE FROM tenure_later").rowcount
        db.execute("INSERT INTO tenure_due VALUES ('default', 5, 'default', 1, 'nobody')")
        db.execute("INSERT INTO tenure_leases VALUES ('nobody', 1, 1, 1, 1)")

    level, message = findings(stage, "-A", "shop")["places"]

    assert (level, message.startswith(f"{taken + 2} jobs or places")) == ("problem", True)
    remedy = re.search('sqlite3 FILE "(.*)"', stage.tenure.shop("doctor").out)
    assert remedy
    with closing(sqlite3.connect(stage.tenure.home / "jobs.db")) as db:
        db.executescript(remedy[1])
        places = "(SELECT id FROM tenure_due UNION SELECT id FROM tenure_later)"
        assert db.execute(f"SELECT count(*) FROM {places}").fetchone() == (taken,)
    assert findings(stage, "-A", "shop")["places"][0] == "ok"


def test_doctor_for_people(stage: Stage) -> None:
    ran = stage.tenure.shop("doctor")

    assert ran.code == 1
    assert "✓ integrity: quick_check found nothing" in ran.out
    assert (
        "✗ workers: no live worker, and 1 job due\n    → start one: tenure -A module:app worker\n"
        in ran.out
    )
    assert SECRET not in ran.out


def _somebody() -> object:
    from tenure.job import Actor

    return Actor("user", "max")
