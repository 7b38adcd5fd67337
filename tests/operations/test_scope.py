"""A scope travels with every call: which tenant it sees, whom it is audited as."""

from __future__ import annotations

import pytest

import tenure
from tenure.job import SYSTEM, Actor
from tenure.operations.scope import Scope


def test_an_actor_is_given_or_acts_here() -> None:
    assert Scope().by == SYSTEM
    with tenure.acting(actor=("user", "7")):
        assert Scope().by == Actor("user", "7")
        assert Scope(actor=Actor("user", "8")).by == Actor("user", "8")


def test_a_scope_narrows() -> None:
    acme = Scope().narrowed(org="acme", actor=("user", "7"), request_id="r-1")

    assert acme == Scope("acme", Actor("user", "7"), "r-1")
    assert acme.narrowed() == acme.narrowed(org="acme") == acme
    with pytest.raises(tenure.ConfigError, match="operations of org 'acme', not of 'other'"):
        acme.narrowed(org="other")
    with pytest.raises(tenure.ConfigError, match="actor type must be user, system or api_key"):
        acme.narrowed(actor=("robot", "7"))


def test_operations_of_an_app_differ_in_their_scope_only(app: tenure.App) -> None:
    @app.task
    def work() -> None: ...

    ours = work.options(org="acme").enqueue()
    theirs = work.options(org="other").enqueue()
    acme = app.operations.narrowed(org="acme")

    assert app.operations.scope == Scope()
    assert acme.jobs.get(ours.id) is not None
    assert acme.jobs.get(theirs.id) is None
    assert [job.id for job in acme.jobs.find()] == [ours.id]
    assert [job.id for job in app.operations.jobs.find()] == [theirs.id, ours.id]


@pytest.mark.parametrize("what", ["totals", "queues", "workers", "overview", "series"])
def test_what_is_known_for_all_orgs_together_is_not_told_to_one(app: tenure.App, what: str) -> None:
    acme = app.operations.narrowed(org="acme")

    with pytest.raises(tenure.ConfigError, match="not for org 'acme' alone"):
        getattr(acme.statistics, what)()
    with pytest.raises(tenure.ConfigError, match="not for org 'acme' alone"):
        acme.health.report()
    with pytest.raises(tenure.ConfigError, match="not for org 'acme' alone"):
        acme.health.findings()
