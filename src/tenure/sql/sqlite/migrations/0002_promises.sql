-- compatible from: 2
--
-- Who is to blame for a death (losses), jobs whose time has to come and suspects apart from those that
-- are due, what a job died of, what the owner lays down, one pass of upkeep for all workers. A program
-- of version 1 finds tenure_ready no more, and stops there: it would not look at clocks as this one does.

CREATE TABLE tenure_stamps (
  pack             TEXT NOT NULL DEFAULT 'tenure',
  version          INTEGER NOT NULL,
  name             TEXT NOT NULL,
  compatible_from  INTEGER NOT NULL,
  applied_at       INTEGER NOT NULL,
  PRIMARY KEY (pack, version)
) STRICT, WITHOUT ROWID;
INSERT INTO tenure_stamps (version, name, compatible_from, applied_at)
SELECT version, name, 1, applied_at FROM tenure_migrations;
DROP TABLE tenure_migrations;
ALTER TABLE tenure_stamps RENAME TO tenure_migrations;

DROP VIEW job_queue;
DROP TRIGGER tenure_jobs_move;

ALTER TABLE tenure_jobs ADD COLUMN losses INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tenure_jobs ADD COLUMN asked_at INTEGER;
ALTER TABLE tenure_jobs ADD COLUMN death TEXT NOT NULL DEFAULT '';
ALTER TABLE tenure_jobs ADD COLUMN traceback TEXT;
ALTER TABLE tenure_history ADD COLUMN losses INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tenure_history ADD COLUMN asked_at INTEGER;
ALTER TABLE tenure_history ADD COLUMN traceback TEXT;

CREATE INDEX tenure_jobs_death ON tenure_jobs (queue, type, death, completed_at, id)
  WHERE completed_at IS NOT NULL;

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

INSERT INTO tenure_suspects
SELECT r.queue, r.ready_at, r.id FROM tenure_ready r JOIN tenure_jobs j ON j.id = r.id
 WHERE j.crashes > 0;
INSERT INTO tenure_later
SELECT queue, ready_at, id FROM tenure_ready
 WHERE ready_at > unixepoch() * 1000 AND id NOT IN (SELECT id FROM tenure_suspects);
INSERT INTO tenure_due
SELECT queue, priority, org, ready_at, id FROM tenure_ready
 WHERE ready_at <= unixepoch() * 1000 AND id NOT IN (SELECT id FROM tenure_suspects);
DROP TABLE tenure_ready;

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

CREATE TABLE tenure_keys_new (
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
  PRIMARY KEY (key, org)
) STRICT, WITHOUT ROWID;
INSERT INTO tenure_keys_new SELECT * FROM tenure_keys;
DROP TABLE tenure_keys;
ALTER TABLE tenure_keys_new RENAME TO tenure_keys;
CREATE INDEX tenure_keys_expiry ON tenure_keys (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE tenure_settings (
  name    TEXT PRIMARY KEY NOT NULL,
  value   TEXT NOT NULL,
  set_at  INTEGER NOT NULL,
  set_by  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE tenure_upkeep (
  name  TEXT PRIMARY KEY NOT NULL,
  at    INTEGER NOT NULL,
  note  TEXT NOT NULL DEFAULT '{}'
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
