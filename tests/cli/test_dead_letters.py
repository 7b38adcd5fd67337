"""The dead-letter workbench: groups, replay and discard with a preview and at a pace, --watch."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import signal
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from tenure import outcome
from tenure.cli import main
from tenure.ids import new_id
from tenure.job import NewJob, Terms

from .conftest import Cli, Stage, enlist

BOOM = outcome.Failure(
    "ValueError: boom\n\x1b[2Jat line 7 " + "x" * 300, "ValueError", "ValueError at a.py:7"
)
GONE = outcome.Failure("KeyError: gone", "KeyError", "KeyError at b.py:9")


def handle(*parts: str) -> str:
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]


BOOMS = handle("report", "dead_letter", BOOM.code, BOOM.place)
GONES = handle("report", "failed", GONE.code, GONE.place)


def put(stage: Stage, count: int, queue: str = "reports", **more: Any) -> list[str]:
    terms = Terms("report", queue, 5, "default", 5, 300_000, 86_400_000)
    jobs = [NewJob(new_id(), terms, '{"pages": 1}', **more) for _ in range(count)]
    return [receipt.id for receipt in stage.store.enqueue(jobs)]


def die(stage: Stage, count: int, end: Any, queue: str = "reports") -> list[str]:
    """So many jobs that ended like this."""
    ids = put(stage, count, queue)
    worker = enlist(stage.store)
    claimed = stage.store.claim(worker, [(queue, count)]).jobs
    assert sorted(job.id for job in claimed) == sorted(ids)
    stage.store.finish(worker, [outcome.Ended(job.id, job.lease_no, 1, end) for job in claimed])
    return ids


def statuses(stage: Stage, ids: list[str]) -> Counter[str]:
    return Counter(stage.status(id) for id in ids)


# -- groups -----------------------------------------------------------------------------------


def test_dead_jobs_are_grouped_for_people(stage: Stage) -> None:
    die(stage, 2, outcome.Failed(GONE))
    booms = die(stage, 3, outcome.Dead(BOOM))

    ran = stage.tenure.shop("jobs", "--dead")

    lines = ran.out.splitlines()
    assert lines[0].split() == [
        "GROUP", "JOBS", "TYPE", "STATUS", "FIRST", "SEEN", "LAST", "SEEN", "CODE", "PLACE",
    ]  # fmt: skip
    assert lines[1].split()[:4] == [BOOMS, "3", "report", "dead_letter"]
    assert lines[1].endswith("ValueError  a.py:7")
    assert lines[2].startswith(f"    {max(booms)}  ValueError: boom ⏎ �[2Jat line 7 xxx")
    assert lines[2].endswith("x…")
    assert lines[3].split()[:4] == [GONES, "2", "report", "failed"]
    assert lines[-1].startswith("7 dead jobs in 4 groups; ")
    assert (
        "… there are 3 more groups: --limit 10"
        in stage.tenure.shop("jobs", "--dead", "--limit", "1").out
    )


def test_dead_jobs_are_grouped_for_programs(stage: Stage) -> None:
    gone = die(stage, 2, outcome.Failed(GONE))

    def found(*args: str) -> list[dict[str, Any]]:
        return stage.tenure.shop("jobs", "--dead", "--json", *args).objects

    first, *rest = found()
    assert first.pop("first_seen") <= first.pop("last_seen")
    assert first == {
        "group": GONES, "count": 2, "type": "report", "status": "failed", "code": "KeyError",
        "place": "KeyError at b.py:9", "sample_id": max(gone), "sample_error": "KeyError: gone",
        "capped": False,
    }  # fmt: skip
    assert {group["sample_id"] for group in rest} == {stage["failed"], stage["dead_letter"]}
    assert [group["group"] for group in found("--type", "report")] == [GONES]
    assert {group["status"] for group in found("--status", "failed")} == {"failed"}
    assert [group["group"] for group in found("--queue", "reports")] == [GONES]
    assert found("--org", "acme") == []
    assert stage.tenure.shop("jobs", "--dead", "--org", "acme").out == "no dead jobs\n"


def test_a_group_lists_its_jobs(stage: Stage) -> None:
    die(stage, 1, outcome.Failed(GONE))
    booms = die(stage, 3, outcome.Dead(BOOM))

    for option in (BOOMS, BOOMS[:4].upper()):
        jobs = stage.tenure.shop("jobs", "--group", option, "--json").objects
        assert [job["id"] for job in jobs] == sorted(booms, reverse=True)

    absent = stage.tenure.shop("jobs", "--group", "00000000")
    assert (absent.code, absent.out) == (1, "")
    assert "there is no group 00000000" in absent.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["jobs", "--dead", "--status", "queued"], "--status queued none"),
        (["jobs", "--queue", "q:deadletter", "--status", "queued"], "--status queued none"),
        (["jobs", "--dead", "--payload"], "which have no payload: add --flat"),
        (["jobs", "--dead", "--key", "k"], "which have no key: add --flat"),
        (["jobs", "--flat"], "--flat goes with --dead"),
        (["jobs", "--group", "xyz"], "'xyz' is not a group"),
        (["replay", "01M7GEX6W23EXZBGJQ83K1S2QG", "--group", "abcd"], "ids or --group, not both"),
        (["replay", "--group", "abcd", "--edit"], "--edit is for one ID"),
        (["replay", "--group", "abcd", "--rate", "50"], "is not a rate such as 50/s"),
        (["discard", "--group", "abcd", "--rate", "0/s"], "is not a rate such as 50/s"),
        (["cancel", "--group=abcd"], "unrecognized arguments: --group"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(command)
    except SystemExit as exit:
        code = exit.code

    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert message in said.err


# -- replay and discard -----------------------------------------------------------------------


def test_a_group_is_replayed_and_nothing_else(stage: Stage) -> None:
    gone = die(stage, 2, outcome.Failed(GONE))
    booms = die(stage, 3, outcome.Dead(BOOM))

    ran = stage.tenure.shop("replay", "--group", BOOMS)

    assert (ran.code, ran.out) == (0, "replayed 3 jobs\n")
    assert statuses(stage, booms) == {"queued": 3}
    assert statuses(stage, gone) == {"failed": 2}
    last = stage.store.events(job_id=booms[0]).events[-1]
    assert (last.kind, last.actor.type, last.data) == ("job.replayed", "user", None)
    assert stage.tenure.shop("replay", "--group", BOOMS).code == 1  # there is none any more


def test_a_group_is_discarded_within_the_filters(stage: Stage) -> None:
    here = die(stage, 2, outcome.Failed(GONE))
    there = die(stage, 2, outcome.Failed(GONE), queue="others")

    ran = stage.tenure.shop(
        "discard", "--group", GONES, "--queue", "others", "--reason", "old", "--json"
    )

    assert ran.objects == [
        {"id": id, "outcome": "cancelled", "changed": True} for id in sorted(there, reverse=True)
    ]
    assert (statuses(stage, there), statuses(stage, here)) == ({"cancelled": 2}, {"failed": 2})


def test_jobs_that_died_nowhere_are_a_group(stage: Stage) -> None:
    """A poisoned job has no exception, so no place; any place must not match it."""
    booms = die(stage, 1, outcome.Dead(outcome.Failure("no place", "ValueError")))
    die(stage, 1, outcome.Dead(BOOM))
    group = handle("report", "dead_letter", "ValueError", "")

    assert stage.tenure.shop("replay", "--group", group).out == "replayed 1 job\n"
    assert stage.status(booms[0]) == "queued"


def test_a_preview_names_the_groups(stage: Stage) -> None:
    ids = die(stage, 12, outcome.Dead(BOOM))
    command = ["discard", "--queue", "reports", "--rate", "10/m", "--dry-run"]

    lines = stage.tenure.shop(*command).out.splitlines()
    assert lines[0] == "would discard 12 jobs, 10/m, about 72 s; nothing was changed"
    assert lines[11:13] == ["  … and 2 more", ""]
    assert lines[14].split()[:4] == [BOOMS, "12", "report", "dead_letter"]

    seen = stage.tenure.shop(*command, "--json").object
    assert (seen["count"], seen["ids"]) == (12, sorted(ids, reverse=True)[:10])
    assert [(group["group"], group["count"]) for group in seen["groups"]] == [(BOOMS, 12)]
    assert statuses(stage, ids) == {"dead_letter": 12}


def test_a_rate_spreads_the_work(stage: Stage) -> None:
    ids = die(stage, 24, outcome.Dead(BOOM))

    assert stage.tenure.shop("replay", "--group", BOOMS, "--rate", "40/s").code == 0

    events = stage.store.events(limit=1000).events
    at = [event.at.timestamp() for event in events if event.kind == "job.replayed"]
    assert len(at) == len(ids)
    assert at[-1] - at[0] >= 0.35  # 8 every 0.2 s: the third batch starts 0.4 s after the first


def test_ctrl_c_stops_between_two_batches(stage: Stage) -> None:
    ids = die(stage, 30, outcome.Dead(BOOM))
    command = ["-A", "shop", "replay", "--group", BOOMS, "--rate", "5/s", "--json"]

    with stage.tenure.started(*command) as replaying:
        assert replaying.stdout is not None
        said = [replaying.stdout.readline(), replaying.stdout.readline()]
        replaying.send_signal(signal.SIGINT)
        out, err = replaying.communicate(timeout=20)

    said += out.splitlines()
    assert replaying.returncode == 130
    assert err == f"tenure: stopped: {30 - len(said)} of 30 jobs were left as they were\n"
    done = [json.loads(line)["id"] for line in said]
    assert 2 <= len(done) < 30
    assert statuses(stage, done) == {"queued": len(done)}
    assert statuses(stage, ids) == {"queued": len(done), "dead_letter": 30 - len(done)}


def test_many_jobs_are_asked_about_on_a_terminal(stage: Stage) -> None:
    ids = die(stage, 101, outcome.Dead(BOOM))
    command = ["-A", "shop", "discard", "--group", BOOMS, "--rate", "500/s"]

    screen, code = on_a_terminal(stage.tenure, *command, answer="n\n")
    assert f"{BOOMS}   101  report" in screen
    assert "Discard 101 jobs, 500/s, about 202 ms? [y/N] " in screen
    assert "tenure: nothing was changed" in screen
    assert (code, statuses(stage, ids)) == (1, {"dead_letter": 101})

    screen, code = on_a_terminal(stage.tenure, *command, answer="y\n")
    assert "discard [" in screen
    assert " of 101 · " in screen
    assert "/s · 1 s left" in screen
    assert "\r\x1b[Kdiscarded 101 jobs" in screen
    assert (code, statuses(stage, ids)) == (0, {"cancelled": 101})


def test_nobody_is_asked_who_said_yes(stage: Stage) -> None:
    die(stage, 101, outcome.Dead(BOOM))

    screen, code = on_a_terminal(stage.tenure, "-A", "shop", "replay", "--group", BOOMS, "--yes")

    assert (screen, code) == ("replayed 101 jobs\r\n", 0)


# -- other arguments --------------------------------------------------------------------------


def test_an_edited_replay_starts_over(stage: Stage) -> None:
    id, *_ = put(stage, 1)
    worker = enlist(stage.store)
    (job,) = stage.store.claim(worker, [("reports", 1)]).jobs
    assert stage.store.save_step(worker, (id, job.lease_no), "open", "1")
    stage.store.finish(worker, [outcome.Ended(id, job.lease_no, 1, outcome.Dead(BOOM))])

    assert stage.tenure.shop("job", id, "--json").object["steps"] == ["open"]
    assert stage.tenure.shop("replay", id, "--payload", '{"pages": 2}').code == 0

    assert stage.store.steps(id) == {}
    replayed = stage.store.events(job_id=id).events[-1]
    assert (replayed.kind, replayed.data) == ("job.replayed", {"reason": "edited"})


def test_an_editor_changes_the_arguments(stage: Stage) -> None:
    (id,) = die(stage, 1, outcome.Dead(BOOM))

    def edit(change: str) -> Any:
        script = stage.tenure.home / "edit.py"
        script.write_text(
            f"import pathlib, sys\nfile = pathlib.Path(sys.argv[1])\nfile.write_text({change})\n"
        )
        return stage.tenure.shop(
            "replay", id, "--edit", VISUAL="", EDITOR=f"{sys.executable} {script}"
        )

    unchanged = edit("file.read_text()")
    assert (unchanged.code, "the arguments are as before" in unchanged.err) == (1, True)
    wrong = edit("""'{"pages": "x"}'""")
    assert (wrong.code, "argument pages: expected int" in wrong.err) == (2, True)
    assert stage.status(id) == "dead_letter"

    assert edit("file.read_text().replace('1', '7')").out == "replayed 1 job\n"
    job = stage.store.get(id)
    assert job is not None
    assert (job.status, job.payload) == ("queued", {"pages": 7})


# -- one job ----------------------------------------------------------------------------------


def test_a_job_shows_what_it_ran_after(stage: Stage) -> None:
    (dead,) = die(stage, 1, outcome.Dead(BOOM))
    (id,) = put(stage, 1, after=(stage["completed"], dead))

    shown = stage.tenure.shop("job", id)
    job = stage.tenure.shop("job", id, "--json").object

    assert f"after      {stage['completed']} completed, {dead} dead_letter\n" in shown.out
    assert job["needs"] == {stage["completed"]: "completed", dead: "dead_letter"}
    assert job["why"].startswith(
        f"It waits for 1 job: {dead}; {dead} is a dead letter, but may still"
    )

    (ready,) = put(stage, 1, after=(stage["completed"],))
    assert "waits for 1 job" not in stage.tenure.shop("job", ready, "--json").object["why"]

    (many,) = put(stage, 1, after=tuple(put(stage, 7)))
    assert "after      7 jobs: 7 queued (" in stage.tenure.shop("job", many).out


def test_watching_prints_a_line_a_change(stage: Stage) -> None:
    (id,) = put(stage, 1)
    worker = enlist(stage.store)

    with stage.tenure.started("-A", "shop", "job", id, "--watch") as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().endswith("Z  queued\n")
        (job,) = stage.store.claim(worker, [("reports", 1)]).jobs
        assert watching.stdout.readline().endswith("  in_progress  attempt 1 of 5\n")
        stage.store.renew(worker)  # moves the lease, which is no news
        report = '{"percent": 40, "phase": "embedding", "pages": 3}'
        stage.store.progress(worker, [(id, job.lease_no, report)])
        assert watching.stdout.readline().endswith(
            "  in_progress  40 %  embedding  pages=3  attempt 1 of 5\n"
        )
        stage.store.finish(worker, [outcome.Ended(id, job.lease_no, 1, outcome.Failed(GONE))])
        assert watching.stdout.readline().endswith("  failed  KeyError: gone\n")
        assert watching.wait(20) == 1
        assert watching.stdout.read() == ""


def test_a_terminal_sees_a_bar(stage: Stage) -> None:
    (id,) = put(stage, 1)
    worker = enlist(stage.store)
    (job,) = stage.store.claim(worker, [("reports", 1)]).jobs
    stage.store.progress(worker, [(id, job.lease_no, '{"percent": 50, "phase": "embedding"}')])

    def finish(seen: str) -> None:
        if "50 %" in seen:
            end = outcome.Ended(id, job.lease_no, 1, outcome.Completed("7"))
            stage.store.finish(worker, [end])

    screen, code = on_a_terminal(stage.tenure, "-A", "shop", "job", id, "--watch", look=finish)

    assert f"\r\x1b[Kin_progress  [{'#' * 12}{'.' * 12}] 50 %  embedding  attempt 1 of 5" in screen
    assert code == 0
    assert "It finished at " in screen.rpartition("\x1b[K")[2]  # the bar has gone, all is shown


def on_a_terminal(tenure: Cli, *args: str, answer: str = "", look: Any = None) -> tuple[str, int]:
    """What somebody sees who runs this and types `answer`, and its exit code."""
    ours, theirs = pty.openpty()
    size = {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    with tenure.started(
        *args, stdin=theirs, stdout=theirs, stderr=theirs, environment=size
    ) as running:
        os.close(theirs)
        os.write(ours, answer.encode())
        seen = b""
        with suppress(OSError):  # how Linux says that the other side has hung up
            while chunk := os.read(ours, 4096):
                seen += chunk
                if look is not None:
                    look(seen.decode(errors="replace"))
        code = running.wait(20)
    os.close(ours)
    return seen.decode(), code
