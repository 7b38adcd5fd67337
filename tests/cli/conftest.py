"""The real command in real processes, against a real file.

`stage` is made once: one job in every state there is. Each test gets its own copy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tenure.app import open_store
from tenure.config import Settings
from tenure.ids import new_id
from tenure.store import Store, WorkerInfo

SOURCE = Path(__file__).resolve().parents[2] / "src"
SECRET = "ada@secret.example"

SHOP = """
import time

import tenure

app = tenure.App("sqlite:///jobs.db")


@app.task
def nap(seconds: float) -> None:
    time.sleep(seconds)


@app.task(queue="notifications", retry=tenure.Retry(attempts=3, backoff=tenure.Fixed(3600)))
def send_email(to: str, template: str = "welcome") -> str:
    if to == "bounce":
        raise ValueError("no such mailbox")
    return f"sent {template}"


@app.task(retry=tenure.Retry(attempts=1))
def fragile(how: str = "dead") -> None:
    if how == "failed":
        raise tenure.PermanentError("closed for good", code="CLOSED")
    raise ValueError("boom")


@app.task
def report(pages: int = 1) -> dict[str, int]:
    return {"pages": pages}
"""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[Any]:
        """What --json printed, line by line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def object(self) -> Any:
        (only,) = self.objects
        return only


class Cli:
    """`tenure …` in one directory."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TENURE_", "NO_COLOR"))}
        return {**kept, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error", **more}

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "tenure", *args]

    def __call__(self, *args: str, stdin: str = "", **environment: str) -> Ran:
        ran = subprocess.run(
            self.command(*args),
            cwd=self.home,
            env=self.environment(**environment),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "\nTraceback" not in f"\n{ran.stderr}", ran.stderr  # in a log they are indented
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    @contextmanager
    def started(self, *args: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on by itself; killed if the test is done with it before."""
        given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        environment = self.environment(**given.pop("environment", {}))
        command = self.command(*args)
        with subprocess.Popen(
            command, cwd=self.home, env=environment, text=True, **given
        ) as running:
            try:
                yield running
            finally:
                running.kill()

    def shop(self, *args: str, **more: str) -> Ran:
        return self("-A", "shop:app", *args, **more)


@pytest.fixture
def tenure(tmp_path: Path) -> Cli:
    """A directory with the app and nothing else."""
    (tmp_path / "shop.py").write_text(SHOP, "utf-8")
    return Cli(tmp_path)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("stage")
    (home / "shop.py").write_text(SHOP, "utf-8")
    (home / "ids.json").write_text(json.dumps(populate(Cli(home))), "utf-8")
    return home


def populate(tenure: Cli) -> dict[str, str]:
    """One job in every state; their ids by state."""
    ids = {}

    def put(name: str, *args: str) -> None:
        ran = tenure.shop("enqueue", *args, "--json")
        assert ran.code == 0, ran.err
        ids[name] = ran.object["id"]

    put("completed", "send_email", json.dumps({"to": SECRET}), "--key", "welcome:7")
    put("retried", "send_email", '{"to": "bounce"}')
    put("failed", "fragile", '{"how": "failed"}')
    put("dead_letter", "fragile")
    put("later", "report", "--delay", "2h")
    put("cancelled", "report", '{"pages": 9}', "--org", "acme")
    assert tenure.shop("cancel", ids["cancelled"], "--reason", "changed my mind").code == 0
    drained = tenure.shop("worker", "--drain", "--json")
    assert drained.code == 0, drained.err
    put("queued", "report", '{"pages": 2}')
    return ids


@dataclass(frozen=True)
class Stage:
    tenure: Cli
    ids: dict[str, str]
    store: Store

    def __getitem__(self, name: str) -> str:
        return self.ids[name]

    def status(self, id: str) -> str:
        job = self.store.get(id)
        assert job is not None, f"no job {id}"
        return job.status


@pytest.fixture
def stage(made: Path, tmp_path: Path) -> Any:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    store = open_store(Settings(url=f"sqlite:///{tmp_path}/jobs.db"))
    yield Stage(Cli(tmp_path), json.loads((tmp_path / "ids.json").read_text("utf-8")), store)
    store.close()


def enlist(store: Store, **meta: Any) -> int:
    """A worker that is alive as far as the store knows."""
    return store.register(
        WorkerInfo(
            no=0, id=f"host:4711:{new_id()}", host="host", boot="boot", pid=4711, pid_started="1",
            beat=0, lease_ms=30_000, started_at=0, seen_at=0, dead_at=None, dead_reason=None,
            meta={"queues": None, "types": ["report"]} | meta, held=0,
        )
    )  # fmt: skip
