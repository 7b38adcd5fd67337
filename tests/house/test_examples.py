"""Every example is a program that works."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.testing import drain

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "order_flow": ["3 payments, 7649 cents, 6 jobs completed"],
    "resumable_upload": [
        "sent 12 bytes",
        "calls: split, send 0, send 1, send 1, send 2",
        "attempts: 2 progress: {'percent': 100.0, 'phase': 'sending'}",
    ],
    "fan_in_report": ["A short book: 6 words in 3 chapters"],
    "sentry": [
        "reports go to https://key@sentry.example/1",
        "order failed after 2 attempts",
        "  job = order",
        "  KeyError: 'coffee' in price_of",
        "kept with the job: KeyError: '[redacted]'",
    ],
    "heavy_work": ["primes: [25, 1229, 78498]", "processes: 3"],
}
# The same programs on PostgreSQL, where TENURE_URL says so; this one on nothing else.
ON_POSTGRES = {
    **{name: said for name, said in EXPECTED.items() if name != "order_flow"},
    "postgres_orders": EXPECTED["order_flow"],
}


def test_every_example_is_tested() -> None:
    there = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert there == {*EXPECTED, *ON_POSTGRES, "flask_app", "fastapi_app", "fastapi_sqlalchemy"}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs_and_says_what_it_should(name: str, tmp_path: Path) -> None:
    runs(name, tmp_path, EXPECTED[name])


@pytest.mark.parametrize("name", ON_POSTGRES)
def test_an_example_does_the_same_on_postgres(name: str, tmp_path: Path, database: str) -> None:
    runs(name, tmp_path, ON_POSTGRES[name], TENURE_URL=database)


def runs(name: str, tmp_path: Path, expected: list[str], **more: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path), **more}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in expected:
        assert line in done.stdout


@pytest.fixture(params=["sqlite", "postgres"])
def example(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    url = f"sqlite:///{tmp_path / 'web.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("make_database")(migrated=True)
    monkeypatch.setenv("TENURE_URL", url)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield
    for name in (
        "flask_app",
        "fastapi_app",
        "fastapi_sqlalchemy",
    ):  # each time anew, on the database of its test
        module = sys.modules.pop(name, None)
        if module is not None:
            module.jobs.close()


@pytest.mark.usefixtures("example")
def test_the_flask_example_enqueues_once_per_user() -> None:
    import flask_app

    client = flask_app.web.test_client()
    first = client.post("/signup", data={"email": "a@b.c"})
    again = client.post("/signup", data={"email": "a@b.c"})
    assert (first.status_code, first.json["duplicate"]) == (202, False)
    assert again.json == {"job": first.json["job"], "duplicate": True}

    drain(flask_app.jobs)
    assert client.get(f"/jobs/{first.json['job']}").json == {
        "status": "completed",
        "result": "welcomed a@b.c",
    }
    assert client.get("/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV").status_code == 404


@pytest.mark.usefixtures("example")
def test_the_fastapi_example_works_in_its_own_process() -> None:
    import fastapi_app
    from starlette.testclient import TestClient

    with TestClient(fastapi_app.web) as client:
        id = client.post("/exports?rows=7").json()["job"]
        deadline = time.monotonic() + 20
        while client.get(f"/exports/{id}").json()["status"] != "completed":
            assert time.monotonic() < deadline
        assert client.get(f"/exports/{id}").json()["result"] == {"rows": 7}


@pytest.mark.usefixtures("example")
def test_the_sqlalchemy_example_charges_each_order_once() -> None:
    import fastapi_sqlalchemy as shop
    from sqlalchemy.orm import Session
    from starlette.testclient import TestClient

    with TestClient(shop.web) as client:
        placed = []
        for path in ("/orders", "/blocking/orders"):
            assert client.post(f"{path}?cents=0").status_code == 400
            answer = client.post(f"{path}?cents=1999")
            assert answer.status_code == 202
            placed.append(answer.json()["order"])
        deadline = time.monotonic() + 20
        for order in placed:
            while client.get(f"/orders/{order}").json()["state"] != "confirmed":
                assert time.monotonic() < deadline
        with Session(shop.engine) as session:
            paid = session.query(shop.Payment).order_by(shop.Payment.order_id).all()
            assert [(each.order_id, each.cents) for each in paid] == [(n, 1999) for n in placed]
            assert session.query(shop.Order).count() == 2
        assert shop.jobs.stats()["jobs"]["completed"] == 4
