"""Totals, rates, quantiles and series, out of rollups."""

from __future__ import annotations

import datetime
import itertools
import math

import pytest

from contract.builders import (
    FAILURE,
    HOUR,
    MINUTE,
    OPERATOR,
    SECOND,
    Clock,
    end,
    ended_job,
    put,
    put_many,
    started_job,
    worker,
)
from tenure.errors import ConfigError
from tenure.operations.queues import Queue
from tenure.operations.statistics import BOUNDS, Statistics, quantile, summarized
from tenure.operations.workers import Worker
from tenure.outcome import Completed, Dead, Failed, Retried
from tenure.store import Prune, QueueInfo, Rollup, Store

from .conftest import Enter


def span(**length: float) -> datetime.timedelta:
    return datetime.timedelta(**length)


def test_the_percentiles_of_one_run_are_that_run() -> None:
    one = Rollup(0, "default", "t", "completed", 1, 37, tuple(int(n == 3) for n in range(13)))
    cancelled = Rollup(0, "default", "t", "cancelled", 5, 900, (0,) * 12 + (5,))

    numbers = summarized([one, cancelled])
    assert (numbers.p50, numbers.p95, numbers.p99) == (0.037, 0.037, 0.037)
    long = one._replace(duration_ms=400_000, buckets=(0,) * 12 + (1,))
    assert summarized([long]).p95 == 400
    assert summarized([one, one]).p95 != 0.037  # of two only the bucket is known


def test_quantiles_interpolate_within_a_bucket() -> None:
    buckets = [0] * (len(BOUNDS) + 1)
    assert quantile(buckets, 0.5) is None

    buckets[4] = 100  # 0.05 to 0.1 s
    assert quantile(buckets, 0.5) == pytest.approx(0.075)
    assert quantile(buckets, 1.0) == pytest.approx(0.1)

    buckets[12] = 100  # longer than the last bound
    assert quantile(buckets, 0.99) == math.inf


def test_queues_and_workers_have_times(store: Store, enter: Enter, clock: Clock) -> None:
    me = worker(store, meta={"name": "mailer", "queues": ["default"], "types": ["noop"]})
    started_job(store, me)
    put(store)
    clock.advance(90 * SECOND)
    store.pause("default", actor=OPERATOR, reason="a look")
    room: Statistics = enter(Statistics)

    (queue,) = room.queues()
    assert (queue.ready, queue.running, queue.oldest) == (1, 1, span(seconds=90))
    assert queue.paused
    assert queue.paused_at is not None
    assert queue.paused_at.timestamp() * 1000 == pytest.approx(clock())
    (found,) = room.workers()
    assert (found.name, found.held, found.live) == ("mailer", 1, False)
    assert found.serves("default")
    assert not found.serves("other")
    assert found.knows("noop")
    store.renew(me)
    assert room.workers()[0].live
    assert isinstance(found, Worker)
    assert isinstance(queue, Queue)
    assert room.queue_names() == ["default"]


def test_a_time_that_is_none_stops_no_reader() -> None:
    row = QueueInfo("q", 1, 0, 0, 0, 0, 2**63 - 1, -(2**62), None, None)

    assert Queue.of(row).oldest is not None
    assert Queue.of(row).paused_at == datetime.datetime.min.replace(tzinfo=datetime.UTC)


def test_totals_and_counts(store: Store, enter: Enter) -> None:
    me = worker(store)
    ended_job(store, me, Dead(FAILURE))
    put_many(store, 2)
    room: Statistics = enter(Statistics)

    assert room.totals().jobs["queued"] == 2
    assert room.totals().jobs["dead_letter"] == 1
    counts = room.counts()
    assert counts["jobs"] == room.totals().jobs
    assert (counts["workers"], counts["capped"]) == (1, [])
    assert counts["queues"][0]["ready"] == 2


def test_figures_of_a_length_of_time(store: Store, enter: Enter, clock: Clock) -> None:
    me = worker(store)
    room: Statistics = enter(Statistics)
    ended_job(store, me, Completed("null"), type="old")
    clock.advance(2 * HOUR)
    for outcome in (Completed("null"), Completed("null"), Failed(FAILURE)):
        ended_job(store, me, outcome, type="new", queue="mail")
    ended_job(store, me, Retried(60, FAILURE), type="other")

    hour = room.figures()
    assert (hour.runs, hour.outcomes["completed"], hour.outcomes["snoozed"]) == (4, 2, 0)
    assert hour.success_rate == pytest.approx(2 / 3)
    assert room.figures(span(hours=3)).outcomes["completed"] == 3
    assert room.figures(type="other").runs == 1
    assert room.figures(queue="mail").runs == 3
    assert list(room.by_type()) == ["new", "other"]
    assert [figures.runs for figures in room.by_queue().values()] == [3, 1]
    seen = room.overview()
    assert (seen.last_hour, seen.last_5_min) == (hour, hour)
    assert seen.types == room.by_type()


def test_a_series_has_every_step(store: Store, enter: Enter, clock: Clock) -> None:
    me = worker(store)
    room: Statistics = enter(Statistics)
    ended_job(store, me, Completed("null"))
    clock.advance(10 * MINUTE)
    for _ in range(2):
        job = started_job(store, me, type="slow")
        store.finish(me, [end(job, Completed("null"), duration_ms=2 * SECOND)])

    series = room.series(span(minutes=15))
    assert len(series) == 16  # the step at hand goes on
    assert all(b.start - a.start == span(minutes=1) for a, b in itertools.pairwise(series))
    assert [bucket.figures.runs for bucket in series if bucket.figures.runs] == [1, 2]
    assert series[-1].figures.runs == 2
    assert series[-11].figures.runs == 1
    assert series[-1].start.timestamp() * 1000 == clock() // MINUTE * MINUTE
    assert 1 < (series[-1].figures.p95 or 0) <= 5
    assert sum(bucket.figures.runs for bucket in room.series(type="slow")) == 2
    five = room.series(span(minutes=15), step=span(minutes=5))
    assert sum(bucket.figures.runs for bucket in five) == 3
    assert len(five) == 4


def test_a_series_of_days_is_of_hours(store: Store, enter: Enter, clock: Clock) -> None:
    me = worker(store)
    room: Statistics = enter(Statistics)
    ended_job(store, me, Completed("null"))
    at = clock() // HOUR * HOUR
    clock.advance(30 * HOUR)
    store.prune(Prune(1e9, 1e9, 1e9))  # folds minutes into hours
    ended_job(store, me, Completed("null"))

    series = room.series(span(hours=48), step=span(hours=1))
    ran = {b.start.timestamp() * 1000: b.figures.runs for b in series if b.figures.runs}
    assert ran == {at: 1, clock() // HOUR * HOUR: 1}
    with pytest.raises(ConfigError, match="only hours are known"):
        room.series(span(hours=25))
    with pytest.raises(ConfigError, match="whole number of minutes"):
        room.series(step=span(seconds=30))
    with pytest.raises(ConfigError, match="kept for 90 days"):
        room.figures(span(days=91))


def test_a_dead_worker_is_shown_while_it_holds_jobs(
    store: Store, enter: Enter, clock: Clock
) -> None:
    gone, idle = worker(store), worker(store)
    started_job(store, gone)
    clock.advance(10 * MINUTE)

    assert [each.id for each in enter(Statistics).overview().workers] == [gone.id]
    assert {each.id for each in enter(Statistics).workers()} == {gone.id, idle.id}
