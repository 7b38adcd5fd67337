"""Tenure: durable background work for Python, from one SQLite file to a PostgreSQL fleet.

import tenure
app = tenure.App("sqlite:///jobs.db")

@app.task
def greet(name: str) -> str:
    return f"hello {name}"

greet.enqueue("world")        # then: tenure -A module:app worker
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenure.app import App
from tenure.context import Cancel, Context, Fail, Lifecycle, Snooze, acting
from tenure.errors import (
    ArgumentError,
    ConfigError,
    DuplicateKey,
    DuplicateTask,
    IllegalTransition,
    JobCancelled,
    JobError,
    JobFailed,
    JobNotFound,
    LeaseLost,
    PayloadError,
    PermanentError,
    SchemaError,
    StoreBusy,
    StoreError,
    StoreUnavailable,
    TaskError,
    TenureError,
    TransientError,
    UnknownTask,
)
from tenure.job import Actor, NewJob, Receipt
from tenure.policy import Exponential, Fixed, Keep, Retry, Steps, stable_key
from tenure.task import Task

if TYPE_CHECKING:
    from tenure.stored import Event, Job

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "App",
    "ArgumentError",
    "Cancel",
    "ConfigError",
    "Context",
    "DuplicateKey",
    "DuplicateTask",
    "Event",
    "Exponential",
    "Fail",
    "Fixed",
    "IllegalTransition",
    "Job",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobNotFound",
    "Keep",
    "LeaseLost",
    "Lifecycle",
    "NewJob",
    "PayloadError",
    "PermanentError",
    "Receipt",
    "Retry",
    "SchemaError",
    "Snooze",
    "Steps",
    "StoreBusy",
    "StoreError",
    "StoreUnavailable",
    "Task",
    "TaskError",
    "TenureError",
    "TransientError",
    "UnknownTask",
    "acting",
    "stable_key",
]


def __getattr__(name: str) -> Any:
    if name in ("Event", "Job"):  # 5 ms, for who reads jobs: short-lived processes only enqueue
        from tenure import stored

        return getattr(stored, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
