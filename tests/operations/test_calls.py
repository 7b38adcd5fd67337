"""The calls of an app, which delegate to its operations; and their async twins."""

from __future__ import annotations

import inspect

import pytest

import tenure
from contract.builders import FAILURE, ended_job, worker
from tenure.job import Actor
from tenure.operations.calls import OperatorCalls
from tenure.outcome import Completed, Dead
from tenure.store import Store


async def test_async_twins(app: tenure.App, store: Store) -> None:
    @app.task
    def noop(pages: int = 1) -> None: ...

    me = worker(store)
    done = ended_job(store, me, Completed("7"))
    dead = [ended_job(store, me, Dead(FAILURE), payload="{}") for _ in range(2)]
    queued = await noop.aenqueue()

    job = await app.aget(done)
    assert job is not None
    assert await app.aresult(done, timeout=5) == 7
    assert {found.id for found in await app.afind(status="dead_letter")} == {*dead}
    assert [event.kind for event in await app.aevents(queued.id)] == ["job.enqueued"]
    assert len(await app.aevents()) == len(list(app.events()))
    assert (await app.astats())["jobs"] == app.stats()["jobs"]
    assert [queue.name for queue in await app.aqueues()] == ["default"]
    assert [each.id for each in await app.aworkers()] == [me.id]
    assert (await app.ahealth()).status == app.health().status
    with tenure.acting(actor=("user", "9")):
        assert await app.areplay(dead[0], {"pages": 2}) == "queued"
        assert await app.adiscard(dead[1], reason="old") == "cancelled"
        assert await app.acancel(queued.id, actor=("user", "7")) == "cancelled"
        await app.apause("default", reason="a look")
        assert (await app.aqueues())[0].pause_reason == "a look"
        await app.aresume("default")
    acts = [(e.kind, e.actor.id) for e in await app.aevents() if e.actor.type == "user"]
    assert acts == [
        ("job.replayed", "9"), ("job.discarded", "9"), ("job.cancelled", "7"),
        ("queue.paused", "9"), ("queue.resumed", "9"),
    ]  # fmt: skip


def test_every_call_has_a_twin() -> None:
    calls = {name for name in vars(OperatorCalls) if not name.startswith("_")}
    twins = {name for name in calls if inspect.iscoroutinefunction(getattr(OperatorCalls, name))}

    assert {f"a{name}" for name in calls - twins} == twins
    for name in calls - twins:
        ours = inspect.signature(getattr(OperatorCalls, name)).parameters
        theirs = inspect.signature(getattr(OperatorCalls, f"a{name}")).parameters
        assert list(ours) == list(theirs) or name == "find", name


def test_calls_say_what_is_wrong(app: tenure.App, store: Store) -> None:
    id = ended_job(store, worker(store), Completed("null"))

    with pytest.raises(tenure.IllegalTransition, match="only queued and running jobs"):
        app.cancel(id)
    with pytest.raises(tenure.JobNotFound, match="an id is a ULID or a UUID"):
        app.discard("x")
    with pytest.raises(tenure.ConfigError, match="status is one of"):
        app.find(status="happy")
    with pytest.raises(tenure.ConfigError, match="is a view of jobs"):
        app.find(queue="deadletter")
    assert app.operations.scope.by == Actor("system", "tenure")
