"""A report made of parts: many jobs, then one that runs after all of them.

python examples/fan_in_report.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import tenure

URL = os.environ.get("TENURE_URL") or f"sqlite:///{Path(tempfile.mkdtemp()) / 'report.db'}"
app = tenure.App(URL)


@app.task(queue="planning")
async def count_words(text: str) -> int:
    return len(text.split())


@app.task(queue="exports")
def summarise(ctx: tenure.Context, title: str) -> str:
    counts = ctx.results()  # id -> result of every job this one ran after
    return f"{title}: {sum(counts.values())} words in {len(counts)} chapters"


@app.task
def report(ctx: tenure.Context, title: str, chapters: list[str]) -> str:
    """The parts and the summary are stored with this job's completion, or not at all."""
    parts = [ctx.enqueue(count_words, chapter) for chapter in chapters]
    return ctx.enqueue(summarise.options(after=parts), title).id


def main() -> None:
    app.migrate()
    receipt = report.enqueue("A short book", ["one two three", "four five", "six"])
    app.run_worker(drain=True)
    print(app.result(app.result(receipt.id)))
    app.close()


if __name__ == "__main__":
    main()
