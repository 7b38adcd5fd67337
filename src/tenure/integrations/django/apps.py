"""What Django loads: tasks are found in each app's `tasks.py`; `manage.py migrate` makes tables."""

from __future__ import annotations

from typing import Any

from asgiref.sync import SyncToAsync
from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from tenure.integrations.django.project import DjangoApp, project_app


class TenureConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    name = "tenure.integrations.django"
    label = "tenure"
    verbose_name = "Tenure"

    def ready(self) -> None:
        autodiscover_modules("tasks")
        post_migrate.connect(make_tables, sender=self)


def make_tables(using: str, **_more: Any) -> None:
    """In the database that was migrated just now, a test's included."""
    app, connection = project_app(), connections[using]
    if connection.vendor == "sqlite" and connection.is_in_memory_db():
        return  # a test's: an enqueue says what to do
    if app.lives_in(using):
        app.migrate()
        app.close()  # a test runner may be about to copy the file
        leave_before_the_end(connection.creation, app)


def leave_before_the_end(creation: Any, app: DjangoApp) -> None:
    """A server drops no database, a test's neither, while somebody is connected to it. Once: the
    flush after each TransactionTestCase migrates again, and a thousand wrappers are too deep."""
    drop = creation._destroy_test_db
    if getattr(drop, "__name__", "") == "close_and_drop":
        return

    def close_and_drop(*args: Any, **named: Any) -> None:
        app.close()
        SyncToAsync.single_thread_executor.submit(connections.close_all).result()
        drop(*args, **named)

    creation._destroy_test_db = close_and_drop
