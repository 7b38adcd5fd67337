"""A resumable upload: finished steps are not repeated when the job runs again.

The second step fails on the first attempt. On the second attempt the first step's result is read
from the store instead of being computed again.

    python examples/resumable_upload.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import tenure

DIRECTORY = Path(tempfile.mkdtemp())
app = tenure.App(os.environ.get("TENURE_URL") or f"sqlite:///{DIRECTORY / 'uploads.db'}")
calls: list[str] = []


def split(path: str) -> list[str]:
    calls.append("split")
    text = Path(path).read_text()
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def send(number: int, part: str) -> int:
    calls.append(f"send {number}")
    if number == 1 and calls.count("send 1") == 1:
        raise ConnectionError("the line went dead")
    return len(part)


@app.task(retry=tenure.Retry(attempts=5, backoff=tenure.Fixed(0.05)))
def upload(ctx: tenure.Context, path: str) -> int:
    parts = ctx.step("split", split, path)
    sent = 0
    for number, part in enumerate(parts):
        sent += ctx.step(f"part {number}", send, number, part)
        ctx.progress(100 * (number + 1) / len(parts), phase="sending")
    return sent


def main() -> None:
    app.migrate()
    file = DIRECTORY / "data.txt"
    file.write_text("twelve bytes")
    receipt = upload.enqueue(str(file))
    with app.worker():
        print("sent", app.result(receipt.id, timeout=20), "bytes")
    print("calls:", ", ".join(calls))
    job = app.get(receipt.id)
    assert job is not None
    print("attempts:", job.attempts, "progress:", job.progress)
    app.close()


if __name__ == "__main__":
    main()
