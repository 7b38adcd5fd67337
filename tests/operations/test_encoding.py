"""One function makes every value of operations fit for JSON."""

from __future__ import annotations

import datetime
import json

import tenure
from contract.builders import FAILURE, Clock, ended_job, put, worker
from tenure.ids import to_uuid
from tenure.operations.acts import Acts, Replay
from tenure.operations.dead import Dead
from tenure.operations.encoding import to_json
from tenure.operations.jobs import Jobs
from tenure.operations.listing import JobFilter
from tenure.operations.statistics import Statistics
from tenure.outcome import Dead as Died
from tenure.store import Store

from .conftest import Enter


def test_every_value(app: tenure.App, store: Store, enter: Enter, clock: Clock) -> None:
    id = ended_job(store, worker(store), Died(FAILURE))
    put(store)
    choice = enter(Acts).choose(Replay(), where=JobFilter())
    statistics: Statistics = enter(Statistics)
    values = [
        enter(Jobs).detail(id),
        enter(Jobs).page(),
        enter(Jobs).events_before(),
        enter(Dead).groups(),
        choice.preview(2.0),
        enter(Acts).apply(choice),
        statistics.overview(),
        statistics.series(),
        statistics.queues(),
        app.health(),
        app.operations.health.findings(),
    ]
    for value in values:
        assert json.loads(json.dumps(to_json(value))) == to_json(value)

    seen = to_json(values[0])
    assert seen["job"]["uuid"] == str(to_uuid(id))
    assert seen["job"]["actor"] == {"type": "system", "id": "tenure"}
    assert seen["why"]["code"] == "dead_letter"
    made = datetime.datetime.fromisoformat(seen["job"]["created_at"])
    assert made.timestamp() * 1000 == clock()


def test_times_and_lengths() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=1))
    when = datetime.datetime(2030, 1, 31, 9, 0, 0, 123_999, zone)

    assert to_json(when) == "2030-01-31T08:00:00.123Z"
    assert to_json({"took": datetime.timedelta(milliseconds=1500)}) == {"took": 1.5}
    assert to_json((True, None, {"a"})) == [True, None, ["a"]]
