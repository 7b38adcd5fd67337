"""Secrets by reference: which ones an app may fetch, and how `ctx.secret` fetches one.

    tenure.App(url, secrets=["STRIPE_KEY", "env:MAIL_*", "file:/run/secrets/*", "vault:app/*"])

A reference may come out of a payload, and whoever can enqueue can write a payload. So the code
says what may be fetched: exact references, or prefixes that end in `*`. Nothing else is looked up,
neither in the environment nor in a file nor by the app's provider. No message shows a secret.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence

from tenure.errors import ConfigError
from tenure.secrecy import compiled, find_secret

MAX_SECRET_FILE = 65_536
_ENVIRONMENT_NAME = r"[A-Z_][A-Z0-9_]*"
_REFERENCE = r"[A-Za-z0-9_./:@-]{1,200}"
_TOO_WIDE = ("*", "env:*", "file:*", "file:/*")
_EXAMPLE = '["STRIPE_KEY", "env:MAIL_*", "file:/run/secrets/*"]'


def declared(secrets: Iterable[str]) -> tuple[str, ...]:
    """What `tenure.App(secrets=…)` was given, checked when the app is made."""
    entries = () if isinstance(secrets, str) else tuple(secrets)
    if isinstance(secrets, str) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"secrets= takes a list of references, such as {_EXAMPLE}")
    for entry in entries:
        if not entry or "*" in entry[:-1]:
            raise ConfigError(
                f"secrets= got {entry!r}: a reference, or the beginning of some and one * at its "
                f"end, such as {_EXAMPLE}"
            )
        if entry in _TOO_WIDE:
            raise ConfigError(
                f"secrets= got {entry!r}, which would hand out everything there is: say how the "
                f"references begin that this app needs, such as {_EXAMPLE}"
            )
        if entry.startswith("file:") and not entry.startswith("file:/"):
            raise ConfigError(f"secrets= got {entry!r}: the path of a file must be absolute")
    return entries


def resolve(
    ref: object,
    allowed: Sequence[str],
    provider: Callable[[str], object] | None,
    environ: Mapping[str, str],
) -> str:
    """The secret behind a declared reference: the provider's answer unless that is None, else
    `env:NAME` or `NAME` from the environment, else `file:/path`. ConfigError if there is none."""
    if not isinstance(ref, str):
        raise ConfigError(f"ctx.secret takes a reference as a string, got {type(ref).__name__}")
    shown = _shown(ref)
    path = _real_path(ref) if ref.startswith("file:") else None
    if not any(_covers(entry, ref, path) for entry in allowed):
        raise ConfigError(
            f"secret {shown} is not declared, so it is not fetched: name it where the app is made, "
            f"tenure.App(…, secrets={_EXAMPLE}); a * at the end stands for the rest"
        ).quoting(shown)
    if provider is not None and (answer := provider(ref)) is not None:
        if not isinstance(answer, str):
            kind = type(answer).__name__
            raise ConfigError(f"the secret provider must return a str or None, it returned {kind}")
        return answer
    if path is not None:
        return _read(shown, path)
    name = _canonical(ref).removeprefix("env:")
    if _canonical(ref) != name and (secret := environ.get(name)):
        return secret
    raise ConfigError(
        f"no secret {shown}: give the app a secret provider that knows it, or set an "
        "environment variable and refer to it as env:NAME, or store it in a file and refer to it "
        "as file:/path"
    ).quoting(shown)


# -- what is declared ---------------------------------------------------------------------------
def _canonical(ref: str) -> str:
    return f"env:{ref}" if compiled(_ENVIRONMENT_NAME).fullmatch(ref) else ref


def _covers(entry: str, ref: str, path: str | None) -> bool:
    if path is not None:
        return entry.startswith("file:") and _covers_file(entry.removeprefix("file:"), path)
    if not entry.endswith("*"):
        return _canonical(entry) == _canonical(ref)
    prefix = entry[:-1]
    if _canonical(ref).startswith("env:"):
        return _canonical(ref).startswith(f"env:{prefix.removeprefix('env:')}")
    return ref.startswith(prefix) and not _climbs(ref)


def _covers_file(entry: str, path: str) -> bool:
    """Real paths are compared: neither `..` nor a symbolic link leads out of what is declared."""
    if not entry.endswith("*"):
        return os.path.realpath(entry) == path
    folder, beginning = os.path.split(entry[:-1])
    return path.startswith(os.path.join(os.path.realpath(folder), beginning))


def _climbs(ref: str) -> bool:
    """Whether a provider that takes references for paths could be led elsewhere."""
    from urllib.parse import unquote

    return not {".", ".."}.isdisjoint(re.split(r"[/\\:]", unquote(ref)))


def _real_path(ref: str) -> str:
    path = ref.removeprefix("file:")
    if not path.startswith("/"):
        shown = _shown(ref)
        raise ConfigError(
            f"secret {shown}: the path must be absolute, as in file:/run/secrets/x"
        ).quoting(shown)
    return os.path.realpath(path) if "\0" not in path else ""


# -- files --------------------------------------------------------------------------------------
def _read(shown: str, path: str) -> str:
    try:
        # Nonblocking: opening a pipe nobody writes to would wait for ever. The path is a real one:
        # a link that stands there now was put there since.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            regular = stat.S_ISREG(os.fstat(file).st_mode)
            data = os.read(file, MAX_SECRET_FILE + 1) if regular else b""
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(
            f"secret {shown} cannot be read: {error.strerror}; make the file readable for the "
            "worker, or use env:NAME or the app's secret provider"
        ).quoting(shown) from None
    problem = None
    if not regular:
        problem = "not a regular file; refer to one"
    elif len(data) > MAX_SECRET_FILE:
        problem = f"more than {MAX_SECRET_FILE:,} bytes; is it the file?"
    else:
        try:
            return data.decode().removesuffix("\n")
        except UnicodeDecodeError:
            problem = "not UTF-8 text; store it as base64"
    raise ConfigError(f"secret {shown}: {problem}").quoting(shown)


def _shown(ref: str) -> str:
    """A reference for a message, unless somebody passed the secret itself."""
    if compiled(_REFERENCE).fullmatch(ref) and find_secret(ref) is None:
        return repr(ref)
    return "(not shown: it does not look like a reference)"
