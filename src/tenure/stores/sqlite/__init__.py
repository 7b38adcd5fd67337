"""The store contract on one SQLite file. The statements are in `sql/sqlite/queries.sql`.

Every write is one transaction behind the gate of `file.py`; batches go in as one JSON text.
The parts follow `store.py`: enqueue, claiming, finishing, leases, reading, operators, retention.
"""

from __future__ import annotations

from tenure.store import Finding
from tenure.stores.sqlite import doctor
from tenure.stores.sqlite.claiming import Claiming
from tenure.stores.sqlite.leases import Leases
from tenure.stores.sqlite.operators import Operators
from tenure.stores.sqlite.reading import Reading


class SqliteStore(Claiming, Leases, Operators, Reading):
    parallel = False  # one writer at a time

    def migrate(self) -> list[str]:
        return self.file.migrate()

    def close(self) -> None:
        self.file.close()

    def data_version(self) -> int:
        """Moves when another connection commits; always asked on the same connection."""
        return self.file.data_version()

    def inspect(self) -> list[Finding]:
        return doctor.inspect(self.file)


__all__ = ["SqliteStore"]
