-- The first schema; ../schema.sql explains every table and column.

CREATE TABLE tenure_migrations (
  version     INTEGER PRIMARY KEY,
  name        TEXT NOT NULL,
  applied_at  INTEGER NOT NULL
) STRICT;

CREATE TABLE tenure_jobs (
  id              TEXT PRIMARY KEY NOT NULL,
  type            TEXT NOT NULL,
  status          TEXT NOT NULL CHECK (status IN ('queued', 'failed', 'dead_letter')),
  queue           TEXT NOT NULL,
  priority        INTEGER NOT NULL CHECK (priority BETWEEN 1 AND 10),
  org             TEXT NOT NULL,
  ready_at        INTEGER NOT NULL,
  waits           INTEGER NOT NULL DEFAULT 0,
  lease_no        INTEGER NOT NULL DEFAULT 0,
  finish_no       INTEGER,
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
  after_failed    TEXT,
  scheduled_at    INTEGER NOT NULL,
  created_at      INTEGER NOT NULL,
  updated_at      INTEGER NOT NULL,
  started_at      INTEGER,
  completed_at    INTEGER,
  cancel_at       INTEGER,
  cancel_reason   TEXT,
  payload         TEXT NOT NULL,
  result          TEXT,
  error           TEXT,
  error_code      TEXT,
  error_place     TEXT,
  progress        TEXT
) STRICT, WITHOUT ROWID;

CREATE INDEX tenure_jobs_dead ON tenure_jobs (status, id) WHERE completed_at IS NOT NULL;
CREATE INDEX tenure_jobs_cancel ON tenure_jobs (cancel_at) WHERE cancel_at IS NOT NULL;
CREATE INDEX tenure_jobs_waiting ON tenure_jobs (queue) WHERE waits > 0;

CREATE TABLE tenure_ready (
  queue     TEXT NOT NULL,
  priority  INTEGER NOT NULL,
  org       TEXT NOT NULL,
  ready_at  INTEGER NOT NULL,
  id        TEXT NOT NULL,
  PRIMARY KEY (queue, priority, org, ready_at, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_leases (
  id          TEXT PRIMARY KEY NOT NULL,
  worker      INTEGER NOT NULL,
  lease_no    INTEGER NOT NULL,
  attempts    INTEGER NOT NULL,
  started_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TRIGGER tenure_jobs_move
AFTER UPDATE OF status, waits, queue, priority, org, ready_at ON tenure_jobs
BEGIN
  DELETE FROM tenure_ready
   WHERE queue = OLD.queue AND priority = OLD.priority AND org = OLD.org
     AND ready_at = OLD.ready_at AND id = OLD.id;
  INSERT INTO tenure_ready
  SELECT NEW.queue, NEW.priority, NEW.org, NEW.ready_at, NEW.id
   WHERE NEW.status = 'queued' AND NEW.waits = 0
     AND NOT EXISTS (SELECT 1 FROM tenure_leases WHERE id = NEW.id);
END;

CREATE TABLE tenure_history (
  id              TEXT PRIMARY KEY NOT NULL,
  type            TEXT NOT NULL,
  status          TEXT NOT NULL CHECK (status IN ('completed', 'cancelled')),
  queue           TEXT NOT NULL,
  priority        INTEGER NOT NULL,
  org             TEXT NOT NULL,
  lease_no        INTEGER NOT NULL,
  worker          INTEGER,
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
  progress        TEXT
) STRICT, WITHOUT ROWID;

CREATE INDEX tenure_history_age ON tenure_history (type, completed_at);

CREATE INDEX tenure_history_cancelled ON tenure_history (id) WHERE status = 'cancelled';

CREATE TABLE tenure_keys (
  org            TEXT NOT NULL,
  key            TEXT NOT NULL,
  job_id         TEXT NOT NULL,
  status         TEXT,
  first_seen_at  INTEGER NOT NULL,
  last_seen_at   INTEGER NOT NULL,
  ttl_ms         INTEGER NOT NULL,
  expires_at     INTEGER,
  result_ref     TEXT,
  error_ref      TEXT,
  PRIMARY KEY (org, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX tenure_keys_expiry ON tenure_keys (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE tenure_events (
  seq             INTEGER PRIMARY KEY,
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

CREATE INDEX tenure_events_job ON tenure_events (job_id);

CREATE TRIGGER tenure_events_append_only BEFORE UPDATE ON tenure_events
BEGIN
  SELECT RAISE(ABORT, 'tenure_events is append-only');
END;

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
  met    INTEGER NOT NULL,
  PRIMARY KEY (needs, job)
) STRICT, WITHOUT ROWID;

CREATE INDEX tenure_edges_job ON tenure_edges (job, met);
CREATE INDEX tenure_edges_unmet ON tenure_edges (job, needs) WHERE met = 0;

CREATE TABLE tenure_workers (
  no           INTEGER PRIMARY KEY AUTOINCREMENT,
  id           TEXT NOT NULL UNIQUE,
  host         TEXT NOT NULL,
  boot         TEXT NOT NULL,
  pid          INTEGER NOT NULL,
  pid_started  TEXT NOT NULL,
  beat         INTEGER NOT NULL DEFAULT 0,
  lease_ms     INTEGER NOT NULL,
  started_at   INTEGER NOT NULL,
  seen_at      INTEGER NOT NULL,
  dead_at      INTEGER,
  dead_reason  TEXT,
  meta         TEXT NOT NULL
) STRICT;

CREATE TABLE tenure_queues (
  name          TEXT PRIMARY KEY NOT NULL,
  created_at    INTEGER NOT NULL,
  paused_at     INTEGER,
  paused_by     TEXT,
  pause_reason  TEXT
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
       coalesce(j.correlation_id, j.id) AS correlation_id, j.traceparent, j.parent
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
       coalesce(h.correlation_id, h.id), h.traceparent, h.parent
  FROM tenure_history h;
