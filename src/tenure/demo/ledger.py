"""The books of `tenure demo`: what was promised, what the audit trail says, whether it adds up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tenure.job import TERMINAL

if TYPE_CHECKING:
    from tenure.job import Event, Job
    from tenure.store import Store

PAGE = 500
ENDS = ("job.succeeded", "job.failed", "job.deadlettered", "job.cancelled")
PUT_BACK = ("job.rescued", "job.released")
FAN_INS, UPLOADS = 4, 4  # half of them shortly before each kill
PARTS = 12  # of a report that is made of parts
STEPS, STEP_BYTES = ("open", "first", "second", "third", "close"), 4096  # of an upload


def sold(report: int, part: int) -> int:
    """Another number for every part: a total with one missing, or one twice, is wrong."""
    return 1000 * report + (1 << part)


class Kind(NamedTuple):
    """A task of the demo, how many jobs it gets, and how each of them has to end."""

    task: str
    what: str
    jobs: int
    status: str = "completed"
    code: str | None = None


def kinds(jobs: int) -> list[Kind]:
    """`jobs` divided into kinds: most of them do nothing, most of the others little."""
    pings = jobs * 7 // 10
    reports, cards = max(8, jobs // 160), max(10, jobs // 40)
    files, partners, images = max(4, jobs // 400), max(3, jobs // 700), 2
    fan_ins = FAN_INS * (1 + PARTS + 1)
    emails = jobs - pings - reports - cards - files - partners - images - fan_ins - UPLOADS
    return [
        Kind("ping", "does nothing", pings),
        Kind("send_email", "quick", emails),
        Kind("make_report", "slow, with progress", reports),
        Kind("charge_card", "fails, is retried", cards),
        Kind("import_file", "cannot succeed", files, "failed", "BAD_FILE"),
        Kind("call_partner", "fails every time", partners, "dead_letter", "ConnectionError"),
        Kind("resize_image", "kills its process", images, "dead_letter", "poison"),
        Kind("plan_report", f"enqueues {PARTS} parts, a summary", FAN_INS),
        Kind("count_part", "a part of a report", FAN_INS * PARTS),
        Kind("sum_report", f"runs after its {PARTS} parts", FAN_INS),
        Kind("upload", f"{len(STEPS)} steps, each stored", UPLOADS),
    ]


class Ledger:
    """The audit trail, read as it grows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seq = 0
        self.succeeded: Counter[str] = Counter()  # by task
        self.dead: Counter[str] = Counter()  # by task
        self.retried: Counter[str] = Counter()  # by task
        self.runs = 0
        self.put_back: list[Event] = []  # runs that were cut short
        self.interrupted: set[str] = set()  # their jobs
        self.ends: Counter[str] = Counter()  # by job: 1 each, or something is wrong
        self.successes: Counter[str] = Counter()  # by job
        self.running: dict[str, str] = {}  # job -> task
        self.began: dict[str, int] = {}  # job -> the place of its first start in the trail
        self.over: dict[str, int] = {}  # job -> the place of its end

    @property
    def ended(self) -> int:
        return len(self.ends)

    def read(self) -> None:
        """Take in what is new."""
        while page := self._store.events(after=self._seq, limit=PAGE).events:
            for event in page:
                self._enter(event)
            self._seq = page[-1].seq

    def _enter(self, event: Event) -> None:
        job, task = event.job_id, event.type
        if job is None or task is None:
            return
        if event.kind == "job.started":
            self.running[job] = task
            self.began.setdefault(job, event.seq)
            self.runs += 1
            return
        self.running.pop(job, None)
        if event.kind in ENDS:
            self.ends[job] += 1
            self.over[job] = event.seq
        if event.kind == "job.succeeded":
            self.succeeded[task] += 1
            self.successes[job] += 1
        elif event.kind in ENDS:
            self.dead[task] += 1
        elif event.kind == "job.retried":
            self.retried[task] += 1
        elif event.kind in PUT_BACK:
            self.put_back.append(event)
            self.interrupted.add(job)


# ------------------------------------------------------------------------------- the audit


class Check(NamedTuple):
    ok: bool
    text: str


def audit(acknowledged: Sequence[str], jobs: Iterable[Job], ledger: Ledger) -> list[Check]:
    """Receipts against rows, rows against events: three books kept apart."""
    found = {job.id: job for job in jobs}
    return [
        _nothing_lost(acknowledged, found),
        _ended_once(acknowledged, ledger),
        _results_once(found, ledger),
    ]


def promised(acknowledged: Iterable[str], jobs: Iterable[Job]) -> list[str]:
    """Everything somebody was told is stored: by a receipt, or by the result of a job that
    enqueued others and completed."""
    told = list(acknowledged)
    for job in jobs:
        if job.type == "plan_report" and job.status == "completed":
            told += [*job.result["parts"], job.result["summary"]]
    return told


def statuses(jobs: Iterable[Job]) -> dict[str, int]:
    counts = Counter(job.status for job in jobs)
    return {name: counts[name] for name in ("completed", "failed", "dead_letter", "cancelled")}


def _nothing_lost(acknowledged: Sequence[str], found: dict[str, Job]) -> Check:
    counts = statuses(found.values())
    lost = set(acknowledged) - set(found)
    strange = set(found) - set(acknowledged)
    open_ = sum(job.status not in TERMINAL for job in found.values())
    ok = not lost and not strange and not open_ and sum(counts.values()) == len(acknowledged)
    adds = " + ".join(f"{number:,} {name}" for name, number in counts.items())
    text = f"{len(acknowledged):,} enqueued {'=' if ok else '≠'} {adds}"
    if not ok:
        text += f"; lost: {len(lost)}, never enqueued: {len(strange)}, not ended: {open_}"
    return Check(ok, text)


def _ended_once(acknowledged: Sequence[str], ledger: Ledger) -> Check:
    once = sum(ledger.ends[id] == 1 for id in acknowledged)
    ok = once == len(acknowledged) == ledger.ended
    text = (
        f"every job ended exactly once: {once:,} of {len(acknowledged):,}, in {ledger.runs:,} runs"
    )
    return Check(ok, text)


def _results_once(found: dict[str, Job], ledger: Ledger) -> Check:
    completed = {id for id, job in found.items() if job.status == "completed"}
    wrong = sum(ledger.successes[id] != (id in completed) for id in found)
    if wrong:
        return Check(False, f"{wrong:,} jobs whose row and audit trail disagree about success")
    return Check(True, "rows and audit trail agree about every job")


def as_expected(kinds: Sequence[Kind], jobs: Iterable[Job]) -> Check:
    """Each kind ended the way it has to, whoever was killed meanwhile."""
    expected = {kind.task: kind for kind in kinds}
    wrong = [
        job
        for job in jobs
        if job.status != expected[job.type].status
        or (expected[job.type].code or job.error_code) != job.error_code
    ]
    if not wrong:
        return Check(True, f"each of the {len(kinds)} kinds ended as it has to")
    job = wrong[0]
    detail = f"{job.type} {job.id} is {job.status}, {job.error_code}: {job.error}"
    return Check(False, f"{len(wrong):,} jobs did not end as they have to, such as {detail}")


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
