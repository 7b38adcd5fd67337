"""What a child says about its app: how each task takes a time-out, as numbers."""

from __future__ import annotations

import pytest

import tenure
from tenure.engine.hello import after_time_outs
from tenure.policy import Backoff


class Infinite:
    def delay(self, attempt: int) -> float:
        return float("inf")


class Odd:
    def delay(self, attempt: int) -> float:
        return "soon"  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("retry", "delays"),
    [
        (tenure.Retry(attempts=4, backoff=tenure.Steps(1, 2)), [1, 2, 2]),
        (tenure.Retry(attempts=3, backoff=tenure.Fixed(0.5)), [0.5, 0.5]),
        # A job may have been given more attempts than its task has now: the last one repeats.
        (tenure.Retry(attempts=1, backoff=tenure.Fixed(7)), [7]),
        (tenure.Retry(attempts=2, give_up_on=(TimeoutError,)), None),
        (tenure.Retry(attempts=2, give_up_on=(OSError,)), None),  # TimeoutError is one
        (tenure.Retry(attempts=2, give_up_on=(KeyError, "TIMEOUT")), "default"),
        (tenure.Retry(attempts=2, backoff=Infinite()), "default"),
        (tenure.Retry(attempts=2, backoff=Odd()), "default"),
    ],
)
def test_a_time_out_of_each_attempt(retry: tenure.Retry, delays: object) -> None:
    found = after_time_outs(retry)

    if delays == "default":
        assert found is not None
        (only,) = found
        assert 5 <= only <= 5.5
    else:
        assert found == delays


def test_any_backoff_is_asked_for_each_attempt() -> None:
    class Asked:
        def delay(self, attempt: int) -> float:
            return attempt * 1.5

    assert isinstance(Asked(), Backoff)
    assert after_time_outs(tenure.Retry(attempts=1000, backoff=Asked())) == [
        attempt * 1.5 for attempt in range(1, 1000)
    ]
