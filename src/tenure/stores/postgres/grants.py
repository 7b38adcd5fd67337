"""What the role of a worker may do: everything to jobs, nothing to the tables themselves.

Partitions are made and dropped by functions that run with their owner's rights, so a worker needs
no DDL. What it needs is written down once, here: `tenure migrate --grant` grants it, `tenure
doctor` looks for it. `history` and `events` never change, so nobody is given UPDATE on them; what
is past its time is removed by the owner's functions, so nobody is given DELETE either.
"""

from __future__ import annotations

import re

from tenure import sql
from tenure.errors import ConfigError, StoreUnavailable
from tenure.stores.postgres.database import Database
from tenure.stores.postgres.examining import Examination

ALL = ("SELECT", "INSERT", "UPDATE", "DELETE")
TABLES = {
    "migrations": ("SELECT",),
    "settings": ("SELECT",),
    "upkeep": ("SELECT", "UPDATE"),
    "job_queue": ("SELECT",),
    "jobs": ALL,
    "keys": ALL,
    "rollups": ALL,
    "steps": ALL,
    "edges": ALL,
    "workers": ALL,
    "queues": ALL,
    "history": ("SELECT", "INSERT"),
    "history_other": ("SELECT",),
    "events": ("SELECT", "INSERT"),
    "events_other": ("SELECT",),
}
SEQUENCES = {"events_seq": "USAGE", "flushes": "UPDATE"}
LONGEST_NAME = 63
REGRANT = """
DO $regrant$
DECLARE
  held record;
BEGIN
  FOR held IN
    SELECT DISTINCT a.grantee::regrole::text AS role FROM pg_class c
           CROSS JOIN LATERAL aclexplode(c.relacl) a
     WHERE c.oid = 'tenure.jobs'::regclass AND a.privilege_type = 'UPDATE'
       AND a.grantee NOT IN (0, c.relowner)
  LOOP
    EXECUTE format('{script}', held.role);
  END LOOP;
END $regrant$;
"""


def functions() -> list[str]:
    """Ours by name: a schema may hold functions of somebody else's, which are not ours to grant."""
    text = sql.schema("postgres") + sql.functions()
    ours = re.findall(r"^CREATE (?:OR REPLACE )?(?:FUNCTION|PROCEDURE) tenure\.(\w+)", text, re.M)
    return sorted(set(ours))


def quoted(role: str) -> str:
    """A role's name for use in SQL; refused where it cannot be one, or is everybody."""
    if not role or len(role.encode()) > LONGEST_NAME or not role.isprintable():
        raise ConfigError(f"{role[:80]!r} is not the name of a role: 1 to {LONGEST_NAME} bytes")
    if role.lower() in ("public", "none"):
        # PostgreSQL reads "public" as everybody, in quotes too.
        raise ConfigError(f"{role!r} is no role: name the one your workers log in with")
    return '"' + role.replace('"', '""') + '"'


def grant_sql(schema: str, role: str) -> str:
    """The statements, for a DBA to read. Granting again changes nothing."""
    return _grant_sql(schema, quoted(role))


def regrant_sql(schema: str) -> str:
    """With new functions: whoever may change jobs, and is not their owner, is granted it again."""
    script = _grant_sql(schema, "%1$s").replace("'", "''")
    return sql.with_schema(REGRANT, schema).replace("{script}", script)


def _grant_sql(schema: str, to: str) -> str:
    lines = ["GRANT USAGE ON SCHEMA tenure TO {role};"]
    by_rights: dict[tuple[str, ...], list[str]] = {}
    for table, rights in TABLES.items():
        by_rights.setdefault(rights, []).append(f"tenure.{table}")
    for rights, tables in by_rights.items():
        lines.append(f"GRANT {', '.join(rights)} ON {', '.join(tables)} TO {{role}};")
    for sequence, right in SEQUENCES.items():
        lines.append(f"GRANT {right} ON SEQUENCE tenure.{sequence} TO {{role}};")
    called = ",\n  ".join(f"tenure.{name}" for name in functions())
    lines.append(f"GRANT EXECUTE ON ROUTINE {called} TO {{role}};")
    return "\n".join(sql.with_schema(line, schema).replace("{role}", to) for line in lines) + "\n"


def require_role(database: Database, role: str) -> None:
    examination = Examination(database)
    try:
        known = examination.ask("role_exists", role=role)
    finally:
        examination.close()
    if not known:
        raise ConfigError(
            f"{database.place} has no role {role!r}: CREATE ROLE {quoted(role)} LOGIN, then try "
            "again"
        )


def grant(database: Database, role: str) -> None:
    """Give `role` what a worker needs, all or nothing. To be called by the owner of the tables."""
    with database.connection() as connection, connection.transaction():
        connection.execute(grant_sql(database.schema, role))
    examination = Examination(database)
    try:
        missing = missing_rights(examination, role)
    finally:
        examination.close()
    if missing:  # PostgreSQL only warns where the grantor has some rights but may not pass them on
        raise StoreUnavailable(
            f"{database.place}: {quoted(role)} still lacks {missing}. Grant as the role that "
            "migrates, which owns the tables"
        )


def missing_rights(examination: Examination, role: str) -> str:
    """What a role lacks, in words: `INSERT, UPDATE on jobs; EXECUTE on claim()`; or nothing."""
    wanted = [(table, right) for table, rights in TABLES.items() for right in rights]
    rows = examination.ask(
        "missing_rights",
        schema=examination.schema,
        role=role,
        tables=[table for table, _right in wanted],
        privileges=[right for _table, right in wanted],
        sequences=list(SEQUENCES),
        uses=list(SEQUENCES.values()),
        functions=functions(),
    )
    lacks: dict[str, list[str]] = {}
    shown = {"schema": "schema {}", "table": "{}", "sequence": "sequence {}", "function": "{}()"}
    order = [*ALL, "USAGE", "EXECUTE"]
    for kind, name, right in sorted(rows, key=lambda row: (order.index(row[2]), row[1])):
        rights = lacks.setdefault(shown[kind].format(name), [])
        if right not in rights:
            rights.append(right)
    return "; ".join(f"{', '.join(rights)} on {what}" for what, rights in lacks.items())
