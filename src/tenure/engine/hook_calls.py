"""Lifecycle hooks: functions of the app's that are told when a run starts, ends or gets on.

A hook that raises, `sys.exit()` included, is logged and changes nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from tenure import outcome
from tenure.context import Lifecycle
from tenure.job import ClaimedJob

log = logging.getLogger("tenure.job")

Hook = Callable[[Lifecycle], Any]
Hooks = Mapping[str, Sequence[Hook]]  # by the kind of event


def tell(hooks: Hooks, event: Lifecycle) -> None:
    """The exception that the run has failed of is being handled then: `sys.exc_info()` has it."""
    here = os.getpid()
    for hook in hooks.get(event.kind, ()):
        try:
            said = _handling(event.exception, hook, event)
            if inspect.iscoroutine(said):
                _finish_hook(hook, event, said)
        except BaseException as error:
            if os.getpid() != here:
                raise  # in a process that the hook has forked: it ends
            _complain(hook, event.kind, error)


def tell_of_end(
    hooks: Hooks, job: ClaimedJob, how: outcome.Outcome, raised: BaseException | None
) -> None:
    match how:
        case outcome.Completed(result=result):
            if hooks.get("complete"):
                tell(hooks, Lifecycle.ended("complete", job, result, None))
        case outcome.Retried(failure=why):
            tell(hooks, Lifecycle.ended("failed", job, None, why.message, raised))
        case outcome.Failed(failure=why) | outcome.Dead(failure=why):
            tell(hooks, Lifecycle.ended("failed", job, None, why.message, raised))
            tell(hooks, Lifecycle.ended("final_failure", job, None, why.message, raised))


def _handling(raised: BaseException | None, call: Callable[..., Any], *args: Any) -> Any:
    """Call it as if from where `raised` is caught, which leaves no trace in it."""
    if raised is None:
        return call(*args)
    trace = raised.__traceback__
    try:
        raise raised
    except BaseException:
        raised.__traceback__ = trace
        return call(*args)


def _finish_hook(hook: Hook, event: Lifecycle, said: Coroutine[Any, Any, Any]) -> None:
    """An `async def` hook: on the loop when one runs here, else to its end right now."""

    async def guarded() -> None:
        try:
            await _handled(event.exception, said)
        except asyncio.CancelledError:
            raise  # the loop ends
        except BaseException as error:
            _complain(hook, event.kind, error)

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(guarded())
    else:
        loop.create_task(guarded())  # noqa: RUF006  held by the loop while it runs


async def _handled(raised: BaseException | None, said: Coroutine[Any, Any, Any]) -> None:
    if raised is None:
        await said
        return
    trace = raised.__traceback__
    try:
        raise raised
    except BaseException:
        raised.__traceback__ = trace
        await said


def _complain(hook: Hook, kind: str, error: BaseException) -> None:
    """Types only: the text may hold payload values, and a partial shows what it was given."""
    name = getattr(hook, "__name__", type(hook).__name__)
    log.error("hook %s for %r raised %s; the job goes on", name, kind, type(error).__name__)
