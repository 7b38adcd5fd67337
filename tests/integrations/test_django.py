"""`tenure.integrations.django`: a project's jobs beside its data, its commands, its workers, its
tests, and connections that are killed under them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

import tenure
from crash.harness import eventually
from places import only

from .conftest import Project

PLACE = """
from django.db import transaction
from django.test import Client
posted = Client().post("/orders/", {"cents": %d})
print(posted.status_code)
"""


def test_an_order_goes_through(project: Project, app: tenure.App) -> None:
    """From a view to a worker of `manage.py`, started in another directory than the project's."""
    assert project.shell(PLACE % 1999).split()[-1] == "202"
    (job,) = app.find()
    assert (job.type, job.status, job.queue) == ("charge", "queued", "critical")

    said = project.manage("tenure", "worker", "--drain")
    jobs = {job.type: (job.status, job.result) for job in app.find()}
    assert jobs == {
        "charge": ("completed", {"cents": 1999}),
        "confirm": ("completed", "order 1 is paid"),
    }, said
    listed = project.manage("tenure", "jobs", "--json")
    assert {json.loads(line)["type"] for line in listed.splitlines()} == {"charge", "confirm"}


def test_inside_atomic_a_job_shares_its_fate(project: Project, app: tenure.App) -> None:
    assert project.shell(PLACE % 0).split()[-1] == "400"
    assert list(app.find()) == []

    ways = """
import asyncio
from django.db import transaction
from shop.tasks import app, charge, confirm
class Undo(Exception): pass
for end in (False, True):
    try:
        with transaction.atomic():
            charge.enqueue(1)
            app.enqueue_many([charge.job(2), confirm.job(3)])
            app.enqueue("confirm", {"order": 4})
            if end: raise Undo
    except Undo: pass
charge.enqueue(5)  # outside: durable at once
asyncio.run(charge.aenqueue(6))
"""
    project.shell(ways)
    orders = sorted(job.payload["order"] for job in app.find())
    assert orders == [1, 2, 3, 4, 5, 6]


def test_other_commands(project: Project) -> None:
    assert "usage: tenure worker" in project.manage("tenure", "worker", "--help")
    assert "no such command" not in project.manage("tenure", "doctor", "--help")
    project.manage("tenure", "no-such-command", code=2)
    called = "from django.core.management import call_command; call_command('tenure', 'jobs')"
    project.shell(called)


def test_a_plain_worker_sets_django_up(project: Project, app: tenure.App) -> None:
    """`tenure worker` of a module that imports models first, told by the environment."""
    project.shell(PLACE % 700)
    tenure_command = ["-m", "tenure", "-A", "shop.tasks:app", "worker", "--drain"]
    project.run(*tenure_command, DJANGO_SETTINGS_MODULE="shop.settings")
    assert {job.status for job in app.find()} == {"completed"}

    broken = project.run(*tenure_command, DJANGO_SETTINGS_MODULE="nowhere.settings", code=2)
    assert "DJANGO_SETTINGS_MODULE=nowhere.settings" in broken


def test_the_project_s_own_tests(project: Project, app: tenure.App) -> None:
    """Jobs are in Django's test database, rolled back with each TestCase; none is in the real
    one. In parallel each process has a copy."""
    said = project.manage("test", "shop")
    assert "Ran 3 tests" in said
    assert "OK" in said
    assert list(app.find()) == []
    assert "OK" in project.manage("test", "shop", "--parallel", "2")
    assert list(app.find()) == []


def test_a_thousand_migrations_of_one_test_database(project: Project) -> None:
    """Each TransactionTestCase ends in a flush, which migrates; the end drops the database once."""
    tests = """
from django.db import connection
from django.test import TransactionTestCase
from tenure.integrations.django import app
from tenure.integrations.django.apps import leave_before_the_end

class Many(TransactionTestCase):
    def test_many(self):
        for _ in range(1_000):
            leave_before_the_end(connection.creation, app)
"""
    (project.folder / "shop" / "tests.py").write_text(tests)
    assert "OK" in project.manage("test", "shop")


def test_an_enqueue_after_an_error_in_the_same_atomic(project: Project) -> None:
    """It is not the enqueue that was refused, on neither store."""
    said = project.shell("""
from django.db import IntegrityError, transaction
from shop.models import Order
from shop.tasks import charge
order = Order.objects.create(cents=1)
with transaction.atomic():
    try:
        Order.objects.create(id=order.id, cents=1)
    except IntegrityError:
        pass
    try:
        charge.enqueue(order.id)
    except Exception as error:
        print(type(error).__name__, error)
""")
    assert "TransactionManagementError An error occurred in the current transaction" in said


def test_statements_of_earlier_jobs_are_forgotten(project: Project) -> None:
    """With DEBUG Django remembers them until the next request, and a worker has none."""
    said = project.shell("""
from django.db import connection
from shop.models import Order
from tenure.integrations.django import app
from tenure.testing import drain
@app.task
def ask() -> int:
    list(Order.objects.all())
    return len(connection.queries_log)
receipts = app.enqueue_many([ask.job() for _ in range(5)])
drain(app)
print(*(app.result(each.id) for each in receipts))
""")
    first, *later = (int(word) for word in said.split())
    assert first > 0
    assert max(later) <= first


def test_a_test_without_a_database_does_not_reach_the_real_one(
    project: Project, app: tenure.App
) -> None:
    """Django makes no test database for these, and forbids its connections; ours, too."""
    tests = """
from django.test import SimpleTestCase
from shop.tasks import app, charge
from tenure.testing import drain

class WithoutADatabase(SimpleTestCase):
    def test_all_are_refused(self):
        for ask in (lambda: charge.enqueue(1), lambda: drain(app)):
            with self.assertRaisesRegex(Exception, "not allowed in SimpleTestCase"):
                ask()
"""
    (project.folder / "shop" / "tests.py").write_text(tests)
    project.manage("test", "shop")
    assert list(app.find()) == []


OWN_FILE = """

import tempfile

from tenure.testing import drain, use


class OnAFileOfItsOwn(TestCase):
    @classmethod
    def setUpTestData(cls):
        cls.order = Order.objects.create(cents=5)

    def test_a_job_leaves_the_transaction_of_the_test_open(self):
        with tempfile.TemporaryDirectory() as folder, use(app, folder):
            touch.enqueue(self.order.id)
            drain(app, raise_failures=True)
        self.assertEqual(Order.objects.get().state, "touched")

    def test_the_next_one_finds_its_data(self):
        self.assertEqual(Order.objects.get().state, "new")
"""
TOUCH = """

@app.task
def touch(order: int) -> None:
    Order.objects.filter(id=order).update(state="touched")
"""


def test_a_job_that_runs_inside_a_testcase(project: Project) -> None:
    """On the thread of the test, whose transaction is open: it is not ours to close."""
    tests, tasks = project.folder / "shop" / "tests.py", project.folder / "shop" / "tasks.py"
    tasks.write_text(tasks.read_text() + TOUCH)
    imported = tests.read_text().replace("import charge\n", "import charge, touch\n")
    tests.write_text(imported + OWN_FILE)
    assert "Ran 2 tests" in project.manage("test", "shop.tests.OnAFileOfItsOwn")


def test_jobs_inside_a_transaction_of_a_test(project: Project) -> None:
    """Inline they run when it commits, if it does. What a TestCase holds nobody can look at: the
    assertions say so at once, for one that nothing was enqueued would always hold."""
    tests = """
from django.db import transaction
from django.test import TestCase, TransactionTestCase
import tenure
from shop.models import Order
from shop.tasks import app, charge
from tenure.testing import assert_enqueued, drain, enqueued, inline, refute_enqueued

class Inside(TestCase):
    def test_all_of_them_say_what_to_do(self):
        self.client.post("/orders/", {"cents": 5})
        asked = [
            lambda: assert_enqueued(app, charge),
            lambda: refute_enqueued(app, charge),
            lambda: enqueued(app),
            lambda: drain(app),
            lambda: inline(app).__enter__(),
        ]
        for ask in asked:
            with self.assertRaisesRegex(tenure.TenureError, "make it a TransactionTestCase"):
                ask()

class Inline(TransactionTestCase):
    def test_it_runs_with_the_commit(self):
        with inline(app):
            self.client.post("/orders/", {"cents": 5})
            self.assertEqual(Order.objects.get().state, "paid")

    def test_what_is_rolled_back_leaves_no_job(self):
        before = len(enqueued(app))
        with inline(app):
            answer = self.client.post("/orders/", {"cents": 0})
        self.assertEqual((answer.status_code, len(enqueued(app)) - before), (400, 0))

    def test_a_failure_comes_out_of_the_commit(self):
        with inline(app), self.assertRaises(tenure.JobFailed), transaction.atomic():
            charge.enqueue(0)
"""
    (project.folder / "shop" / "tests.py").write_text(tests)
    assert "Ran 4 tests" in project.manage("test", "shop")


@only("sqlite", "other databases of a test are on a server")
def test_a_test_database_in_memory_is_refused_by_who_enqueues(project: Project) -> None:
    settings = project.folder / "shop" / "settings.py"
    settings.write_text(settings.read_text().replace('"TEST": ', '"TEST_OF_OTHERS": '))
    said = project.manage("test", "shop", code=1)
    assert '"TEST": {"NAME": BASE_DIR / "test.sqlite3"}' in said
    assert "Ran 3 tests" in said  # those that enqueue nothing go on


def test_a_url_of_its_own(project: Project, tmp_path: Path) -> None:
    elsewhere = tmp_path / "jobs.db"
    settings = project.folder / "shop" / "settings.py"
    url = f"sqlite:///{elsewhere}"
    settings.write_text(settings.read_text() + f"\nTENURE = {{'url': {url!r}, 'concurrency': 3}}\n")
    print_settings = "from tenure.integrations.django import app; print(app.settings.concurrency)"
    assert project.shell(print_settings).split() == ["3"]
    project.shell("from shop.tasks import charge; charge.enqueue(1)")
    app = tenure.App(url)
    assert [job.type for job in app.find()] == ["charge"]
    app.close()


def test_a_setting_that_is_misspelt(project: Project) -> None:
    settings = project.folder / "shop" / "settings.py"
    settings.write_text(settings.read_text() + "\nTENURE = {'concurency': 3}\n")
    assert "did you mean concurrency?" in project.manage("tenure", "jobs", code=1)


def test_an_alias_that_is_misspelt(project: Project) -> None:
    settings = project.folder / "shop" / "settings.py"
    settings.write_text(settings.read_text() + "\nTENURE = {'database': 'defalt'}\n")
    said = project.manage("tenure", "jobs", code=1)
    assert "DATABASES has no 'defalt', which TENURE names; it has: 'default'" in said


def test_without_settings(project: Project) -> None:
    said = project.run("-m", "tenure", "-A", "tenure.integrations.django:app", "jobs", code=2)
    assert "set DJANGO_SETTINGS_MODULE" in said and "manage.py tenure" in said


# -- killed connections ---------------------------------------------------------------------------

MANY = """
import time
from asgiref.sync import sync_to_async
import tenure
from django.db import connection
from shop.models import Order
from tenure.integrations.django import app

AGAIN = tenure.Retry(attempts=5, backoff=tenure.Fixed(0.2))

@app.task(retry=AGAIN)
def touch(order: int) -> int:
    for _ in range(10):
        Order.objects.filter(id=order).update(state="touched")
        time.sleep(0.03)
    return Order.objects.get(id=order).cents

@app.task(retry=AGAIN)
async def atouch(order: int) -> int:
    for _ in range(10):
        await Order.objects.filter(id=order).aupdate(state="touched")
    return (await Order.objects.aget(id=order)).cents

@app.task(retry=AGAIN)
def settle(ctx: tenure.Context, order: int) -> None:
    with ctx.transaction(conn=connection):
        Order.objects.filter(id=order).update(state="settled")
        time.sleep(0.05)
        ctx.result(order)
"""
JOBS = 60


@contextmanager
def working(project: Project) -> Iterator[None]:
    worker = project.start(str(project.folder / "manage.py"), "tenure", "worker", "-c", "8")
    try:
        yield
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(40) == 0, (project.folder / "worker.log").read_text()


@only("postgres", "a file has no connections that somebody could kill")
@pytest.mark.parametrize("task", ["touch", "atouch", "settle"])
def test_killed_connections_cost_an_attempt_at_most(
    project: Project, app: tenure.App, task: str
) -> None:
    """All of Django's connections, again and again, while 60 jobs use the ORM: with connections
    that are kept for a minute, nobody would notice until they are used."""
    tasks = project.folder / "shop" / "tasks.py"
    tasks.write_text(tasks.read_text() + MANY)
    project.shell(
        "from shop.models import Order\n"
        f"Order.objects.bulk_create(Order(cents=n) for n in range({JOBS}))\n"
        f"from shop.tasks import app, {task}\n"
        f"app.enqueue_many([{task}.job(order.id) for order in Order.objects.all()])\n"
    )
    with working(project), psycopg.connect(project.url, autocommit=True) as killer:
        for done in (5, 20, 35, 50):
            eventually(
                lambda done=done: app.stats()["jobs"]["completed"] >= done,
                within=60,
                what=f"{done} completed",
            )
            killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND application_name NOT LIKE 'tenure%'"
            )
        eventually(
            lambda: app.stats()["jobs"]["completed"] == JOBS, within=60, what="all completed"
        )
    jobs = list(app.find())
    attempts = sum(job.attempts for job in jobs)
    print(f"\n{JOBS} jobs of {task}, 4 x all connections killed: {attempts} attempts")
    assert {job.status for job in jobs} == {"completed"}
    assert max(job.attempts for job in jobs) <= 5
