-- Tenure on SQLite, schema version 2.
--
-- Dictionary
--   tenure_jobs      HOT: every job that may still change (queued, in_progress, failed, dead_letter).
--   tenure_due       the queues: jobs that wait for nothing but a worker, in claim order.
--   tenure_later     jobs whose time has to come; then a claim moves them to tenure_due.
--   tenure_suspects  jobs that run alone, because their process or their workers have died.
--   tenure_leases    jobs in progress: who runs them, under which number, since when.
--   tenure_history   jobs that never change again (completed, cancelled), moved here by the finish.
--   job_queue        the view over both, for people and other programs: text times, no internals.
--   tenure_keys      idempotency keys, apart from the jobs so that no job state is ever unique-indexed.
--   tenure_events    the audit trail: one line per change, written in the transaction of the change.
--   tenure_rollups   counts and durations per minute / hour / total; charts read these, never jobs.
--   tenure_steps     results of finished steps of a running job (checkpoints).
--   tenure_edges     "job waits for needs"; tenure_jobs.waits counts the unmet ones.
--   tenure_workers   one row per start of a worker. A LEASE LASTS as long as its worker renews here.
--   tenure_queues    queue names with their pause switch.
--   tenure_settings  what the owner has laid down for every program: floors of retention, audit.
--   tenure_upkeep    one row for each kind of upkeep of all workers: when it was last done.
--   tenure_migrations  which migrations ran, and when.
--
-- Conventions
--   * times are INTEGER milliseconds since 1970 UTC; only the view turns them into text.
--   * NULL in request_id and correlation_id stands for the job's own id: 52 bytes less a row.
--   * payload, result, progress, data, meta hold JSON text, checked before it gets here.
--   * a job of tenure_jobs stands in exactly one place: in tenure_due, tenure_later, tenure_suspects,
--     tenure_leases, with waits > 0, or with completed_at. A claim moves it to its lease and leaves
--     its row alone (rewriting it and two indexes of it was a fifth of the time of a job).
--   * what stands in tenure_due is due, whatever any clock says: it was when it was written.
--   * lease_no grows when a lease is granted and when it ends without completing; every later
--     write of a run names the number it was granted. Row and lease differ while it runs: the
--     lease has the truth about lease_no, attempts and started_at, and status is in_progress.
--   * finish_no is the lease_no of the last accepted finish: the same finish sent twice
--     (its COMMIT reply was lost) is recognised by it.
--   * WITHOUT ROWID: the id is the table, one b-tree less to maintain per insert and delete.

CREATE TABLE tenure_migrations (
  pack             TEXT NOT NULL DEFAULT 'tenure',  -- whose tables
  version          INTEGER NOT NULL,
  name             TEXT NOT NULL,
  compatible_from  INTEGER NOT NULL,          -- the oldest program (schema version) that still runs
  applied_at       INTEGER NOT NULL,
  PRIMARY KEY (pack, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_jobs (
  id              TEXT PRIMARY KEY NOT NULL,   -- ULID
  type            TEXT NOT NULL,               -- the task's name
  status          TEXT NOT NULL CHECK (status IN ('queued', 'failed', 'dead_letter')),
  queue           TEXT NOT NULL,
  priority        INTEGER NOT NULL CHECK (priority BETWEEN 1 AND 10),
  org             TEXT NOT NULL,
  ready_at        INTEGER NOT NULL,            -- when it became (or becomes) runnable: claim order
  waits           INTEGER NOT NULL DEFAULT 0,  -- unmet dependencies
  lease_no        INTEGER NOT NULL DEFAULT 0,
  finish_no       INTEGER,                     -- see above; NULL until a finish was accepted
  attempts        INTEGER NOT NULL DEFAULT 0,
  max_attempts    INTEGER NOT NULL,
  crashes         INTEGER NOT NULL DEFAULT 0,
  timeout_ms      INTEGER NOT NULL,
  category        TEXT NOT NULL,
  project         TEXT,
  actor_type      TEXT NOT NULL,
  actor_id        TEXT NOT NULL,
  request_id      TEXT,
  correlation_id  TEXT,
  traceparent     TEXT,
  key             TEXT,
  parent          TEXT,
  after_failed    TEXT,                        -- what to do when a dependency dies: wait, cancel
  scheduled_at    INTEGER NOT NULL,            -- when it was asked (or is due) to run
  created_at      INTEGER NOT NULL,
  updated_at      INTEGER NOT NULL,
  started_at      INTEGER,
  completed_at    INTEGER,                     -- set for failed and dead_letter
  cancel_at       INTEGER,                     -- a cancel request not yet obeyed
  cancel_reason   TEXT,
  payload         TEXT NOT NULL,
  result          TEXT,
  error           TEXT,
  error_code      TEXT,
  error_place     TEXT,                        -- fingerprint: exception type at file:line
  progress        TEXT,
  losses          INTEGER NOT NULL DEFAULT 0,  -- deaths of its worker or machine while it was held
  asked_at        INTEGER,                     -- when it was first asked to run; NULL: at once
  death           TEXT NOT NULL DEFAULT '',    -- handle of what it died of: equal for equal deaths
  traceback       TEXT
) STRICT, WITHOUT ROWID;

-- Dead jobs, for operators.
CREATE INDEX tenure_jobs_dead ON tenure_jobs (status, id) WHERE completed_at IS NOT NULL;
-- The same by what they died of, oldest first: groups, counts and retention.
CREATE INDEX tenure_jobs_death ON tenure_jobs (queue, type, death, completed_at, id)
  WHERE completed_at IS NOT NULL;
-- Cancel requests that a running handler has not obeyed yet.
CREATE INDEX tenure_jobs_cancel ON tenure_jobs (cancel_at) WHERE cancel_at IS NOT NULL;
-- Jobs waiting for others, for counting them.
CREATE INDEX tenure_jobs_waiting ON tenure_jobs (queue) WHERE waits > 0;

-- The claim walks this one: one probe per (queue, priority, org), in due order.
CREATE TABLE tenure_due (
  queue     TEXT NOT NULL,
  priority  INTEGER NOT NULL,
  org       TEXT NOT NULL,
  ready_at  INTEGER NOT NULL,
  id        TEXT NOT NULL,
  PRIMARY KEY (queue, priority, org, ready_at, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_later (
  queue     TEXT NOT NULL,
  ready_at  INTEGER NOT NULL,
  id        TEXT NOT NULL,
  PRIMARY KEY (queue, ready_at, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_suspects (
  queue     TEXT NOT NULL,
  ready_at  INTEGER NOT NULL,
  id        TEXT NOT NULL,
  PRIMARY KEY (queue, ready_at, id)
) STRICT, WITHOUT ROWID;

-- Renewal and rescue walk all of it: it is never longer than what runs.
CREATE TABLE tenure_leases (
  id          TEXT PRIMARY KEY NOT NULL,
  worker      INTEGER NOT NULL,                -- tenure_workers.no
  lease_no    INTEGER NOT NULL,
  attempts    INTEGER NOT NULL,                -- with this one
  started_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Whatever changes a job, it stands where it should. Only enqueue, claim and what removes a job write
-- these places themselves. What changes a job says when, in updated_at: what is due then is due, and
-- what was when it was stored.
CREATE TRIGGER tenure_jobs_move
AFTER UPDATE OF status, waits, queue, priority, org, ready_at, crashes, losses ON tenure_jobs
BEGIN
  DELETE FROM tenure_due
   WHERE queue = OLD.queue AND priority = OLD.priority AND org = OLD.org
     AND ready_at = OLD.ready_at AND id = OLD.id;
  DELETE FROM tenure_later
   WHERE queue = OLD.queue AND ready_at = OLD.ready_at AND id = OLD.id;
  DELETE FROM tenure_suspects
   WHERE queue = OLD.queue AND ready_at = OLD.ready_at AND id = OLD.id;
  INSERT INTO tenure_due
  SELECT NEW.queue, NEW.priority, NEW.org, NEW.ready_at, NEW.id
   WHERE NEW.status = 'queued' AND NEW.waits = 0
     AND NEW.ready_at <= max(NEW.updated_at, NEW.created_at)
     AND NEW.crashes = 0 AND NEW.losses < 3
     AND NOT EXISTS (SELECT 1 FROM tenure_leases WHERE id = NEW.id);
  INSERT INTO tenure_later
  SELECT NEW.queue, NEW.ready_at, NEW.id
   WHERE NEW.status = 'queued' AND NEW.waits = 0
     AND NEW.ready_at > max(NEW.updated_at, NEW.created_at)
     AND NEW.crashes = 0 AND NEW.losses < 3
     AND NOT EXISTS (SELECT 1 FROM tenure_leases WHERE id = NEW.id);
  INSERT INTO tenure_suspects
  SELECT NEW.queue, NEW.ready_at, NEW.id
   WHERE NEW.status = 'queued' AND NEW.waits = 0 AND (NEW.crashes > 0 OR NEW.losses >= 3)
     AND NOT EXISTS (SELECT 1 FROM tenure_leases WHERE id = NEW.id);
END;

CREATE TABLE tenure_history (
  id              TEXT PRIMARY KEY NOT NULL,
  type            TEXT NOT NULL,
  status          TEXT NOT NULL CHECK (status IN ('completed', 'cancelled')),
  queue           TEXT NOT NULL,
  priority        INTEGER NOT NULL,
  org             TEXT NOT NULL,
  lease_no        INTEGER NOT NULL,            -- the number it finished under
  worker          INTEGER,                     -- who finished it
  attempts        INTEGER NOT NULL,
  max_attempts    INTEGER NOT NULL,
  crashes         INTEGER NOT NULL,
  timeout_ms      INTEGER NOT NULL,
  category        TEXT NOT NULL,
  project         TEXT,
  actor_type      TEXT NOT NULL,
  actor_id        TEXT NOT NULL,
  request_id      TEXT,
  correlation_id  TEXT,
  traceparent     TEXT,
  key             TEXT,
  parent          TEXT,
  scheduled_at    INTEGER NOT NULL,
  created_at      INTEGER NOT NULL,
  updated_at      INTEGER NOT NULL,
  started_at      INTEGER,
  completed_at    INTEGER NOT NULL,
  payload         TEXT NOT NULL,
  result          TEXT,
  error           TEXT,
  error_code      TEXT,
  progress        TEXT,
  losses          INTEGER NOT NULL DEFAULT 0,
  asked_at        INTEGER,
  traceback       TEXT
) STRICT, WITHOUT ROWID;

-- Retention: the oldest completions of each task.
CREATE INDEX tenure_history_age ON tenure_history (type, completed_at);

CREATE INDEX tenure_history_cancelled ON tenure_history (id) WHERE status = 'cancelled';

CREATE TABLE tenure_keys (
  org            TEXT NOT NULL,
  key            TEXT NOT NULL,
  job_id         TEXT NOT NULL,
  status         TEXT,                         -- NULL while the job lives (derived), then written once
  first_seen_at  INTEGER NOT NULL,
  last_seen_at   INTEGER NOT NULL,
  ttl_ms         INTEGER NOT NULL,
  expires_at     INTEGER,                      -- set when the job is terminal, never before
  result_ref     TEXT,
  error_ref      TEXT,
  PRIMARY KEY (key, org)                       -- in this order: people look for a key in any org
) STRICT, WITHOUT ROWID;

CREATE INDEX tenure_keys_expiry ON tenure_keys (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE tenure_events (
  seq             INTEGER PRIMARY KEY,         -- never reused: a prune keeps the newest
  at              INTEGER NOT NULL,
  kind            TEXT NOT NULL,
  job_id          TEXT,
  type            TEXT,
  attempt         INTEGER,
  lease_no        INTEGER,
  org             TEXT NOT NULL,
  project         TEXT,
  actor_type      TEXT NOT NULL,
  actor_id        TEXT NOT NULL,
  request_id      TEXT,
  correlation_id  TEXT,
  worker          INTEGER,
  data            TEXT
) STRICT;

-- With seq behind it: that is the rowid, which every index ends with.
CREATE INDEX tenure_events_job ON tenure_events (job_id);

CREATE TRIGGER tenure_events_append_only BEFORE UPDATE ON tenure_events
BEGIN
  SELECT RAISE(ABORT, 'tenure_events is append-only');
END;

-- Upper bounds in seconds: 0.005 0.01 0.025 0.05 0.1 0.5 1 5 10 30 60 300, then everything above.
CREATE TABLE tenure_rollups (
  grain        TEXT NOT NULL CHECK (grain IN ('minute', 'hour', 'total')),
  start        INTEGER NOT NULL,
  worker       INTEGER NOT NULL,
  queue        TEXT NOT NULL,
  type         TEXT NOT NULL,
  outcome      TEXT NOT NULL,
  count        INTEGER NOT NULL,
  duration_ms  INTEGER NOT NULL,
  b0  INTEGER NOT NULL, b1  INTEGER NOT NULL, b2  INTEGER NOT NULL, b3 INTEGER NOT NULL,
  b4  INTEGER NOT NULL, b5  INTEGER NOT NULL, b6  INTEGER NOT NULL, b7 INTEGER NOT NULL,
  b8  INTEGER NOT NULL, b9  INTEGER NOT NULL, b10 INTEGER NOT NULL, b11 INTEGER NOT NULL,
  b12 INTEGER NOT NULL,
  PRIMARY KEY (grain, start, worker, queue, type, outcome)
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_steps (
  job_id    TEXT NOT NULL,
  name      TEXT NOT NULL,
  result    TEXT NOT NULL,
  lease_no  INTEGER NOT NULL,
  at        INTEGER NOT NULL,
  PRIMARY KEY (job_id, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_edges (
  needs  TEXT NOT NULL,
  job    TEXT NOT NULL,
  met    INTEGER NOT NULL,                     -- 1 once `needs` has completed, or `job` was cancelled
  PRIMARY KEY (needs, job)
) STRICT, WITHOUT ROWID;

CREATE INDEX tenure_edges_job ON tenure_edges (job, met);
-- Whether anything waits at all, and the janitor's walk.
CREATE INDEX tenure_edges_unmet ON tenure_edges (job, needs) WHERE met = 0;

CREATE TABLE tenure_workers (
  no           INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused
  id           TEXT NOT NULL UNIQUE,               -- host:pid:ULID
  host         TEXT NOT NULL,
  boot         TEXT NOT NULL,                      -- boot and pid namespace: where the pid means something
  pid          INTEGER NOT NULL,
  pid_started  TEXT NOT NULL,                      -- guards against a reused pid
  beat         INTEGER NOT NULL DEFAULT 0,         -- grows with each renewal
  lease_ms     INTEGER NOT NULL,
  started_at   INTEGER NOT NULL,
  seen_at      INTEGER NOT NULL,
  dead_at      INTEGER,
  dead_reason  TEXT,
  meta         TEXT NOT NULL                       -- queues, types, concurrency, version
) STRICT;

CREATE TABLE tenure_queues (
  name          TEXT PRIMARY KEY NOT NULL,
  created_at    INTEGER NOT NULL,
  paused_at     INTEGER,
  paused_by     TEXT,
  pause_reason  TEXT
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_settings (
  name    TEXT PRIMARY KEY NOT NULL,           -- keep_history, keep_events (milliseconds), audit
  value   TEXT NOT NULL,
  set_at  INTEGER NOT NULL,
  set_by  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_upkeep (
  name  TEXT PRIMARY KEY NOT NULL,             -- retention
  at    INTEGER NOT NULL,                      -- when it was last begun
  note  TEXT NOT NULL DEFAULT '{}'             -- JSON: what was done in the last pass
) STRICT, WITHOUT ROWID;

CREATE VIEW job_queue AS
SELECT j.id, j.type, iif(l.id IS NULL, j.status, 'in_progress') AS status, j.queue, j.priority,
       j.org AS org_id, j.project AS project_id,
       strftime('%Y-%m-%dT%H:%M:%fZ', j.scheduled_at / 1000.0, 'unixepoch') AS scheduled_at,
       w.id AS lease_owner,
       strftime('%Y-%m-%dT%H:%M:%fZ', (w.seen_at + w.lease_ms) / 1000.0, 'unixepoch') AS lease_until,
       coalesce(l.lease_no, j.lease_no) AS lease_no, j.payload, j.key AS idempotency_key,
       coalesce(l.attempts, j.attempts) AS attempts, j.max_attempts AS max_retries, j.crashes,
       j.error, j.error_code,
       strftime('%Y-%m-%dT%H:%M:%fZ', j.created_at / 1000.0, 'unixepoch') AS created_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', max(j.updated_at, coalesce(l.started_at, 0)) / 1000.0,
                'unixepoch') AS updated_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', coalesce(l.started_at, j.started_at) / 1000.0,
                'unixepoch') AS started_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', j.completed_at / 1000.0, 'unixepoch') AS completed_at,
       j.result, j.progress, j.category, j.actor_type, j.actor_id,
       coalesce(j.request_id, j.id) AS request_id,
       coalesce(j.correlation_id, j.id) AS correlation_id, j.traceparent, j.parent, j.losses
  FROM tenure_jobs j LEFT JOIN tenure_leases l ON l.id = j.id
                     LEFT JOIN tenure_workers w ON w.no = l.worker
UNION ALL
SELECT h.id, h.type, h.status, h.queue, h.priority, h.org, h.project,
       strftime('%Y-%m-%dT%H:%M:%fZ', h.scheduled_at / 1000.0, 'unixepoch'),
       NULL, NULL,
       h.lease_no, h.payload, h.key, h.attempts, h.max_attempts,
       h.crashes, h.error, h.error_code,
       strftime('%Y-%m-%dT%H:%M:%fZ', h.created_at / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', h.updated_at / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', h.started_at / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', h.completed_at / 1000.0, 'unixepoch'),
       h.result, h.progress, h.category, h.actor_type, h.actor_id,
       coalesce(h.request_id, h.id),
       coalesce(h.correlation_id, h.id), h.traceparent, h.parent, h.losses
  FROM tenure_history h;
