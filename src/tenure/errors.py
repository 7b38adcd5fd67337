"""Every error Tenure raises on purpose, each saying what is wrong and what to do.

TenureError
├── ConfigError            a setting, a URL or a command line that cannot work
├── TaskError              something about a task's definition or its arguments
│   ├── UnknownTask        no task of that name in this app
│   ├── DuplicateTask      two functions under one name
│   └── ArgumentError      arguments that do not fit the task's signature
├── PayloadError           a value that cannot be stored as JSON on every store
├── JobError               something about one job
│   ├── JobNotFound        no job of that id (for you)
│   ├── IllegalTransition  the job's status does not allow that step
│   ├── DuplicateKey       the key is taken and the caller asked to be told
│   ├── JobFailed          raised by ``app.result``: the job ended without a result
│   └── LeaseLost          this run no longer owns the job; stop, its outcome is void
├── StoreError             the database
│   ├── StoreBusy          somebody holds the write lock longer than we may wait
│   ├── StoreUnavailable   cannot be opened, read or written
│   └── SchemaError        tables are missing, or newer than this version of Tenure
├── PermanentError         raised by handlers: do not retry
└── TransientError         raised by handlers: retry, perhaps after ``retry_after``

BaseException
└── JobCancelled           raised inside a handler by ``ctx.check()``: asked to stop
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class TenureError(Exception):
    """The root of the tree above.

    ``quoted`` are the parts of the message that Tenure did not write: names, paths a caller gave.
    Only they are scrubbed before a run's error is stored; None: nobody knows, so all of it is.
    """

    quoted: tuple[str, ...] | None = None

    def quoting(self, *texts: str) -> Self:
        self.quoted = texts
        return self


class ConfigError(TenureError):
    pass


class TaskError(TenureError):
    pass


class UnknownTask(TaskError):
    pass


class DuplicateTask(TaskError):
    pass


class ArgumentError(TaskError):
    code = "VALIDATION_ERROR"


class PayloadError(TenureError):
    """``code`` is RESULT_ERROR for what a handler has made: its result, a step's, progress. That
    is not retried, which could only do its work again. ``foreign``: it is about a type that JSON
    has no word for, and that may still be turned into one it has."""

    code: str | None = None
    foreign = False


class JobError(TenureError):
    pass


class JobNotFound(JobError):
    pass


class IllegalTransition(JobError):
    pass


class DuplicateKey(JobError):
    pass


class JobFailed(JobError):
    """The job ended ``failed``, ``dead_letter`` or ``cancelled``; ``status`` says which."""

    def __init__(self, message: str, *, status: str = "failed", code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class LeaseLost(JobError):
    pass


class StoreError(TenureError):
    """`unknown`: the reply was lost, so nobody knows whether the change was made. `uncharged`: the
    store could not end a run's work because of what others did; the run costs no attempt."""

    unknown = False
    uncharged = False


class StoreBusy(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class SchemaError(StoreError):
    pass


class PermanentError(TenureError):
    """Raise it in a handler when trying again cannot help: the job becomes ``failed``."""

    def __init__(self, message: str = "", *, code: str = "PERMANENT_ERROR") -> None:
        super().__init__(message)
        self.code = code


class TransientError(TenureError):
    """Raise it in a handler when trying again may help; ``retry_after`` overrides the backoff."""

    def __init__(
        self,
        message: str = "",
        *,
        retry_after: float | None = None,
        code: str = "TRANSIENT_ERROR",
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = code


class JobCancelled(BaseException):
    """Raised inside a handler that was asked to stop, by ``ctx.check()``.

    Not a TenureError: a handler's own ``except Exception`` must not swallow it.
    """
