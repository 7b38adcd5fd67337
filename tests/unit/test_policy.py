from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError
from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure import policy
from tenure.errors import (
    ArgumentError,
    ConfigError,
    PayloadError,
    PermanentError,
    TransientError,
)
from tenure.policy import CATEGORIES, Category, Exponential, Fixed, Retry, Steps

DAY = 86_400
NOW_MS = 1_700_000_000_000
NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)


def delays(backoff: policy.Backoff, attempts: int) -> list[float]:
    return [backoff.delay(attempt) for attempt in range(1, attempts + 1)]


# ------------------------------------------------------------------------------- backoff


def test_s0_one_second_times_two_to_the_n_capped_at_60_plus_up_to_a_second():
    backoff = Exponential(base=2, cap=60, jitter=0, jitter_seconds=1)
    for attempt, least in [(1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (50, 60)]:
        seen = [backoff.delay(attempt) for _ in range(200)]
        assert all(least <= delay <= least + 1 for delay in seen)
        assert max(seen) - min(seen) > 0.5  # really spread


def test_s2_two_to_the_n_up_to_1024():
    backoff = Exponential(base=2, cap=1024, jitter=0)
    assert delays(backoff, 12) == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_s3_up_to_an_hour():
    backoff = Exponential(base=1, cap=3600, jitter=0)
    assert delays(backoff, 13)[-2:] == [2048, 3600]


def test_s4_a_table():
    assert delays(Steps(0, 30, 300), 5) == [0, 30, 300, 300, 300]


def test_the_default_is_5_seconds_doubling_to_5_minutes_with_jitter():
    for attempt, least, most in [(1, 5, 5.5), (2, 10, 11), (6, 160, 176), (7, 272, 300)]:
        seen = [Exponential().delay(attempt) for _ in range(200)]
        assert all(least <= delay <= most for delay in seen)
        assert max(seen) - min(seen) > (most - least) / 2


def test_fixed_waits_the_same_plus_jitter():
    assert delays(Fixed(0.2), 3) == [0.2, 0.2, 0.2]
    seen = [Fixed(10, jitter=0.5).delay(1) for _ in range(200)]
    assert all(10 <= delay <= 15 for delay in seen)
    assert max(seen) > 12.5


@given(
    st.floats(0, policy.MAX_BACKOFF),
    st.floats(0, policy.MAX_BACKOFF),
    st.floats(1, 1000),
    st.floats(0, 1),
    st.integers(1, 100_000),
)
def test_an_exponential_delay_is_finite_and_within_the_cap(base, cap, factor, jitter, attempt):
    delay = Exponential(base, cap, factor, jitter).delay(attempt)
    assert 0 <= delay <= cap


def test_no_base_means_no_wait_even_where_the_factor_overflows():
    assert Exponential(base=0, factor=1000, jitter=0).delay(100_000) == 0


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, 31 * DAY, True, "5", None])
def test_wrong_numbers_of_a_backoff_are_refused(wrong):
    for make in (
        lambda: Exponential(base=wrong),
        lambda: Exponential(cap=wrong),
        lambda: Exponential(jitter_seconds=wrong),
        lambda: Fixed(wrong),
        lambda: Steps(0, wrong),
    ):
        with pytest.raises(ConfigError, match="must be"):
            make()


def test_more_wrong_backoffs():
    for make in (
        lambda: Steps(),
        lambda: Exponential(factor=0.5),
        lambda: Exponential(jitter=1.5),
        lambda: Fixed(1, jitter=10),
    ):
        with pytest.raises(ConfigError):
            make()


def test_policies_are_values():
    retry = Retry(3, Steps(1, 2), (KeyError, "NOT_FOUND"))
    assert retry == Retry(3, Steps(1, 2), (KeyError, "NOT_FOUND"))
    assert hash(retry) == hash(Retry(3, Steps(1, 2), (KeyError, "NOT_FOUND")))
    assert pickle.loads(pickle.dumps(retry)) == retry  # noqa: S301 (our own bytes)
    with pytest.raises(FrozenInstanceError):
        retry.attempts = 4  # type: ignore[misc]


# ------------------------------------------------------------------------------- retries


class Throttled(Exception):
    retry_after = 17


class Coded(Exception):
    def __init__(self, code: object) -> None:
        self.code = code


class Hostile(Exception):
    @property
    def code(self) -> str:
        raise RuntimeError("no code")

    @property
    def retry_after(self) -> float:
        raise RuntimeError("no retry_after")


def test_unknown_errors_are_retried_until_attempts_are_used_up():
    retry = Retry(attempts=3, backoff=Steps(1, 2, 3))
    assert retry.verdict(ValueError("x"), 1, 3) == 1
    assert retry.verdict(ValueError("x"), 2, 3) == 2
    assert retry.verdict(ValueError("x"), 3, 3) == "dead"
    assert retry.verdict(ValueError("x"), 4, 3) == "dead"
    assert retry.verdict(ValueError("x"), 3, 4) == 3  # the job's limit counts, not the policy's


@pytest.mark.parametrize("error", [PermanentError("no"), ArgumentError("no")])
def test_permanent_and_validation_errors_fail_at_once(error):
    assert Retry().verdict(error, 1, 5) == "failed"
    assert Retry().verdict(error, 5, 5) == "failed"


def test_give_up_on_classes_and_codes():
    retry = Retry(backoff=Fixed(1), give_up_on=(LookupError, "NOT_FOUND", "404"))
    assert retry.verdict(KeyError("x"), 1, 5) == "failed"  # a subclass
    assert retry.verdict(Coded("NOT_FOUND"), 1, 5) == "failed"
    assert retry.verdict(Coded(404), 1, 5) == "failed"
    assert retry.verdict(TransientError("x", code="NOT_FOUND"), 1, 5) == "failed"
    assert retry.verdict(Coded("BUSY"), 1, 5) == 1
    assert retry.verdict(Coded(None), 1, 5) == 1
    assert retry.verdict(Coded(["NOT_FOUND"]), 1, 5) == 1
    assert Retry(give_up_on=["A"]).give_up_on == ("A",)  # type: ignore[arg-type]
    assert Retry(give_up_on="ABC").give_up_on == ("ABC",)  # type: ignore[arg-type]
    assert Retry(give_up_on=KeyError).give_up_on == (KeyError,)  # type: ignore[arg-type]


def test_retry_after_wins_over_the_curve_but_not_over_the_limit():
    retry = Retry(backoff=Fixed(1))
    assert retry.verdict(TransientError("x", retry_after=90), 1, 5) == 90
    assert retry.verdict(TransientError("x", retry_after=0), 1, 5) == 0
    assert retry.verdict(TransientError("x"), 1, 5) == 1
    assert retry.verdict(Throttled(), 1, 5) == 17
    assert retry.verdict(Throttled(), 5, 5) == "dead"
    assert retry.verdict(TransientError("x", retry_after=math.inf), 1, 5) == policy.MAX_BACKOFF
    for nonsense in (-5, math.nan, True, "90"):
        error = TransientError("x", retry_after=nonsense)  # type: ignore[arg-type]
        assert retry.verdict(error, 1, 5) == 1


def test_an_exception_whose_properties_raise_is_retried_like_any_other():
    assert Retry(backoff=Fixed(1), give_up_on=("X",)).verdict(Hostile(), 1, 5) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"attempts": 1001},
        {"attempts": 2.0},
        {"attempts": True},
        {"attempts": "3"},
        {"backoff": 5},
        {"backoff": Exponential},
        {"give_up_on": (5,)},
        {"give_up_on": ("",)},
        {"give_up_on": (int,)},
        {"give_up_on": (KeyError("instance"),)},
    ],
)
def test_wrong_retries_are_refused(options):
    with pytest.raises(ConfigError, match=r"^Retry "):
        Retry(**options)


# ------------------------------------------------------------------------------- queues, categories


def test_queue_names():
    assert policy.QUEUES == (
        "critical",
        "default",
        "notifications",
        "planning",
        "exports",
        "maintenance",
    )
    assert policy.queue_name("q:critical") == policy.queue_name("critical") == "critical"
    assert policy.queue_name("team:a.b-c_9") == "team:a.b-c_9"
    assert policy.queue_name("x" * 128)


@pytest.mark.parametrize("wrong", ["", "q:", "a b", "a\n", "x" * 129, "é", "a;drop", None, 5])
def test_wrong_queue_names_are_refused(wrong):
    with pytest.raises(ConfigError, match="queue"):
        policy.queue_name(wrong)


@pytest.mark.parametrize("text", ["deadletter", "q:deadletter"])
def test_the_dead_letter_view_is_no_queue(text):
    with pytest.raises(ConfigError, match="is a view"):
        policy.queue_name(text)


@pytest.mark.parametrize(
    ("name", "queue", "attempts", "cap", "days"),
    [
        ("default", "default", 5, 300, 7),
        ("notification", "notifications", 10, 1800, 7),
        ("planning", "planning", 3, 120, 30),
        ("export", "exports", 5, 600, 30),
        ("import", "exports", 5, 600, 30),
        ("audit_enrichment", "default", 5, 300, 7),
        ("maintenance", "maintenance", 5, 300, 7),
    ],
)
def test_categories_have_their_policy(name, queue, attempts, cap, days):
    retry = Retry(attempts, Exponential(base=5, cap=cap))
    assert policy.category(name) == Category(name, queue, retry, days * DAY)


def test_the_tables_cannot_be_changed():
    assert len(CATEGORIES) == 7
    with pytest.raises(TypeError):
        CATEGORIES["x"] = CATEGORIES["default"]  # type: ignore[index]
    with pytest.raises(TypeError):
        policy.QUEUE_WEIGHTS["x"] = 1  # type: ignore[index]


def test_an_unknown_category_comes_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'notification'"):
        policy.category("notifications")
    with pytest.raises(ConfigError, match="There are: default, notification"):
        policy.category("zzz")
    with pytest.raises(ConfigError, match="unknown category"):
        policy.category(["export"])


# ------------------------------------------------------------------------------- enqueue options


def test_priority():
    assert [policy.priority(value) for value in (1, 5, 10)] == [1, 5, 10]
    with pytest.raises(ConfigError) as caught:
        policy.priority(0)
    assert str(caught.value) == "priority must be 1 (first) to 10, got 0"
    for wrong in (11, -1, 1.0, True, "1", None):
        with pytest.raises(ConfigError, match="priority must be 1"):
            policy.priority(wrong)


def test_delay():
    assert policy.delay_seconds(0) == 0
    assert policy.delay_seconds(1.5) == 1.5
    assert policy.delay_seconds(timedelta(minutes=2)) == 120
    assert policy.delay_seconds(3650 * DAY) == 3650 * DAY
    for wrong in (-1, timedelta(seconds=-1), math.nan, math.inf, True, "5", None, 3660 * DAY):
        with pytest.raises(ConfigError, match=r"^delay must be"):
            policy.delay_seconds(wrong)  # type: ignore[arg-type]


def test_times_must_say_their_zone():
    assert policy.aware(datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))) == 0
    with pytest.raises(ConfigError, match="time zone"):
        policy.aware(datetime(2030, 1, 1))
    for wrong in (date(2030, 1, 1), 5, "2030-01-01T00:00:00Z"):
        with pytest.raises(ConfigError, match="must be a datetime"):
            policy.aware(wrong)  # type: ignore[arg-type]


def test_up_to_a_minute_in_the_past_is_now():
    assert policy.due_ms(NOW + timedelta(milliseconds=1), NOW_MS) == NOW_MS + 1
    assert policy.due_ms(NOW + timedelta(days=3), NOW_MS) == NOW_MS + 3 * DAY * 1000
    assert policy.due_ms(NOW - timedelta(seconds=60), NOW_MS) == NOW_MS
    with pytest.raises(ConfigError, match="in the past"):
        policy.due_ms(NOW - timedelta(seconds=60, milliseconds=1), NOW_MS)
    with pytest.raises(ConfigError, match="10 years"):
        policy.due_ms(NOW + timedelta(days=3660), NOW_MS)


def test_names():
    assert policy.name("acme", "org") == "acme"
    assert policy.name("Grün & Söhne 🌱", "org")
    assert policy.name("x" * 512, "key", limit=512)
    with pytest.raises(ConfigError, match=r"^org must have 1 to 128 characters, got 129"):
        policy.name("x" * 129, "org")
    for wrong in ("", "a\0", "a\n", "a\x7f", "a\x85", "\ud800", "a\u2028", None, 7, b"x"):
        with pytest.raises(ConfigError, match=r"^org must"):
            policy.name(wrong, "org")  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        policy.name("secret\n", "key")
    assert "secret" not in str(caught.value)


# ------------------------------------------------------------------------------- keys


def test_a_key_has_the_documented_form():
    key = policy.stable_key("export", "acme", "p1", {"b": 1, "a": [1, 2]})
    # sha256 of {"a":[1,2],"b":1}
    assert key == (
        "export:acme:p1:94a786c3662bc7beeb598efa7d8cb58d7bea25d6c275ea9785a0230ff1f8c2ba"
    )
    assert policy.stable_key("export", "acme", None, {}).startswith("export:acme::")


def test_equal_inputs_have_equal_keys():
    berlin = timezone(timedelta(hours=1))
    one = {"a": 1, "b": {"d": [1], "c": datetime(2026, 1, 1, 12, tzinfo=UTC)}}
    two = {"b": {"c": datetime(2026, 1, 1, 13, tzinfo=berlin), "d": (1,)}, "a": 1}
    three = {"b": {"c": "2026-01-01T12:00:00Z", "d": [1]}, "a": 1}
    made = {policy.stable_key("t", "o", None, value) for value in (one, two, three)}
    assert len(made) == 1


def test_different_inputs_have_different_keys():
    made = {
        policy.stable_key("t", "o", None, {"a": 1}),
        policy.stable_key("t", "o", None, {"a": "1"}),
        policy.stable_key("t", "o", None, {"a": [1]}),
        policy.stable_key("t", "o", "p", {"a": 1}),
        policy.stable_key("t", "o2", None, {"a": 1}),
        policy.stable_key("t2", "o", None, {"a": 1}),
        policy.stable_key("t", "o", None, datetime(2026, 1, 1, microsecond=1, tzinfo=UTC)),
        policy.stable_key("t", "o", None, datetime(2026, 1, 1, tzinfo=UTC)),
        policy.stable_key("t", "o", None, date(2026, 1, 1)),
    }
    assert len(made) == 9


def test_what_has_no_one_form_is_refused():
    circle: list[object] = []
    circle.append(circle)
    for value in ({1: 2}, {"a": object()}, math.nan, circle):
        with pytest.raises(PayloadError, match="the value of the key"):
            policy.stable_key("t", "o", None, value)
    with pytest.raises(ConfigError, match="time zone"):
        policy.stable_key("t", "o", None, [datetime(2026, 1, 1)])
    with pytest.raises(ConfigError, match="org"):
        policy.stable_key("t", "", None, 1)


# ------------------------------------------------------------------------------- shares


def test_one_slot_at_a_time_is_shared_by_weight_and_smoothly():
    credit: dict[str, float] = {}
    weights = {"critical": 4.0, "default": 1.0}
    turns = []
    for _ in range(1000):
        given = policy.shares(1, weights, credit)
        turns += [queue for queue, count in given.items() if count]
    assert turns.count("critical") == 800
    assert turns.count("default") == 200
    assert all("default" in turns[start : start + 5] for start in range(995))


def test_all_built_in_queues_get_their_turn():
    credit: dict[str, float] = {}
    totals = dict.fromkeys(policy.QUEUES, 0)
    for _ in range(900):
        for queue, count in policy.shares(1, policy.QUEUE_WEIGHTS, credit).items():
            totals[queue] += count
    assert abs(totals.pop("critical") - 400) <= 1
    assert all(abs(count - 100) <= 1 for count in totals.values())


def test_edges_of_shares():
    assert policy.shares(0, {"a": 1, "b": 1}, {}) == {"a": 0, "b": 0}
    assert policy.shares(-3, {"a": 1}, {}) == {"a": 0}
    assert policy.shares(7, {"a": 1}, {}) == {"a": 7}
    assert policy.shares(5, {}, {}) == {}
    assert policy.shares(1, {"a": 1, "b": 1}, {}) == {"a": 1, "b": 0}  # ties: the first
    assert policy.shares(500, {"critical": 4, "default": 1}, {}) == {
        "critical": 400,
        "default": 100,
    }
    for wrong in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="weight of queue 'a'"):
            policy.shares(1, {"a": wrong}, {})


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 100), min_size=1),
    st.lists(st.integers(0, 60), max_size=60),
)
def test_every_slot_is_given_and_proportions_hold_at_every_moment(weights, calls):
    credit: dict[str, float] = {}
    totals = dict.fromkeys(weights, 0)
    for free in calls:
        given_now = policy.shares(free, weights, credit)
        assert sum(given_now.values()) == free
        assert all(count >= 0 for count in given_now.values())
        for queue, count in given_now.items():
            totals[queue] += count
    everything = sum(weights.values())
    for queue, weight in weights.items():
        assert abs(totals[queue] - sum(calls) * weight / everything) < len(weights)
