"""The end of `tenure demo`: what happened, whether anything was lost, what to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.demo.books import FanIns, Uploads
from tenure.demo.ledger import Check, Ledger, percentile, statuses
from tenure.demo.panel import hanging
from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.job import Job

LABEL = 14  # columns of the words on the left
POISON = "resize_image"


class Kill(NamedTuple):
    what: str  # "child" or "worker"
    pid: int
    running: int  # jobs whose handlers it took down


class Report(NamedTuple):
    """All the demo has to say at its end."""

    directory: str
    url: str
    spec: str
    seconds: float
    jobs: Sequence[Job]
    ledger: Ledger
    checks: Sequence[Check]
    kills: Sequence[Kill]
    fan_ins: FanIns
    uploads: Uploads
    latencies: Sequence[float]
    rush: int
    rush_seconds: float

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def per_second(self) -> float:
        return self.rush / max(self.rush_seconds, 0.001)

    def cut_short(self) -> Counter[str]:
        """Runs that ended with their process, poison apart; by the reason the engine gave."""
        return Counter(
            (event.data or {}).get("error") or "its handler was not running"
            for event in self.ledger.put_back
            if event.type != POISON
        )

    def dead(self) -> list[tuple[int, Job]]:
        """One job of each task that ended badly, and how many there are of it."""
        found = [job for job in self.jobs if job.dead]
        counts = Counter((job.type, job.status, job.error_code) for job in found)
        examples = {(job.type, job.status, job.error_code): job for job in found}
        return [(count, examples[what]) for what, count in sorted(counts.items(), reverse=True)]

    def next_steps(self) -> list[tuple[str, str]]:
        """Three commands that work as they stand, and what they show."""
        tenure, url = _command(), shlex.quote(self.url)
        poison = next((job.id for job in self.jobs if job.type == POISON), self.jobs[0].id)
        return [
            (f"{tenure} jobs --dead --url {url}", "the dead jobs, and why"),
            (f"{tenure} job {poison} --url {url}", "the life of a poison job, event by event"),
            (
                f"{tenure} -A {self.spec} worker --url {url}",
                "a worker of your own, Ctrl-C stops it; for your own jobs see README.md",
            ),
        ]


def _command() -> str:
    """How this person starts tenure: `make demo` runs it from a virtual environment."""
    if shutil.which("tenure"):
        return "tenure"
    if os.path.basename(sys.argv[0]) == "tenure":
        return shlex.quote(os.path.relpath(sys.argv[0]))
    return f"{shlex.quote(sys.executable)} -m tenure"


# ------------------------------------------------------------------------------- for programs


def as_dict(report: Report) -> dict[str, Any]:
    ledger = report.ledger
    return {
        "ok": report.ok,
        "seconds": round(report.seconds, 1),
        "directory": report.directory,
        "url": report.url,
        "throughput": {"jobs": report.rush, "per_second": round(report.per_second)},
        "pick_up_ms": {
            "jobs": len(report.latencies),
            "p50": round(percentile(report.latencies, 0.5) * 1000, 2),
            "p95": round(percentile(report.latencies, 0.95) * 1000, 2),
        },
        "kills": [kill._asdict() for kill in report.kills],
        "runs": ledger.runs,
        "retried": dict(ledger.retried),
        "recovered": dict(report.cut_short()),
        "reports": report.fan_ins._asdict(),
        "uploads": report.uploads._asdict(),
        "dead": [
            {"count": count, "type": job.type, "status": job.status, "code": job.error_code}
            for count, job in report.dead()
        ],
        "ledger": {"enqueued": len(report.jobs)} | statuses(report.jobs),
        "checks": [check._asdict() for check in report.checks],
        "next": [command for command, _ in report.next_steps()],
    }


# ------------------------------------------------------------------------------- for people


def print_report(report: Report) -> None:
    _heading(f"What happened in {output.span(report.seconds)}")
    p50, p95 = (percentile(report.latencies, fraction) for fraction in (0.5, 0.95))
    _line(
        "throughput",
        f"{report.per_second:,.0f} jobs/s: {report.rush:,} jobs that do nothing, in one process, "
        "every step durable and on record",
    )
    _line(
        "pick-up",
        f"{p50 * 1000:.1f} ms (p50), {p95 * 1000:.1f} ms (p95) from the call of enqueue() to the "
        "running handler, by an idle worker",
    )
    retried = report.ledger.retried
    _line(
        "retried",
        f"{sum(retried.values()):,} runs failed and were tried again: "
        + ", ".join(f"{count:,} {task}" for task, count in retried.most_common()),
    )
    _print_recovered(report)
    _line("fan-in", report.fan_ins.told())
    _line("steps", report.uploads.told())
    for place, (count, job) in enumerate(report.dead()):
        _line("" if place else "dead", f"{count:,} {job.type} {job.status}: {_why(job)}")
    _heading("Is anything lost?")
    for check in report.checks:
        mark = output.paint("✓", "green") if check.ok else output.paint("✗", "red")
        output.say(f"  {mark} {hanging(check.text, 4)}")
    _heading("Try next")
    cleaning = (f"rm -r {shlex.quote(report.directory)}", "when you have seen enough")
    for command, what in (*report.next_steps(), cleaning):
        output.say(f"  {output.paint(f'# {what}', 'dim')}")
        output.say(f"  {command}")  # never wrapped: it is there to be copied


def _print_recovered(report: Report) -> None:
    reasons = report.cut_short()
    total = sum(reasons.values())
    _line(
        "recovered",
        f"{output.count(total, 'run')} cut short when a process died; each of these jobs went "
        "back to the queue and ran again",
    )
    for reason, count in reasons.most_common():
        _line("", f"{count:,}: {reason}")


def _why(job: Job) -> str:
    if job.error_code == "poison":
        return f"poison, {job.crashes} processes died running it, so nobody tries again"
    tried = "one attempt was enough" if job.status == "failed" else "all attempts used up"
    return f"{job.error_code}, {tried}"


def _heading(text: str) -> None:
    output.say()
    output.say(output.paint(text, "bold"))


def _line(label: str, text: str) -> None:
    output.say(f"  {output.paint(label.ljust(LABEL - 2), 'dim')}{hanging(text, LABEL)}")
