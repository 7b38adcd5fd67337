"""Whether the tables are kept in shape: dead rows, autovacuum, partitions by day, replication."""

from __future__ import annotations

from collections.abc import Callable

from tenure.store import Finding
from tenure.stores.postgres.activity import span
from tenure.stores.postgres.examining import Examination
from tenure.stores.rows import waiting_for_the_dead

DEAD_TUPLES = 100_000
# Autovacuum looks every minute: rows that died since its last round say nothing yet. So many that
# not even a round of a minute ago explains them could not be removed by it.
VACUUMED_SECONDS = 600.0
UNREMOVED = 10
OTHER_ROWS = 100_000
WAITING_ROWS = 20_000
BEHIND_BYTES = 1 << 30  # of log that a slot in use keeps from being removed
RELOAD = "SELECT pg_reload_conf()"


def vacuum(examination: Examination) -> list[Finding]:
    findings = _switches(examination)
    rows = examination.ask("dead_tuples", schema=examination.schema)
    for table, live, dead, ago in rows:
        late = ago is None or ago > VACUUMED_SECONDS
        if dead > (DEAD_TUPLES if late else UNREMOVED * DEAD_TUPLES):
            when = "never vacuumed" if ago is None else f"vacuumed {span(ago)} ago"
            findings.append(
                Finding(
                    "vacuum",
                    "warning",
                    f"{table} has {dead:,} dead rows beside {live:,} live ones, {when}",
                    f"VACUUM {examination.schema}.{table}; if they stay, something under "
                    "`sessions` holds vacuum back; if they come again, lower autovacuum_naptime",
                )
            )
    if findings:
        return findings
    dead = {table: number for table, _live, number, _ago in rows}
    return [Finding("vacuum", "ok", f"jobs has {dead.get('jobs', 0):,} dead rows")]


def _switches(examination: Examination) -> list[Finding]:
    """Without autovacuum every queue slows down; the statistics are what it goes by."""
    it = examination.server
    findings = [
        Finding(
            "vacuum",
            "problem",
            f"{name} is off: dead rows are never cleaned up, and claims get slower by the hour",
            f"ALTER SYSTEM SET {name} = on; {RELOAD}",
        )
        for name, value in (("autovacuum", it.autovacuum), ("track_counts", it.track_counts))
        if value == "off"
    ]
    for (table,) in examination.ask("tables_without_autovacuum", schema=examination.schema):
        findings.append(
            Finding(
                "vacuum",
                "problem",
                f"autovacuum is switched off for {table}",
                f"ALTER TABLE {examination.schema}.{table} RESET (autovacuum_enabled)",
            )
        )
    return findings


def partitions(examination: Examination) -> list[Finding]:
    """Rows without a partition of their day are safe, but go one by one when their time is up."""
    schema, findings = examination.schema, []
    missing = [name for (name,) in examination.ask("missing_partitions", schema=schema)]
    if missing:
        findings.append(
            Finding(
                "partitions",
                "warning",
                f"not there yet: {', '.join(missing)}",
                "a running worker adds them within minutes; so does `tenure migrate`",
            )
        )
    (counts,) = examination.ask("other_rows", most=OTHER_ROWS)
    many = [
        f"{table} ({OTHER_ROWS:,} or more)"
        for table, number in zip(("history_other", "events_other"), counts, strict=True)
        if number >= OTHER_ROWS
    ]
    if many:
        findings.append(
            Finding(
                "partitions",
                "warning",
                f"many rows lie outside the partitions by day: {', '.join(many)}",
                "they go in batches once their time is up; keep a worker running, so that each "
                "day has its partition in time",
            )
        )
    text = f"today's and tomorrow's are there; rows outside: {counts[0]:,} finished jobs, "
    return findings or [Finding("partitions", "ok", f"{text}{counts[1]:,} events")]


def dependencies(examination: Examination) -> list[Finding]:
    return waiting_for_the_dead(examination.ask("waiting_for_the_dead", most=WAITING_ROWS)[0])


def replication(examination: Examination) -> list[Finding]:
    schema = examination.schema
    findings = [
        Finding(
            "replication",
            "problem",
            f"publication {publication} has {table}, whose rows nothing identifies: every change "
            "of them is refused",
            f"ALTER TABLE {schema}.{table} REPLICA IDENTITY DEFAULT; if it has no primary key, "
            "`tenure migrate`",
        )
        for table, publication in examination.ask("without_identity", schema=schema)
    ]
    for names, needed, there in examination.ask("synchronous_standbys"):
        if there >= needed:
            continue
        findings.append(
            Finding(
                "replication",
                "problem",
                f"commits wait for a standby (synchronous_standby_names is {names!r}), and of "
                f"{needed} there {'is' if there == 1 else 'are'} {there}: every enqueue and every "
                "finish ends after the busy time-out, its outcome unknown",
                "see why it is not in pg_stat_replication; to do without, ALTER SYSTEM SET "
                "synchronous_standby_names = ''; SELECT pg_reload_conf()",
            )
        )
    for slot, active, state, kept in examination.ask("slots", bytes=BEHIND_BYTES):
        who = "is behind" if active else "is read by nobody"
        kept_text = f" and keeps {(kept or 0) / 1e6:,.0f} MB of log" if state != "lost" else ""
        remedy = "let its subscriber catch up"
        if not active:
            remedy = f"start its subscriber, or SELECT pg_drop_replication_slot('{slot}')"
        findings.append(
            Finding(
                "replication",
                "warning",
                f"replication slot {slot!r} {who}{kept_text}: the disk fills, and vacuum of the "
                "catalog waits",
                f"{remedy}; max_slot_wal_keep_size bounds what slots may keep",
            )
        )
    return findings or [Finding("replication", "ok", "nothing stands in its way")]


CHECKS: dict[str, Callable[[Examination], list[Finding]]] = {
    "vacuum": vacuum,
    "partitions": partitions,
    "replication": replication,
    "waiting": dependencies,
}
