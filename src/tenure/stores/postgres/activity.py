"""Who stands in the way: transactions that hold back vacuum, sessions that hold locks.

Other sessions' statements may carry payloads and passwords: of their text we show what comes before
the first value.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tenure.store import Finding
from tenure.stores.postgres.examining import Examination
from tenure.stores.postgres.horizon import holder

OLD_SECONDS = 60.0  # a transaction this old is worth knowing
LONG_SECONDS = 600.0  # one this old needs somebody
WAIT_SECONDS = 2.0
LONG_WAIT_SECONDS = 15.0  # what our own calls wait at most
HELD_SECONDS = 10.0  # an open transaction that has written events, and so long
OLD_TRANSACTIONS = 100_000  # that have been since a standby's oldest snapshot
SHOWN = 80

# A value begins: a quote of any kind but for names, a number, a comment (which may hold anything).
_VALUE = re.compile(r"'|\$(?!\d)|(?<![\w$])\d|(?<=[=<>(,\s])[-+.]\d|--|/\*")
_LEADING_COMMENT = re.compile(r"\s*(?:/\*.*?\*/|--[^\n]*(?:\n|$))", re.DOTALL)


def shortened(query: str) -> str:
    """The beginning of a statement, up to the first value in it."""
    while found := _LEADING_COMMENT.match(query):
        query = query[found.end() :]
    text = " ".join(query.split())
    if text[:4].upper() == "SET ":  # its values need no quotes
        return "SET …"
    value = _VALUE.search(text)
    end = min(value.start() if value else len(text), SHOWN)
    return text if end == len(text) else text[:end].rstrip() + " …"


def sessions(examination: Examination) -> list[Finding]:
    """Long transactions: while one is open, nothing deleted since it began is cleaned up."""
    findings = []
    rows = examination.ask("long_transactions", seconds=OLD_SECONDS)
    for pid, user, application, state, seconds, holds, query in rows:
        who = _who(pid, user, application, state)
        what = "holds back vacuum" if holds else "may hold locks"
        findings.append(
            Finding(
                "sessions",
                "problem" if holds and seconds > LONG_SECONDS else "warning",
                f"{who} has had a transaction open for {span(seconds)} and {what}: "
                f"{shortened(query) or 'no statement'}",
                f"end that transaction where it was begun, or SELECT pg_terminate_backend({pid}); "
                "idle_in_transaction_session_timeout ends such ones by itself",
            )
        )
    ((hidden,),) = examination.ask("hidden_sessions")
    if hidden:
        findings.append(
            Finding(
                "sessions",
                "warning",
                f"role {examination.server.role} may not look into {hidden} of the sessions in "
                "this database: whether one of them holds back vacuum is not known",
                f"GRANT pg_read_all_stats TO {examination.server.role}, or run this as a role "
                "that has it",
            )
        )
    findings += _prepared(examination) + _standbys(examination)
    return findings or [
        Finding("sessions", "ok", f"no transaction is older than {OLD_SECONDS:g} s")
    ]


def _prepared(examination: Examination) -> list[Finding]:
    return [
        Finding(
            "sessions",
            "problem",
            f"transaction {gid!r} of {owner} has been prepared for {span(seconds)} and holds back "
            "vacuum, also after a restart",
            f"whoever coordinates it has gone: ROLLBACK PREPARED {_literal(gid)} (or COMMIT)",
        )
        for gid, owner, seconds in examination.ask("prepared_transactions", seconds=OLD_SECONDS)
    ]


def _standbys(examination: Examination) -> list[Finding]:
    findings = []
    for kind, name, active, age in examination.ask("standbys", transactions=OLD_TRANSACTIONS):
        what = "replication slot" if kind == "slot" else "standby"
        if active:
            remedy = "end the long query on that standby, or set hot_standby_feedback = off there"
        else:
            remedy = f"nobody uses it: SELECT pg_drop_replication_slot({_literal(name)}), or start "
            remedy += "its standby again"
        findings.append(
            Finding(
                "sessions",
                "warning" if active else "problem",
                f"{what} {name!r} holds back vacuum: {age:,} transactions since its snapshot",
                remedy,
            )
        )
    return findings


def locks(examination: Examination) -> list[Finding]:
    findings = []
    rows = examination.ask("lock_waits", schema=examination.schema, seconds=WAIT_SECONDS)
    for pid, user, application, state, seconds, query, waiters, waited in rows:
        long = waited is not None and waited > LONG_WAIT_SECONDS
        waits = "1 session waits" if waiters == 1 else f"{waiters} sessions wait"
        since = "" if waited is None else f", the longest for {span(waited)}"
        if pid == 0:
            who, doing = "a prepared transaction", ""
            remedy = "SELECT * FROM pg_prepared_xacts, then ROLLBACK PREPARED it"
        else:
            who = _who(pid, user, application, state)
            lasts = "" if seconds is None else f" (its transaction is {span(seconds)} old)"
            doing = f"{lasts}: {shortened(query) or 'its statement is not shown to this role'}"
            remedy = (
                f"end that transaction where it was begun, or SELECT pg_terminate_backend({pid})"
            )
        findings.append(
            Finding(
                "locks",
                "problem" if long else "warning",
                f"{waits} for a lock on our tables{since}, held by {who}{doing}",
                remedy,
            )
        )
    return findings or [Finding("locks", "ok", "nobody waits for our tables")]


def events(examination: Examination) -> list[Finding]:
    """Who reads all events waits for transactions that may still add some."""
    rows = examination.ask("event_holders", seconds=HELD_SECONDS)
    if not rows:
        return [Finding("events", "ok", "nobody keeps readers of the audit trail waiting")]
    return [
        Finding(
            "events",
            "warning",
            "readers of all events (`tenure events`, app.events()) stop before those of an open "
            f"transaction: {holder(row)}",
            "jobs run meanwhile; end that transaction where it was begun"
            + (f", or SELECT pg_terminate_backend({row[0]})" if row[0] is not None else ""),
        )
        for row in rows
    ]


def _who(pid: int, user: str, application: str, state: str) -> str:
    named = f" {application!r}" if application else ""
    return f"pid {pid}{named} of {user or 'another role'}{f', {state},' if state else ''}"


def span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


CHECKS: dict[str, Callable[[Examination], list[Finding]]] = {
    "sessions": sessions,
    "locks": locks,
    "events": events,
}
