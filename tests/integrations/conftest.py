"""A Django project of the test's own: a copy of the example, on a database of each kind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import tenure
from crash.harness import environment
from places import store_kind

__all__ = ["store_kind"]
ROOT = Path(__file__).resolve().parents[2]


class Project:
    """`manage.py` and what it works on."""

    def __init__(self, folder: Path, url: str) -> None:
        shutil.copytree(ROOT / "examples" / "django_shop", folder)
        self.folder = folder
        self.url = url
        self.started: list[subprocess.Popen[str]] = []
        address = urlsplit(url)
        self.variables = {"SHOP_FILE": str(folder / "shop.sqlite3")}
        if address.scheme != "sqlite":
            self.variables = {
                "SHOP_POSTGRES": address.path[1:],
                "PGHOST": str(address.hostname),
                "PGPORT": str(address.port),
                "PGUSER": str(address.username),
                "PGPASSWORD": address.password or "",
            }

    def environment(self, **more: str) -> dict[str, str]:
        return environment() | self.variables | {"PYTHONWARNINGS": "error"} | more

    def manage(self, *words: str, code: int = 0, **more: str) -> str:
        """Both streams, whatever the directory it is run from."""
        return self.run(str(self.folder / "manage.py"), *words, cwd=self.folder.parent, code=code)

    def run(self, *words: str, cwd: Path | None = None, code: int = 0, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=cwd or self.folder,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        with (self.folder / "worker.log").open("w") as log:
            self.started.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    cwd=self.folder,
                    env=self.environment(**more),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    text=True,
                )
            )
        return self.started[-1]

    def shell(self, program: str, **more: str) -> str:
        """With Django set up, as a view or a script of the project's has it."""
        head = "import django; django.setup()\n"
        return self.run("-c", head + program, DJANGO_SETTINGS_MODULE="shop.settings", **more)

    def close(self) -> None:
        for process in self.started:
            process.terminate()
            process.wait(30)


@pytest.fixture
def project(store_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    folder = tmp_path / "project"
    url = f"sqlite:///{folder / 'shop.sqlite3'}"
    if store_kind == "postgres":
        url = request.getfixturevalue("make_database")()
    made = Project(folder, url)
    made.manage("migrate", "--verbosity", "0")
    yield made
    made.close()


@pytest.fixture
def app(project: Project) -> Iterator[tenure.App]:
    """The project's jobs, seen from outside."""
    app = tenure.App(project.url)
    yield app
    app.close()
