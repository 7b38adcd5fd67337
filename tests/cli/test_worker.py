"""`tenure worker` as a real process: drain, signals, log lines. `test_terminal.py` has more."""

from __future__ import annotations

import json
import re
import signal
import time

from .conftest import Cli, Stage


def test_a_drain_says_what_it_did_and_left(stage: Stage) -> None:
    ran = stage.tenure.shop("worker", "--drain")

    assert ran.code == 0
    assert ran.out.startswith("1 completed in ")
    assert "left: 2 jobs due later\n" in ran.out
    assert "INFO    started: jobs from " in ran.err
    assert stage.status(stage["queued"]) == "completed"


def test_a_drain_for_programs(stage: Stage) -> None:
    ran = stage.tenure.shop("worker", "--burst", "--json", "-Q", "default", "-c", "2", "-p", "1")

    assert (ran.object["completed"], ran.object["failed"]) == (1, 0)
    assert ran.object["left"]["due later"] == 1
    assert isinstance(ran.object["seconds"], float)
    for line in ran.err.splitlines():
        assert json.loads(line)["logger"] == "tenure.worker"


def test_the_log_level_counts(stage: Stage) -> None:
    assert stage.tenure.shop("worker", "--drain", "-l", "warning").err == ""


def test_failures_are_heard(stage: Stage) -> None:
    dead = stage.tenure.shop("enqueue", "fragile", "--json").object["id"]
    bounced = stage.tenure.shop("enqueue", "send_email", '{"to": "bounce"}', "--json").object["id"]

    said = stage.tenure.shop("worker", "--drain").err

    first = f"ERROR   fragile {dead}: attempt 1 of 1 failed, now a dead letter: ValueError: boom"
    assert f"{first} (shop.py:" in said
    assert '        raise ValueError("boom")\n    ValueError: boom\n' in said
    assert f"WARNING send_email {bounced}: attempt 1 of 3 failed, next try in 3600 s: " in said
    assert stage["queued"] not in said, "nothing is said of what succeeds"


def test_every_start_and_end_on_request(stage: Stage) -> None:
    said = stage.tenure.shop("worker", "--drain", "-l", "debug").err

    assert f"DEBUG   report {stage['queued']}: attempt 1 of 5 started\n" in said
    assert f"DEBUG   report {stage['queued']}: attempt 1 of 5 ended: completed, " in said


def test_failures_for_programs(stage: Stage) -> None:
    id = stage.tenure.shop("enqueue", "send_email", '{"to": "bounce"}', "--json").object["id"]

    lines = map(json.loads, stage.tenure.shop("worker", "--drain", "--json").err.splitlines())
    (said,) = [line for line in lines if line["logger"] == "tenure.job"]

    assert (said["level"], said["type"], said["job_id"]) == ("WARNING", "send_email", id)
    assert (said["attempt"], said["max_attempts"], said["will_retry"]) == (1, 3, True)
    assert said["exception"] == "ValueError: no such mailbox"
    assert said["traceback"].endswith('("no such mailbox")\nValueError: no such mailbox')
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+\.\d{3}Z", said["next_try"])
    assert said["next_try"] > said["time"]
    assert said["worker_id"] and said["request_id"] == id


def test_other_queues_are_left_alone(stage: Stage) -> None:
    ran = stage.tenure.shop("worker", "--drain", "-Q", "critical")

    assert ran.out.startswith("nothing to do in ")
    assert "in queues this worker does not serve" in ran.out
    assert stage.status(stage["queued"]) == "queued"


def test_a_queue_that_nobody_has_ever_used_is_pointed_out(stage: Stage) -> None:
    ran = stage.tenure.shop("worker", "--drain", "-Q", "notification,default:2,zzz")

    assert ran.code == 0
    warnings = [line for line in ran.err.splitlines() if " WARNING " in line]
    assert [line.partition(" WARNING ")[2] for line in warnings] == [
        "no job has ever been in q:notification and no task of this app names it: did you mean "
        "q:notifications? known are q:default, q:notifications",
        "no job has ever been in q:zzz and no task of this app names it: "
        "known are q:default, q:notifications",
    ]


def test_it_waits_at_a_queue_that_nobody_has_used(tenure: Cli) -> None:
    with tenure.started("-A", "shop", "worker", "-Q", "zzz", "--max-jobs", "1") as working:
        assert working.stderr is not None
        while "no job has ever been in q:zzz" not in working.stderr.readline():
            assert working.poll() is None
        assert tenure.shop("enqueue", "report", "--queue", "zzz").code == 0
        out, _ = working.communicate(timeout=20)
    assert out.startswith("1 completed in ")


def test_a_queue_that_a_task_names_is_known(tenure: Cli) -> None:
    ran = tenure.shop("worker", "--drain", "-Q", "notifications")
    assert "WARNING" not in ran.err


def test_reload_and_drain_exclude_each_other(tenure: Cli) -> None:
    ran = tenure.shop("worker", "--reload", "--drain")
    assert (ran.code, ran.out) == (2, "")
    assert "--reload goes on until it is stopped" in ran.err


def test_a_wrong_app_or_queue(tenure: Cli) -> None:
    for args in (["-A", "nowhere", "worker"], ["-A", "shop", "worker", "-Q", "a:b"]):
        ran = tenure(*args)
        assert (ran.code, ran.out) == (2, ""), ran.err
        assert "tenure: " in ran.err
    assert not (tenure.home / "jobs.db").exists()


def test_a_worker_that_cannot_start_says_why_and_leaves_nothing(tenure: Cli) -> None:
    (tenure.home / "jobs.db").write_text("certainly not a database" * 100)
    boards = tenure.home / "tmp"
    boards.mkdir()

    ran = tenure.shop("worker", "-p", "2", TMPDIR=str(boards))

    assert (ran.code, ran.out) == (1, "")
    assert "is not an SQLite database" in ran.err and "started: " not in ran.err
    assert [path for path in boards.rglob("*") if not path.is_dir()] == []


def test_url_cannot_split_a_worker_from_its_app(stage: Stage) -> None:
    ran = stage.tenure.shop("worker", "--drain", "--url", "sqlite:///other.db")

    assert ran.code == 2
    assert "--url cannot move a worker" in ran.err

    (stage.tenure.home / "free.py").write_text("import tenure\napp = tenure.App()\n")
    ran = stage.tenure("-A", "free", "worker", "--drain", "--url", "sqlite:///other.db")
    assert ran.code == 0, ran.err


def test_sigterm_ends_it_well(stage: Stage) -> None:
    with stage.tenure.started("-A", "shop", "worker", "-n", "mailer") as working:
        deadline = time.monotonic() + 20
        while stage.status(stage["queued"]) != "completed":
            assert time.monotonic() < deadline, "it never ran the job"
            time.sleep(0.05)
        (live,) = stage.tenure.shop("stats", "--json").object["workers"]
        assert (live["name"], live["live"]) == ("mailer", True)
        working.send_signal(signal.SIGTERM)
        out, _ = working.communicate(timeout=20)

    assert working.returncode == 0
    assert out.startswith("1 completed in ")
