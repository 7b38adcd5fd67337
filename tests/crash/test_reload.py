"""`--reload`: code that changes is loaded anew; what cannot be loaded is waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .harness import Workshop, eventually, gone

WORK = """
    if __name__ == "jobs":  # in a worker's child, not in the test's own process
        import parts.text

    @app.task
    def word() -> str:
        return parts.text.WORD

    @app.task(timeout=120)
    def hold() -> str:
        say("hold", os.getpid())
        while not there("go"):
            time.sleep(0.01)
        return parts.text.WORD
"""
LATER = """
@app.task
def later() -> str:
    return "a new task"
"""


def parts(folder: Path) -> Path:
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").touch()
    text = folder / "parts" / "text.py"
    text.write_text("WORD = 'one'\n")
    return text


def says(shop: Workshop) -> object:
    return shop.app.result(shop.jobs.word.enqueue().id, timeout=20)


def test_what_changes_is_loaded_anew(workshop: Callable[..., Workshop], tmp_path: Path) -> None:
    text = parts(tmp_path)
    shop = workshop(WORK)
    worker = shop.worker(reload=True)
    assert says(shop) == "one"
    (first,) = worker.children()

    text.write_text("WORD = 'two'\n")  # as long as before, and perhaps in the same second
    eventually(lambda: gone(first), what="the old child gone")

    assert says(shop) == "two"
    assert f"{Path('parts', 'text.py')} has changed: replacing the children" in worker.log
    assert "is gone" not in worker.log
    with (shop.folder / "jobs.py").open("a") as file:
        file.write(LATER)
    eventually(lambda: "jobs.py has changed" in worker.log, what="another change")
    eventually(lambda: "later" in shop.row_of(worker).meta["types"], what="the new task known")


def test_what_runs_is_finished_by_the_old_code(
    workshop: Callable[..., Workshop], tmp_path: Path
) -> None:
    text = parts(tmp_path)
    shop = workshop(WORK)
    worker = shop.worker(reload=True)
    held = shop.jobs.hold.enqueue()
    shop.wait_said("hold")
    old = int(shop.said()[0][1])

    text.write_text("WORD = 'three'\n")
    eventually(lambda: "has changed" in worker.log, what="the change noticed")
    assert says(shop) == "three"
    assert not gone(old)
    shop.touch("go")

    assert shop.app.result(held.id, timeout=10) == "one"
    eventually(lambda: gone(old), what="the old child gone")
    assert shop.job(held.id).attempts == 1


def test_what_does_not_end_runs_again_uncharged(
    workshop: Callable[..., Workshop], tmp_path: Path
) -> None:
    text = parts(tmp_path)
    shop = workshop(WORK, shutdown_timeout=1)
    shop.worker(reload=True)
    held = shop.jobs.hold.enqueue()
    shop.wait_said("hold")

    text.write_text("WORD = 'four'\n")
    shop.wait_said("hold", times=2)
    shop.touch("go")

    assert shop.app.result(held.id, timeout=10) == "four"
    job = shop.job(held.id)
    assert (job.attempts, job.crashes) == (1, 0)


def test_code_that_cannot_be_loaded_is_waited_for(
    workshop: Callable[..., Workshop], tmp_path: Path
) -> None:
    text = parts(tmp_path)
    shop = workshop(WORK)
    worker = shop.worker(reload=True)
    assert says(shop) == "one"

    text.write_text("WORD = 'one\n")
    eventually(lambda: "waiting for the next change" in worker.log, what="the error")

    assert "SyntaxError: unterminated string literal" in worker.log
    assert f'text.py", line 1\n    WORD = {chr(39)}one\n' in worker.log
    assert "importlib" not in worker.log
    receipt = shop.jobs.word.enqueue()
    text.write_text("WORD = 'five'\n")
    assert shop.app.result(receipt.id, timeout=20) == "five"
    assert worker.log.count("SyntaxError: ") == 1 + worker.log.count("could not load the app")
    assert worker.log.count("could not load the app") == 1


def test_code_that_cannot_be_loaded_at_the_start(
    workshop: Callable[..., Workshop], tmp_path: Path
) -> None:
    text = parts(tmp_path)
    shop = workshop(WORK)
    text.write_text("1 / 0\n")
    worker = shop.worker(reload=True, ready=False)
    eventually(lambda: "waiting for the next change" in worker.log, what="the error")
    assert "ZeroDivisionError: division by zero" in worker.log
    assert worker.alive

    text.write_text("WORD = 'six'\n")

    assert says(shop) == "six"
    worker.stop()
