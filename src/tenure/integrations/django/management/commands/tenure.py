"""`manage.py tenure worker`, `manage.py tenure jobs --dead`, …: the `tenure` command with this
project's app."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand

from tenure import cli

APP = "tenure.integrations.django:app"


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    help = "The tenure command with this project's app: worker, jobs, doctor, …"
    requires_system_checks: list[str] = []  # noqa: RUF012  as Django declares it

    def run_from_argv(self, argv: list[str]) -> None:
        """All words are the command's own."""
        sys.exit(run(argv[2:]))

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("words", nargs="*")

    def handle(self, *args: Any, **options: Any) -> None:
        run([*args, *options.get("words", ())])


def run(words: list[str]) -> int:
    """A worker's processes are to find the modules that manage.py finds."""
    os.environ.setdefault("TENURE_APP", APP)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], *([inherited] if inherited else [])])
    return cli.main(words)
