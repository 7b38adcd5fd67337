"""Nothing of a payload in what is stored or logged about a failure: checked after every test that
runs jobs, over all it has left behind."""

from __future__ import annotations

from places import Place
from tenure.secrecy import scrub

STORED = """
SELECT type, CAST(payload AS text), error FROM job_queue WHERE error IS NOT NULL
UNION
SELECT j.type, CAST(j.payload AS text), e.data ->> 'error'
  FROM tenure_events e JOIN job_queue j ON j.id = e.job_id WHERE e.data ->> 'error' IS NOT NULL
"""


def assert_nothing_leaked(place: Place, logs: str = "") -> None:
    """Scrubbing what was stored again must find nothing to scrub."""
    rows = place.sql(STORED) if place.exists() else []
    leaks = [
        f"{type_}: {error}" for type_, payload, error in rows if scrub(error, payload) != error
    ]
    assert leaks == [], "payload values in stored errors"
    lines = [line for line in logs.splitlines() if "Error" in line]
    payloads = {payload for _type, payload, _error in rows}
    told = [line for line in lines for payload in payloads if scrub(line, payload) != line]
    assert told == [], "payload values in logged errors"
