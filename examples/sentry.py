"""Failures to Sentry, Rollbar or the like: a hook gets the exception itself.

`@app.on("failed")` is called in the process where the handler ran, while the exception is being
handled, so `sentry_sdk.capture_exception()` finds it without being told. Here a stand-in for the
package prints what it would send; with the real one, write `import sentry_sdk` in its place.

    python examples/sentry.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

import tenure


class sentry_sdk:
    @staticmethod
    def init(*, dsn: str) -> None:
        print("reports go to", dsn)

    @staticmethod
    def set_tag(name: str, value: object) -> None:
        print(f"  {name} = {value}")

    @staticmethod
    def capture_exception() -> None:
        kind, error, trace = sys.exc_info()
        assert kind is not None
        frames = traceback.extract_tb(trace)
        print(f"  {kind.__name__}: {error} in {frames[-1].name}")


DIRECTORY = Path(tempfile.mkdtemp())
app = tenure.App(os.environ.get("TENURE_URL") or f"sqlite:///{DIRECTORY / 'orders.db'}")
sentry_sdk.init(dsn="https://key@sentry.example/1")


@app.on("final_failure")  # or "failed": every failed attempt
def report(event: tenure.Lifecycle) -> None:
    print(f"{event.job.type} failed after {event.job.attempts} attempts")
    sentry_sdk.set_tag("job", event.job.type)
    sentry_sdk.capture_exception()  # or capture_exception(event.exception)


def price_of(article: str) -> int:
    prices = {"tea": 3}
    return prices[article]


@app.task(retry=tenure.Retry(attempts=2, backoff=tenure.Fixed(0)))
def order(article: str) -> int:
    return price_of(article)


def main() -> None:
    app.migrate()
    order.enqueue("tea")
    receipt = order.enqueue("coffee")
    app.run_worker(drain=True)
    job = app.get(receipt.id)
    assert job is not None and job.traceback is not None
    print("kept with the job:", job.traceback.splitlines()[-1])
    app.close()


if __name__ == "__main__":
    main()
