from __future__ import annotations

import math
import os
from dataclasses import FrozenInstanceError, replace

import pytest

from tenure.config import Settings
from tenure.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """An empty directory and no setting in the environment."""
    for variable in list(os.environ):
        if variable.startswith("TENURE_"):
            monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)


def test_defaults():
    settings = Settings.load()
    assert settings == Settings()
    shown = {
        name: getattr(settings, name)
        for name in Settings.__dataclass_fields__
        if not name.startswith("_")
    }
    assert shown == {
        "url": "sqlite:///tenure.db",
        "schema": "tenure",
        "listen_url": None,
        "app": None,
        "lease_seconds": 30.0,
        "lease_renew_seconds": 10.0,
        "poll_interval_ms": 1000,
        "hint_poll_interval_ms": 5000,
        "notify": True,
        "concurrency": 50,
        "processes": 1,
        "queues": None,
        "shutdown_timeout": 30.0,
        "start_timeout": 120.0,
        "max_jobs_per_child": 0,
        "max_memory_per_child": 0,
        "timeout": 300.0,
        "crash_limit": 3,
        "loss_limit": 10,
        "max_payload_bytes": 262_144,
        "audit": "all",
        "keep_completed_seconds": 7 * 86_400,
        "keep_dead_seconds": 30 * 86_400,
        "keep_events_seconds": 30 * 86_400,
        "sqlite_module": "sqlite3",
        "allow_network_file": False,
        "busy_timeout": 15.0,
        "enqueue_timeout": 5.0,
        "connections": 8,
        "log_level": "INFO",
        "log_format": "text",
        "cancel_grace_seconds": 10.0,
    }
    with pytest.raises(FrozenInstanceError):
        settings.url = "x"  # type: ignore[misc]


def test_each_layer_wins_over_the_one_before(monkeypatch, tmp_path):
    (tmp_path / "tenure.toml").write_text(
        'url = "sqlite:///file.db"\nconcurrency = 7\nprocesses = 2\nlease_seconds = 60\n'
    )
    monkeypatch.setenv("TENURE_CONCURRENCY", "8")
    monkeypatch.setenv("TENURE_PROCESSES", "3")
    settings = Settings.load(processes=4, url=None)

    assert settings.url == "sqlite:///file.db"  # None is unset
    assert settings.concurrency == 8
    assert settings.processes == 4
    assert settings.lease_seconds == 60.0
    assert isinstance(settings.lease_seconds, float)


def test_tenure_config_names_another_file(monkeypatch, tmp_path):
    (tmp_path / "tenure.toml").write_text("concurrency = 1\n")
    (tmp_path / "other.toml").write_text("concurrency = 2\n")
    monkeypatch.setenv("TENURE_CONFIG", str(tmp_path / "other.toml"))
    assert Settings.load().concurrency == 2

    monkeypatch.setenv("TENURE_CONFIG", "absent.toml")
    with pytest.raises(ConfigError, match=r"absent\.toml \(named by TENURE_CONFIG\) cannot be"):
        Settings.load()


def test_a_file_that_is_not_toml(tmp_path):
    (tmp_path / "tenure.toml").write_text("concurrency = \n")
    with pytest.raises(ConfigError, match=r"tenure\.toml is not valid TOML: .*line 1"):
        Settings.load()
    (tmp_path / "tenure.toml").write_bytes(b'app = "\xff"\n')
    with pytest.raises(ConfigError, match="not valid TOML"):
        Settings.load()


def test_unknown_names_are_errors_with_a_suggestion(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="unknown setting 'concurency'; did you mean concurrency"):
        Settings.load(concurency=3)
    with pytest.raises(ConfigError, match="unknown setting '_given'"):
        Settings.load(_given=frozenset())

    monkeypatch.setenv("TENURE_LEASE_SECOND", "30")
    with pytest.raises(
        ConfigError,
        match="unknown setting TENURE_LEASE_SECOND in the environment; "
        "did you mean TENURE_LEASE_SECONDS",
    ):
        Settings.load()
    monkeypatch.delenv("TENURE_LEASE_SECOND")

    (tmp_path / "tenure.toml").write_text("[worker]\nconcurrency = 3\n")
    with pytest.raises(ConfigError, match=r"unknown setting 'worker' in tenure\.toml"):
        Settings.load()


def test_variables_that_resemble_no_setting_are_a_warning(monkeypatch, caplog):
    """Kubernetes gives every container these for a service named `tenure`, and for `tenure-web`."""
    for variable in (
        "TENURE_PORT",
        "TENURE_PORT_8080_TCP",
        "TENURE_PORT_8080_TCP_ADDR",
        "TENURE_PORT_8080_TCP_PORT",
        "TENURE_PORT_8080_TCP_PROTO",
        "TENURE_SERVICE_HOST",
        "TENURE_SERVICE_PORT",
        "TENURE_SERVICE_PORT_HTTP",
        "TENURE_WEB_PORT",
        "TENURE_WEB_SERVICE_HOST",
        "TENURE_POSTGRESQL_SERVICE_HOST",
    ):
        monkeypatch.setenv(variable, "10.0.0.7")
    for _ in range(3):
        assert Settings.load() == Settings()

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no setting has such a name: TENURE_PORT, TENURE_PORT_8080_TCP, " in record.message


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("TENURE_LEASE_SECOND", "LEASE_SECONDS"),
        ("TENURE_POLL_INTERVAL", "POLL_INTERVAL_MS"),
        ("TENURE_CONCURENCY", "CONCURRENCY"),
        ("TENURE_PROCESS", "PROCESSES"),
        ("TENURE_LOGLEVEL", "LOG_LEVEL"),
        ("TENURE_QUEUE", "QUEUES"),
        ("TENURE_SQLITE_MODUL", "SQLITE_MODULE"),
        ("TENURE_URI", "URL"),
    ],
)
def test_a_variable_that_resembles_a_setting_is_an_error(monkeypatch, variable, meant):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(
        ConfigError, match=f"unknown setting {variable} .*did you mean TENURE_{meant}"
    ):
        Settings.load()


def test_reserved_variables_are_left_alone(monkeypatch):
    for variable in ("TENURE_TEST_X", "TENURE_HEALTH_REQUIRE_QUEUE", "TENURE_AMQP_URL"):
        monkeypatch.setenv(variable, "1")
    assert Settings.load() == Settings()


def test_an_empty_variable_is_unset(monkeypatch):
    monkeypatch.setenv("TENURE_URL", "")
    monkeypatch.setenv("TENURE_CONCURRENCY", "")
    assert Settings.load() == Settings()


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", False), ("false", False), ("No", False), ("OFF", False), ("1", True), ("yes", True)],
)
def test_switches(monkeypatch, text, value):
    monkeypatch.setenv("TENURE_NOTIFY", text)
    assert Settings.load().notify is value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TENURE_NOTIFY", "maybe"),
        ("TENURE_LEASE_SECONDS", "soon"),
        ("TENURE_LEASE_SECONDS", "nan"),
        ("TENURE_LEASE_SECONDS", "inf"),
        ("TENURE_LEASE_SECONDS", "-1"),
        ("TENURE_CONCURRENCY", "1.5"),
        ("TENURE_CONCURRENCY", "0"),
        ("TENURE_CONCURRENCY", "10001"),
        ("TENURE_AUDIT", "none"),
        ("TENURE_SCHEMA", "x; drop table"),
        ("TENURE_SCHEMA", "tenure\n"),
        ("TENURE_SQLITE_MODULE", "os; x"),
        ("TENURE_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_wrong_value_says_where_it_came_from(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"^{variable} in the environment must be"):
        Settings.load()


def test_wrong_values_in_the_file_and_in_arguments(tmp_path):
    with pytest.raises(ConfigError, match=r"^argument timeout must be between"):
        Settings.load(timeout=math.nan)
    with pytest.raises(
        ConfigError, match=r"^argument concurrency must be a whole number, got bool"
    ):
        Settings.load(concurrency=True)
    with pytest.raises(ConfigError, match=r"^argument url must be a string"):
        Settings.load(url=5)
    with pytest.raises(ConfigError, match=r"^setting crash_limit must be between"):
        Settings(crash_limit=0)
    (tmp_path / "tenure.toml").write_text('concurrency = "7"\n')
    with pytest.raises(ConfigError, match=r"^concurrency in tenure\.toml must be a whole number"):
        Settings.load()
    (tmp_path / "tenure.toml").write_text("notify = 0\n")
    with pytest.raises(ConfigError, match=r"^notify in tenure\.toml must be true or false"):
        Settings.load()


def test_log_level_in_any_case():
    assert Settings.load(log_level="debug").log_level == "DEBUG"


def test_a_lease_below_two_renewals_is_refused_below_three_warned():
    with pytest.raises(
        ConfigError, match=r"at least 2 x lease_renew_seconds .* raise TENURE_LEASE"
    ):
        Settings.load(lease_seconds=19.9)
    (line,) = Settings.load(lease_seconds=20).warnings()
    assert "less than 3 x" in line
    assert Settings.load(lease_seconds=29.9).warnings()
    assert Settings.load(lease_seconds=30).warnings() == []
    assert Settings.load(lease_seconds=1, lease_renew_seconds=0.3).warnings() == []


def test_passwords_are_not_shown():
    settings = Settings(url="postgresql://u:hunter2@h/d", listen_url="postgresql://u:hunter2@h/d")
    assert "hunter2" not in repr(settings)


def test_to_env_holds_what_is_not_a_default():
    assert Settings.load().to_env() == {}
    settings = Settings(notify=False, lease_seconds=45, url="sqlite:///x.db", queues="a,b:2")
    assert settings.to_env() == {
        "TENURE_URL": "sqlite:///x.db",
        "TENURE_LEASE_SECONDS": "45.0",
        "TENURE_NOTIFY": "0",
        "TENURE_QUEUES": "a,b:2",
    }


def test_to_env_gives_a_child_the_same_settings(monkeypatch, tmp_path):
    (tmp_path / "tenure.toml").write_text("concurrency = 7\nnotify = false\n")
    monkeypatch.setenv("TENURE_LEASE_SECONDS", "60")
    # Arguments that say the default again must win in the child over the file and the environment.
    settings = Settings.load(
        concurrency=50, notify=True, lease_seconds=30.0, keep_dead_seconds=0.1, app="m:app"
    )
    for variable, text in settings.to_env().items():
        monkeypatch.setenv(variable, text)

    assert Settings.load() == settings
    assert replace(settings, crash_limit=9).to_env()["TENURE_CONCURRENCY"] == "50"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("postgresql+psycopg://u:p@h/d", "postgresql://u:p@h/d"),
        ("postgresql+psycopg_async://h/d", "postgresql://h/d"),
        ("postgres+psycopg://h/d", "postgres://h/d"),
        ("postgres://h/d", "postgres://h/d"),
        ("sqlite+pysqlite:///jobs.db", "sqlite:///jobs.db"),
        ("sqlite:///a+b://c.db", "sqlite:///a+b://c.db"),
    ],
)
def test_a_url_of_sqlalchemy_is_understood(given, meant):
    assert Settings.load(url=given).url == meant
    assert Settings.load(listen_url=given).listen_url == meant


@pytest.mark.parametrize(
    "scheme", ["postgresql+asyncpg", "postgresql+psycopg2", "sqlite+aiosqlite"]
)
def test_a_url_with_another_driver_says_what_to_write(scheme):
    kind = scheme.partition("+")[0]
    with pytest.raises(ConfigError, match=f"write {kind}://") as raised:
        Settings.load(url=f"{scheme}://u:hunter2@h/d")
    assert "hunter2" not in str(raised.value)
