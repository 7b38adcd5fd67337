"""Secrets and payload values: refused at the door, fetched by reference, kept out of every word
that is stored, told to a hook or logged; and our own words, which no payload may eat.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import tenure
from crash.harness import Workshop
from leaks import (
    assert_absent,
    assert_not_stored,
    assert_nothing_leaked,
    canary,
    leaks,
    said_about_jobs,
)
from lookalikes import LETTERS
from places import Place
from tenure.scrubbing import Scrubber

NOW = tenure.Retry(attempts=5, backoff=tenure.Fixed(0))
ONCE = tenure.Retry(attempts=1)
SECRET = {"password": "hunter22"}


def run(app: tenure.App, task: tenure.Task[..., Any], *args: Any) -> tenure.Job:
    """Enqueue one and work until nothing is left to do now."""
    receipt = task.enqueue(*args)
    app.run_worker(drain=True)
    job = app.get(receipt.id)
    assert job is not None
    return job


def told_of(app: tenure.App, job: tenure.Job) -> str:
    events = [event.data for event in app.events(job.id)]
    return f"{job.error} {job.error_code} {job.error_place} {job.traceback} {events}"


# -- the door ---------------------------------------------------------------------------------


def test_a_secret_in_a_payload_is_refused_and_nothing_is_stored(
    app: tenure.App, count: Callable[[], int]
) -> None:
    @app.task
    def connect(account: dict[str, str]) -> None: ...

    @app.task
    def login(user: str, password: str) -> None: ...

    @app.task
    def parent(ctx: tenure.Context) -> None:
        ctx.enqueue(connect, SECRET)

    app.migrate()
    before = count()
    attempts: list[Callable[[], Any]] = [
        lambda: connect.enqueue(SECRET),
        lambda: login.enqueue("ann", "hunter22"),
        lambda: app.enqueue("connect", {"account": SECRET}),
        lambda: app.enqueue_many([connect.job({"user": "ann"}), connect.job(SECRET)]),
        lambda: connect.options(key="k", delay=5).enqueue(SECRET),
        lambda: connect.enqueue({"body": json.dumps(SECRET)}),
    ]
    for attempt in attempts:
        with pytest.raises(tenure.PayloadError) as caught:
            attempt()
        text = str(caught.value)
        assert "password" in text
        assert "ctx.secret" in text, "the message says what to do"
        assert "allow_secret" in text
        assert "not_secret" in text
        assert "hunter22" not in text
    assert count() == before

    job = run(app, parent)
    assert job.error_code == "PayloadError"
    assert "hunter22" not in str(job.error)
    assert [*app.find(type="connect")] == []


async def test_the_async_twin_refuses_secrets_too(
    app: tenure.App, count: Callable[[], int]
) -> None:
    @app.task
    def connect(account: dict[str, str]) -> None: ...

    with pytest.raises(tenure.PayloadError):
        await connect.aenqueue(SECRET)
    with pytest.raises(tenure.PayloadError):
        await app.aenqueue("connect", {"account": SECRET})
    assert count() == 0


def test_an_edited_replay_refuses_secrets_too(app: tenure.App) -> None:
    @app.task(retry=ONCE)
    def connect(account: dict[str, str]) -> None:
        raise RuntimeError

    job = run(app, connect, {"user": "ann"})
    with pytest.raises(tenure.PayloadError):
        app.replay(job.id, {"account": SECRET})

    after = app.get(job.id)
    assert after is not None
    assert (after.status, after.payload) == ("dead_letter", {"account": {"user": "ann"}})


@pytest.mark.parametrize("audit", ["all", "errors"])
def test_a_secret_that_was_allowed_is_stored_and_on_record(
    make_app: Callable[..., tenure.App], audit: str
) -> None:
    app = make_app(audit=audit)

    @app.task
    def connect(account: dict[str, str]) -> str:
        return account["password"][:2]

    receipt = connect.options(allow_secret=True).enqueue(SECRET)
    app.run_worker(drain=True)

    assert app.get(receipt.id).payload == {"account": SECRET}  # type: ignore[union-attr]
    assert app.result(receipt.id) == "hu"
    (enqueued,) = [e for e in app.events(receipt.id) if e.kind == "job.enqueued"]
    assert enqueued.data == {"allow_secret": True}
    assert "hunter22" not in str([event.data for event in app.events(receipt.id)])


# -- fields that only look like secrets ---------------------------------------------------------


@pytest.mark.parametrize("audit", ["all", "errors"])
def test_a_field_that_is_no_secret_passes_and_is_on_record(
    make_app: Callable[..., tenure.App], audit: str
) -> None:
    app, reset_token = make_app(audit=audit), canary()

    @app.task(not_secret=("token", "users[].reset.token"), retry=ONCE)
    def mail(to: str, token: str = "", users: list[Any] | None = None) -> None:
        raise RuntimeError(f"cannot mail {token} or {users}")

    one = mail.enqueue("a@b.c", reset_token)
    nested = mail.enqueue("a@b.c", users=[{}, {"reset": {"token": reset_token}}])
    neither = mail.enqueue("a@b.c")
    followed = app.enqueue_many([mail.job("a@b.c", reset_token), mail.job("a@b.c")])

    def remark(receipt: tenure.Receipt) -> Any:
        return [e.data for e in app.events(receipt.id) if e.kind == "job.enqueued"]

    unremarked = [None] if audit == "all" else []
    assert remark(one) == [{"not_secret": ["token"]}]
    assert remark(nested) == [{"not_secret": ["users[].reset.token"]}]
    assert remark(neither) == unremarked
    assert [remark(receipt) for receipt in followed] == [[{"not_secret": ["token"]}], unremarked]
    app.run_worker(drain=True)
    for receipt in (one, nested):
        job = app.get(receipt.id)
        assert job is not None
        assert str(job.error).startswith("RuntimeError: cannot mail ")
        assert_absent([reset_token], told_of(app, job))
    app.replay(one.id, {"to": "a@b.c", "token": reset_token})


def test_what_is_waived_for_one_field_is_waived_for_no_other(
    app: tenure.App, count: Callable[[], int]
) -> None:
    @app.task(not_secret=["token", "reset", "reset.token"])
    def mail(token: str = "", reset: Any = None, password: str = "") -> None: ...

    app.migrate()
    for arguments, path in [
        ({"token": "t1", "password": "hunter2"}, 'not_secret=("password",)'),
        ({"reset": {"password": "hunter2"}}, 'not_secret=("reset.password",)'),
        ({"reset": {"deep": {"token": "t1"}}}, 'not_secret=("reset.deep.token",)'),
        ({"reset": [{"token": "t1"}]}, 'not_secret=("reset[].token",)'),
    ]:
        with pytest.raises(tenure.PayloadError) as refused:
            app.enqueue("mail", arguments)
        assert path in str(refused.value), "ready to be pasted"
    with pytest.raises(tenure.PayloadError, match=r"a key of .*reset looks like a GitHub token"):
        app.enqueue("mail", {"reset": {"ghp_" + LETTERS: 1}})
    assert count() == 0
    app.enqueue("mail", {"token": "t1", "reset": {"token": "t2"}})


@pytest.mark.parametrize("paths", [["tokn"], "token", ["reset.token", 5], [""], [".token"]])
def test_paths_are_checked_when_a_task_is_decorated(app: tenure.App, paths: Any) -> None:
    with pytest.raises(tenure.ConfigError, match="not_secret"):

        @app.task(not_secret=paths)
        def mail(token: str, reset: Any) -> None: ...

    assert app.tasks == {}


# -- by reference -----------------------------------------------------------------------------


def test_a_secret_by_reference(
    make_app: Callable[..., tenure.App], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "smtp"
    file.write_text("from a file\n")
    monkeypatch.setenv("SMTP_PASSWORD", "from the environment")
    app = make_app(secrets=["SMTP_PASSWORD", "env:NO_*", f"file:{tmp_path}/*", "vault/*"])

    @app.task(retry=ONCE)
    def connect(ctx: tenure.Context, password_ref: str) -> str:
        return ctx.secret(password_ref)

    assert run(app, connect, "env:SMTP_PASSWORD").result == "from the environment"
    assert run(app, connect, "SMTP_PASSWORD").result == "from the environment"
    assert run(app, connect, f"file:{file}").result == "from a file"
    lost = run(app, connect, "env:NO_SUCH_VARIABLE")
    assert (lost.status, lost.error_code) == ("dead_letter", "ConfigError")

    app.secret_provider = {"vault/smtp": "from the provider"}.get
    assert run(app, connect, "vault/smtp").result == "from the provider"
    assert run(app, connect, "SMTP_PASSWORD").result == "from the environment"  # it said None


def test_what_is_not_declared_is_not_fetched_whoever_asks(
    make_app: Callable[..., tenure.App], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference out of a payload is whatever somebody wrote there."""
    monkeypatch.setenv("OTHER_SECRET", "of another app")
    asked: list[str] = []
    app = make_app(secrets=["env:MAIL_*", f"file:{tmp_path}/own/*"])
    app.secret_provider = lambda ref: asked.append(ref) or "from the provider"
    (tmp_path / "own").mkdir()
    (tmp_path / "elsewhere").write_text("somebody's")

    @app.task(retry=ONCE)
    def connect(ctx: tenure.Context, password_ref: str) -> str:
        return ctx.secret(password_ref)

    for ref in (
        "OTHER_SECRET", "env:OTHER_SECRET", "vault:app/key", f"file:{tmp_path}/elsewhere",
        f"file:{tmp_path}/own/../elsewhere", "env:MAIL", "file:/etc/hostname", "",
    ):  # fmt: skip
        job = run(app, connect, ref)
        assert (job.status, job.error_code) == ("dead_letter", "ConfigError")
        assert "is not declared" in str(job.error)
        assert "tenure.App(…, secrets=[" in str(job.error), "it says how to"
        assert job.result is None
    assert asked == []


def test_an_app_that_declares_nothing_is_given_nothing(
    app: tenure.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRIPE_KEY", "sk-1")

    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> str:
        return ctx.secret("STRIPE_KEY")

    job = run(app, pay)
    assert job.error_code == "ConfigError"
    assert "secret 'STRIPE_KEY' is not declared" in str(job.error)
    assert "secrets=" in str(job.error)


# -- what a run has fetched -------------------------------------------------------------------
Say = Callable[[str], Any]


class Coded(Exception):
    def __init__(self, code: str) -> None:
        self.code = code


def raises(error: Callable[[str], BaseException]) -> Say:
    def say(text: str) -> Any:
        raise error(text)

    return say


def raises_elsewhere(text: str) -> None:
    exec(compile("raise RuntimeError('from a template')", f"/templates/{text}", "exec"))


def raises_from_another(text: str) -> None:
    try:
        raise KeyError(text)
    except KeyError as error:
        raise RuntimeError("it is not there") from error


WAYS: dict[str, Say] = {
    "error": raises(RuntimeError),
    "key error": raises(KeyError),
    "code": raises(Coded),
    "permanent": raises(lambda text: tenure.PermanentError(f"no {text!r}", code=text)),
    "transient": raises(lambda text: tenure.TransientError(text, code=text)),
    "exit": raises(SystemExit),
    "cancelled": raises(tenure.JobCancelled),
    "own type": raises(lambda text: type(f"No {text}", (Exception,), {})()),
    "config": raises(tenure.ConfigError),
    "file": raises_elsewhere,
    "chained": raises_from_another,
    "group": raises(lambda text: ExceptionGroup(text, [ValueError(text)])),
    "cancel": tenure.Cancel,
    "fail": lambda text: tenure.Fail(text, code=text),
    "bad result": lambda text: {text: object()},
    "bad delay": lambda text: tenure.Snooze(text),  # type: ignore[arg-type]
}
FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "sentence": "cannot log in as {}, sorry".format,
    "lower": str.lower,
    "upper": str.upper,
    "repr": repr,
    "ascii": ascii,
    "json": lambda text: json.dumps({"password": text}),
    "url": lambda text: f"https://api.example.com/?q={quote(text)}&x=1",
    "basic": lambda text: f"Authorization {b64encode(f'user:{text}'.encode()).decode()}",
    "hex": lambda text: f"sent {text.encode().hex()}",
    "cut off": lambda text: f"input_value='{text[: len(text) // 2 + 2]}...'",
    "quoted head": lambda text: f"{text[:-4]!r}... is too long",
    "tail": lambda text: f"input_value='...{text[len(text) // 2 - 2 :]}'",
}


@pytest.mark.parametrize("source", ["secret", "payload"])
@pytest.mark.parametrize("handler", ["def", "async"])
def test_nothing_a_run_knows_is_in_what_it_says(
    make_app: Callable[..., tenure.App],
    place: Place,
    caplog: pytest.LogCaptureFixture,
    handler: str,
    source: str,
) -> None:
    """Every way to say it, in every form: not in the store, not in an event, a hook or a log."""
    word, told = canary(), list[str]()
    app = make_app(secrets=["vault:*"])
    app.secret_provider = {"vault:word": word}.get
    for kind in ("failed", "final_failure"):
        app.on(kind)(lambda event: told.append(str(event.error)))

    def body(ctx: tenure.Context, way: str, form: str, value: str = "") -> Any:
        known = ctx.secret("vault:word") if source == "secret" else value
        return WAYS[way](FORMS[form](known))

    async def abody(ctx: tenure.Context, way: str, form: str, value: str = "") -> Any:
        return body(ctx, way, form, value)

    work = app.task(name="work", retry=ONCE)(body if handler == "def" else abody)
    value = word if source == "payload" else ""
    pairs = [(way, form) for way in WAYS for form in FORMS]
    app.enqueue_many([work.job(way, form, value) for way, form in pairs])
    with caplog.at_level(logging.DEBUG):
        app.run_worker(drain=True)

    statuses = {job.status for job in app.find()}
    assert statuses == {"cancelled", "failed", "dead_letter"}
    assert len(told) > len(pairs)
    assert_absent([word], "\n".join(told), caplog.text)
    assert_absent([word], "\n".join(said for _payload, said in said_about_jobs(place)))
    if source == "secret":
        assert_not_stored([word], place)


def test_the_oracle_finds_what_scrubbing_hides(
    make_app: Callable[..., tenure.App], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with scrubbing switched off: each of the forms is found, in each of the places."""
    monkeypatch.setattr(Scrubber, "__call__", lambda self, text: text)
    word, told = canary(), dict[str, str]()
    app = make_app(secrets=["vault:*"])
    app.secret_provider = {"vault:word": word}.get
    app.on("failed")(lambda event: told.update({event.job.id: str(event.error)}))

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context, way: str, form: str) -> Any:
        return WAYS[way](FORMS[form](ctx.secret("vault:word")))

    for form in FORMS:
        job = run(app, work, "error", form)
        assert leaks(told[job.id], [word]), form
        assert leaks(str(job.error), [word]), form
        assert leaks(str([event.data for event in app.events(job.id)]), [word]), form
    with pytest.raises(AssertionError, match="plain"):
        assert_not_stored([word], place)
    for way in ("code", "file", "own type", "fail", "cancel"):
        assert leaks(told_of(app, run(app, work, way, "hex")), [word]), way


def test_what_is_looked_at_after_every_test_is_looked_at(app: tenure.App, place: Place) -> None:
    @app.task(retry=ONCE)
    def work(to: str) -> None:
        raise RuntimeError("cannot be reached")

    job = run(app, work, "gertrude.stein@example.com")
    assert_nothing_leaked(place, "RuntimeError: no answer")

    with pytest.raises(AssertionError, match="gertrude"):
        assert_nothing_leaked(place, "RuntimeError: no gertrude.stein@example.com")
    for column in ("error", "error_code", "error_place", "traceback"):
        place.sql(f"UPDATE tenure_jobs SET {column} = 'of gertrude.stein@example.com'")
        with pytest.raises(AssertionError, match="gertrude"):
            assert_nothing_leaked(place)
        place.sql(f"UPDATE tenure_jobs SET {column} = 'mended'")
    assert app.get(job.id)


def test_short_secrets_are_hidden_as_words_of_their_own(
    make_app: Callable[..., tenure.App],
) -> None:
    app = make_app(secrets=["vault:*"])
    app.secret_provider = {"vault:pin": "4821", "vault:word": "abc", "vault:two": "x7"}.get

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context) -> None:
        for name in ("pin", "word", "two"):
            ctx.secret(f"vault:{name}")
        raise RuntimeError("4821, 48210, pin=4821; abc abcd 'abc'; x7 x77")

    assert run(app, work).error == (
        "RuntimeError: [secret], 48210, pin=[secret]; [secret] abcd '[secret]'; [secret] x77"
    )


def test_what_is_taken_out_of_a_secret_is_one_too(make_app: Callable[..., tenure.App]) -> None:
    app, word = make_app(secrets=["vault:*"]), "n0t4you-Ever"
    secrets = {
        "json": json.dumps({"user": "app", "password": word}),
        "url": f"postgresql://shop:{word}@db.example.com/shop",
        "pair": f"shop:{word}",
        "lines": f"-----BEGIN\n{word}\n-----END",
    }
    app.secret_provider = lambda ref: secrets[ref.removeprefix("vault:")]

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context, kind: str) -> None:
        assert word in ctx.secret(f"vault:{kind}")
        raise RuntimeError(f"the app at db.example.com said no to {word}")

    for kind in secrets:
        error = run(app, work, kind).error
        assert error == "RuntimeError: the app at db.example.com said no to [secret]", kind


def test_a_secret_is_known_to_its_own_run_only(make_app: Callable[..., tenure.App]) -> None:
    app = make_app(secrets=["vault:*"])
    app.secret_provider = {"vault:colour": "ultramarine"}.get

    @app.task(retry=ONCE)
    def fetch(ctx: tenure.Context) -> None:
        raise RuntimeError(ctx.secret("vault:colour"))

    @app.task(retry=ONCE)
    def other() -> None:
        raise RuntimeError("out of ultramarine")

    assert run(app, fetch).error == "RuntimeError: [secret]"
    assert run(app, other).error == "RuntimeError: out of ultramarine"


def test_a_worker_process_says_nothing_of_a_secret(
    workshop: Callable[..., Workshop], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = canary()
    monkeypatch.setenv("SHOP_PASSWORD", word)
    shop = workshop(
        """
        import logging

        @app.on("failed")
        def failed(event):
            say("hook", event.error)

        @app.task(retry=tenure.Retry(attempts=1))
        def threaded(ctx: tenure.Context) -> None:
            raise RuntimeError(f"no entry with {ctx.secret('SHOP_PASSWORD')!r}")

        @app.task(retry=tenure.Retry(attempts=1))
        async def looped(ctx: tenure.Context) -> None:
            raise RuntimeError(f"no entry with {ctx.secret('env:SHOP_PASSWORD')!r}")

        @app.task(process=True)
        def alone(ctx: tenure.Context) -> object:
            return tenure.Fail(ctx.secret("SHOP_PASSWORD"), code=ctx.secret("SHOP_PASSWORD"))

        @app.task
        def settled(ctx: tenure.Context) -> None:
            password = ctx.secret("SHOP_PASSWORD")
            with ctx.transaction():
                pass
            raise RuntimeError(f"after the end: {password}")

        @app.task(timeout=0.3, retry=tenure.Retry(attempts=1))
        def late(ctx: tenure.Context) -> None:
            password = ctx.secret("SHOP_PASSWORD")
            while not ctx.cancelled:
                time.sleep(0.01)
            raise RuntimeError(password)
        """,
        secrets=["SHOP_PASSWORD"],
    )
    for task in ("threaded", "looped", "alone", "settled", "late"):
        getattr(shop.jobs, task).enqueue()
    worker = shop.worker(ready=False, drain=True)
    worker.wait(60)

    ended = {job.type: job for job in shop.app.find()}
    assert ended["threaded"].error == "RuntimeError: no entry with '[secret]'"
    assert ended["looped"].error == "RuntimeError: no entry with '[secret]'"
    assert (ended["alone"].error, ended["alone"].error_code) == ("[secret]", "[secret]")
    assert ended["settled"].status == "completed"
    assert "ignored: RuntimeError: after the end: [secret]" in worker.log
    said = (shop.folder / "said.log").read_text()
    assert said.count("hook") == 4
    output = (shop.folder / "worker-1.out").read_text()
    assert_absent([word], said, output, worker.log)
    assert_not_stored([word], place)


@pytest.mark.parametrize("handler", ["def", "async"])
def test_errors_are_stored_and_logged_without_payload_values(
    app: tenure.App, handler: str, caplog: pytest.LogCaptureFixture
) -> None:
    mail, number = "gertrude.stein@example.com", 4_111_222_333
    told: list[tenure.Lifecycle] = []
    app.on("failed")(told.append)

    def body(ctx: tenure.Context, to: str, card: int) -> None:
        if ctx.attempt == 1:
            raise RuntimeError(f"mail to {to} bounced for {card}")
        if ctx.attempt == 2:
            raise KeyError(to)
        raise tenure.PermanentError(f"no {to!r}", code=to)

    async def abody(ctx: tenure.Context, to: str, card: int) -> None:
        body(ctx, to, card)

    with caplog.at_level(logging.DEBUG):
        work = app.task(name="work", retry=NOW)(body if handler == "def" else abody)
        job = run(app, work, mail, number)

    assert (job.status, job.attempts) == ("failed", 3)
    assert job.error == "PermanentError: no '[redacted]'"
    everything = f"{told_of(app, job)} {caplog.text} {[e.error for e in told]}"
    assert "mail to [redacted] bounced for [redacted]" in everything
    for leak in ("gertrude", "4111222333", "stein"):
        assert leak not in everything


def test_a_long_name_is_not_saved_by_the_cut(app: tenure.App) -> None:
    """Our own words around it stay, unless the end of the message is gone."""

    @app.task
    def other() -> None: ...

    @app.task(retry=ONCE)
    def work(name: str) -> None:
        app.enqueue("other", {name: 1})

    short = run(app, work, "gertrude")
    long = run(app, work, "gertrude stein " * 1000)

    assert short.error == (
        "ArgumentError: Task 'other' got an unexpected argument '[redacted]'; it takes ()."
    )
    assert long.error == "ArgumentError: Task 'other' got an unexpected argument '[redacted]"


def test_a_hook_that_raises_is_not_shown_with_what_it_was_given(
    app: tenure.App, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(password: str, event: tenure.Lifecycle) -> None:
        raise RuntimeError(password)

    @app.task
    def work() -> None: ...

    app.on("complete")(functools.partial(hook, "hunter22"))
    run(app, work)

    assert "hook partial for 'complete' raised RuntimeError" in caplog.text
    assert "hunter22" not in caplog.text


def test_values_inside_json_text_are_payload_values_too(app: tenure.App) -> None:
    @app.task(retry=ONCE)
    def work(body: str) -> None:
        raise RuntimeError(f"no customer {json.loads(body)['customer']}")

    job = run(app, work, json.dumps({"customer": "gertrude"}))

    assert job.error == "RuntimeError: no customer [redacted]"


# -- our own words ----------------------------------------------------------------------------
OUR_WORDS = [
    *("still", "running", "after", "time-out", "still running after its time-out of", "30"),
    *("300", "ran", "result", "cannot be stored", "the job ran", "stored", "process", "killed"),
    *("its process was killed by SIGKILL", "SIGKILL", "crashed", "poison", "TimeoutError", "work"),
    *("TIMEOUT", "RESULT_ERROR", "FAILED", "argument", "expected", "Task", "is of type", "object"),
    *("secret", "declared", "fetched", "nested", "levels", "VALIDATION_ERROR", "converting"),
]


def test_a_time_out_is_told_in_our_words(app: tenure.App) -> None:
    @app.task(timeout=0.2, retry=ONCE)
    async def work(words: list[str]) -> None:
        await asyncio.sleep(60)

    job = run(app, work, OUR_WORDS)

    assert job.error == "TimeoutError: still running after its time-out of 0.2 s"
    assert job.error_code == "TIMEOUT"
    assert str(job.error_place).startswith("TimeoutError at test_secrets.py:")
    assert str(job.traceback).endswith(str(job.error))


def test_a_bad_result_is_told_in_our_words_but_for_its_path(app: tenure.App) -> None:
    @app.task
    def work(words: list[str]) -> Any:
        return {"result": {"gertrude@example.com": object()}}

    job = run(app, work, [*OUR_WORDS, "gertrude@example.com"])

    assert str(job.error).startswith(
        "the job ran, but its result cannot be stored: result of 'work'.[redacted]['[redacted]'] "
        "is of type object, which is not JSON; convert it to a dict with str keys"
    )
    assert job.error_code == "RESULT_ERROR"


def test_a_bad_step_is_told_in_our_words_but_for_its_name(app: tenure.App) -> None:
    @app.task
    def work(ctx: tenure.Context, words: list[str], to: str) -> Any:
        ctx.step(f"mail {to}", lambda: {"nested": object()})

    job = run(app, work, [*OUR_WORDS, "step"], "gertrude@example.com")

    assert str(job.error).startswith(
        "PayloadError: the result of step 'mail [redacted]'.[redacted] is of type object, which"
    )
    assert (job.status, job.error_code) == ("failed", "RESULT_ERROR")


def test_a_reference_that_is_not_declared_is_told_in_our_words(app: tenure.App) -> None:
    @app.task(retry=ONCE)
    def work(ctx: tenure.Context, words: list[str], ref: str) -> Any:
        return ctx.secret(ref)

    job = run(app, work, OUR_WORDS, "env:GERTRUDE")

    assert str(job.error).startswith(
        "ConfigError: secret '[redacted]' is not declared, so it is not fetched: name it where the "
        "app is made, tenure.App(…, secrets="
    )


def test_arguments_that_do_not_fit_are_told_in_our_words(
    make_app: Callable[..., tenure.App],
) -> None:
    """Stored under an old signature, run under a new one."""
    old, new = make_app(), make_app()
    old.task(name="work")(lambda amount, words: None)

    @new.task
    def work(amount: int, words: list[str]) -> None: ...

    receipt = old.enqueue("work", {"amount": "a lot", "words": ["Task", "VALIDATION_ERROR"]})
    new.run_worker(drain=True)

    job = new.get(receipt.id)
    assert job is not None
    assert job.error == "ArgumentError: Task 'work': argument amount: expected int, got str"
    assert job.error_code == "VALIDATION_ERROR"


def test_a_killed_process_is_told_in_our_words(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        @app.task
        def work(words: list) -> None:
            os.kill(os.getpid(), 9)
        """,
        crash_limit=1,
    )
    receipt = shop.jobs.work.enqueue(OUR_WORDS)
    shop.worker()
    shop.wait_for("dead_letter", 1)

    assert shop.job(receipt.id).error == "its process was killed by SIGKILL"


def test_an_operators_reason_is_his_own(app: tenure.App) -> None:
    """He saw the job when he wrote it, and it is in the audit trail already."""

    @app.task
    async def work(words: list[str]) -> None:
        app.cancel(current[0], reason="not needed after all")
        await asyncio.sleep(60)

    receipt = work.options(delay=0).enqueue(["needed", "after", "not needed after all"])
    current = [receipt.id]
    app.run_worker(drain=True)

    job = app.get(receipt.id)
    assert job is not None
    assert (job.status, job.error) == ("cancelled", "not needed after all")


def test_codes_of_ours_are_not_eaten(app: tenure.App) -> None:
    @app.task
    def work(words: list[str]) -> Any:
        return tenure.Fail("no")

    job = run(app, work, OUR_WORDS)

    assert (job.error, job.error_code) == ("no", "FAILED")
    assert os.path.basename(__file__) not in str(job.error)
