"""Two more books of `tenure demo`: reports made of parts, and uploads made of steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tenure.demo.ledger import PARTS, STEP_BYTES, STEPS, Check, Ledger, sold

if TYPE_CHECKING:
    from tenure.job import Job

Calls = Mapping[str, Mapping[int, list[str]]]  # job -> run -> the steps it called, in order


class FanIns(NamedTuple):
    """Reports, counted; all but `total` are equal or multiples when everything is well."""

    reports: int
    parts_each: int
    parts_once: int  # parts that succeeded exactly once
    summaries_once: int  # summaries that succeeded exactly once
    in_order: int  # summaries that began after the last of their parts had ended
    exact: int  # summaries with the right total
    total: int  # of all summaries
    cut_short: int  # jobs of theirs that were running when their process died

    @property
    def ok(self) -> bool:
        each = (self.summaries_once, self.in_order, self.exact)
        return self.parts_once == self.reports * PARTS and set(each) == {self.reports}

    def told(self) -> str:
        what = f"{self.reports} reports of {self.parts_each} parts each"
        if self.ok:
            return f"{what}: every part once, every summary exactly once"
        return (
            f"{what}: {self.parts_once} parts and {self.summaries_once} summaries exactly once, "
            f"{self.in_order} summaries after all of their parts, {self.exact} totals right"
        )

    def check(self) -> Check:
        if not self.ok:
            return Check(False, self.told())
        return Check(True, f"all {self.reports} totals are exact, together {self.total:,}")


def fan_ins(jobs: Iterable[Job], ledger: Ledger) -> FanIns:
    """What the parents promised, against the rows, the results and the order of events."""
    found = {job.id: job for job in jobs}
    children: dict[str | None, list[Job]] = {}
    for job in found.values():
        children.setdefault(job.parent, []).append(job)
    parents = [job for job in found.values() if job.type == "plan_report"]
    parts_once = summaries_once = in_order = exact = total = cut_short = 0
    for parent in parents:
        parts = [job for job in children.get(parent.id, ()) if job.type == "count_part"]
        summaries = [job for job in children.get(parent.id, ()) if job.type == "sum_report"]
        parts_once += sum(ledger.successes[part.id] == 1 for part in parts)
        cut_short += sum(job.id in ledger.interrupted for job in (parent, *parts, *summaries))
        if len(summaries) != 1:
            continue  # a second one is no summary exactly once
        (summary,) = summaries
        summaries_once += ledger.successes[summary.id] == 1
        last = max((ledger.over.get(part.id, 0) for part in parts), default=0)
        in_order += 0 < last < ledger.began.get(summary.id, 0)
        right = sum(sold(parent.payload["report"], part) for part in range(PARTS))
        exact += summary.result == right
        total += summary.result or 0
    return FanIns(
        len(parents), PARTS, parts_once, summaries_once, in_order, exact, total, cut_short
    )


class Uploads(NamedTuple):
    """Uploads, counted. `calls` are those of the steps' functions."""

    uploads: int
    steps_each: int
    calls: int
    cut_short: int  # uploads that began more than once
    skipped: int  # finished steps that a later run did not repeat
    in_flight: int  # steps called again because a kill had come before their end
    repeated: int  # finished steps called again: there must be none
    complete: int  # uploads with every step called, and every byte

    @property
    def ok(self) -> bool:
        return not self.repeated and self.complete == self.uploads

    def told(self) -> str:
        if not self.cut_short:
            return f"{self.uploads} uploads of {self.steps_each} steps; no kill hit one of them"
        went_on = "and went on where they stopped" if self.ok else "and did not all go on well"
        return (
            f"{self.cut_short} uploads of {self.steps_each} steps were cut short {went_on}: "
            f"{self.skipped} steps skipped instead of repeated"
        )

    def check(self) -> Check:
        if not self.ok:
            text = f"{self.repeated} finished steps ran again, {self.complete} of {self.uploads}"
            return Check(False, f"{text} uploads are complete")
        text = f"no finished step ran twice: {self.uploads * self.steps_each} steps, "
        return Check(True, f"{text}{self.calls} calls, {self.in_flight} again after a kill in them")


def read_calls(path: str) -> Calls:
    """What the uploads noted: a line for every run, and one for every call of a step."""
    calls: dict[str, dict[int, list[str]]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        job, run, *step = line.split()
        calls.setdefault(job, {}).setdefault(int(run), []).extend(step)
    return calls


def uploads(jobs: Iterable[Job], calls: Calls) -> Uploads:
    found = [job for job in jobs if job.type == "upload"]
    total = cut_short = skipped = in_flight = repeated = complete = 0
    for job in found:
        runs = [called for _run, called in sorted(calls.get(job.id, {}).items())]
        every = [step for called in runs for step in called]
        again = finished_again(runs)
        total += len(every)
        cut_short += len(runs) > 1
        skipped += sum(_spared(called, last=called is runs[-1]) for called in runs[1:])
        repeated += again
        in_flight += len(every) - len(set(every)) - again
        complete += set(every) == set(STEPS) and job.result == len(STEPS) * STEP_BYTES
    return Uploads(len(found), len(STEPS), total, cut_short, skipped, in_flight, repeated, complete)


def finished_again(runs: Iterable[list[str]]) -> int:
    """Calls of steps that had finished: a step has when its run went on to the next one."""
    finished: set[str] = set()
    again = 0
    for called in runs:
        for place, step in enumerate(called):
            again += step in finished
            finished.update(called[:place])
    return again


def _spared(called: list[str], *, last: bool) -> int:
    """The steps that a run need not take. The last run of a job reaches its end: if it called
    nothing, everything was done. An earlier one may have been cut short before its first call."""
    if called:
        return STEPS.index(called[0])
    return len(STEPS) if last else 0
