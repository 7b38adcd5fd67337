"""Acts: chosen, looked at, applied in batches and at a pace, audited."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import tenure
from contract.builders import (
    FAILURE,
    all_events,
    claim_one,
    ended_job,
    get,
    put,
    put_many,
    started_job,
    worker,
)
from tenure.cli import build_parser
from tenure.errors import ConfigError, IllegalTransition, JobNotFound
from tenure.ids import new_id
from tenure.job import STATUSES, TRANSITIONS, Actor
from tenure.operations import acts
from tenure.operations.acts import (
    VERBS,
    Act,
    Acts,
    Cancel,
    Discard,
    Pause,
    Replay,
    Resume,
    Verb,
    Verdict,
)
from tenure.operations.listing import JobFilter
from tenure.operations.pace import Pace
from tenure.operations.scope import Scope
from tenure.outcome import Completed, Dead
from tenure.store import Store

from .conftest import Enter

USER = Actor("user", "7")


def dead_jobs(store: Store, count: int, **over: Any) -> list[str]:
    me = worker(store)
    return [ended_job(store, me, Dead(FAILURE), **over) for _ in range(count)]


def statuses(store: Store, ids: list[str]) -> dict[str, int]:
    return dict(Counter(get(store, id).status for id in ids))


# -- the table --------------------------------------------------------------------------------
def test_every_verb_leads_where_jobs_may_go() -> None:
    for verb in VERBS.values():
        assert VERBS[verb.name] is verb
        assert acts.verb_of(verb.act(), of=verb.of) is verb
        if verb.of == "jobs":
            assert verb.becomes in STATUSES
            assert all(verb.becomes in TRANSITIONS[status] for status in verb.statuses)


class Note(Act):
    """An act that is not there yet."""

    reason: str = ""

    def write(self, store: Store, names: Sequence[str], scope: Scope) -> Mapping[str, str]:
        return store.cancel(names, actor=scope.by, reason=self.reason, org=scope.org)


def test_a_new_act_is_one_value_and_one_row(
    store: Store, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Verb("note", Note, "noted", ("queued",), "queued", "cancelled", "note something")
    monkeypatch.setitem(VERBS, "note", row)
    ids = put_many(store, 2)
    room: Acts = enter(Acts)

    assert room.apply(room.choose(Note("x"), where=JobFilter())).done == 2
    assert statuses(store, ids) == {"cancelled": 2}
    given = ["note", ids[0], "--reason", "y", "--rate", "5/s", "--dry-run"]
    args = build_parser(given).parse_args(given)
    assert (args.verb, args.reason, args.dry_run) == (row, "y", True)


# -- choosing ---------------------------------------------------------------------------------
def test_choose_by_ids(store: Store, enter: Enter) -> None:
    me = worker(store)
    done = ended_job(store, me, Completed("null"))
    queued, foreign, absent = put(store), put(store, org="acme"), new_id()
    ids = [queued, done, absent, foreign, queued]

    choice = enter(Acts).choose(Cancel(), ids=ids)
    assert list(choice.jobs) == [queued, foreign]
    assert choice.refused == {done: "completed", absent: "absent"}
    ours = enter(Acts, org="default").choose(Cancel(), ids=ids)
    assert (list(ours.jobs), ours.refused[foreign]) == ([queued], "absent")


def test_choose_by_filter(store: Store, enter: Enter) -> None:
    queued = put_many(store, 3, type="report")
    put(store)
    dead = dead_jobs(store, 2, queue="others")
    room: Acts = enter(Acts)

    assert list(room.choose(Cancel(), where=JobFilter(type="report")).jobs) == queued[::-1]
    assert list(room.choose(Replay(), where=JobFilter(queue="deadletter")).jobs) == dead[::-1]
    assert not room.choose(Discard(), where=JobFilter(type="report")).jobs
    for where in (JobFilter(("completed",)), JobFilter(queue="q:deadletter")):
        with pytest.raises(ConfigError, match="only queued and running jobs can be cancelled"):
            room.choose(Cancel(), where=where)
    with pytest.raises(ConfigError, match="Give ids or a filter"):
        room.choose(Cancel())


def test_a_preview_changes_nothing(store: Store, enter: Enter) -> None:
    ids = dead_jobs(store, 12)
    before = all_events(store)

    seen = enter(Acts).choose(Replay(), where=JobFilter(type="noop")).preview(rate=4)

    assert (seen.verb, seen.count, seen.seconds) == ("replay", 12, 3.0)
    assert seen.ids == tuple(ids[::-1][:10])
    assert [(each.count, each.code) for each in seen.groups] == [(12, "BOOM")]
    assert (statuses(store, ids), all_events(store)) == ({"dead_letter": 12}, before)
    cancelled = enter(Acts).choose(Cancel(), ids=[put(store)]).preview()
    assert (cancelled.groups, cancelled.seconds) == ((), None)


# -- applying ---------------------------------------------------------------------------------
def test_batches_and_their_verdicts(
    store: Store, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acts, "BATCH", 2)
    me = worker(store)
    running = started_job(store, me).id
    ids = [running, *put_many(store, 4)]
    room: Acts = enter(Acts, actor=USER)
    choice = room.choose(Cancel("not needed"), ids=ids)
    late = claim_one(store, me).id  # after it was chosen: now it can only be asked
    told: list[tuple[int, list[Verdict]]] = []

    applied = room.apply(choice, tell=lambda progress, new: told.append((progress.done, [*new])))

    assert [verdict.id for verdict in applied.verdicts] == ids
    assert {v.id for v in applied.verdicts if v.outcome == "requested"} == {running, late}
    assert (applied.done, applied.requested, applied.left) == (3, 2, 0)
    assert all(verdict.changed for verdict in applied.verdicts)
    batches = [(done, len(new)) for done, new in told if new]
    assert batches == [(2, 2), (4, 2), (5, 1)]
    changes = [event for event in all_events(store) if event.kind.startswith("job.cancel")]
    assert {event.actor for event in changes} == {USER}
    assert get(store, ids[-1]).error == "not needed"


def test_what_has_changed_since_it_was_chosen_is_left_alone(store: Store, enter: Enter) -> None:
    first, second = dead_jobs(store, 2)
    room: Acts = enter(Acts)
    choice = room.choose(Discard(), ids=[first, second])
    room.one(Replay(), first)

    applied = room.apply(choice)

    assert applied.verdicts == (
        Verdict(first, "queued", False),
        Verdict(second, "cancelled", True),
    )


def test_a_stop_comes_between_two_batches(store: Store, enter: Enter) -> None:
    ids = dead_jobs(store, 6)
    room: Acts = enter(Acts)
    stop = threading.Event()

    def tell(progress: Any, verdicts: Any) -> None:
        if progress.done == 2:
            stop.set()

    applied = room.apply(room.choose(Replay(), ids=ids), rate=5, stop=stop.wait, tell=tell)

    assert (len(applied.verdicts), applied.left) == (2, 4)
    assert statuses(store, ids) == {"queued": 2, "dead_letter": 4}


def test_another_org_is_left_alone(store: Store, enter: Enter) -> None:
    mine, theirs = put(store, org="acme"), put(store)
    room: Acts = enter(Acts, org="acme")

    assert room.one(Cancel(), mine) == "cancelled"
    with pytest.raises(JobNotFound):
        room.one(Cancel(), theirs)
    choice = room.choose(Cancel(), where=JobFilter())
    assert not choice.jobs
    forged = acts.Choice(Cancel(), dict.fromkeys([theirs]), {})  # type: ignore[arg-type]
    assert room.apply(forged).verdicts == (Verdict(theirs, "absent", False),)


def test_one_job(store: Store, enter: Enter) -> None:
    me = worker(store)
    room: Acts = enter(Acts)
    running = started_job(store, me).id
    (dead,) = dead_jobs(store, 1)

    assert room.one(Cancel(), running) == "requested"
    assert room.one(Replay(), dead) == "queued"
    with pytest.raises(IllegalTransition, match="is queued: only dead jobs can be discarded"):
        room.one(Discard(), dead)
    with pytest.raises(JobNotFound, match="there is no job"):
        room.one(Cancel(), new_id())
    with pytest.raises(ConfigError, match="pause is for queues, not for jobs"):
        room.one(Pause(), dead)
    with pytest.raises(ConfigError, match="cancel is for jobs, not for queues"):
        room.switch(Cancel(), "default")
    with pytest.raises(ConfigError, match="reason must be a string"):
        room.one(Cancel(7), dead)  # type: ignore[arg-type]


def test_other_arguments_are_checked_by_the_app(app: tenure.App, store: Store) -> None:
    @app.task
    def report(pages: int) -> None: ...

    (dead,) = dead_jobs(store, 1, type="report", payload='{"pages": 1}')
    with pytest.raises(tenure.ArgumentError):
        app.operations.acts.replay(dead, {"pages": "x"})
    with pytest.raises(ConfigError, match="need the app"):
        Acts(store).replay(dead, {"pages": 2})
    assert get(store, dead).status == "dead_letter"

    assert app.operations.acts.replay(dead, {"pages": 2}) == "queued"
    assert get(store, dead).payload == {"pages": 2}


# -- queues -----------------------------------------------------------------------------------
def test_switching_queues(store: Store, enter: Enter) -> None:
    put(store)
    room: Acts = enter(Acts, actor=USER)

    def switch(act: acts.Act, name: str = "q:default") -> tuple[str, bool]:
        switched = room.switch(act, name)
        assert switched.name == name.removeprefix("q:")
        return switched.before, switched.changed

    assert switch(Resume()) == ("open", False)
    assert switch(Pause("a look")) == ("open", True)
    assert switch(Pause("another")) == ("paused", True)
    assert switch(Resume()) == ("paused", True)
    assert switch(Resume(), "nowhere") == ("absent", False)
    assert switch(Pause(), "nowhere") == ("absent", True)
    kinds = [(e.kind, e.actor) for e in all_events(store) if e.kind.startswith("queue.")]
    assert kinds == [
        ("queue.paused", USER), ("queue.paused", USER), ("queue.resumed", USER),
        ("queue.paused", USER),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="not for org 'acme' alone"):
        enter(Acts, org="acme").switch(Pause(), "default")


# -- pace -------------------------------------------------------------------------------------
def test_a_pace_is_never_faster_than_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slept: list[float] = []

    def stop(seconds: float) -> bool:
        slept.append(seconds)
        now[0] += seconds
        return False

    pace = Pace(30, 5.0, most=500, stop=stop)
    assert pace.batch == 1
    assert pace.turn(0)
    assert slept == [0.0]
    assert pace.turn(1)
    assert slept[-1] == pytest.approx(0.2)
    now[0] += 60  # a stall does not earn a burst
    assert pace.turn(2)
    assert pace.turn(3)
    assert slept[-1] == pytest.approx(0.2)
    slept.clear()
    assert pace.turn(13)
    assert slept == pytest.approx([1.0, 1.0]), "told every second meanwhile"


def test_a_pace_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    told: list[Any] = []
    pace = Pace(1000, None, most=500, tell=lambda progress, _: told.append(progress))

    pace.told(0)
    now[0] += 2
    pace.told(500)

    assert (told[0].per_second, told[0].seconds_left) == (None, None)
    assert (told[1].per_second, told[1].seconds_left) == (250.0, 2.0)
    assert Pace(1000, 10_000, most=500).batch == 500
