-- Tenure on PostgreSQL (13 and newer), schema version 2.
--
-- Dictionary
--   jobs        HOT: every job that may still change (queued, in_progress, failed, dead_letter).
--   history     jobs that never change again (completed, cancelled), moved here by the finish.
--               Partitioned by id: ids are ULIDs, so a range of ids is a range of time, an id is
--               unique over all partitions, and a look-up touches one of them.
--   job_queue   the view over both, for people and other programs.
--   keys        idempotency keys, apart from the jobs so that no job state is ever unique-indexed.
--   events      the audit trail: one line per change, in the transaction of the change.
--               Partitioned by time: retention drops partitions.
--   rollups     counts and durations per minute / hour / total; charts read these, never jobs.
--   steps       results of finished steps of a running job (checkpoints).
--   edges       "job waits for needs"; jobs.waits counts the unmet ones.
--   workers     one row per start of a worker. THE LEASE LIVES HERE: a job names its worker.
--   queues      queue names with their pause switch.
--   settings    what the owner has laid down for every program: floors of retention, audit.
--   upkeep      one row for each kind of upkeep of the whole fleet: when it was last done.
--   migrations  which migrations ran, and when.
--
-- Conventions
--   * ids are uuid here and ULIDs (the same 128 bits in base 32) in programs; tenure.ulid() shows
--     one as the other.
--   * times are bigint milliseconds since 1970 UTC; only the view turns them into timestamptz.
--   * NULL in request_id and correlation_id stands for the job's own id: 52 bytes less a row.
--   * payload, result, progress, data and meta are `json`, not `jsonb`: kept as they were written.
--   * a lease is (worker, lease_no). lease_no grows when a lease is granted and when it ends
--     without completing; every later write of a run names the number it was granted.
--   * finish_no is the lease_no of the last accepted finish: the same finish sent twice (its
--     COMMIT reply was lost) is recognised by it.
--   * names compare byte by byte (COLLATE "C"): the same order everywhere, and faster.
--   * every change is ONE call of a function below, so it is one statement and one round trip:
--     no transaction of ours is ever open while a program thinks, and it all works behind a
--     pooler in transaction mode. Functions take `now_ms` for tests; NULL is the server's clock.
--   * locks are taken in one order by every function, so that no two can wait in a circle: runs by
--     their ids, then jobs that wait for them by theirs, keys by (org, key), queues, rollups.
--   * every table has a primary key: logical replication needs one.

CREATE TABLE tenure.migrations (
  version          integer NOT NULL,
  name             text NOT NULL,
  compatible_from  integer NOT NULL,        -- the oldest program (schema version) that still runs
  applied_at       timestamptz NOT NULL DEFAULT now(),
  pack             text COLLATE "C" NOT NULL DEFAULT 'tenure',  -- whose tables
  PRIMARY KEY (pack, version)
);

-- What some columns may hold. Domains, because a table's CHECK is parsed again by every statement
-- that writes a row, and a domain's once a session: 14 of the 110 us a row of jobs takes.
CREATE DOMAIN tenure.priority AS smallint CHECK (VALUE BETWEEN 1 AND 10);
CREATE DOMAIN tenure.hot_status AS text
  CHECK (VALUE IN ('queued', 'in_progress', 'failed', 'dead_letter'));
CREATE DOMAIN tenure.end_status AS text CHECK (VALUE IN ('completed', 'cancelled'));
CREATE DOMAIN tenure.grain AS text CHECK (VALUE IN ('minute', 'hour', 'total'));

CREATE TABLE tenure.jobs (
  id              uuid PRIMARY KEY,
  ready_at        bigint NOT NULL,          -- when it became (or becomes) runnable: claim order
  scheduled_at    bigint NOT NULL,          -- when it was asked (or is due) to run
  created_at      bigint NOT NULL,
  updated_at      bigint NOT NULL,
  started_at      bigint,
  completed_at    bigint,                   -- set for failed and dead_letter
  cancel_at       bigint,                   -- a cancel request not yet obeyed
  timeout_ms      bigint NOT NULL,
  lease_no        integer NOT NULL DEFAULT 0,
  finish_no       integer,                  -- see above; NULL until a finish was accepted
  worker          integer,                  -- workers.no while in_progress
  waits           integer NOT NULL DEFAULT 0,  -- unmet dependencies
  attempts        integer NOT NULL DEFAULT 0,
  max_attempts    integer NOT NULL,
  crashes         integer NOT NULL DEFAULT 0,
  priority        tenure.priority NOT NULL,
  status          tenure.hot_status NOT NULL,
  type            text COLLATE "C" NOT NULL,            -- the task's name
  queue           text COLLATE "C" NOT NULL,
  org             text COLLATE "C" NOT NULL,
  category        text NOT NULL,
  project         text,
  actor_type      text NOT NULL,
  actor_id        text NOT NULL,
  request_id      text,
  correlation_id  text,
  traceparent     text,
  key             text COLLATE "C",
  parent          uuid,
  after_failed    text,                     -- what to do when a dependency dies: wait, cancel
  cancel_reason   text,
  payload         json NOT NULL,
  result          json,
  error           text,
  error_code      text,
  error_place     text,                     -- fingerprint: exception type at file:line
  progress        json,
  losses          integer NOT NULL DEFAULT 0,  -- deaths of its worker or machine while it was held
  promoted        boolean NOT NULL DEFAULT false,  -- was to run later, and its time has come
  asked_at        bigint,                   -- when it was first asked to run; NULL: at once
  death           text COLLATE "C" NOT NULL DEFAULT '',  -- handle of what it died of
  traceback       text
) WITH (
  -- Every job is inserted, updated and deleted here within moments: clean up early and at full
  -- speed, keep room on the page, and never take the lock that shortens the file.
  fillfactor = 80,
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
  autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off
);

-- The claim walks this one: one probe per (queue, priority, org), in due order. Everything in it is
-- due, whatever any clock says: it was when it was stored, or has been promoted.
CREATE INDEX jobs_claim ON tenure.jobs (queue, priority, org, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND crashes = 0 AND losses < 3
    AND (ready_at <= created_at OR promoted);
-- Jobs whose time has to come, apart: however many orgs have some, no claim looks at them.
CREATE INDEX jobs_later ON tenure.jobs (queue, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND crashes = 0 AND losses < 3
    AND ready_at > created_at AND NOT promoted;
-- Jobs that run alone, because their process or their workers have died: a few, and apart as well.
CREATE INDEX jobs_suspect ON tenure.jobs (queue, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND (crashes > 0 OR losses >= 3);
-- What a worker holds: renewal and rescue.
CREATE INDEX jobs_held ON tenure.jobs (worker) WHERE worker IS NOT NULL;
-- Dead jobs, for operators.
CREATE INDEX jobs_dead ON tenure.jobs (status, id) WHERE completed_at IS NOT NULL;
-- The same by what they died of, oldest first: groups, counts and retention.
CREATE INDEX jobs_death ON tenure.jobs (queue, type, death, completed_at, id)
  WHERE completed_at IS NOT NULL;
-- Cancel requests that a running handler has not obeyed yet, which are asked for often: beside a
-- long transaction jobs_held keeps all that a worker ever held.
CREATE INDEX jobs_cancel ON tenure.jobs (worker, cancel_at) WHERE cancel_at IS NOT NULL;
-- Jobs waiting for others, for counting them.
CREATE INDEX jobs_waiting ON tenure.jobs (queue) WHERE waits > 0;

CREATE TABLE tenure.history (
  id              uuid PRIMARY KEY,
  scheduled_at    bigint NOT NULL,
  created_at      bigint NOT NULL,
  started_at      bigint,
  completed_at    bigint NOT NULL,
  timeout_ms      bigint NOT NULL,
  lease_no        integer NOT NULL,         -- the number it finished under
  worker          integer,                  -- who finished it
  attempts        integer NOT NULL,
  max_attempts    integer NOT NULL,
  crashes         integer NOT NULL,
  priority        tenure.priority NOT NULL,
  status          tenure.end_status NOT NULL,
  type            text COLLATE "C" NOT NULL,
  queue           text COLLATE "C" NOT NULL,
  org             text COLLATE "C" NOT NULL,
  category        text NOT NULL,
  project         text,
  actor_type      text NOT NULL,
  actor_id        text NOT NULL,
  request_id      text,
  correlation_id  text,
  traceparent     text,
  key             text COLLATE "C",
  parent          uuid,
  payload         json NOT NULL,
  result          json,
  error           text,
  error_code      text,
  progress        json,
  losses          integer NOT NULL DEFAULT 0,
  asked_at        bigint,
  traceback       text
) PARTITION BY RANGE (id);

-- Retention: the oldest completions of each task.
CREATE INDEX history_age ON tenure.history (type, completed_at);
CREATE INDEX history_cancelled ON tenure.history (id) WHERE status = 'cancelled';
-- Ids of days that have no partition (any more): a job that waited for weeks, a foreign clock.
CREATE TABLE tenure.history_other PARTITION OF tenure.history DEFAULT;

CREATE TABLE tenure.keys (
  org            text COLLATE "C" NOT NULL,
  key            text COLLATE "C" NOT NULL,
  job_id         uuid NOT NULL,
  status         text,                      -- NULL while the job lives (derived), then written once
  first_seen_at  bigint NOT NULL,
  last_seen_at   bigint NOT NULL,
  ttl_ms         bigint NOT NULL,
  expires_at     bigint,                    -- set when the job is terminal, never before
  result_ref     uuid,
  error_ref      uuid,
  PRIMARY KEY (key, org)                    -- in this order: people look for a key in any org
);

CREATE INDEX keys_expiry ON tenure.keys (expires_at) WHERE expires_at IS NOT NULL;

-- Counts nothing. A setval() is logged, so the commit after it waits until the log is on disk.
CREATE SEQUENCE tenure.flushes;

CREATE SEQUENCE tenure.events_seq CACHE 1;

CREATE TABLE tenure.events (
  seq             bigint NOT NULL DEFAULT nextval('tenure.events_seq'),
  at              bigint NOT NULL,
  job_id          uuid,
  attempt         integer,
  lease_no        integer,
  worker          integer,
  kind            text NOT NULL,
  type            text COLLATE "C",
  org             text COLLATE "C" NOT NULL,
  project         text,
  actor_type      text NOT NULL,
  actor_id        text NOT NULL,
  request_id      text,
  correlation_id  text,
  data            json,
  PRIMARY KEY (seq, at)
) PARTITION BY RANGE (at);

CREATE INDEX events_job ON tenure.events (job_id, seq);
CREATE TABLE tenure.events_other PARTITION OF tenure.events DEFAULT;

CREATE FUNCTION tenure.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'tenure.events is append-only';
END $$;

CREATE TRIGGER append_only BEFORE UPDATE ON tenure.events
  FOR EACH ROW EXECUTE FUNCTION tenure.refuse_change();

-- Upper bounds in seconds: 0.005 0.01 0.025 0.05 0.1 0.5 1 5 10 30 60 300, then everything above.
CREATE TABLE tenure.rollups (
  grain        tenure.grain NOT NULL,
  start        bigint NOT NULL,
  worker       integer NOT NULL,
  queue        text COLLATE "C" NOT NULL,
  type         text COLLATE "C" NOT NULL,
  outcome      text NOT NULL,
  count        bigint NOT NULL,
  duration_ms  bigint NOT NULL,
  buckets      bigint[] NOT NULL,           -- 13 of them
  PRIMARY KEY (grain, start, worker, queue, type, outcome)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE tenure.steps (
  job_id    uuid NOT NULL,
  name      text NOT NULL,
  result    json NOT NULL,
  lease_no  integer NOT NULL,
  at        bigint NOT NULL,
  PRIMARY KEY (job_id, name)
);

CREATE TABLE tenure.edges (
  needs  uuid NOT NULL,
  job    uuid NOT NULL,
  met    boolean NOT NULL,                  -- true once `needs` has completed, or `job` was cancelled
  PRIMARY KEY (needs, job)
);

CREATE INDEX edges_job ON tenure.edges (job, met);
-- Whether anything waits at all, and the janitor's walk.
CREATE INDEX edges_unmet ON tenure.edges (job, needs) WHERE NOT met;

CREATE TABLE tenure.workers (
  no           integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- never reused
  id           text NOT NULL UNIQUE,        -- host:pid:ULID
  host         text NOT NULL,
  boot         text NOT NULL,               -- boot and pid namespace: where the pid means something
  pid          integer NOT NULL,
  pid_started  text NOT NULL,               -- guards against a reused pid
  beat         bigint NOT NULL DEFAULT 0,   -- grows with each renewal
  lease_ms     bigint NOT NULL,
  started_at   bigint NOT NULL,
  seen_at      bigint NOT NULL,
  dead_at      bigint,
  dead_reason  text,
  meta         json NOT NULL                -- queues, types, concurrency, version
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

CREATE TABLE tenure.queues (
  name          text COLLATE "C" PRIMARY KEY,
  created_at    bigint NOT NULL,
  rewind_no     bigint NOT NULL DEFAULT 0,  -- grows when a job goes back to its old place
  paused_at     bigint,
  paused_by     text,
  pause_reason  text
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

CREATE TABLE tenure.settings (
  name    text COLLATE "C" PRIMARY KEY,     -- keep_history, keep_events (milliseconds), audit
  value   text NOT NULL,
  set_at  bigint NOT NULL,
  set_by  text NOT NULL                     -- the database role
);

CREATE TABLE tenure.upkeep (
  name   text COLLATE "C" PRIMARY KEY,      -- partitions, retention, events
  at     bigint NOT NULL DEFAULT 0,         -- when it was last begun
  value  bigint NOT NULL DEFAULT 0,         -- events: up to which number nothing can appear any more
  note   text NOT NULL DEFAULT '{}'         -- JSON: what was done in the last pass
);

INSERT INTO tenure.upkeep (name) VALUES ('partitions'), ('retention'), ('events');

-- Milliseconds as a timestamp, for people: a row may hold a number that is none.
CREATE FUNCTION tenure.shown(ms bigint) RETURNS timestamptz LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN ms > 253402300799999 THEN timestamptz '9999-12-31 23:59:59.999Z'
              WHEN ms < -62135596800000 THEN timestamptz '0001-01-01 00:00:00Z'
              ELSE to_timestamp(ms / 1000.0) END
$$;

CREATE VIEW tenure.job_queue AS
SELECT j.id, j.type, j.status, j.queue, j.priority, j.org AS org_id, j.project AS project_id,
       tenure.shown(j.scheduled_at) AS scheduled_at,
       w.id AS lease_owner, tenure.shown(w.seen_at + w.lease_ms) AS lease_until,
       j.lease_no, j.payload, j.key AS idempotency_key, j.attempts, j.max_attempts AS max_retries,
       j.crashes, j.error, j.error_code, tenure.shown(j.created_at) AS created_at,
       tenure.shown(j.updated_at) AS updated_at,
       tenure.shown(j.started_at) AS started_at,
       tenure.shown(j.completed_at) AS completed_at,
       j.result, j.progress, j.category, j.actor_type, j.actor_id,
       coalesce(j.request_id, j.id::text) AS request_id,
       coalesce(j.correlation_id, j.id::text) AS correlation_id, j.traceparent, j.parent,
       j.losses
  FROM tenure.jobs j LEFT JOIN tenure.workers w ON w.no = j.worker
UNION ALL
SELECT h.id, h.type, h.status, h.queue, h.priority, h.org, h.project,
       tenure.shown(h.scheduled_at), NULL, NULL, h.lease_no, h.payload, h.key,
       h.attempts, h.max_attempts, h.crashes, h.error, h.error_code,
       tenure.shown(h.created_at), tenure.shown(h.completed_at),
       tenure.shown(h.started_at), tenure.shown(h.completed_at),
       h.result, h.progress, h.category, h.actor_type, h.actor_id,
       coalesce(h.request_id, h.id::text), coalesce(h.correlation_id, h.id::text),
       h.traceparent, h.parent, h.losses
  FROM tenure.history h;
