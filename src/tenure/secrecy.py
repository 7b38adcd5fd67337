"""What looks like a secret: the door that keeps passwords and keys out of payloads.

A payload is stored, backed up and shown to operators, so a password in it is refused. Pure logic:
`looks_secret` is the quick check of every enqueue, `findings` and `find_secret` the thorough one,
`spans` the same for a running text (`scrubbing.py`). It guards against accidents, not against
somebody who wants to smuggle a secret in. No message made here contains a value.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from tenure.errors import PayloadError
from tenure.payload import decode

# -- what a secret looks like -------------------------------------------------------------------
# Every run is possessive, and is either satisfied by its minimum or stopped by a character that
# cannot start another match: 256 KiB of anything takes linear time. (?a) throughout: without it
# (?i) equates k with the Kelvin sign, which `looks_secret` does not know. Compiling them all takes
# 12 ms, which `import tenure` shall not pay: see `compiled`.
# The name of a group is what the match looks like; a group inside it is the secret part.
_SHAPES = r"""(?ax)
    # a line of an .env file; first, because it stands where a line begins
    (?P<a_setting_with_a_secret>(?m:^)[ \t]{0,8}+(?:export[ \t]{1,8}+)?+[A-Za-z0-9_.-]{0,48}?
        (?i:pass(?:word|wd|phrase|code)?|pwd|secret|token|jwt|credentials?|pin(?:[_.-]?code)?
          |(?:api|access|secret|private|signing|encryption|master|account|shared|auth)[_.-]?key)
        (?:_?\d{1,3}+)?+=
        ("[^"\n]{1,256}+"|'[^'\n]{1,256}+'|[^\s"'`&,;()<>\[\]{}|]{1,256}+(?![^\s&;])))
  | (?<![A-Za-z0-9_])(?:
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
        (?P<a_password>pass[\W_]?(?:word|wd|phrase|code)s?|(?:\A|(?:db|database|smtp|imap|e?mail|user
            |admin|root|login|auth|basic|http|proxy|s?ftp|ssh|ldap|mysql|postgres|pg|redis|mongo|amqp
            |mqtt|wifi|vpn|account|my)[\W_]?)pass)
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
_PART_NAME = r"(?ai)value|plain(?:text)?|cleartext|raw"  # {"password": {"value": "..."}}
# Digits alone are no secret under most names (a token_count, a key's number); a PIN is nothing
# else. Where there is a street a pin_code is India's word for a postal code.
_PIN = (
    r"(?ai)(?:\A|[\W_]|card|user|bank|atm|sim|phone|device|account|login|security|unlock)"
    r"pin(?:[\W_]?(?:code|number))?\Z"
)
_ADDRESS = r"(?ai)street|address|city|town|state|district|country|post(?:al|code)|zip|locality"
_COUNT = r"(?ai)s\Z|\A(?:max|min|num|total|count|failed|wrong|reset|changed?|forgot|expire)"
_VERDICT = r"(?ai)\s*+(?:pass(?:ed)?|fail(?:ed)?|ok|first|second|third|last|final|\d{1,3})\s*+"
# Words that stand before another word in any list of pairs (a glossary), not only before a secret.
_PROSE = r"(?ai)tokens?|secrets?|bearer|credentials?|creds"

# Each name and each pattern above contains one of these; an escape (`\u0070assword`, `:\/\/`) could
# hide them, but our own encoder writes none for letters and slashes.
_HINT = (
    r"(?a)pass|key|token|secret|cred|pwd|authorization|bearer|jwt|cookie|connection|phrase|eyj|a[ks]ia"
    r"|aiza|sk-|sk[0-9a-f]{8}|sg\.|k_live_|xox|npm_|pypi-|glpat-|whsec_|gh[pousr]_|github_pat_"
    r'|://[^\s/@"]{0,2100}+@|\\[u/]|pin(?:[\W_]?(?:code|number))?(?:["\\=]|\Z)'
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
PLAIN_NAME = r"[A-Za-z_][A-Za-z0-9_-]{0,63}"
JSON_LEVELS = 4  # of JSON inside a string inside JSON: each is read once more

_Trail: TypeAlias = "tuple[Any, str | int] | None"
_Places: TypeAlias = "list[tuple[object, _Trail, str, int]]"  # value, way to it, its name, level


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def looks_secret(text: str) -> bool:
    """Whether JSON text deserves `findings`: quick, often wrongly yes, never wrongly no."""
    return compiled(_HINT).search(text.lower()) is not None


# -- the walk through a payload -----------------------------------------------------------------
class Finding(NamedTuple):
    """`.smtp.password` looks like `a password`; the path never has a value in it."""

    path: str
    kind: str
    key: bool = False  # not the value there: one of its keys

    def about(self, what: str) -> str:
        return f"{'a key of ' if self.key else ''}{what}{self.path} looks like {self.kind}"


def find_secret(value: object, what: str = "payload") -> str | None:
    """`payload.smtp.password looks like a password`, or None."""
    found = next(findings(value), None)
    return None if found is None else found.about(what)


def findings(value: object) -> Iterator[Finding]:
    stack: _Places = [(value, None, "", 0)]
    while stack:
        item, trail, name, level = stack.pop()
        if isinstance(item, str):
            if kind := _kind(item, name):
                yield Finding(_path(trail), kind)
            elif level < JSON_LEVELS and looks_secret(item):
                stack.append((json_inside(item), trail, name, level + 1))
        elif isinstance(item, dict):
            for key in item:
                if isinstance(key, str) and (kind := _kind(key, "")):
                    yield Finding(_path(trail), kind, key=True)
            stack += [
                (child, (trail, str(key)), _name(item, str(key), name), level)
                for key, child in reversed(item.items())
                if isinstance(child, (str, dict, list, tuple)) or type(child) is int
            ]
        elif isinstance(item, (list, tuple)):
            stack += _items(item, trail, name, level)
        elif type(item) is int and item > 999 and (kind := _kind_of_number(item, name)):
            yield Finding(_path(trail), kind)


def _items(items: Sequence[Any], trail: _Trail, name: str, level: int) -> _Places:
    """What a list holds, last first. A list of pairs is a dict: [["Authorization", "..."], ...]."""
    found: _Places = []
    pairs = items and all(_is_pair(item) for item in items)
    for index in range(len(items) - 1, -1, -1):
        item, place = items[index], (trail, index)
        if pairs:
            word = compiled(_PROSE).fullmatch(item[0]) and not any(map(str.isdigit, str(item[1])))
            found += [
                (item[1], (place, 1), "" if word else item[0], level),
                (item[0], (place, 0), "", level),
            ]
        else:
            found.append((item, place, name, level))
    return found


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, (list, tuple))
        and len(item) == 2
        and isinstance(item[0], str)
        and compiled(PLAIN_NAME).fullmatch(item[0]) is not None
    )


def json_inside(text: str) -> object:
    """The object or list that a string holds as JSON, or None."""
    if text[:1] not in ("{", "[", " ", "\n", "\r", "\t"):
        return None
    text = text.strip()
    if (text[:1], text[-1:]) not in (("{", "}"), ("[", "]")):
        return None
    try:
        return decode(text)
    except PayloadError:
        return None


def _name(parent: dict[Any, Any], key: str, parent_name: str) -> str:
    """The name a field goes by: mostly its key."""
    if key.lower() == "value":
        for label, known_as in parent.items():  # {"name": "DB_PASSWORD", "value": "..."}
            if str(label).lower() in ("name", "key", "header") and isinstance(known_as, str):
                return known_as
    if compiled(_HOLDER_NAME).search(parent_name[-64:]) and not compiled(_REFERENCE_NAME).search(
        key[-64:]
    ):
        return parent_name  # {"secrets": {"stripe": "..."}}
    if compiled(_PART_NAME).fullmatch(key):
        return parent_name
    if "pin" in key[-12:].lower() and compiled(_PIN).search(key[-64:]):
        return "" if any(compiled(_ADDRESS).search(str(other)) for other in parent) else key
    return key


def _path(trail: _Trail) -> str:
    steps: list[str] = []
    while trail is not None:
        trail, step = trail
        if isinstance(step, int):
            steps.append(f"[{step}]")
        else:  # a key that is no name may be data: somebody's address
            steps.append(f".{step}" if compiled(PLAIN_NAME).fullmatch(step) else "[...]")
    return "".join(reversed(steps))


def any_index(path: str) -> str:
    """`.users[3].token` as a task's `not_secret` names it: `users[].token`."""
    return compiled(r"\[\d*\]").sub("[]", path.removeprefix("."))


# -- one value ----------------------------------------------------------------------------------
def _kind(text: str, name: str) -> str | None:
    """What a string looks like, by its value, then by its name."""
    for group, _, _ in spans(text):
        if group != "an_AWS_access_key" or not compiled(_REFERENCE_NAME).search(name[-64:]):
            return _in_words(group)  # (the id alone, under its name, is none)
    if text[:6].lower() == "bearer" and compiled(_BARE_BEARER).fullmatch(text):
        return "an authorization header"
    return _kind_by_name(text, name[-64:])


def _kind_by_name(text: str, name: str) -> str | None:
    if not looks_secret(name):
        return None
    named = compiled(_NAME).search(name)
    if named is None:
        is_pin = compiled(_PIN).search(name) and text.isdigit() and 4 <= len(text) <= 12
        return "a PIN" if is_pin else None
    if compiled(_INNOCENT_NAME).search(name) or compiled(_PLACEHOLDER).fullmatch(text):
        return None
    group = named.lastgroup or ""
    if group == "a_password_" and text.startswith("/"):  # where a shell is
        return None
    if name.lower() == "pass" and compiled(_VERDICT).fullmatch(text):
        return None
    if group == "an_authorization_header" and len(text) < 16 and not compiled(_SCHEME).match(text):
        return None  # "approved", says the bank
    return _in_words(group)


def _kind_of_number(number: int, name: str) -> str | None:
    """Only passwords and PINs are written as numbers."""
    name = name[-64:]
    if not looks_secret(name):
        return None
    if compiled(_PIN).search(name):
        return "a PIN" if number < 10**12 else None
    named = compiled(_NAME).search(name)
    if named is None or named.lastgroup not in ("a_password", "a_password_"):
        return None
    return None if compiled(_COUNT).search(name) else "a password"


def _in_words(group: str) -> str:
    return group.strip("_").replace("_", " ")


def spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Group, start and end of each secret in a text."""
    position = 0 if looks_secret(text) else len(text)
    while found := compiled(_SHAPES).search(text, position):
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
    if group == "a_setting_with_a_secret":
        name = found[0].partition("=")[0].removeprefix("export").strip()
        if name in ("token", "jwt"):  # TOKEN is a variable's name, this a form's or a link's
            return False
        return _kind_by_name(found[part].strip("\"'"), name) is not None
    if group == "a_connection_string_with_a_password":
        around = found.string[max(0, found.start() - 64) : found.end() + 64]
        if not compiled(_LIBPQ).search(around):
            return False
    return part == found.lastindex or not compiled(_PLACEHOLDER).fullmatch(found[part])
