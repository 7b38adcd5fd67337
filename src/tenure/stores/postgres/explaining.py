"""What an error of PostgreSQL means: may the call be made again, and what is a person told.

Messages never hold values: DETAIL and the texts of data errors quote rows and parameters, so of
those only the SQLSTATE is shown.
"""

from __future__ import annotations

import re
from typing import Literal

import psycopg

from tenure import errors
from tenure.stores.postgres.connecting import CannotConnect, Late, Unconfirmed

# Rolled back because of what others did at the same time: nobody's fault.
CONFLICTS = frozenset({"40001", "40P01"})
# Certainly rolled back: made again whatever the call was.
ROLLED_BACK = CONFLICTS | {"55P03", "53300", "57P03"}
# Perhaps committed before the reply was lost: made again only where twice is once.
UNKNOWN = frozenset({"25006", "57014", "57P01", "57P02", "57P05"})
BUSY = CONFLICTS | {"55P03", "53300", "57014"}
# The session was ended: by an operator, with its server, for being idle.
ENDED = frozenset({"57P01", "57P02", "57P05", "25P03", "25P04"})
# About a prepared statement, before anything ran: the tables changed under it, or a pooler gave us
# another server's session. Or a migration replaced a function and its types in the middle of a call
# (XX000, 42883), which is rolled back. With new connections it cannot happen again.
STALE = frozenset({"0A000", "26000", "42P05", "XX000", "42883"})
NO_SCHEMA = frozenset({"3F000", "42P01", "42883"})
# Classes whose primary message names objects and settings, never values.
TELLING = ("08", "25", "28", "3D", "3F", "40", "42", "53", "55", "57", "58", "XX")
# Why a connection was refused is only said in words; a server that speaks another language is
# asked again until the time is up, and then quoted.
REFUSALS = (
    (r"authentication failed|no password supplied|no pg_hba\.conf entry|no such user", "28000"),
    (r"role .* (does not exist|is not permitted to log in)", "28000"),
    (r"database .* does not exist|no such database", "3D000"),
    (r"permission denied for database", "42501"),
    (r"too many (clients|connections)|remaining connection slots", "53300"),
    (r"session is (read-only|not read-write)|server is in hot standby", "25006"),
)

UNCONFIRMED = (
    "committed it, but no standby has confirmed that, and a failover would undo it: whether it "
    "lasts is not known. Repeat the call with the same jobs or key; see pg_stat_replication and "
    "synchronous_standby_names."
)

Verdict = Literal["again", "if repeatable", "never"]


def state_of(error: Exception) -> str:
    """The SQLSTATE, also of a refused connection; empty when there is none."""
    if isinstance(error, CannotConnect):
        return next((code for words, code in REFUSALS if re.search(words, error.reason)), "")
    return getattr(error, "sqlstate", None) or ""


def judge(error: Exception, *, lost: bool) -> Verdict:
    """May the call be made again? `lost`: its connection is gone."""
    state = state_of(error)
    if isinstance(error, CannotConnect):
        return "never" if state in ("28000", "3D000", "42501") else "again"
    if isinstance(error, Late):
        return "never"  # its time is up
    if state in ROLLED_BACK:
        return "again"
    if isinstance(error, Unconfirmed) or state in UNKNOWN or state.startswith("08") or lost:
        return "if repeatable"
    return "never"


def explain(error: Exception, place: str, schema: str, seconds: float) -> errors.TenureError:
    state = state_of(error)
    said = primary(error)
    if isinstance(error, Late | Unconfirmed):
        return _late(error, place, seconds)
    if state == "TN001":
        return errors.JobError(said)
    if state == "TN002":
        return errors.SchemaError(said)
    if state in NO_SCHEMA:
        return errors.SchemaError(
            f"{place} has no Tenure tables of this version in schema {schema} ({said or state}): "
            "run `tenure migrate`"
        )
    if state == "42501":
        return errors.StoreUnavailable(
            f"{place}: {said}. The database user lacks that right. `tenure migrate` and its --set "
            "are for the role that owns the tables; with --grant ROLE it gives a worker's role "
            "what that needs."
        )
    if state == "25006":
        return errors.StoreUnavailable(
            f"{place} is read-only: a replica, or a primary that was demoted. Name every host in "
            "the URL (postgresql://user@one,two/name), or point it at the primary."
        )
    if state == "53300":
        return errors.StoreBusy(
            f"{place} has no connection left for us, for {seconds:.3g} s. Raise max_connections, "
            "or put a pooler in front and use its URL."
        )
    if isinstance(error, CannotConnect):
        return _refused(error, state, place, seconds)
    if state in BUSY:
        return errors.StoreBusy(
            f"{place}: {said} ({state}), for {seconds:.3g} s. Nothing was changed; try again. "
            "`tenure doctor` shows who holds locks."
        )
    if state.startswith(("22", "23")):
        return errors.StoreError(
            f"{place} refused a value ({state}, {type(error).__name__}); values are not shown here"
        )
    if not state and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return errors.StoreUnavailable(
            f"the connection to {place} was lost. If it stays so, see the server's log and "
            "whatever is between here and there."
        )
    return errors.StoreUnavailable(f"{place}: {said or type(error).__name__} ({state or 'driver'})")


def _late(error: Late | Unconfirmed, place: str, seconds: float) -> errors.TenureError:
    if isinstance(error, Unconfirmed):
        return errors.StoreUnavailable(f"{place} {UNCONFIRMED}")
    if error.cancelled:
        return errors.StoreBusy(
            f"{place} did not get a statement done within {seconds:.3g} s, so it was cancelled "
            "and nothing was changed: it waits for somebody's lock, or the server is overloaded. "
            "Try again; `tenure doctor` shows who holds locks."
        )
    return errors.StoreUnavailable(
        f"{place} did not answer within {seconds:.3g} s: the server, its host or the network "
        "hangs. Whether the last change was made is not known."
    )


def _refused(error: CannotConnect, state: str, place: str, seconds: float) -> errors.TenureError:
    if state == "28000":
        return errors.StoreUnavailable(
            f"{place} refuses this user: wrong name or password in the URL, or pg_hba.conf has no "
            "line for it from this host"
        )
    if state == "3D000":
        return errors.StoreUnavailable(
            f"{place}: there is no such database. Create it (`createdb`), or correct the URL."
        )
    return errors.StoreUnavailable(
        f"{place} cannot be reached, tried for {seconds:.3g} s: {error.reason}. Is the server "
        "running, and are host and port right?"
    )


def primary(error: Exception) -> str:
    """The first line of what the server said, where that cannot quote a value."""
    if isinstance(error, CannotConnect):
        return error.reason
    if not isinstance(error, psycopg.Error):
        return ""
    state = error.sqlstate or ""
    ours = state.startswith("TN")
    if not ours and not state.startswith(TELLING):
        return ""
    return error.diag.message_primary or ""


def shows_values(error: Exception) -> bool:
    """Its text may quote values, so it must not be in a traceback as the cause of ours."""
    return isinstance(error, psycopg.Error) and not state_of(error).startswith(TELLING)
