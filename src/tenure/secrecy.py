"""Secrets and payload values: kept out of payloads, error texts and logs; found by reference.

Three guards, pure logic. `looks_secret` and `find_secret` stand at the door: a payload is stored,
backed up and shown to operators, so a password in it is refused. `scrub` stands before the log and
the store: exception texts love to quote the value they choked on. `resolve` is what `ctx.secret`
does instead. They guard against accidents, not against somebody who wants to smuggle a secret in.
No message made here contains a value.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

from tenure.errors import ConfigError, PayloadError
from tenure.payload import MAX_BYTES, decode

REMEDY = (
    "Pass a reference to it (in a field ending in _ref) and read it in the handler with "
    'ctx.secret("ref"), or say options(allow_secret=True) if it is not a secret.'
)

# -- what a secret looks like -------------------------------------------------------------------
# Every run is possessive, and is either satisfied by its minimum or stopped by a character that
# cannot start another match: 256 KiB of anything takes linear time. (?a) throughout: without it
# (?i) equates k with the Kelvin sign, which `looks_secret` does not know. Compiling them all takes
# 12 ms, which `import tenure` shall not pay: see `_re`.
# The name of a group is what the match looks like; a group inside it is the secret part.
_SHAPES = r"""(?ax)
    (?<![A-Za-z0-9_])(?:
        (?P<an_AWS_access_key>(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z]))
      | (?P<a_Google_API_key>AIza[\w-]{35}(?![\w-]))
      | (?P<a_GitHub_token>gh[pousr]_[A-Za-z0-9]{30,}+|github_pat_\w{22,}+)
      | (?P<a_GitLab_token>glpat-[\w-]{20,}+)
      | (?P<a_Slack_token>xox[abeprs]-[A-Za-z0-9-]{10,}+)
      | (?P<a_Stripe_key>[sr]k_live_[A-Za-z0-9]{16,}+)
      | (?P<a_webhook_signing_secret>whsec_[A-Za-z0-9+/=]{16,}+)
      | (?P<an_npm_token>npm_[A-Za-z0-9]{36,}+)
      | (?P<a_PyPI_token>pypi-Ag[\w-]{30,}+)
      | (?P<an_Anthropic_API_key>sk-ant-[\w-]{16,}+)
        # bare only without hyphens: sk-fading-circle-spinner is a name, sk-SK a language
      | (?P<an_OpenAI_API_key>sk-(?:(?:proj|svcacct|admin|or)-[\w-]{20,}+|[A-Za-z0-9]{32,}+))
      | (?P<a_SendGrid_API_key>SG\.[\w-]{16,128}+\.[\w-]{16,}+)
      | (?P<a_Twilio_API_key>SK[0-9a-f]{32}(?![0-9A-Za-z]))
      | (?P<a_JSON_web_token>(?<!-)eyJ[\w-]{8,2048}+\.[\w-]{4,}+\.[\w-]{4,}+)
      | (?P<an_authorization_header>
            (?i:authorization['"]?+\s{0,8}+[:=]\s{0,8}+['"]?+(?:bearer|basic|digest|token))\s{1,8}+
            ([^\s'",<>]{3,}+))
      | (?P<a_storage_account_key>
            (?i:accountkey|sharedaccesskey)=([A-Za-z0-9+/=]{20,}+))
      | (?P<a_connection_string_with_a_password>
            (?i:password)=([^\s,;()<>]{1,256}+)(?!\S))
    )
    # the body ends at the next five hyphens; a text cut off inside the key has no end line
  | (?P<a_private_key>-----BEGIN[ ](?:[A-Z0-9]{1,16}[ ]){0,3}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----
        (?:[^-]|-(?!----))*+(?:-----END[ ][A-Z0-9 ]{1,64}+-----)?)
  | (?P<a_URL_with_a_password>
        ://[^\s/:@?\#'"<>]{0,256}+:([^\s/@?\#'"]{1,256}+)@)
    # not `token=`: mailing a link with a one-time token is what background jobs are for
  | (?P<a_password_or_key_in_a_query_or_connection_string>
        [?&;][ ]?(?i:password|passwd|pwd|client_secret|api_?key|(?:access|refresh|auth)_token)=
        ([^\s&;,'"<>]{3,256}+))
"""
_BARE_BEARER = r"(?ai)bearer\s{1,8}+(?=[^\d\s]*+\d)[\w.~+/-]{12,}+=*+\s*"
_LIBPQ = r"(?ai)(?:host|dbname|user|port)=[^\s,()]{1,256}+(?!\S)"

# A field is judged by the end of its name, so that password_ref, tokenId, secretHash, token_count
# and password_policy pass without being listed.
_NAME = r"""(?aix)(?:
        (?P<a_password>pass[\W_]?(?:word|wd|phrase|code)s?|(?:db|smtp|user)[\W_]?pass)
      | (?P<a_password_>pwd)
      | (?P<a_private_key>private[\W_]?keys?)
      | (?P<an_API_key>
            (?:api|access|secret|signing|encryption|master|account|shared|auth)[\W_]?keys?)
      | (?P<a_token>(?:access|refresh|auth|api|bearer)[\W_]?tokens|token|jwt)
      | (?P<a_bearer_token>(?:\A|auth[\W_]?)bearer)
      | (?P<a_credential>credentials?|creds)
      | (?P<an_authorization_header>authorization)
      | (?P<a_session_cookie>(?:session|auth|set)[\W_]?cookies?)
      | (?P<a_connection_string>connection[\W_]?string)
      | (?P<a_seed_phrase>(?:seed|recovery|secret)[\W_]?phrase)
      | (?P<a_secret>secrets?)
    )
    (?:[\W_]?(?:value|plain(?:text)?|cleartext|raw|confirm(?:ation)?|repeat|again|new|old|current
        |v?\d{1,9}))?[\W_]{0,2}\Z"""
# Cursors, the marks of tokenizers and the addresses of telephones are tokens in name only.
_INNOCENT_NAME = (
    r"(?ai)(?:page|next|continuation|pagination|cursor|sync|resume|idempotency|push|device|fcm|apns"
    r"|[ebs]os|pad|unk|sep|cls|mask|stop|special)[\W_]?token\Z"
)
_REFERENCE_NAME = r"(?ai)(?:ref|id|hash|name|arn)(?:s|es)?\Z"
_HOLDER_NAME = r"(?ai)(?:secrets|passwords|api_?keys)\Z"

# Each name and each pattern above contains one of these; an escape (`\u0070assword`, `:\/\/`) could
# hide them, but our own encoder writes none for letters and slashes.
_HINT = (
    r"(?a)pass|key|token|secret|cred|pwd|authorization|bearer|jwt|cookie|connection|phrase|eyj|a[ks]ia"
    r"|aiza|sk-|sk[0-9a-f]{8}|sg\.|k_live_|xox|npm_|pypi-|glpat-|whsec_|gh[pousr]_|github_pat_"
    r'|://[^\s/@"]{0,2100}+@|\\[u/]'
)

# What stands where a secret will be, or says where it is.
_PLACEHOLDER = (
    r"(?ai)\s*+(?:[*•.x#_-]+|\$\{[^{}]*\}|\$\([^()]*\)|(?-i:\$[A-Z_][A-Z0-9_]*)"
    r"|\{{1,2}[\w .:-]*\}{1,2}|%\w*%|%\(\w*\)s|%s|<[\w .:-]*>|\[[\w .:-]*\]"
    r"|redacted|hidden|masked|none|null|nil|n/?a|undefined|true|false|yes|no|todo|tbd"
    r"|include|omit|same-origin"  # what fetch() calls credentials
    r"|(?:env|file|vault|ssm|op|arn|ref|secrets?|secretsmanager|keyvault|kms|sops|k8s):\S++)?\s*+"
)
_SCHEME = r"(?ai)(?:bearer|basic|digest|token|negotiate|aws4-\S++)\s"
_KEY = r"[A-Za-z_][A-Za-z0-9_-]{0,63}"

_Trail: TypeAlias = "tuple[Any, str | int] | None"


@cache
def _re(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def looks_secret(text: str) -> bool:
    """Whether JSON text deserves `find_secret`: quick, often wrongly yes, never wrongly no."""
    return _re(_HINT).search(text.lower()) is not None


def find_secret(value: object, what: str = "payload") -> str | None:
    """`payload.smtp.password looks like a password`, or None. The path never has a value in it."""
    stack: list[tuple[object, _Trail, str]] = [(value, None, "")]
    while stack:
        item, trail, name = stack.pop()
        if isinstance(item, str):
            if kind := _kind(item, name):
                return f"{_path(what, trail)} looks like {kind}"
        elif isinstance(item, dict):
            for key in item:
                if isinstance(key, str) and (kind := _kind(key, "")):
                    return f"a key of {_path(what, trail)} looks like {kind}"
            stack += [
                (child, (trail, str(key)), _name(item, str(key), name))
                for key, child in reversed(item.items())
                if isinstance(child, (str, dict, list, tuple))  # numbers are no secrets
            ]
        elif isinstance(item, (list, tuple)):
            indexes = range(len(item) - 1, -1, -1)
            stack += [(item[index], (trail, index), name) for index in indexes]
    return None


def _name(parent: dict[Any, Any], key: str, parent_name: str) -> str:
    """The name a field goes by: mostly its key."""
    if key == "value":
        for label in ("name", "key", "header"):  # {"name": "DB_PASSWORD", "value": "..."}
            if isinstance(known_as := parent.get(label), str):
                return known_as
    if _re(_HOLDER_NAME).search(parent_name[-64:]) and not _re(_REFERENCE_NAME).search(key[-64:]):
        return parent_name  # {"secrets": {"stripe": "..."}}
    return key


def _kind(text: str, name: str) -> str | None:
    """What a string looks like, by its value, then by its name."""
    for group, _, _ in _secrets(text):
        if group != "an_AWS_access_key" or not _re(_REFERENCE_NAME).search(name[-64:]):
            return _in_words(group)  # (the id alone, under its name, is none)
    if text[:6].lower() == "bearer" and _re(_BARE_BEARER).fullmatch(text):
        return "an authorization header"
    name = name[-64:]
    named = _re(_NAME).search(name) if looks_secret(name) else None
    if named is None or _re(_INNOCENT_NAME).search(name) or _re(_PLACEHOLDER).fullmatch(text):
        return None
    group = named.lastgroup or ""
    if group == "a_password_" and text.startswith("/"):  # where a shell is
        return None
    if group == "an_authorization_header" and len(text) < 16 and not _re(_SCHEME).match(text):
        return None  # "approved", says the bank
    return _in_words(group)


def _in_words(group: str) -> str:
    return group.strip("_").replace("_", " ")


def _secrets(text: str) -> Iterator[tuple[str, int, int]]:
    """Group, start and end of each secret in a text."""
    position = 0 if looks_secret(text) else len(text)
    while found := _re(_SHAPES).search(text, position):
        group, part = found.lastgroup or "", found.lastindex or 0
        if found[part + 1] is not None:  # the group inside
            part += 1
        if _confirmed(found, group, part):
            yield group, found.start(part), found.end(part)
            position = found.end()
        else:
            position = found.start() + 1


def _confirmed(found: re.Match[str], group: str, part: int) -> bool:
    """What a pattern alone cannot tell."""
    if group == "a_JSON_web_token":
        header = found[0].partition(".")[0].replace("-", "+").replace("_", "/")
        try:
            content = decode(a2b_base64(header + "=="))
        except (ValueError, PayloadError):
            return False
        return isinstance(content, dict) and "alg" in content
    if group == "a_connection_string_with_a_password":
        around = found.string[max(0, found.start() - 64) : found.end() + 64]
        if not _re(_LIBPQ).search(around):
            return False
    return part == found.lastindex or not _re(_PLACEHOLDER).fullmatch(found[part])


def _path(what: str, trail: _Trail) -> str:
    steps: list[str] = []
    while trail is not None:
        trail, step = trail
        if isinstance(step, int):
            steps.append(f"[{step}]")
        else:  # a key that is no name may be data: somebody's address
            steps.append(f".{step}" if _re(_KEY).fullmatch(step) else "[...]")
    return what + "".join(reversed(steps))


# -- error texts --------------------------------------------------------------------------------
MAX_TEXT = 8_192
_WORK = 100_000  # comparisons of payload values with places in the text: 40 ms
_ANYWHERE_FROM = 8  # characters; shorter values count only as words of their own
_EDGE = 6  # characters of a cut-off value that give it away
_TYPE_NAME = (
    r"(?am)^(?:[A-Za-z_]\w*+\.)*+[A-Z]\w*(?:Error|Exception|Warning|Exit|Interrupt|Iteration|Timeout"
    r"|Group)(?=:|\(|\s*$)"
)
_PLAIN = r"[A-Za-z0-9]{3,}"
_LONG = 30  # characters; from here on values get cut off
_CUT = r"\.\.\.|…|\Z"
_QUOTES = ("'", '"', "`")
_SHORT_WORD = r"[a-z]{3}"


def scrub(text: str, payload_text: str) -> str:
    """An exception's text without the values of the job's payload and without secrets.

    Strings from 3 characters (plain, escaped or URL-quoted; also cut off by `...`), numbers from 3
    digits. Values under 8 characters count as words of their own only, so that `err` leaves `error`
    alone, and lower-case words of 3 letters only in quotes. The exception's type at the start of
    a line stays. Never raises: what cannot be examined within bounds is withheld.
    """
    try:
        return _scrub(text[:MAX_TEXT], payload_text)
    except Exception:  # OverflowError mostly: then nothing but the type is safe to show
        named = _re(_TYPE_NAME).match(text[:256])
        return f"{named[0]}: [redacted]" if named else "[redacted]"


def _scrub(text: str, payload_text: str) -> str:
    if len(payload_text) > 4 * MAX_BYTES:
        raise OverflowError
    marks = bytearray(len(text))  # 1: a value of the payload, 2: a secret
    places: dict[str, list[int]] = {}  # of each three characters in the text
    for index in range(len(text) - 2):
        places.setdefault(text[index : index + 3], []).append(index)
    cuts = [cut.span() for cut in _re(_CUT).finditer(text)]
    work, words = 0, list[tuple[int, int]]()
    for form in _forms(text, decode(payload_text) if payload_text else None, places):
        heads = places.get(form[:3], [])
        tails = places.get(form[-3:], []) if len(cuts) > 1 else []
        if (work := work + len(heads) + len(tails)) > _WORK:
            raise OverflowError
        spans = [(at, at + len(form)) for at in heads if text.startswith(form, at)]
        if len(form) < _ANYWHERE_FROM:
            words += spans
            spans = []
        for start, end in chain(spans, _cut_off(text, form, heads, tails, cuts)):
            marks[start:end] = b"\1" * (end - start)
    for _, start, end in _secrets(text):
        marks[start:end] = b"\2" * (end - start)
    _mark_words(text, marks, words)
    for named in _re(_TYPE_NAME).finditer(text):
        marks[named.start() : named.end()] = bytes(len(named[0]))
    pieces, position = list[str](), 0
    for run in re.finditer(rb"[\1\2]+", marks):  # values that overlap or touch become one
        pieces += text[position : run.start()], "[secret]" if 2 in run[0] else "[redacted]"
        position = run.end()
    return ("".join(pieces) + text[position:])[:MAX_TEXT]


def _forms(text: str, payload: object, places: Mapping[str, object]) -> set[str]:
    """The ways in which the payload's scalars could stand in the text. Nearly all are ruled out by
    three of their characters: 40,000 values take 30 ms."""
    escaped, quoted = "\\" in text, "%" in text or "+" in text
    forms: set[str] = set()
    for scalar in _scalars(payload):
        if not isinstance(scalar, str):
            forms.update(_digits(scalar, grouped="," in text))
            continue
        forms.update((scalar, scalar.lower(), scalar.strip()))
        if (escaped or quoted) and not (scalar.isalnum() and scalar.isascii()):
            plain = _re(_PLAIN).findall(scalar[:_LONG])  # what no escaping changes
            if all(run in text for run in (plain if len(scalar) < _LONG else plain[:1])):
                forms.update(_escaped(scalar) if escaped else (), _quoted(scalar) if quoted else ())
    return {form for form in forms if len(form) > 2 and (form[:3] in places or form[-3:] in places)}


def _scalars(payload: object) -> set[str | int | float]:
    """Strings and numbers of the payload, and keys that are data rather than names."""
    found: set[str | int | float] = set()
    stack = [payload]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            found.update(key for key in item if not _re(_KEY).fullmatch(key))
            stack += item.values()
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, (str, int, float)):  # True has no three digits
            found.add(item)
    return found


def _digits(value: float, *, grouped: bool) -> Iterator[str]:
    value = abs(value)
    if len(written := repr(value)) - ("." in written) > 2:
        yield written
        if grouped:
            yield f"{value:,}"
        if "." in written:
            yield written.removesuffix(".0")


def _escaped(value: str) -> Iterator[str]:
    import json

    yield from (repr(value)[1:-1], ascii(value)[1:-1], repr(value.encode())[2:-1])
    yield from (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])


def _quoted(value: str) -> Iterator[str]:
    from urllib.parse import quote

    quoted = quote(value, safe="")
    yield from (quoted, quoted.replace("%2F", "/"), quoted.replace("%20", "+"))


def _mark_words(text: str, marks: bytearray, words: list[tuple[int, int]]) -> None:
    """Short values; again, because what stood next to one may be gone now."""
    for _ in range(8):
        if not (found := [span for span in words if _own_word(text, marks, *span)]):
            break
        for start, end in found:
            marks[start:end] = b"\1" * (end - start)
        words = [span for span in words if 0 in marks[span[0] : span[1]]]


def _own_word(text: str, marks: bytearray, start: int, end: int) -> bool:
    """Neither side continues with more of the same: letters with letters, digits with digits."""
    before = "" if start == 0 or marks[start - 1] else text[start - 1]
    after = "" if end == len(text) or marks[end] else text[end]
    if _re(_SHORT_WORD).fullmatch(text, start, end):
        return before in _QUOTES and after in _QUOTES
    if before.isalpha() and text[max(0, start - 2) : start - 1] == "\\":
        before = ""  # the n of an escaped line feed
    return not (_same(before, text[start]) or _same(text[end - 1], after))


def _same(left: str, right: str) -> bool:
    return (left.isalpha() and right.isalpha()) or (left.isdigit() and right.isdigit())


def _cut_off(
    text: str, form: str, heads: list[int], tails: list[int], cuts: list[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The head of a value before `...` or the end of the text, its tail after `...`: libraries
    shorten what they quote, and we cut texts ourselves."""
    for start in heads:
        before = cuts[bisect_left(cuts, (start, 0))][0]  # the last one is the end of the text
        if _EDGE <= before - start < len(form) and form.startswith(text[start:before]):
            yield start, before
    for start in tails:
        if index := bisect_right(cuts, start, key=lambda span: span[1]):
            after, end = cuts[index - 1][1], start + 3
            if _EDGE <= end - after < len(form) and form.endswith(text[after:end]):
                yield after, end


# -- references ---------------------------------------------------------------------------------
MAX_SECRET_FILE = 65_536
_ENVIRONMENT_NAME = r"[A-Z_][A-Z0-9_]*"
_REFERENCE = r"[A-Za-z0-9_./:@-]{1,200}"


def resolve(
    ref: str, provider: Callable[[str], str | None] | None, environ: Mapping[str, str]
) -> str:
    """The secret behind a reference: the provider's answer unless that is None, else
    `env:NAME` or `NAME` from the environment, else `file:/path`. ConfigError if there is none."""
    if provider is not None and (answer := provider(ref)) is not None:
        return answer
    if ref.startswith("file:"):
        return _read(ref, ref.removeprefix("file:"))
    name = ref.removeprefix("env:")
    if (name != ref or _re(_ENVIRONMENT_NAME).fullmatch(name)) and (secret := environ.get(name)):
        return secret
    raise ConfigError(
        f"no secret {_shown(ref)}: give the app a secret provider that knows it, or set an "
        "environment variable and refer to it as env:NAME, or store it in a file and refer to it "
        "as file:/path"
    )


def _read(ref: str, path: str) -> str:
    import os
    import stat

    shown = _shown(ref)
    if not path.startswith("/"):
        raise ConfigError(f"secret {shown}: the path must be absolute, as in file:/run/secrets/x")
    try:
        # Nonblocking: opening a pipe nobody writes to would wait for ever.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            regular = stat.S_ISREG(os.fstat(file).st_mode)
            data = os.read(file, MAX_SECRET_FILE + 1) if regular else b""
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(
            f"secret {shown} cannot be read: {why}; make the file readable for the worker, or "
            "use env:NAME or the app's secret provider"
        ) from None
    if not regular:
        raise ConfigError(f"secret {shown}: not a regular file; refer to one")
    if len(data) > MAX_SECRET_FILE:
        raise ConfigError(f"secret {shown}: more than {MAX_SECRET_FILE:,} bytes; is it the file?")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"secret {shown}: not UTF-8 text; store it as base64") from None


def _shown(ref: str) -> str:
    """A reference for a message, unless somebody passed the secret itself."""
    if _re(_REFERENCE).fullmatch(ref) and _kind(ref, "") is None:
        return repr(ref)
    return "(not shown: it does not look like a reference)"
