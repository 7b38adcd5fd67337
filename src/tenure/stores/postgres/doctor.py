"""What `tenure doctor` says about a PostgreSQL database, each finding with what to do about it.

Here: the server, how we get to it, the schema, the role. Who stands in the way is looked for in
`activity.py`, whether vacuum and partitions keep up in `upkeep.py`.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import psycopg

from tenure.store import Finding
from tenure.stores.postgres import activity, grants, upkeep
from tenure.stores.postgres.database import Database
from tenure.stores.postgres.examining import Examination, settle_for_a_standby, unseen
from tenure.stores.postgres.schema import SCHEMA_VERSION

OLDEST_MAJOR = 13
END_OF_LIFE = {
    13: datetime.date(2025, 11, 13),
    14: datetime.date(2026, 11, 12),
    15: datetime.date(2027, 11, 11),
    16: datetime.date(2028, 11, 9),
    17: datetime.date(2029, 11, 8),
    18: datetime.date(2030, 11, 14),
}
NEAR_DAYS = 180
CLOCK_SECONDS = 2.0
BUSY_SHARE = 0.8  # of the connections there may be
RELOAD = "SELECT pg_reload_conf()"

Check = Callable[[Examination], list[Finding]]


def inspect(database: Database) -> list[Finding]:
    """Reads only, and asks on when a question gets no answer. Raises where there is no server."""
    examination = Examination(database)
    try:
        findings = _each(examination, SERVER_CHECKS)
        tables = examination.tables
        if tables.usable and tables.readable:
            findings += _each(examination, {"role": role} | activity.CHECKS | upkeep.CHECKS)
    finally:
        examination.close()
    return findings


def _each(examination: Examination, checks: dict[str, Check]) -> list[Finding]:
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check(examination)
        except psycopg.Error as error:
            why = unseen(error, examination.database)
            findings.append(
                Finding(name, "warning", f"not known: {why}", "run `tenure doctor` again")
            )
    return findings


# ------------------------------------------------------------------------------- the server


def server(examination: Examination) -> list[Finding]:
    it, place = examination.server, examination.database.place
    text = f"PostgreSQL {it.version} at {place}, as role {it.role}"
    findings = []
    ends = END_OF_LIFE.get(it.major)
    if it.major < OLDEST_MAJOR:
        remedy = f"upgrade the server to PostgreSQL {max(END_OF_LIFE)}"
        what = f"{text}: Tenure needs {OLDEST_MAJOR} or newer"
        findings.append(Finding("server", "problem", what, remedy))
    elif ends is not None and ends <= datetime.date.today() + datetime.timedelta(NEAR_DAYS):
        verb = "ends" if ends > datetime.date.today() else "ended"
        what = f"{text}: support for {it.major} {verb} on {ends}"
        findings.append(
            Finding("server", "warning", what, f"plan its upgrade to {max(END_OF_LIFE)}")
        )
    else:
        findings.append(Finding("server", "ok", text))
    if it.standby:
        findings.append(
            Finding(
                "server",
                "problem",
                f"{place} is a standby, so it is read-only: jobs can be looked at, not run",
                "name every host in the URL (postgresql://user@one,two/name), or point it at the "
                "primary; findings about vacuum are the primary's",
            )
        )
    if it.encoding != "UTF8":
        what = f"the database's encoding is {it.encoding}: payloads in other alphabets are refused"
        remedy = "move to a database made with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        findings.append(Finding("server", "problem", what, remedy))
    ahead = it.clock - time.time()
    if abs(ahead) > CLOCK_SECONDS:
        what = f"the server's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
        findings.append(
            Finding(
                "clock",
                "warning",
                f"{what} this machine's: jobs are due by the server's, and what this command says "
                "about workers is off by as much",
                "let both follow a time server (chrony, systemd-timesyncd)",
            )
        )
    return findings


def durability(examination: Examination) -> list[Finding]:
    """Promise 1: what was acknowledged is never lost. These settings break it."""
    it = examination.server
    findings = []
    if it.fsync == "off":
        findings.append(
            Finding(
                "durability",
                "problem",
                "fsync is off: when the machine stops, the whole database may be lost",
                f"ALTER SYSTEM SET fsync = on; {RELOAD}",
            )
        )
    if it.full_page_writes == "off":
        findings.append(
            Finding(
                "durability",
                "warning",
                "full_page_writes is off: half-written pages cannot be repaired after a power "
                "failure, unless the file system never writes half a page (ZFS)",
                f"ALTER SYSTEM SET full_page_writes = on; {RELOAD}",
            )
        )
    if it.synchronous_commit == "off":
        findings.append(
            Finding(
                "durability",
                "problem",
                f"synchronous_commit is off for role {it.role}: the last acknowledged jobs are "
                "lost when the server stops",
                f"ALTER ROLE {grants.quoted(it.role)} SET synchronous_commit = on, or ALTER SYSTEM "
                f"SET synchronous_commit = on; {RELOAD}",
            )
        )
    settings = f"fsync on, synchronous_commit {it.synchronous_commit}"
    return findings or [Finding("durability", "ok", settings)]


def connections(examination: Examination) -> list[Finding]:
    it = examination.server
    ((used,),) = examination.ask("connections")
    usable = it.max_connections - it.reserved
    text = f"{used} of {usable} in use"
    if it.reserved:
        text += f" ({it.reserved} more are reserved)"
    if used < usable * BUSY_SHARE:
        return [Finding("connections", "ok", text)]
    return [
        Finding(
            "connections",
            "warning",
            text,
            "raise max_connections (needs a restart), or put pgbouncer in transaction mode in "
            "front and use its URL; a worker holds about 4, at most 11 and one for each open "
            "ctx.transaction()",
        )
    ]


# ------------------------------------------------------------------------------- a pooler


def pooler(examination: Examination) -> list[Finding]:
    if not examination.database.pooled:
        return []
    mode = _mode(examination)
    return [
        Finding(
            "pooler",
            "ok",
            f"a pooler is in between, in {mode}: nothing is prepared there. LISTEN needs the "
            "server itself: TENURE_LISTEN_URL; `hints` says whether that works",
        )
    ]


def _mode(examination: Examination) -> str:
    """Two clients tell: who shares a server session with another client that is still there, or
    changes it between two transactions, is not in session mode."""
    one, two = examination.another(), examination.another()
    try:
        with examination.transaction(one):
            first = examination.run(one, "own_session")
        with examination.transaction(two):
            other = examination.run(two, "own_session")
            with examination.transaction(one):
                second = examination.run(one, "own_session")
    finally:
        one.close()
        two.close()
    if other == first or second != first:
        return "transaction mode"
    return "session mode, as far as it can be told"


# ------------------------------------------------------------------------------- schema and role


def schema(examination: Examination) -> list[Finding]:
    name = examination.schema
    tables, role = examination.tables, examination.server.role
    if tables.present and not (tables.usable and (tables.readable or not tables.stamped)):
        what = f"role {role} may not look into schema {name}"
        remedy = f"as the role that migrates: tenure migrate --grant {role}"
        return [Finding("schema", "problem", what, remedy)]
    version, compatible_from = examination.ask("version")[0] if tables.stamped else (0, 0)
    known = SCHEMA_VERSION
    if version == 0:
        return [Finding("schema", "problem", f"no tables in schema {name}", "tenure migrate")]
    if version < known:
        what = f"schema {name} has version {version}, this program needs {known}"
        return [Finding("schema", "problem", what, "tenure migrate")]
    if compatible_from > known:
        what = f"schema {name} has version {version}, which needs a newer program than this one"
        return [Finding("schema", "problem", what, "upgrade Tenure here")]
    if version > known:
        what = f"version {version}, which works with this program's {known}"
        return [Finding("schema", "ok", what)]
    return [Finding("schema", "ok", f"version {version} of {known}, up to date")]


def role(examination: Examination) -> list[Finding]:
    name = examination.server.role
    missing = grants.missing_rights(examination, name)
    if missing:
        return [
            Finding(
                "role",
                "problem",
                f"role {name} lacks {missing}",
                f"as the role that migrates: tenure migrate --grant {name}",
            )
        ]
    text = f"{name} has what a worker needs"
    if examination.tables.may_create or examination.tables.owned:
        text += "; it may also change and drop the tables, which a worker need not: give workers a "
        text += "role of their own with tenure migrate --grant ROLE"
    return [Finding("role", "ok", text)]


SERVER_CHECKS: dict[str, Check] = {
    "server": server,
    "durability": durability,
    "pooler": pooler,
    "connections": connections,
    "schema": schema,
}

__all__ = ["inspect", "settle_for_a_standby"]
