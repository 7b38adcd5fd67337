"""What a supervisor and a child say to each other.

Messages are tagged structs. Between processes they travel through a pipe (`pipe.py`); an embedded
worker passes the same objects by calls.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tenure.job import ClaimedJob
from tenure.outcome import Ended
from tenure.policy import Keep
from tenure.store import Registration


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A child's first message: what it can run, and how its app is set up."""

    pid: int
    types: list[str]
    environment: dict[str, str]  # the app's settings, as Settings.to_env gives them
    alone: list[str]  # types that run in a process of their own
    keep: dict[str, Keep]  # types with a retention of their own
    # What follows a time-out whose process had to be killed: seconds until the next attempt after
    # the first attempt, the second, ... (the last repeats); None: the task gives up on a time-out.
    time_outs: dict[str, list[float] | None]
    queues: list[str] = []  # the queues that its tasks name
    folders: list[str] = []  # where its code is; only with `--reload`


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Sent instead of Hello: the app could not be loaded."""

    message: str
    folders: list[str] = []


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    slot: int  # where the board says whether the job has started
    job: ClaimedJob


class RunJobs(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    jobs: list[Assignment]
    worker: Registration  # under which these jobs were claimed, and are finished


class CancelJobs(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Job id -> reason. A reason of None: the lease is gone, stop without an outcome."""

    ids: dict[str, str | None]


class ForgetWaiting(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """The child did not answer, so the jobs that it had not started were taken back: it forgets
    them and goes on."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Start nothing more: give back what has not started, end what runs, then leave."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    ended: list[Ended]
    progress: list[tuple[str, int, str]]  # job id, lease_no, JSON text
    stuck: int = 0  # threads lost to handlers that overran their time-out


ToChild: TypeAlias = RunJobs | CancelJobs | ForgetWaiting | Stop
FromChild: TypeAlias = Hello | Refused | Report
