"""jobs, job, queues, stats, events: what people and programs read."""

from __future__ import annotations

import re

from .conftest import SECRET, Stage, enlist


def test_jobs_for_people(stage: Stage) -> None:
    ran = stage.tenure.shop("jobs")

    lines = ran.out.splitlines()
    assert ran.code == 0
    assert lines[0].split() == ["ID", "STATUS", "TYPE", "ORG", "QUEUE", "TRIES", "AGE", "NOTE"]
    assert [line.split()[0] for line in lines[1:]] == sorted(stage.ids.values(), reverse=True)
    (failed,) = [line for line in lines if stage["failed"] in line]
    assert "CLOSED: PermanentError: closed for good" in failed
    assert "\x1b" not in ran.out


def test_jobs_for_programs(stage: Stage) -> None:
    jobs = {job["id"]: job for job in stage.tenure.shop("jobs", "--json").objects}

    assert jobs[stage["completed"]]["status"] == "completed"
    assert jobs[stage["completed"]]["actor"]["type"] == "user"
    assert jobs[stage["cancelled"]]["org"] == "acme"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+\.\d{3}Z", jobs[stage["later"]]["scheduled_at"])


def test_filters(stage: Stage) -> None:
    def found(*args: str) -> list[str]:
        ids = {id: name for name, id in stage.ids.items()}
        return [ids[job["id"]] for job in stage.tenure.shop("jobs", "--json", *args).objects]

    assert found("--status", "queued") == ["queued", "later", "retried"]
    assert found("--type", "fragile") == ["dead_letter", "failed"]
    assert found("--queue", "q:notifications") == ["retried", "completed"]
    assert found("--org", "acme") == ["cancelled"]
    assert found("--key", "welcome:7") == ["completed"]
    assert found("--dead", "--flat") == ["dead_letter", "failed"]
    assert found("--dead", "--flat", "--status", "failed") == ["failed"]
    assert found("--queue", "q:deadletter") == ["dead_letter", "failed"]
    assert found("--limit", "1") == ["queued"]
    assert stage.tenure.shop("jobs", "--type", "nope").out == "no jobs\n"


def test_a_payload_is_shown_only_when_asked_for(stage: Stage) -> None:
    for command in (
        ["jobs"], ["jobs", "--json"], ["job", stage["completed"]],
        ["job", stage["completed"], "--json"], ["events", "--json"],
    ):  # fmt: skip
        ran = stage.tenure.shop(*command)
        assert SECRET not in ran.out + ran.err, command

    for command in (["jobs"], ["job", stage["completed"], "--json"]):
        assert SECRET in stage.tenure.shop(*command, "--payload").out


def test_one_job(stage: Stage) -> None:
    ran = stage.tenure.shop("job", stage["completed"])

    assert ran.code == 0
    assert ran.out.startswith(f"send_email {stage['completed']} completed\nIt finished at ")
    assert "arguments  to (--payload shows them)" in ran.out
    assert re.search(r'result +"sent welcome"', ran.out)
    trail = [line.split()[2] for line in ran.out.splitlines() if " job." in line]
    assert trail == ["job.enqueued", "job.started", "job.succeeded"]


def test_a_failed_job_shows_where(stage: Stage) -> None:
    shown = stage.tenure.shop("job", stage["dead_letter"]).out
    told = stage.tenure.shop("job", stage["dead_letter"], "--json").object

    raised = stage.tenure.home.joinpath("shop.py").read_text("utf-8").splitlines()
    number = raised.index('    raise ValueError("boom")') + 1
    assert re.search(rf"place +ValueError at shop.py:{number}\n", shown)
    traceback = told["traceback"].splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-2:] == ['    raise ValueError("boom")', "ValueError: boom"]
    assert "".join(f"  {line}\n" for line in traceback) in shown
    assert "/tenure/" not in told["traceback"], "the way to the handler is not told"
    assert stage.tenure.shop("job", stage["completed"], "--json").object["traceback"] is None


def test_one_job_for_programs(stage: Stage) -> None:
    job = stage.tenure.shop("job", stage["retried"], "--json").object

    assert job["why"].startswith("It is retried at ")
    assert "after attempt 1 of 3 ended in an error: ValueError: no such mailbox." in job["why"]
    assert [event["kind"] for event in job["events"]] == [
        "job.enqueued", "job.started", "job.retried",
    ]  # fmt: skip


def test_a_job_is_found_by_its_uuid_too(stage: Stage) -> None:
    uuid = stage.tenure.shop("job", stage["queued"], "--json").object["uuid"]

    assert stage.tenure.shop("job", uuid, "--json").object["id"] == stage["queued"]


def test_an_absent_job(stage: Stage) -> None:
    for command in ("job", "events"):
        ran = stage.tenure.shop(command, "01M7GEX6W23EXZBGJQ83K1S2QG")
        assert (ran.code, ran.err) == (1, "tenure: there is no job 01M7GEX6W23EXZBGJQ83K1S2QG\n")


def test_why_asks_the_workers(stage: Stage) -> None:
    def why() -> str:
        return str(stage.tenure.shop("job", stage["queued"], "--json").object["why"])

    assert why().startswith("No live worker:")
    enlist(stage.store, queues=["critical"])
    assert why().startswith("No live worker serves queue q:default")
    enlist(stage.store, types=["other"])
    assert "knows type 'report'" in why()
    able = enlist(stage.store)
    assert "1 live worker serves it." in why()
    stage.store.claim(able, [("default", 1)])
    assert why().startswith("It is running on worker host:4711:")


def test_watching_ends_with_the_job(stage: Stage) -> None:
    with stage.tenure.started(
        "-A", "shop", "job", stage["queued"], "--watch", "--json"
    ) as watching:
        assert watching.stdout is not None
        assert '"status": "queued"' in watching.stdout.readline()
        stage.tenure.shop("cancel", stage["queued"])
        assert '"status": "cancelled"' in watching.stdout.readline()
        assert watching.wait(20) == 1  # it ended, but not completed


def test_queues(stage: Stage) -> None:
    ran = stage.tenure.shop("queues")
    rows = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines()}

    assert rows["QUEUE"] == ["READY", "LATER", "WAITING", "RUNNING", "DEAD", "OLDEST", "PAUSED"]
    assert rows["q:default"][:5] == ["1", "1", "0", "0", "2"]
    assert rows["q:notifications"] == ["0", "1", "0", "0", "0"]
    assert rows["q:deadletter"][0] == "2"

    objects = {queue["name"]: queue for queue in stage.tenure.shop("queues", "--json").objects}
    assert objects["default"]["ready"] == 1
    assert objects["deadletter"] == {"name": "deadletter", "view": True, "dead": 2, "capped": []}


def test_stats(stage: Stage) -> None:
    enlist(stage.store, name="mailer")
    ran = stage.tenure.shop("stats")

    assert "completed 1 " in ran.out
    assert "dead_letter 1 " in ran.out
    assert "success  33.3 % of the jobs that ended in the last hour" in ran.out
    assert re.search(r"send_email +2 +100 %", ran.out)
    assert "workers  1 live" in ran.out
    assert "mailer" in ran.out

    report = stage.tenure.shop("stats", "--json").object
    assert report["jobs"]["queued"] == 3
    assert report["last_hour"]["outcomes"] == {
        "cancelled": 1, "completed": 1, "crashed": 0, "dead": 1, "failed": 1, "released": 0,
        "rescued": 0, "retried": 1, "snoozed": 0,
    }  # fmt: skip
    assert 0 < report["last_hour"]["p50"] <= report["last_hour"]["p99"] <= 300
    assert report["types"]["fragile"]["success_rate"] == 0
    assert [worker["live"] for worker in report["workers"]] == [True]


def test_events(stage: Stage) -> None:
    every = stage.tenure.shop("events", "--json").objects
    assert [event["seq"] for event in every] == sorted(event["seq"] for event in every)
    assert stage.tenure.shop("events", "--json", "--limit", "3").objects == every[-3:]

    of_one = stage.tenure.shop("events", stage["failed"], "--json").objects
    assert of_one == [event for event in every if event["job_id"] == stage["failed"]]
    text = stage.tenure.shop("events", stage["failed"]).out
    assert "error='PermanentError: closed for good' code=CLOSED" in text


def test_following_events(stage: Stage) -> None:
    with stage.tenure.started(
        "-A", "shop", "events", "--follow", "--limit", "1", "--json"
    ) as following:
        assert following.stdout is not None
        following.stdout.readline()
        stage.tenure.shop("queues", "pause", "default", "--reason", "a look")
        assert '"kind": "queue.paused"' in following.stdout.readline()
        following.terminate()
