from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lookalikes import LETTERS, pem
from tenure.errors import ConfigError
from tenure.reference import declared, resolve

ENVIRON = {"DB_PASSWORD": "hunter2", "lower": "s3cr3t", "EMPTY": "", "MAIL_KEY": "m1"}
ALL = ("EMPTY", "MISSING", "lower", "vault:*", "Db")


def fetched(ref: str, *allowed: str, provider: Any = None) -> str:
    return resolve(ref, declared(allowed), provider, ENVIRON)


def refused(ref: Any, *allowed: str, provider: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(ref, declared(allowed), provider, ENVIRON)
    return str(caught.value)


# -- what is declared -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ref", "allowed"),
    [
        ("DB_PASSWORD", "DB_PASSWORD"),
        ("env:DB_PASSWORD", "DB_PASSWORD"),
        ("DB_PASSWORD", "env:DB_PASSWORD"),
        ("MAIL_KEY", "env:MAIL_*"),
        ("env:MAIL_KEY", "MAIL_*"),
        ("env:lower", "env:low*"),
    ],
)
def test_a_name_is_the_same_with_and_without_env(ref: str, allowed: str) -> None:
    assert fetched(ref, "OTHER", allowed) == ENVIRON[ref.removeprefix("env:")]


@pytest.mark.parametrize(
    ("ref", "allowed"),
    [
        ("DB_PASSWORD", ()),
        ("DB_PASSWORD", ("DB_PASS", "DB_PASSWORD_2", "db_password", "env:DB_PASS")),
        ("env:DB_PASSWORD", ("e*", "en*", "vault:*", "MAIL_*", "env:M*", "file:/env*")),
        ("MAIL_KEY", ("MAIL_", "env:MAIL_", "AIL_*")),
        ("vault:app/key", ("vault:app/other", "vault:app/", "vault:apps/*", "VAULT:*", "env:v*")),
        ("vault:app/../root", ("vault:app/*",)),
        ("vault:app/./key", ("vault:app/*",)),
        ("vault:app/%2e%2e/root", ("vault:app/*",)),
        ("vault:app/..\\root", ("vault:app/*",)),
        ("vault:app/..", ("vault:app/*",)),
        ("/etc/passwd", ("file:/etc/*",)),
    ],
)
def test_what_is_not_declared_is_not_looked_up(ref: str, allowed: tuple[str, ...]) -> None:
    asked: list[str] = []

    message = refused(ref, *allowed, provider=lambda ref: asked.append(ref) or "s3cr3t")

    assert "is not declared, so it is not fetched" in message
    assert "tenure.App(…, secrets=[" in message
    assert asked == []


def test_a_provider_is_asked_for_what_is_declared() -> None:
    provider = {"vault:app/key": "k1", "vault:a..b": "k2", "stripe live": "k3"}.get

    assert fetched("vault:app/key", "vault:app/*", provider=provider) == "k1"
    assert fetched("vault:app/key", "vault:app/key", provider=provider) == "k1"
    assert fetched("vault:a..b", "vault:*", provider=provider) == "k2"
    assert fetched("stripe live", "stripe*", provider=provider) == "k3"


@pytest.mark.parametrize(
    "entries",
    [["*"], ["env:*"], ["file:/*"], ["file:*"], [""], ["A*B"], ["**"], [5], "DB_PASSWORD",
     ["file:relative"], ["file:relative/*"]],
)  # fmt: skip
def test_declarations_that_make_no_sense_or_too_much_of_it(entries: Any) -> None:
    with pytest.raises(ConfigError, match="secrets="):
        declared(entries)


# -- where secrets come from ------------------------------------------------------------------


def test_the_provider_is_asked_first() -> None:
    assert fetched("DB_PASSWORD", "DB_PASSWORD", provider={"DB_PASSWORD": "other"}.get) == "other"
    assert fetched("DB_PASSWORD", "DB_PASSWORD", provider={"x": "other"}.get) == "hunter2"
    assert fetched("file:/nowhere", "file:/nowhere", provider=lambda ref: "") == ""


def test_a_provider_that_raises_is_heard() -> None:
    def provider(ref: str) -> str:
        raise TimeoutError("vault is away")

    with pytest.raises(TimeoutError):
        fetched("DB_PASSWORD", "DB_PASSWORD", provider=provider)


@pytest.mark.parametrize("answer", [b"hunter2", 5, ["hunter2"]])
def test_a_provider_returns_text(answer: object) -> None:
    message = refused("DB_PASSWORD", "DB_PASSWORD", provider=lambda ref: answer)

    assert "must return a str or None" in message
    assert "hunter2" not in message


def test_the_environment() -> None:
    assert fetched("DB_PASSWORD", "DB_PASSWORD") == "hunter2"
    assert fetched("env:DB_PASSWORD", "DB_PASSWORD") == "hunter2"
    assert fetched("env:lower", "env:lower") == "s3cr3t"


@pytest.mark.parametrize("ref", ["lower", "MISSING", "env:MISSING", "EMPTY", "vault:db", "Db"])
def test_an_unknown_reference_says_the_three_ways(ref: str) -> None:
    message = refused(ref, *ALL)

    assert repr(ref) in message
    for way in ("provider", "env:NAME", "file:/path"):
        assert way in message
    assert "s3cr3t" not in message


@pytest.mark.parametrize("ref", [None, 5, b"DB_PASSWORD", ["DB_PASSWORD"]])
def test_a_reference_is_text(ref: object) -> None:
    assert "as a string" in refused(ref, "DB_PASSWORD")


@pytest.mark.parametrize(
    "ref", ["ghp_" + LETTERS, "my secret phrase", "x" * 500, pem("PRIVATE KEY")]
)
@pytest.mark.parametrize("allowed", [(), ("gh*", "my*", "x*", "-*")])
def test_a_secret_in_place_of_a_reference_is_not_shown(ref: str, allowed: tuple[str, ...]) -> None:
    assert ref[:10] not in refused(ref, *allowed)


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "secret"),
    [(b"hunter2\n", "hunter2"), (b"a\n\n", "a\n"), (b" \xc3\xa9 ", " é "), (b"", "")],
)
def test_a_file(tmp_path: Path, content: bytes, secret: str) -> None:
    (tmp_path / "secret").write_bytes(content)
    (tmp_path / "link").symlink_to("secret")  # as Kubernetes mounts them

    for allowed in (f"file:{tmp_path}/*", f"file:{tmp_path}/link", f"file:{tmp_path}/sec*"):
        assert fetched(f"file:{tmp_path}/link", allowed) == secret
        assert fetched(f"file:{tmp_path}/./secret", allowed) == secret


def test_mounted_as_kubernetes_does(tmp_path: Path) -> None:
    mounted = tmp_path / "secrets"
    (mounted / "..2026_11_16").mkdir(parents=True)
    (mounted / "..data").symlink_to("..2026_11_16")
    (mounted / "..2026_11_16" / "db").write_text("first")
    (mounted / "db").symlink_to("..data/db")
    (tmp_path / "var").symlink_to(".")

    for allowed in (f"file:{mounted}/*", f"file:{mounted}/db", f"file:{tmp_path}/var/secrets/*"):
        assert fetched(f"file:{mounted}/db", allowed) == "first"
        assert fetched(f"file:{tmp_path}/var/secrets/db", allowed) == "first"


def test_nothing_leads_out_of_what_is_declared(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (other / "key").write_text("of another")
    (own / "key").write_text("ours")
    (own / "link").symlink_to(other / "key")
    (own / "folder").symlink_to(other)
    (tmp_path / "own-2").write_text("a neighbour's")
    allowed = (f"file:{own}/*", "env:X_*")

    for path in (
        f"{own}/../other/key", f"{own}/link", f"{own}/folder/key", f"{own}/./../other/key",
        f"{other}/key", f"{own}/../own-2", f"{own}-2", f"{own}/..", f"{own}", f"{own}/",
        f"{own}/key\0", f"//{other}/key", "/proc/self/environ", "/etc/passwd",
    ):  # fmt: skip
        assert "is not declared" in refused(f"file:{path}", *allowed), path
    assert "absolute" in refused("file:own/key", *allowed)
    assert "absolute" in refused("file:../etc/passwd", *allowed)
    assert fetched(f"file:{own}/key", *allowed) == "ours"
    assert fetched(f"file:{own}/../own/key", *allowed) == "ours"


def test_files_that_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b"x" * 65_537)
    (tmp_path / "binary").write_bytes(b"hunter2\xff")
    (tmp_path / "limit").write_bytes(b"x" * 65_536)

    for name, says in [
        *(("pipe", "not a regular file"), ("folder", "not a regular file")),
        *(("large", "65,536 bytes"), ("binary", "not UTF-8"), ("missing", "No such file")),
    ]:
        message = refused(f"file:{tmp_path}/{name}", f"file:{tmp_path}/*")
        assert says in message
        assert "hunter2" not in message
    assert "not a regular file" in refused("file:/dev/null", "file:/dev/null")
    assert len(fetched(f"file:{tmp_path}/limit", f"file:{tmp_path}/*")) == 65_536


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(5):
        refused(f"file:{tmp_path}/folder", f"file:{tmp_path}/*")
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    assert after == before
