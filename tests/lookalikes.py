"""What looks like keys and tokens. Put together here, so that no scanner of repositories takes
them for real ones; and texts that are tedious to examine."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode

LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC2dF4hJ6"


def part(value: object) -> str:
    return urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


JWT = ".".join([part({"alg": "HS256", "typ": "JWT"}), part({"sub": "1", "n": 4711}), LETTERS])
AKIA = "AKIA" + "IOSFODNN7EXAMPLE"


def pem(kind: str) -> str:
    return f"-----BEGIN {kind}-----\nMIIEpAIBAAKCAQEA{LETTERS}\n-----END {kind}-----\n"


SIZE = 262_144 - 2
REPEATED = [
    *("a", "eyJ", "eyJ.", "eyJaaaaaaaaaaaa.", "eyJhbGciOjEyMzQ1fQ.aaaa.", "://", "://a:", "://:*@"),
    *("a:b@", "-----BEGIN RSA PRIVATE KEY-----"[:-1], "-----BEGIN ", "-----BEGIN AB ", "-", "- "),
    *("Authorization: ", "authorization:        ", "bearer ", "password=a ", "password= ", ";pwd="),
    *("SG.aaaaaaaaaaaaaaaaaa", "SG.", "sk-", "ghp_", "xoxb-", "AKIA", "\\", '"', " ", "key=", "é"),
    *("-----BEGIN AB CD EF ", "?api_key=***&", "token", "user=a ", "SK0123456789abcdef", "…", "0"),
    *(
        "KEY=a\n",
        "A=b\n",
        "TOKEN_A=1\n",
        "PASSWORD=***\n",
        "token=a\n",
        "\n",
        " export ",
        "pass",
        "pin=",
    ),
    *(
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n",
        "passpasspasspass\n",
        "=",
        "pin",
        '{"a":',
    ),
]
