from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lookalikes import AKIA, JWT, LETTERS, REPEATED, SIZE, pem
from stopwatch import within
from tenure.payload import encode
from tenure.secrecy import any_index, find_secret, findings, looks_secret

IMAGE = b64encode(bytes(range(256)) * 40).decode()
PUBLIC_KEY = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYI\n-----END PUBLIC KEY-----\n"
ENV = "TOKEN_COUNT=5\nMAX_TOKENS=4096\nPASSWORD_FILE=/run/secrets/x\nSECRET_NAME=prod\nPASSWORD=\n"
ENV += (
    "API_KEY=${API_KEY}\nPWD=/srv\nOLDPWD=/srv/x\nCOMPASS=north\nSECRET_SANTA=true\nDB_PASS=***\n"
)

SECRET: list[tuple[object, str]] = [  # payload, what the answer must say
    ({"password": "hunter2"}, "payload.password looks like a password"),
    ({"config": {"db": {"passwd": "hunter2"}}}, "payload.config.db.passwd looks like a password"),
    ({"users": [{"name": "bob", "pwd": "hunter2"}]}, "payload.users[0].pwd looks like"),
    ({"DB_PASSWORD": "hunter2"}, "payload.DB_PASSWORD looks like a password"),
    ({"passwordConfirmation": "hunter2"}, "payload.passwordConfirmation looks like a password"),
    ({"password2": "hunter2"}, "payload.password2 looks like a password"),
    ({"passwords": ["hunter2"]}, "payload.passwords[0] looks like a password"),
    ({"secret": "s3cr3t"}, "payload.secret looks like a secret"),
    ({"clientSecret": "s3cr3t"}, "payload.clientSecret looks like a secret"),
    ({"secrets": {"stripe": "s3cr3t"}}, "payload.secrets.stripe looks like a secret"),
    ({"api_key": "abc123"}, "payload.api_key looks like an API key"),
    ({"apiKey": "abc123"}, "payload.apiKey looks like an API key"),
    ({"x-api-key": "abc123"}, "payload.x-api-key looks like an API key"),
    ({"APIKEY": "abc123"}, "payload.APIKEY looks like an API key"),
    ({"aws_secret_access_key": LETTERS}, "payload.aws_secret_access_key looks like an API key"),
    ({"access_token": "abc123"}, "payload.access_token looks like a token"),
    ({"refreshToken": "abc123"}, "payload.refreshToken looks like a token"),
    ({"token": "abc123"}, "payload.token looks like a token"),
    ({"bearer": "abc123"}, "payload.bearer looks like a bearer token"),
    ({"privateKey": "0xabc123"}, "payload.privateKey looks like a private key"),
    ({"credentials": "bob:hunter2"}, "payload.credentials looks like a credential"),
    ({"headers": {"Authorization": "Basic Ym9iOng="}}, "payload.headers.Authorization looks like"),
    ({"session_cookie": "abc123"}, "payload.session_cookie looks like a session cookie"),
    ({"connectionString": "Server=x"}, "payload.connectionString looks like a connection string"),
    ({"env": [{"name": "SMTP_PASSWORD", "value": "x1"}]}, "payload.env[0].value looks like"),
    ({"items": ["a", "b", pem("RSA PRIVATE KEY")]}, "payload.items[2] looks like a private key"),
    ({"pem": pem("EC PRIVATE KEY")}, "payload.pem looks like a private key"),
    ({"file": "Key:\n" + pem("OPENSSH PRIVATE KEY")}, "payload.file looks like a private key"),
    ({"file": pem("PGP PRIVATE KEY BLOCK")}, "payload.file looks like a private key"),
    ({"note": f"use {AKIA} and {LETTERS}"}, "payload.note looks like an AWS access key"),
    (["AIza" + LETTERS[:35]], "payload[0] looks like a Google API key"),
    ("ghp_" + LETTERS, "payload looks like a GitHub token"),
    ({"a": "github_pat_" + LETTERS}, "payload.a looks like a GitHub token"),
    ({"a": "xoxb-123456789012-abcdef"}, "payload.a looks like a Slack token"),
    ({"a": "sk_live_" + LETTERS[:24]}, "payload.a looks like a Stripe key"),
    ({"a": "glpat-" + LETTERS[:20]}, "payload.a looks like a GitLab token"),
    ({"a": "npm_" + LETTERS}, "payload.a looks like an npm token"),
    ({"a": "pypi-AgEIcHlwaS5vcmc" + LETTERS}, "payload.a looks like a PyPI token"),
    ({"a": "sk-proj-" + LETTERS}, "payload.a looks like an OpenAI API key"),
    ({"a": "sk-ant-api03-" + LETTERS}, "payload.a looks like an Anthropic API key"),
    ({"a": f"SG.{LETTERS[:22]}.{LETTERS}"}, "payload.a looks like a SendGrid API key"),
    ({"a": "SK" + "0123456789abcdef" * 2}, "payload.a looks like a Twilio API key"),
    ({"a": f"see {JWT}"}, "payload.a looks like a JSON web token"),
    ({"a": f"AccountName=x;AccountKey={LETTERS}=="}, "payload.a looks like a storage account key"),
    ({"a": "postgres://bob:hunter2@db/shop"}, "payload.a looks like a URL with a password"),
    ({"a": "https://bob:hunter2@example.com/"}, "payload.a looks like a URL with a password"),
    ({"a": "redis://:hunter2@cache:6379/0"}, "payload.a looks like a URL with a password"),
    ({"a": "Authorization: Bearer abc123"}, "payload.a looks like an authorization header"),
    ({"a": "Bearer abc123def456ghi"}, "payload.a looks like an authorization header"),
    ({"a": "Server=db;Uid=sa;Pwd=hunter2;"}, "payload.a looks like a password or key in a query"),
    ({"a": "host=db user=bob password=hunter2"}, "payload.a looks like a connection string"),
    ({"a": "https://x.org/?q=1&api_key=abc123"}, "payload.a looks like a password or key in a"),
    ({"ghp_" + LETTERS: 1}, "a key of payload looks like a GitHub token"),
    ({"bob@example.com": {"password": "hunter2"}}, "payload[...].password looks like a password"),
    ({"smtp": {"password_ref": "ghp_" + LETTERS}}, "payload.smtp.password_ref looks like a GitHub"),
    # JSON inside a string, also inside another, and what is named there
    ({"body": '{"password": "hunter2"}'}, "payload.body.password looks like a password"),
    ({"body": ' [{"user": {"pwd": "hunter2"}}]\n'}, "payload.body[0].user.pwd looks like"),
    ({"a": json.dumps({"b": json.dumps({"token": "abc123"})})}, "payload.a.b.token looks like a"),
    ({"body": '{"\\u0070assword": "hunter2"}'}, "payload.body.password looks like a password"),
    ({"body": '{"note": "use ' + AKIA + '"}'}, "payload.body looks like an AWS access key"),
    ({"body": '{"pin": 4821}'}, "payload.body.pin looks like a PIN"),
    # names
    ({"pass": "hunter2"}, "payload.pass looks like a password"),
    ({"smtp": {"user": "bob", "pass": "hunter2"}}, "payload.smtp.pass looks like a password"),
    ({"smtp_pass": "hunter2", "n": 1}, "payload.smtp_pass looks like a password"),
    ({"ftpPass": "hunter2"}, "payload.ftpPass looks like a password"),
    ({"password": {"value": "hunter2"}}, "payload.password.value looks like a password"),
    ({"tags": [{"Key": "db_password", "Value": "x1"}]}, "payload.tags[0].Value looks like a pass"),
    # numbers
    ({"password": 12345678}, "payload.password looks like a password"),
    ({"user": {"passcode": 4821}}, "payload.user.passcode looks like a password"),
    ({"old_password": 10**18}, "payload.old_password looks like a password"),
    ({"env": [{"name": "DB_PASSWORD", "value": 99887766}]}, "payload.env[0].value looks like a"),
    ({"pin_code": 1234}, "payload.pin_code looks like a PIN"),
    ({"pin": "0042"}, "payload.pin looks like a PIN"),
    ({"cardPin": 9944}, "payload.cardPin looks like a PIN"),
    # pairs
    ({"h": [["Authorization", "Bearer abc123"], ["Accept", "*/*"]]}, "payload.h[0][1] looks like"),
    ({"h": [["Accept", "*/*"], ["X-Api-Key", "abc123"]]}, "payload.h[1][1] looks like an API key"),
    ({"form": [["user", "bob"], ["password", "hunter2"]]}, "payload.form[1][1] looks like a pass"),
    ({"form": [["token", "abc123"]]}, "payload.form[0][1] looks like a token"),
    # lines
    ({"env": "DB_PASSWORD=hunter2\nPORT=5"}, "payload.env looks like a setting with a secret"),
    ({"env": "PORT=5\r\nexport STRIPE_API_KEY='abc 123'\r\n"}, "payload.env looks like a setting"),
    ({"env": "TOKEN=abc123"}, "payload.env looks like a setting with a secret"),
    ({"env": "  SECRET_KEY=abc123 # of the test site"}, "payload.env looks like a setting with"),
    ({"env": "db.password=hunter2"}, "payload.env looks like a setting with a secret"),
    ({"args": ["-e", "PIN=4821"]}, "payload.args[1] looks like a setting with a secret"),
    ({"body": "password=hunter2&user=bob"}, "payload.body looks like a setting with a secret"),
]

INNOCENT: list[object] = [
    {"to": "a@b.c", "n": 1},
    {"to": "alice@example.com", "subject": "Your password was changed"},
    {"body": "Never tell anybody your password or your API key. Password: ask your administrator."},
    {"id": "8c5e2f0e-9d8b-4a52-8a5f-0d1b3cf0f0a1"},
    {"sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {"commit": "ef30e2e5b7d1c2a3948576aabbccddeeff001122"},
    {"image": IMAGE},
    {"image": f"data:image/png;base64,{IMAGE}"},
    {"password_ref": "env:DB_PASSWORD"},
    {"passwordRef": "vault/db", "tokenId": "tok-17", "secretHash": "5f4dcc3b"},
    {"password_hash": "$2b$12$abcdefghijklmnopqrstuv"},
    {"token_count": 512, "max_tokens": "4096", "tokenizer": "cl100k_base"},
    {"token": 42, "password": None, "secret": True},
    {"password": "", "api_key": "***", "token": "<token>"},
    {"password": "${DB_PASSWORD}", "secret": "{{ vault.db }}", "token": "$TOKEN"},
    {"api_key": "env:STRIPE_KEY", "credentials": "file:/run/secrets/gcp.json"},
    {"password_policy": "strict", "password_reset_url": "https://example.com/reset?token=8f2a9c"},
    {"secretary": "Bob", "author": "Alice", "authority": "EU", "monkey": "bananas"},
    {"authorization": "approved"},
    {"standard_bearer": "Roland", "compass": "north", "passenger": "Bob", "passport_id": "X1"},
    {"next_page_token": "CAUQAA", "nextToken": "abc", "continuation-token": "abc"},
    {"device_token": "740f4707bebcf74f9b7c25d48e3358945f6aa01da5ddb387462c7eaf61bb78ad"},
    {"eos_token": "</s>", "pad_token": "<pad>"},
    {"tokens": ["the", "cat", "sat"]},
    {"key": "orders/2026/1.json", "cache_key": "a:b", "primary_key": "id", "idempotency_key": "x"},
    {"public_key": PUBLIC_KEY, "keyboard": "qwertz", "keywords": ["key", "secret santa"]},
    {"url": "https://example.com:8443/a?b=c@d", "repo": "ssh://git@github.com:22/a/b.git"},
    {"url": "postgres://bob@db/shop", "other": "postgres://bob:@db/shop"},
    {"url": "postgres://bob:***@db/shop", "other": "https://u:${PASSWORD}@example.com"},
    {"docs": "Send `Authorization: Bearer <token>` with each request."},
    {"name": "password", "value": ""},
    {"pwd": "/srv/app", "cwd": "/tmp"},
    {"fetch": {"credentials": "include", "mode": "cors"}},
    {"credentials": {"username": "bob", "token_ref": "crm"}},
    {"aws_access_key_id": AKIA},
    {"continent": "ASIA", "language": "sk-SK", "class": "sk-fading-circle-spinner-large-and-slow"},
    {"branch": "task-sk-1234", "package": "pypi-attestations", "script": "npm_config_cache"},
    {"three": "eyJhbGciOi.parts.here", "version": "1.22.333", "host": "a-b.c-d.e-f"},
    {"code": "connect(host=h, user=u, password=password)"},
    {"has_password": True, "password_length": 12, "password_expires_at": "2027-01-01"},
    {"secret_name": "prod/db", "secret_arn": "arn:aws:secretsmanager:eu:1:secret:x"},
    {"phone": "+49 30 901820", "iban": "DE89370400440532013000", "card_last4": "4242"},
    {"text": "The bearer of this letter has credentials; connection strings attached."},
    {"path": "C:\\users\\bob\\keys", "control": "\x01\x02", "emoji": "🔑", "kelvin": "to\u212aen"},
    {"max_tokens": 4096, "token_count": 12, "secret_santa": True, "tokens": 123456},
    {"token": 123456, "api_key": 123456, "secret": 123456, "credentials": 123456},
    {"max_passwords": 1000, "password_length": 1024, "reset_password": 12345, "password": 0},
    {"failed_password": 5000, "password_changed": 20261116, "num_password": 2000, "pwd": 1},
    {"pass": "passed", "n": 1},
    [{"pass": 3}, {"pass": "2"}, {"pass": True}, {"pass": "first"}],
    {"boarding_pass": "A12", "bypass": "yes", "first_pass": "x1", "season_pass": "gold"},
    {
        "pin": 13,
        "pins": [1234],
        "spin": 12345,
        "shipping": 12345,
        "pinned": 1234,
        "opinion": "1234",
    },
    {"pin": "A5", "pin_map": "0123"},
    {"address": {"street": "MG Road 1", "city": "Bengaluru", "pin_code": 560001}},
    {"pincode": "560001", "State": "Karnataka"},
    {"body": '{"to": "a@b.c", "token_count": 12}'},
    {"body": '{"password": "{{password}}", "token": "***"}'},
    {"body": "{password: hunter2}", "list": "[token, secret]", "open": '{"password": "x"'},
    {"fields": ["password", "email"], "order": ["token", "secret"]},
    {"tagged": [["secret", "NN"], ["the", "DT"], ["token", "NN"]]},
    {"points": [[1, 2], [3, 4]], "pairs": [["a", "b"], ["c", "d"]], "none": [[]]},
    {"env": ENV},
    {"code": "token = get()\npassword = os.environ['X']\napi_key=get_key()\nsecret=vault[1]\n"},
    {"query": "token=8f2a9c&user=5", "text": "The password=<yours> goes here"},
    {"password": {"min": 8, "label": "Your password"}, "token": {"type": "int"}},
    "password",
    ["token", "secret", 17, None],
    {},
    None,
]


def test_the_sets_are_as_large_as_promised() -> None:
    assert len(SECRET) >= 40
    assert len(INNOCENT) >= 40


@pytest.mark.parametrize(("value", "says"), SECRET, ids=range(len(SECRET)))
def test_secrets_are_found_and_named_by_path(value: object, says: str) -> None:
    text = encode(value)

    found = find_secret(value)

    assert found is not None
    assert found.startswith(says)
    assert looks_secret(text)
    assert looks_secret(json.dumps(value)), "escaped letters hide nothing"
    for secret in ("hunter2", "s3cr3t", "abc123", LETTERS[:16], AKIA, "bob@"):
        assert secret not in found


@pytest.mark.parametrize("value", INNOCENT, ids=range(len(INNOCENT)))
def test_innocent_payloads_pass(value: object) -> None:
    encode(value)  # a payload indeed

    assert find_secret(value) is None


def test_ordinary_payloads_do_not_even_reach_the_walk() -> None:
    for value in ({"to": "a@b.c", "n": 1}, {"url": "https://a.b/c", "to": "a@b.c"}, {"a": "gh"}):
        assert not looks_secret(encode(value))


def test_what_it_is_called() -> None:
    found = find_secret({"password": "hunter2"}, "arguments of 'mail'")

    assert found == "arguments of 'mail'.password looks like a password"


def test_all_of_them_are_found_and_where() -> None:
    value = {"token": "t1", "users": [{"token": "t2"}, {"n": 1}, {"a b": {"pwd": "x1"}}]}

    paths = [found.path for found in findings(value)]

    assert paths == [".token", ".users[0].token", ".users[2][...].pwd"]
    assert [any_index(path) for path in paths] == ["token", "users[].token", "users[][...].pwd"]
    assert any_index("users[].token") == any_index("users[7].token") == "users[].token"


def test_json_inside_json_is_followed_to_a_depth() -> None:
    def wrapped(levels: int) -> dict[str, str]:
        text = json.dumps({"password": "hunter2"})
        for _ in range(levels - 1):
            text = json.dumps({"body": text})
        return {"body": text}

    for levels in (1, 2, 3, 4):
        assert find_secret(wrapped(levels)) is not None
        assert looks_secret(encode(wrapped(levels)))
    assert find_secret(wrapped(12)) is None


def test_circular_and_deep_values_are_no_concern_of_the_walk() -> None:
    deep: object = "ghp_" + LETTERS
    for _ in range(5_000):
        deep = [deep]

    assert find_secret(deep) is not None


names = st.sampled_from(
    [
        *("password", "PASSWORD", "passWord", "pass_word", "api-key", "API_KEY", "token", "secret"),
        *("creds", "jwt", "set-cookie", "connection.string", "seed phrase", "authorization"),
        *("bearer", "private_key", "value", "name", "key", "x", "pass", "pin", "pin_code", "PIN"),
    ]
)
pieces = st.sampled_from(
    [text for value, _ in SECRET for text in re.findall(r'[^"{}\[\],]+', json.dumps(value))]
    + [
        "PASS=",
        "\nexport TOKEN=",
        "pin=",
        "4821",
        '{"pin":',
        '{"pass":"',
        '"}',
        "[",
        "]",
        "export ",
    ]
    + ["://", "@", ":", "/", "\\", '"', "\n", "ſ", "\u212a", "İ", "Bearer ", "password=", " ", "é"]
)
strings = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
secretive = st.lists(pieces | strings, max_size=5).map("".join)
scalars = secretive | st.integers(-(2**63), 2**63 - 1) | st.none()


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=3)
        | st.dictionaries(names | secretive, inner, max_size=3)
        | st.lists(st.tuples(names, inner).map(list), max_size=2)
        | st.dictionaries(names, inner, max_size=2).map(json.dumps)
    )


values = st.recursive(scalars, containers, max_leaves=8)


@given(values)
@example({"a": "x://" + "\\" * 256 + ":" + "\\" * 256 + "@"})
@example({"a": "x://" + "İ" * 256 + ":" + "İ" * 256 + "@"})
@example({"a": "PIN=1234"})
@example({"a": '{"pin_code": 1234}'})
@example([["PIN", "1234"]])
def test_whatever_is_found_was_suspected(value: Any) -> None:
    if find_secret(value) is not None:
        assert looks_secret(encode(value))
        assert looks_secret(json.dumps(value))
        assert looks_secret(json.dumps(value).replace("/", "\\/"))


# -- time ---------------------------------------------------------------------------------------
@pytest.mark.timed
@pytest.mark.parametrize("unit", REPEATED)
def test_pathological_texts_take_linear_time(unit: str) -> None:
    text = (unit * SIZE)[:SIZE]
    payload = json.dumps(text)

    assert within(200, lambda: looks_secret(payload))
    assert within(200, lambda: find_secret({"a": text}))
    assert within(200, lambda: find_secret({text: {"password" * 30_000: "***"}}))


@pytest.mark.timed
@pytest.mark.parametrize(
    "value",
    [
        list(range(1000, 43_000)),
        [{"password_ref": "x", "n": index} for index in range(8_000)],
        {f"pin {index}": index for index in range(12_000)},
        [['{"key": 1}', "token"]] * 9_000,
        ['{"key":1}'] * 18_000,
        [["token", "NN"]] * 17_000,
        "\n".join(f"TOKEN_{index}=x" for index in range(16_000)),
        json.dumps([json.dumps([json.dumps(["key"] * 1_000)] * 4)] * 2),
    ],
    ids=["numbers", "objects", "pins", "mixed", "JSON", "pairs", "lines", "JSON in JSON"],
)
def test_many_values_are_examined_within_bounds(value: object) -> None:
    assert len(encode(value)) > 60_000
    assert within(200, lambda: find_secret(value))


@pytest.mark.timed
def test_the_check_of_every_enqueue_is_cheap() -> None:
    text = encode({"to": "a@b.c", "n": 1})

    assert within(40, lambda: [looks_secret(text) for _ in range(10_000)])  # 4 µs each


def test_importing_it_compiles_nothing() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; from tenure.secrecy import compiled;"
    code += "assert compiled.cache_info().currsize == 0"

    ran = subprocess.run([sys.executable, "-c", code, *sys.path], timeout=30)

    assert ran.returncode == 0
