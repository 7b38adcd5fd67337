"""Jobs and their audit trails: one, many, why one is not running."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tenure.errors import ConfigError, JobError, JobNotFound
from tenure.ids import known_id, shown
from tenure.operations.listing import PAGE, JobFilter, JobPage, walk
from tenure.operations.room import Room
from tenure.record import Record

if TYPE_CHECKING:
    from tenure.operations.why import Why
    from tenure.store import EventPage, Filter
    from tenure.stored import Event, Job

ID_LENGTH, LEAST_OF_ID = 26, 6  # of a ULID
BEGINNING = rf"[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{{{LEAST_OF_ID - 1},{ID_LENGTH - 2}}}"
CANDIDATES = 5
EVENTS_READ = 500


class JobDetail(Record):
    """All about one job, read at one time."""

    job: Job
    why: Why
    steps: Mapping[str, Any]  # finished ones: name -> result
    needs: Mapping[str, str]  # the jobs it runs after: id -> status
    events: tuple[Event, ...]


def given_id(text: object) -> str:
    """A job's id as a ULID, for calls that cannot do without; JobNotFound for what can be none."""
    ulid = known_id(text)
    if ulid is None:
        raise JobNotFound(f"there is no job {shown(text)}: an id is a ULID or a UUID")
    return ulid


def id_or_beginning(text: str) -> str:
    """A ULID, or a UUID as one, or the beginning of a ULID, also with the mark of a table that has
    cut it (`…`): `Jobs.whole_id` finds the job."""
    begun = text.rstrip("….")
    if (whole := known_id(begun)) is not None:
        return whole
    if re.fullmatch(BEGINNING, begun):
        return begun.upper()
    raise JobError(
        f"{shown(text)} is not a job id: expected a ULID ({ID_LENGTH} characters, or the first "
        f"{LEAST_OF_ID} and more of them) or a UUID"
    )


class Jobs(Room):
    # -- one ----------------------------------------------------------------------------------
    def get(self, id: object) -> Job | None:
        """None when there is no such job in this scope; what cannot be an id is no job's."""
        ulid = known_id(id)
        return None if ulid is None else self.store.get(ulid, org=self.scope.org)

    def require(self, id: object) -> Job:
        ulid = given_id(id)
        job = self.store.get(ulid, org=self.scope.org)
        if job is None:
            raise JobNotFound(f"there is no job {ulid}")
        return job

    def whole_id(self, begun: str) -> str:
        """The id of the one job whose id begins so. A step or two along the primary key, however
        many jobs there are: the jobs that begin so come before the last id that could."""
        from tenure.store import Filter

        if len(begun) == ID_LENGTH:
            return begun
        where = Filter(org=self.scope.org)
        page = self.store.find(where, before=begun.ljust(ID_LENGTH, "Z"), limit=CANDIDATES + 1)
        found = [job for job in page.jobs if job.id.startswith(begun)]
        if not found:
            raise JobNotFound(f"there is no job whose id begins with {begun}")
        if len(found) > 1:
            listed = "".join(f"\n  {job.id}  {job.type} {job.status}" for job in found[:CANDIDATES])
            more = "\n  …" if len(found) > CANDIDATES else ""
            raise ConfigError(
                f"{begun} begins the id of several jobs, give more of it:{listed}{more}"
            )
        return found[0].id

    def needs(self, job: Job) -> dict[str, str]:
        """The jobs it runs after: id -> status."""
        if not job.after:
            return {}
        return {id: status for id, (status, _) in self.store.results(job.id).items()}

    def steps(self, job: Job) -> dict[str, Any]:
        """The steps it has finished: name -> result. They are kept until it completes."""
        from tenure import payload

        return {name: payload.decode(text) for name, text in self.store.steps(job.id).items()}

    def why(self, job: Job, needs: Mapping[str, str] | None = None) -> Why:
        """Why it is not running; of a job that runs or has ended, where or how. `needs`: where they
        have been read already."""
        from tenure.operations.queues import Queue
        from tenure.operations.why import why
        from tenure.operations.workers import Worker

        now = self.now()
        workers = [Worker.of(row, now) for row in self.store.workers()]
        queues = [Queue.of(row) for row in self.store.queues()]
        return why(job, workers, queues, now, needs=self.needs(job) if needs is None else needs)

    def detail(self, id: object) -> JobDetail:
        """All about one job. JobNotFound when there is none."""
        job = self.require(id)
        events = tuple(self.events(job.id))
        steps, needs = self.steps(job), self.needs(job)
        return JobDetail(job, self.why(job, needs), steps, needs, events)

    # -- many ---------------------------------------------------------------------------------
    def find(self, where: JobFilter | None = None, *, page: int = PAGE) -> Iterator[Job]:
        """Newest first, page by page; no cursor stays open between two jobs."""
        filters, fits = self._narrowing(where)
        walks = [walk(self.store, each, page) for each in filters]
        if len(walks) == 1:
            return filter(fits, walks[0])
        import heapq

        return heapq.merge(*walks, key=lambda job: job.id, reverse=True)

    def page(
        self, where: JobFilter | None = None, *, before: str | None = None, limit: int = 50
    ) -> JobPage:
        """One page, newest first; continue with `before=` what it says."""
        filters, fits = self._narrowing(where)
        pages = [self.store.find(each, before=before, limit=limit) for each in filters]
        # The page ends where the first of the walks stopped: of that one, later rows are missing.
        end = max((page.before for page in pages if page.before is not None), default=None)
        read = sorted(
            (job for page in pages for job in page.jobs if end is None or job.id >= end),
            key=lambda job: job.id,
            reverse=True,
        )
        more = read[limit - 1].id if len(read) > limit else end
        return JobPage(tuple(filter(fits, read[:limit])), more)

    def _narrowing(
        self, where: JobFilter | None
    ) -> tuple[list[Filter], Callable[[Job], bool] | None]:
        """What the store can tell apart, one filter a status; and what is left to be told."""
        where = JobFilter() if where is None else where
        if where.group is None:
            return where.filters(self.scope.org), None
        from tenure.operations.dead import Dead

        return Dead(self.store, self.scope).narrowing(where.group, where)

    # -- the audit trail ----------------------------------------------------------------------
    def events(self, id: object = None) -> Iterator[Event]:
        """Of one job, or of all; oldest first, page by page."""
        job_id = None if id is None else known_id(id)
        if id is not None and job_id is None:
            return
        after = 0
        while found := self.events_after(after, job_id, limit=PAGE).events:
            yield from found
            after = found[-1].seq

    def events_after(
        self, number: int, job_id: str | None = None, *, limit: int = EVENTS_READ
    ) -> EventPage:
        """One page of what follows the event of this number, oldest first."""
        return self.store.events(job_id=job_id, org=self.scope.org, after=number, limit=limit)

    def events_before(
        self, number: int | None = None, job_id: str | None = None, *, limit: int = PAGE
    ) -> EventPage:
        """One page of what precedes the event of this number, newest first; None: the newest.

        No store reads backwards yet. Numbers have gaps, because transactions that were rolled back
        have drawn some, and other orgs have theirs: where a stretch of numbers holds too few events
        a longer one is read. Of one job the whole trail is read."""
        back = limit
        while True:
            end = self.events_after(0, limit=1).final if number is None else number - 1
            begin = 0 if job_id is not None else max(0, end - back)
            page = self._trail(begin, number, job_id, limit)
            if len(page.events) >= limit or begin == 0:
                return page
            back *= 8

    def _trail(self, after: int, before: int | None, job_id: str | None, limit: int) -> EventPage:
        """The last events between two numbers, newest first. Read to its end the trail says also
        what holds it up."""
        found: list[Event] = []
        while (page := self.events_after(after, job_id)).events:
            found += [event for event in page.events if before is None or event.seq < before]
            found = found[-limit:]
            after = page.events[-1].seq
            if before is not None and after >= before - 1:
                break
        return page._replace(events=found[::-1])
