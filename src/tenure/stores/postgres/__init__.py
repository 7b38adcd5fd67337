"""The store contract on PostgreSQL. What changes is done by functions of our schema, one call and
one round trip each: `sql/postgres/functions/`; `queries.sql` calls them.

The parts follow `store.py`: enqueue, claiming, finishing, leases, reading, operators, retention.
"""

from __future__ import annotations

from tenure.errors import ConfigError
from tenure.store import Finding

try:
    import psycopg  # noqa: F401  before any part of ours does
except ImportError as error:
    raise ConfigError(
        'PostgreSQL needs a driver that is not installed: pip install "tenure[postgres]"'
    ) from error

from tenure.stores.postgres import doctor, schema
from tenure.stores.postgres.claiming import Claiming
from tenure.stores.postgres.leases import Leases
from tenure.stores.postgres.operators import Operators
from tenure.stores.postgres.reading import Reading
from tenure.stores.postgres.retention import Retention


class PostgresStore(Claiming, Leases, Operators, Reading, Retention):
    parallel = True

    def migrate(self) -> list[str]:
        return schema.migrate(self.database)

    def close(self) -> None:
        self.notices.close()
        self.database.close()
        self._queues.clear()
        self._home = None

    def inspect(self) -> list[Finding]:
        return doctor.inspect(self.database)


__all__ = ["PostgresStore"]
