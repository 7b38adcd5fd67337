"""One run of one job: the lease it runs under, and what its handler asks through `Context`.

The only way from a handler to the store: steps, results of dependencies, the transaction that ends
the job. The store is opened at the first such call; most handlers make none.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from tenure import context, payload, reference
from tenure.config import Settings
from tenure.engine.client import Client
from tenure.engine.hook_calls import Hook, tell
from tenure.errors import JobError, PayloadError
from tenure.job import ClaimedJob, NewJob
from tenure.store import Registration
from tenure.task import Task

RESULT_ERROR = "RESULT_ERROR"
MOST_PROGRESS_BYTES = 8192


class RunningApp(Protocol):
    """The part of an app that running a job needs."""

    settings: Settings
    tasks: dict[str, Task[..., Any]]
    hooks: dict[str, list[Hook]]
    secrets: tuple[str, ...]  # the references it may ask for
    secret_provider: Callable[[str], str | None] | None
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None

    @property
    def client(self) -> Client: ...


class JobRun(msgspec.Struct, eq=False):
    """One assignment on its way through the executor."""

    job: ClaimedJob
    slot: int
    task: Task[..., Any]
    app: RunningApp
    worker: Registration  # under which the job was claimed
    begun: float = 0.0
    deadline: float = 0.0
    cancel_reason: str | None = None
    cancel_by: float = math.inf  # when patience with a cancelled handler ends
    lost: bool = False
    timed_out: bool = False
    done: bool = False
    settled: bool = False  # its own transaction has written its finish
    settling: bool = False  # inside its transaction's block
    result: str | None = None  # what its own transaction has stored
    follow_ups: list[NewJob] = []
    closed: bool = False  # its follow-ups have been taken for its finish: there are no more
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)  # for its follow-ups
    secrets: list[str] = []  # what it has fetched: here only, to be kept out of its words
    stopped: BaseException | None = None  # what the executor has stopped it with
    raised: BaseException | None = None  # what it has failed of, until hooks are told
    progress: str | None = None
    progress_due: float = 0.0
    waiter: asyncio.Task[None] | None = None  # None for a thread's run

    def call(self) -> Any:
        """Call the handler; of an `async def` one this gives a coroutine."""
        signature, function = self.task.signature, self.task.function
        if self.app.around is not None:
            function = self.app.around(function)
        view = context.Context(self) if signature.takes_context else None
        return signature.call(function, view, signature.unpack(self.job.payload))

    def lasted_ms(self) -> int:
        return int((time.monotonic() - self.begun) * 1000)

    # -- follow-up jobs -----------------------------------------------------------------------
    def adopt(self, follow_up: NewJob) -> None:
        """Under a lock: a thread of the handler's may ask while the run ends, and where this
        returns the job will be stored."""
        with self.lock:
            if not self.closed:
                self.follow_ups.append(follow_up)
                return
        raise JobError(
            "ctx.enqueue: this run is over, and with it its follow-up jobs were stored. What comes "
            f"later is a job of its own: {follow_up.terms.type}.enqueue(…)"
        )

    def take_follow_ups(self) -> tuple[NewJob, ...]:
        """For its finish; it gets no more."""
        if not self.task.signature.takes_context:
            return ()  # it could not ask for any
        with self.lock:
            self.closed = True
            return tuple(self.follow_ups)

    # -- what else `Context` asks -------------------------------------------------------------
    def report(self, progress: dict[str, Any]) -> None:
        with made_by_the_handler():
            self.progress = payload.encode(progress, what="progress", max_bytes=MOST_PROGRESS_BYTES)
        if self.app.hooks:
            tell(self.app.hooks, context.Lifecycle("progress", self.job, progress=progress))

    def steps(self) -> dict[str, str]:
        return self.app.client.store.steps(self.job.id)

    def save_step(self, name: str, result: str) -> bool:
        run = (self.job.id, self.job.lease_no)
        return self.app.client.store.save_step(self.worker, run, name, result)

    def results(self) -> dict[str, tuple[str, Any]]:
        return self.app.client.store.results(self.job.id)

    def secret(self, ref: str) -> str:
        app = self.app
        value = reference.resolve(ref, app.secrets, app.secret_provider, os.environ)
        if value not in self.secrets:
            self.secrets.append(value)
        return value

    def pack(self, value: Any, step: str) -> str:
        with made_by_the_handler(repr(step)):
            return self.task.signature.encode(value, f"the result of step {step!r}")

    def transaction(self, result: Callable[[], Any], conn: Any) -> context.Transaction:
        from tenure.engine.run_transaction import RunTransaction  # most runs have none

        return RunTransaction(self, result, conn)

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await self.app.client.in_thread(call, *args)


@contextmanager
def made_by_the_handler(*named: str) -> Iterator[None]:
    """A value of the handler's that cannot be stored is no reason to run the job again."""
    try:
        yield
    except PayloadError as error:
        error.code = RESULT_ERROR
        error.quoting(*(error.quoted or ()), *named)
        raise
