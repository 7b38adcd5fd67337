"""Ids as people type them: the beginning is enough where it is only one job's."""

from __future__ import annotations

import os
import pty
from contextlib import suppress

import pytest

from .conftest import Cli, Stage


def test_every_command_takes_the_beginning_of_an_id(stage: Stage) -> None:
    tenure, length = stage.tenure, 16
    assert len({id[:length] for id in stage.ids.values()}) == len(stage.ids)

    def short(name: str) -> str:
        return stage[name][:length]

    assert tenure.shop("job", short("completed"), "--json").object["id"] == stage["completed"]
    assert (
        tenure.shop("job", short("queued").lower() + "…").out.splitlines()[0].split()[1]
        == (stage["queued"])
    )
    events = tenure.shop("events", short("failed"), "--json").objects
    assert {event["job_id"] for event in events} == {stage["failed"]}
    assert tenure.shop("cancel", short("queued"), short("later")).code == 0
    assert tenure.shop("replay", short("failed"), "--payload", '{"how": "dead"}').code == 0
    assert tenure.shop("discard", short("dead_letter")).code == 0
    assert [stage.status(stage[n]) for n in ("queued", "later", "failed", "dead_letter")] == [
        "cancelled", "cancelled", "queued", "cancelled",
    ]  # fmt: skip


def test_a_beginning_of_several_or_of_none(stage: Stage) -> None:
    ran = stage.tenure.shop("job", stage["completed"][:6])
    assert ran.code == 2
    assert f"{stage['completed'][:6]} begins the id of several jobs, give more of it:" in ran.err
    assert f"  {stage['queued']}  report queued\n" in ran.err
    assert ran.err.endswith("  …\n")

    ran = stage.tenure.shop("job", "7ZZZZZZZ")
    assert (ran.code, ran.err) == (1, "tenure: there is no job whose id begins with 7ZZZZZZZ\n")
    for nonsense in ("01HZZ", "nonsense", "01M7M368Y92FVA4WDQ5HQVQ3M4X", "8ZZZZZZZ"):
        ran = stage.tenure.shop("job", nonsense)
        assert ran.code == 2
        assert "is not a job id: expected a ULID (26 characters, or the first 6" in ran.err


def test_one_step_along_the_key_finds_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many jobs there are: a page of a few, from the last id that could begin so."""
    from tenure import App

    app = App(f"sqlite:///{stage.tenure.home}/jobs.db")
    asked = []
    find = app.store.find

    def counting(where, **how):  # type: ignore[no-untyped-def]
        asked.append((where, how))
        return find(where, **how)

    monkeypatch.setattr(app.store, "find", counting)
    assert app.operations.jobs.whole_id(stage["later"][:20]) == stage["later"]
    assert asked == [((None,) * 7, {"before": stage["later"][:20] + "Z" * 6, "limit": 6})]
    app.close()


@pytest.mark.parametrize(
    "command",
    [["jobs"], ["jobs", "--payload"], ["jobs", "--dead"], ["queues"], ["stats"], ["events"],
     ["jobs", "--dead", "--flat"], ["discard", "--type", "fragile", "--dry-run"]],
    ids=" ".join,
)  # fmt: skip
def test_tables_fit_a_terminal_of_80_columns(stage: Stage, command: list[str]) -> None:
    shown = on_80_columns(stage.tenure, "-A", "shop:app", *command)
    if "--dead" in command and "" in shown:
        del shown[shown.index("") :]  # a sentence, which a terminal wraps

    assert max(map(len, shown)) <= 80, shown
    if command[0] == "jobs" and "--dead" not in command:
        for id in stage.ids.values():
            (line,) = [line for line in shown if line.startswith(id[:12])]
            begun = line.split()[0].rstrip("…")
            assert stage.tenure.shop("job", begun).out.split()[1] == id, "as it is shown"


def on_80_columns(tenure: Cli, *args: str) -> list[str]:
    ours, theirs = pty.openpty()
    size = {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}
    with tenure.started(*args, stdout=theirs, stderr=theirs, environment=size) as running:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # how Linux says that the other side has hung up
            while chunk := os.read(ours, 4096):
                seen += chunk
        assert running.wait(20) == 0, seen
    os.close(ours)
    return seen.decode().replace("\r", "").splitlines()
