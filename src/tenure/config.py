"""One set of settings: defaults < ``tenure.toml`` < environment ``TENURE_*`` < arguments.

An unknown name is an error: a setting that is misspelt must not look set. Only a variable that
resembles no setting is passed over with a warning: beside a Kubernetes service named ``tenure``
there are ``TENURE_PORT``, ``TENURE_SERVICE_HOST`` and more, and nobody has set them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any

from tenure.errors import ConfigError

_DAY = 86_400.0
_YEARS = 10 * 365 * _DAY
_PREFIX = "TENURE_"
_RESERVED = ("TENURE_CONFIG", "TENURE_HEALTH_REQUIRE_QUEUE", "TENURE_AMQP_URL")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
# URLs of SQLAlchemy's name a driver. These are the ones we use as well.
_DRIVERS = ("postgresql+psycopg", "postgresql+psycopg_async", "postgres+psycopg", "sqlite+pysqlite")
_RESEMBLES = 0.65  # as difflib counts: URI is for URL (0.67), API_PORT not for APP (0.55)


def _within(default: float, low: float, high: float) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


def _matching(default: str, pattern: str, hint: str) -> Any:
    return field(default=default, metadata={"pattern": pattern, "hint": hint})


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting, its default and its bounds. In the environment: ``TENURE_`` + upper case."""

    # where jobs are (URLs hold passwords: never shown)
    url: str = field(default="sqlite:///tenure.db", repr=False)
    schema: str = _matching(
        "tenure", r"[a-z_][a-z0-9_]{0,62}", "a lower-case SQL name such as 'tenure'"
    )
    listen_url: str | None = field(default=None, repr=False)
    app: str | None = None
    sqlite_module: str = _matching(
        "sqlite3", r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "the name of a module such as 'pysqlite3'"
    )
    allow_network_file: bool = False
    busy_timeout: float = _within(15.0, 0, 3600)
    enqueue_timeout: float = _within(5.0, 0.1, 3600)  # PostgreSQL: a web request waits for it
    connections: int = _within(8, 1, 1000)  # PostgreSQL: at most, besides leases and hints

    # leases and wake-ups
    lease_seconds: float = _within(30.0, 0.1, _DAY)
    lease_renew_seconds: float = _within(10.0, 0.05, _DAY / 2)
    poll_interval_ms: int = _within(1000, 1, 3_600_000)
    hint_poll_interval_ms: int = _within(5000, 1, 3_600_000)
    notify: bool = True

    # workers
    concurrency: int = _within(50, 1, 10_000)
    processes: int = _within(1, 1, 1024)
    queues: str | None = None
    shutdown_timeout: float = _within(30.0, 0, _DAY)
    start_timeout: float = _within(120.0, 0.1, _DAY)  # until a child has imported the app
    max_jobs_per_child: int = _within(0, 0, 1_000_000_000)  # then another takes its place; 0: never
    max_memory_per_child: int = _within(0, 0, 1 << 24)  # MB, the same
    timeout: float = _within(300.0, 0.01, 30 * _DAY)
    crash_limit: int = _within(3, 1, 100)
    loss_limit: int = _within(10, 1, 1000)
    cancel_grace_seconds: float = _within(10.0, 0, _DAY)

    # what is kept
    max_payload_bytes: int = _within(262_144, 64, 64 * 1024 * 1024)
    audit: str = _matching("all", "all|errors", "'all' or 'errors'")
    keep_completed_seconds: float = _within(7 * _DAY, 0, _YEARS)
    keep_dead_seconds: float = _within(30 * _DAY, 0, _YEARS)
    keep_events_seconds: float = _within(30 * _DAY, 0, _YEARS)
    log_level: str = _matching(
        "INFO", "DEBUG|INFO|WARNING|ERROR|CRITICAL", "DEBUG, INFO, WARNING, ERROR or CRITICAL"
    )

    log_format: str = _matching("text", "text|json", "'text' or 'json'")

    # Names some layer set, also when to the default: a child must not fall back to a lower layer.
    _given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for setting in _settings():
            value = _checked(setting, getattr(self, setting.name), f"setting {setting.name}")
            object.__setattr__(self, setting.name, value)
        if self.lease_seconds < 2 * self.lease_renew_seconds:
            raise ConfigError(
                f"lease_seconds ({self.lease_seconds:g}) must be at least 2 x lease_renew_seconds "
                f"({self.lease_renew_seconds:g}), or one late renewal loses every job: raise "
                f"TENURE_LEASE_SECONDS to {3 * self.lease_renew_seconds:g} or lower "
                f"TENURE_LEASE_RENEW_SECONDS to {self.lease_seconds / 3:.3g}"
            )

    @classmethod
    def load(cls, **arguments: object) -> Settings:
        """The settings of this process; an argument that is None is not set."""
        values: dict[str, object] = {}
        for found in (_from_file(), _from_environment(), _from_arguments(arguments)):
            values.update(found)
        return cls(**values, _given=frozenset(values))  # type: ignore[arg-type]

    @classmethod
    def from_env(cls, variables: Mapping[str, str]) -> Settings:
        """What another process's `to_env` said; this process's own layers play no part."""
        values = _from_environment(variables)
        return cls(**values, _given=frozenset(values))  # type: ignore[arg-type]

    def warnings(self) -> list[str]:
        """What works but is unwise, one line each."""
        lines = []
        if self.lease_seconds < 3 * self.lease_renew_seconds:
            lines.append(
                f"lease_seconds ({self.lease_seconds:g}) is less than 3 x lease_renew_seconds "
                f"({self.lease_renew_seconds:g}): two lost renewals lose the lease; lower "
                f"TENURE_LEASE_RENEW_SECONDS to {self.lease_seconds / 3:.3g}"
            )
        return lines

    def to_env(self) -> dict[str, str]:
        """The environment that gives a child process these settings: what is not a default, and
        what is one but overrides a file or the inherited environment."""
        variables = {}
        for setting in _settings():
            value = getattr(self, setting.name)
            if value is None or (value == setting.default and setting.name not in self._given):
                continue
            text = str(int(value)) if isinstance(value, bool) else str(value)
            variables[_PREFIX + setting.name.upper()] = text
        return variables


def _settings() -> list[Field[Any]]:
    return [entry for entry in fields(Settings) if entry.name != "_given"]


# ------------------------------------------------------------------------------- the layers


def _from_file() -> dict[str, object]:
    named = os.environ.get("TENURE_CONFIG")
    path = named or "tenure.toml"
    if not named and not os.path.isfile(path):
        return {}
    import tomllib

    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        where = f"{path} (named by TENURE_CONFIG)" if named else path
        raise ConfigError(
            f"{where} cannot be read: {error.strerror}; correct the path or the permissions"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct that line") from None
    known = {setting.name: setting for setting in _settings()}
    values = {}
    for key, value in document.items():
        if key not in known:
            raise ConfigError(f"unknown setting {key!r} in {path}{_suggestion(key, known)}")
        values[key] = _checked(known[key], value, f"{key} in {path}")
    return values


def _from_environment(variables: Mapping[str, str] = os.environ) -> dict[str, object]:
    known = {_PREFIX + setting.name.upper(): setting for setting in _settings()}
    values: dict[str, object] = {}
    strange: list[str] = []
    for variable, text in variables.items():
        if not variable.startswith(_PREFIX):
            continue
        if variable in _RESERVED or variable.startswith("TENURE_TEST_"):
            continue
        setting = known.get(variable)
        if setting is None:
            _refuse_resembling(variable, known)
            strange.append(variable)
            continue
        if text:  # empty is unset: compose files and shells cannot always leave a variable out
            where = f"{variable} in the environment"
            values[setting.name] = _checked(setting, _parsed(setting, text, where), where)
    if strange:
        _pass_over(tuple(sorted(strange)))
    return values


def _refuse_resembling(variable: str, known: Iterable[str]) -> None:
    from difflib import get_close_matches

    bare = [name.removeprefix(_PREFIX) for name in known]
    close = get_close_matches(variable.removeprefix(_PREFIX), bare, n=1, cutoff=_RESEMBLES)
    if close:
        raise ConfigError(
            f"unknown setting {variable} in the environment; did you mean {_PREFIX}{close[0]}?"
        )


@cache  # once a process, however many apps it has
def _pass_over(variables: tuple[str, ...]) -> None:
    import logging  # 3 ms, for who has some

    logging.getLogger("tenure.config").warning(
        "passed over in the environment, because no setting has such a name: %s",
        ", ".join(variables),
    )


def _from_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    known = {setting.name: setting for setting in _settings()}
    values = {}
    for key, value in arguments.items():
        if key not in known:
            raise ConfigError(f"unknown setting {key!r}{_suggestion(key, known)}")
        if value is not None:
            values[key] = _checked(known[key], value, f"argument {key}")
    return values


def _suggestion(unknown: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    names = list(known)
    close = get_close_matches(unknown, names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; remove it, or use one of: {', '.join(sorted(names))}"


# ------------------------------------------------------------------------------- one value


def _parsed(setting: Field[Any], text: str, where: str) -> object:
    """The text of an environment variable as the type of its setting."""
    try:
        if setting.type == "int":
            return int(text)
        if setting.type == "float":
            return float(text)
    except ValueError:
        kind = "a whole number" if setting.type == "int" else "a number"
        raise ConfigError(f"{where} must be {kind}, got {text!r}") from None
    if setting.type == "bool":
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise ConfigError(f"{where} must be 1/true/yes/on or 0/false/no/off, got {text!r}")
        return word in _TRUE
    return text


def _checked(setting: Field[Any], value: object, where: str) -> object:
    """``value`` if it fits the setting; ``where`` says whose mistake it is if not."""
    kind = setting.type
    if kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false, got {type(value).__name__}")
        return value
    if kind in ("int", "float"):
        return _checked_number(setting, value, where)
    if value is None and kind == "str | None":
        return None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be a string that is not empty")
    if setting.name == "log_level":
        value = value.upper()
    if setting.name in ("url", "listen_url"):
        value = _plain_url(value, where)
    pattern = setting.metadata.get("pattern")
    if pattern and not re.fullmatch(pattern, value):
        raise ConfigError(f"{where} must be {setting.metadata['hint']}, got {value[:80]!r}")
    return value


def _plain_url(url: str, where: str) -> str:
    """Without a driver; of any other one the error shows no more than its name."""
    scheme, _, rest = url.partition("://")
    kind, plus, driver = scheme.partition("+")
    if not plus:
        return url
    if scheme not in _DRIVERS:
        raise ConfigError(
            f"{where} names the driver {driver!r}, which is for SQLAlchemy: Tenure has its own, "
            f"write {kind}://… here"
        )
    return f"{kind}://{rest}"


def _checked_number(setting: Field[Any], value: object, where: str) -> float:
    low, high = setting.metadata["low"], setting.metadata["high"]
    whole = setting.type == "int"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{where} must be {kind}, got {type(value).__name__}")
    if not low <= value <= high:  # also false for NaN
        raise ConfigError(f"{where} must be between {low:,} and {high:,}, got {value}")
    return value if whole else float(value)
