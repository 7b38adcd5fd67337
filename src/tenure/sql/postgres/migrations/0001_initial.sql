-- Tenure on PostgreSQL (13 and newer), schema version 1.
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
--   * rows of jobs are locked in the order of their ids, in every function.

CREATE TABLE tenure.migrations (
  version          integer PRIMARY KEY,
  name             text NOT NULL,
  compatible_from  integer NOT NULL,        -- the oldest program (schema version) that still runs
  applied_at       timestamptz NOT NULL DEFAULT now()
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
  progress        json
) WITH (
  -- Every job is inserted, updated and deleted here within moments: clean up early and at full
  -- speed, keep room on the page, and never take the lock that shortens the file.
  fillfactor = 80,
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
  autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off
);

-- The claim walks this one: one probe per (queue, priority, org), in due order.
CREATE INDEX jobs_claim ON tenure.jobs (queue, priority, org, ready_at, id)
  WHERE status = 'queued' AND waits = 0;
-- What a worker holds: renewal and rescue.
CREATE INDEX jobs_held ON tenure.jobs (worker) WHERE worker IS NOT NULL;
-- Dead jobs, for operators.
CREATE INDEX jobs_dead ON tenure.jobs (status, id) WHERE completed_at IS NOT NULL;
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
  progress        json
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
  PRIMARY KEY (org, key)
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
  data            json
) PARTITION BY RANGE (at);

CREATE INDEX events_order ON tenure.events (seq);
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
  met    boolean NOT NULL,                  -- true once `needs` has completed
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

CREATE VIEW tenure.job_queue AS
SELECT j.id, j.type, j.status, j.queue, j.priority, j.org AS org_id, j.project AS project_id,
       to_timestamp(j.scheduled_at / 1000.0) AS scheduled_at,
       w.id AS lease_owner, to_timestamp((w.seen_at + w.lease_ms) / 1000.0) AS lease_until,
       j.lease_no, j.payload, j.key AS idempotency_key, j.attempts, j.max_attempts AS max_retries,
       j.crashes, j.error, j.error_code, to_timestamp(j.created_at / 1000.0) AS created_at,
       to_timestamp(j.updated_at / 1000.0) AS updated_at,
       to_timestamp(j.started_at / 1000.0) AS started_at,
       to_timestamp(j.completed_at / 1000.0) AS completed_at,
       j.result, j.progress, j.category, j.actor_type, j.actor_id,
       coalesce(j.request_id, j.id::text) AS request_id,
       coalesce(j.correlation_id, j.id::text) AS correlation_id, j.traceparent, j.parent
  FROM tenure.jobs j LEFT JOIN tenure.workers w ON w.no = j.worker
UNION ALL
SELECT h.id, h.type, h.status, h.queue, h.priority, h.org, h.project,
       to_timestamp(h.scheduled_at / 1000.0), NULL, NULL, h.lease_no, h.payload, h.key,
       h.attempts, h.max_attempts, h.crashes, h.error, h.error_code,
       to_timestamp(h.created_at / 1000.0), to_timestamp(h.completed_at / 1000.0),
       to_timestamp(h.started_at / 1000.0), to_timestamp(h.completed_at / 1000.0),
       h.result, h.progress, h.category, h.actor_type, h.actor_id,
       coalesce(h.request_id, h.id::text), coalesce(h.correlation_id, h.id::text),
       h.traceparent, h.parent
  FROM tenure.history h;
-- What Tenure does to its tables on PostgreSQL, in the order of store.py. Each public function is
-- one transaction; each is called by one statement of queries.sql.
--
-- The functions that touch many rows switch joins and scans of whole tables off for themselves: a
-- batch is looked up by id, whatever the statistics of a table that is empty one moment and holds a
-- million rows the next make the planner believe. And with them the compiler: before version 18 a
-- plan that cannot do without what is switched off looks dear enough to be compiled (finish of 6
-- jobs: 240 instead of 1 ms). There being one good plan for any size, it is made once a session:
-- by default most were made anew at each call (enqueue with a key: 1.15 instead of 0.51 ms).
-- #variable_conflict use_column: a bare name is a column; variables have names of their own.

-- -- ids and time --------------------------------------------------------------------------------

CREATE FUNCTION tenure.clock() RETURNS bigint LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
  SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
$$;

-- A new ULID as uuid: 48 bits of time, the rest random. For jobs enqueued from SQL.
CREATE FUNCTION tenure.new_id(at_ms bigint) RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
  SELECT (lpad(to_hex(at_ms), 12, '0') || right(replace(gen_random_uuid()::text, '-', ''), 20))::uuid
$$;

-- The 26 characters that programs and people call a job by.
CREATE FUNCTION tenure.ulid(id uuid) RETURNS text LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
  SELECT string_agg(substr('0123456789ABCDEFGHJKMNPQRSTVWXYZ',
                           substring(b.bits FROM n * 5 + 1 FOR 5)::bit(5)::int + 1, 1), '' ORDER BY n)
    FROM (SELECT (B'00' || ('x' || replace(id::text, '-', ''))::bit(128)) AS bits) b,
         generate_series(0, 25) AS n
$$;

-- -- enqueue -------------------------------------------------------------------------------------

CREATE TYPE tenure.new_job AS (
  place integer, id uuid, type text, payload json, queue text, priority smallint, org text,
  delay_ms bigint, at_ms bigint, key text, key_ttl_ms bigint, max_attempts integer,
  timeout_ms bigint, category text, project text, actor_type text, actor_id text,
  request_id text, correlation_id text, traceparent text, parent uuid, after uuid[],
  after_failed text, remark json
);

-- Why these jobs cannot be stored, or NULL. What a job is to run after must exist in its own org,
-- or come in the same batch; a job whose key is taken will not be stored and need not be right.
CREATE FUNCTION tenure.refuse_jobs(batch tenure.new_job[], moment bigint) RETURNS text
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  missing record;
BEGIN
  IF EXISTS (SELECT 1 FROM unnest(batch) b WHERE coalesce(b.type, '') = '') THEN
    RETURN 'a job without a type: name its task';
  END IF;
  IF EXISTS (SELECT 1 FROM unnest(batch) b WHERE b.priority NOT BETWEEN 1 AND 10) THEN
    RETURN 'a job''s priority is a number from 1 (first) to 10';
  END IF;
  IF NOT EXISTS (SELECT 1 FROM unnest(batch) b WHERE b.after IS NOT NULL) THEN
    RETURN NULL;
  END IF;
  SELECT b.type, n.needs INTO missing
    FROM unnest(batch) b CROSS JOIN LATERAL unnest(b.after) n(needs)
   WHERE NOT EXISTS (SELECT 1 FROM unnest(batch) o WHERE o.id = n.needs AND o.org = b.org)
     AND NOT EXISTS (SELECT 1 FROM tenure.jobs s WHERE s.id = n.needs AND s.org = b.org)
     AND NOT EXISTS (SELECT 1 FROM tenure.history s WHERE s.id = n.needs AND s.org = b.org)
     AND NOT EXISTS (SELECT 1 FROM tenure.keys k
                      WHERE k.org = b.org AND k.key = b.key AND k.job_id <> b.id
                        AND (k.expires_at IS NULL OR k.expires_at > moment))
     AND NOT EXISTS (SELECT 1 FROM unnest(batch) o
                      WHERE o.org = b.org AND o.key = b.key AND o.place < b.place)
   LIMIT 1;
  IF FOUND THEN
    RETURN format('a ''%s'' job is to run after %s, but there is no such job: enqueue that one '
                  'first, or with it in the same batch', missing.type, tenure.ulid(missing.needs));
  END IF;
  RETURN NULL;
END $$;

-- Store all jobs of a JSON array or none; one receipt each, in order. A key seen before within
-- its org yields the first job's receipt. `again` repeats a call whose reply was lost: what is
-- stored already, live or finished, is not stored twice. `alone`: this call is the transaction. A
-- batch that cannot be stored comes back as one row without an id that says why: an error would
-- end the caller's transaction.
CREATE FUNCTION tenure.enqueue_jobs(jobs json, again boolean, audit text, now_ms bigint,
  alone boolean)
RETURNS TABLE (id uuid, duplicate boolean, status text) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  batch tenure.new_job[];
  stored uuid[];
  added uuid[];
  refusal text;
BEGIN
  batch := ARRAY(
    SELECT ROW(j.ordinality, coalesce(j.id, tenure.new_id(moment)), j.type,
               coalesce(j.payload, '{}'), coalesce(j.queue, 'default'), coalesce(j.priority, 5),
               coalesce(j.org, 'default'), coalesce(j.delay_ms, 0), j.at_ms, j.key,
               coalesce(j.key_ttl_ms, 604800000), coalesce(j.max_attempts, 5),
               coalesce(j.timeout_ms, 300000), coalesce(j.category, 'default'), j.project,
               coalesce(j.actor_type, 'system'), coalesce(j.actor_id, 'tenure'), j.request_id,
               j.correlation_id, j.traceparent, j.parent, j.after, j.after_failed,
               j.remark)::tenure.new_job
      FROM ROWS FROM (json_to_recordset(jobs) AS (
             id uuid, type text, payload json, queue text, priority smallint, org text,
             delay_ms bigint, at_ms bigint, key text, key_ttl_ms bigint, max_attempts integer,
             timeout_ms bigint, category text, project text, actor_type text, actor_id text,
             request_id text, correlation_id text, traceparent text, parent uuid, after uuid[],
             after_failed text, remark json)) WITH ORDINALITY j);
  stored := ARRAY(SELECT b.id FROM unnest(batch) b
                   WHERE EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.id = b.id)
                      OR EXISTS (SELECT 1 FROM tenure.history h WHERE h.id = b.id));
  refusal := tenure.refuse_jobs(batch, moment);
  IF stored <> '{}' AND NOT again THEN
    refusal := format('job %s is stored already: `task.job(…)` makes a new one for each enqueue',
                      tenure.ulid(stored[1]));
  END IF;
  IF refusal IS NOT NULL THEN
    RETURN QUERY SELECT NULL::uuid, NULL::boolean, refusal;
    RETURN;
  END IF;
  INSERT INTO tenure.queues (name, created_at)
  SELECT DISTINCT b.queue, moment FROM unnest(batch) b
   WHERE NOT EXISTS (SELECT 1 FROM tenure.queues q WHERE q.name = b.queue) ORDER BY b.queue
  ON CONFLICT DO NOTHING;
  -- Keys before jobs: whoever inserts the key owns it. An expired key changes hands. A taken
  -- one was seen again, which is noted only where this call is the whole transaction: a caller's
  -- lock on it would last until their commit, and the finish of the key's owner wait for that.
  IF EXISTS (SELECT 1 FROM unnest(batch) b WHERE b.key IS NOT NULL) THEN
    INSERT INTO tenure.keys (org, key, job_id, first_seen_at, last_seen_at, ttl_ms)
    SELECT DISTINCT ON (b.org, b.key) b.org, b.key, b.id, moment, moment, b.key_ttl_ms
      FROM unnest(batch) b
     WHERE b.key IS NOT NULL AND b.id <> ALL (stored)
     ORDER BY b.org, b.key, b.place
    ON CONFLICT (org, key) DO NOTHING;
    UPDATE tenure.keys k SET
      job_id        = CASE WHEN k.expires_at <= moment THEN s.id ELSE k.job_id END,
      first_seen_at = CASE WHEN k.expires_at <= moment THEN moment ELSE k.first_seen_at END,
      status        = CASE WHEN k.expires_at <= moment THEN NULL ELSE k.status END,
      result_ref    = CASE WHEN k.expires_at <= moment THEN NULL ELSE k.result_ref END,
      error_ref     = CASE WHEN k.expires_at <= moment THEN NULL ELSE k.error_ref END,
      ttl_ms        = CASE WHEN k.expires_at <= moment THEN s.key_ttl_ms ELSE k.ttl_ms END,
      expires_at    = CASE WHEN k.expires_at <= moment THEN NULL ELSE k.expires_at END,
      last_seen_at  = moment
      FROM (SELECT t.org, t.key, b.id, b.key_ttl_ms
              FROM (SELECT DISTINCT ON (b.org, b.key) b.org, b.key, b.id, b.key_ttl_ms
                      FROM unnest(batch) b WHERE b.key IS NOT NULL AND b.id <> ALL (stored)
                     ORDER BY b.org, b.key, b.place) b
              JOIN tenure.keys t ON t.org = b.org AND t.key = b.key
             WHERE t.job_id <> b.id
               AND (t.expires_at <= moment OR alone)
             ORDER BY t.org, t.key FOR UPDATE OF t) s
     WHERE k.org = s.org AND k.key = s.key;
  END IF;
  -- What a job is to run after; the owner of a key stands for the job not stored because of it.
  IF EXISTS (SELECT 1 FROM unnest(batch) b WHERE b.after IS NOT NULL) THEN
    INSERT INTO tenure.edges (needs, job, met)
    SELECT DISTINCT coalesce(ok.job_id, n.needs), b.id,
           coalesce(ok.status = 'succeeded', false)  -- history may have forgotten it
           OR EXISTS (SELECT 1 FROM tenure.history h
                       WHERE h.id = coalesce(ok.job_id, n.needs) AND h.status = 'completed')
      FROM unnest(batch) b CROSS JOIN LATERAL unnest(b.after) n(needs)
      LEFT JOIN tenure.keys k ON k.org = b.org AND k.key = b.key
      LEFT JOIN unnest(batch) o ON o.id = n.needs
      LEFT JOIN tenure.keys ok ON ok.org = o.org AND ok.key = o.key
     WHERE (b.key IS NULL OR k.job_id = b.id) AND b.id <> ALL (stored)
    ON CONFLICT DO NOTHING;
  END IF;
  WITH fresh AS (
    INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, waits, max_attempts,
      timeout_ms, category, project, actor_type, actor_id, request_id, correlation_id, traceparent,
      key, parent, after_failed, scheduled_at, created_at, updated_at, payload)
    SELECT b.id, b.type, 'queued', b.queue, b.priority, b.org,
           greatest(coalesce(b.at_ms, moment + b.delay_ms), moment),
           CASE WHEN b.after IS NULL THEN 0
                ELSE (SELECT count(*) FROM tenure.edges e WHERE e.job = b.id AND NOT e.met) END,
           b.max_attempts, b.timeout_ms, b.category, b.project, b.actor_type, b.actor_id,
           b.request_id, b.correlation_id, b.traceparent, b.key, b.parent, b.after_failed,
           coalesce(b.at_ms, moment + b.delay_ms), moment, moment, b.payload
      FROM unnest(batch) b LEFT JOIN tenure.keys k ON k.org = b.org AND k.key = b.key
     WHERE (b.key IS NULL OR k.job_id = b.id) AND b.id <> ALL (stored)
     ORDER BY b.id
    ON CONFLICT (id) DO NOTHING
    RETURNING id)
  SELECT array_agg(f.id) INTO added FROM fresh f;
  IF again THEN
    -- The first try may have committed and not be on disk: what this one then says must be.
    PERFORM setval('tenure.flushes', 1);
    -- Or committed, and its job finished, while this one looked away.
    DELETE FROM tenure.jobs j
     WHERE j.id = ANY (added) AND EXISTS (SELECT 1 FROM tenure.history h WHERE h.id = j.id);
    added := ARRAY(SELECT j.id FROM tenure.jobs j WHERE j.id = ANY (added));
  ELSIF coalesce(cardinality(added), 0) < (
      SELECT count(*) FROM unnest(batch) b LEFT JOIN tenure.keys k ON k.org = b.org AND k.key = b.key
       WHERE b.key IS NULL OR k.job_id = b.id) THEN
    RAISE unique_violation USING MESSAGE = 'the same id twice, in one batch or in two at once';
  END IF;
  INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
    actor_id, request_id, correlation_id, data)
  SELECT moment, 'job.enqueued', b.id, b.type, 0, 0, b.org, b.project, b.actor_type, b.actor_id,
         b.request_id, b.correlation_id, b.remark
    FROM unnest(batch) b
   WHERE b.id = ANY (added) AND (audit = 'all' OR b.remark IS NOT NULL);
  RETURN QUERY
  SELECT coalesce(k.job_id, b.id), coalesce(k.job_id, b.id) <> b.id,
         CASE WHEN coalesce(k.job_id, b.id) = b.id THEN 'queued'
              ELSE coalesce((SELECT s.status FROM tenure.jobs s WHERE s.id = k.job_id),
                            (SELECT s.status FROM tenure.history s WHERE s.id = k.job_id),
                            CASE k.status WHEN 'dead' THEN 'dead_letter' WHEN 'failed' THEN 'failed'
                                          ELSE 'completed' END) END
    FROM unnest(batch) b LEFT JOIN tenure.keys k ON k.org = b.org AND k.key = b.key
   ORDER BY b.place;
END $$;

-- One job without a key or needs: its row and its event. None when history has it: a call that was
-- held up on its way may come after its own repetition is done. An error when it is live. How many
-- were stored.
CREATE FUNCTION tenure.enqueue_job(in_id uuid, in_type text, in_queue text, in_priority smallint,
  in_org text, at_ms bigint, delay_ms bigint, max_attempts integer, timeout_ms bigint,
  category text, project text, actor_type text, actor_id text, request_id text,
  correlation_id text, traceparent text, parent uuid, after_failed text, payload json, remark json,
  audit text, now_ms bigint) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_variable
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  due bigint := coalesce(at_ms, moment + delay_ms);
BEGIN
  INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, max_attempts,
    timeout_ms, category, project, actor_type, actor_id, request_id, correlation_id, traceparent,
    parent, after_failed, scheduled_at, created_at, updated_at, payload)
  SELECT in_id, in_type, 'queued', in_queue, in_priority, in_org, greatest(due, moment),
         max_attempts, timeout_ms, category, project, actor_type, actor_id, request_id,
         correlation_id, traceparent, parent, after_failed, due, moment, moment, payload
   WHERE NOT EXISTS (SELECT 1 FROM tenure.history h WHERE h.id = in_id);
  IF NOT FOUND THEN
    RETURN 0;
  END IF;
  IF audit = 'all' OR remark IS NOT NULL THEN
    INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
      actor_id, request_id, correlation_id, data)
    VALUES (moment, 'job.enqueued', in_id, in_type, 0, 0, in_org, project, actor_type, actor_id,
            request_id, correlation_id, remark);
  END IF;
  RETURN 1;
END $$;

-- The same with its hint, in two transactions. The first waits for no disk: the hint is out at once,
-- and the lock of the whole server that NOTIFY takes at commit is held for a moment. The second
-- writes next to nothing and waits until the log is on disk up to there, so the caller hears of
-- nothing that a crash could undo; nor does a worker, whose claim stands behind it in the log.
CREATE PROCEDURE tenure.enqueue_job_and_hint(in_id uuid, in_type text, in_queue text,
  in_priority smallint, in_org text, at_ms bigint, delay_ms bigint, max_attempts integer,
  timeout_ms bigint, category text, project text, actor_type text, actor_id text, request_id text,
  correlation_id text, traceparent text, parent uuid, after_failed text, payload json, remark json,
  audit text, now_ms bigint, channel text, INOUT stored integer) LANGUAGE plpgsql AS $$
BEGIN
  -- A setval() here as well: what is in its way shall stop the first transaction, not the second.
  PERFORM set_config('synchronous_commit', 'off', true), setval('tenure.flushes', 1),
    pg_notify(channel, in_queue);
  stored := tenure.enqueue_job(in_id, in_type, in_queue, in_priority, in_org, at_ms, delay_ms,
    max_attempts, timeout_ms, category, project, actor_type, actor_id, request_id, correlation_id,
    traceparent, parent, after_failed, payload, remark, audit, now_ms);
  COMMIT;
  PERFORM setval('tenure.flushes', 1);
END $$;

-- For anybody who speaks SQL: SELECT * FROM tenure.enqueue('[{"type": "send_email",
-- "payload": {"to": "a@b.c"}}]'). Everything but the type has a default.
CREATE FUNCTION tenure.enqueue(jobs jsonb)
RETURNS TABLE (id uuid, duplicate boolean, status text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  receipt record;
BEGIN
  FOR receipt IN SELECT * FROM tenure.enqueue_jobs(jobs::text::json, false, 'all', NULL, false) LOOP
    IF receipt.id IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = 'TN001', MESSAGE = receipt.status;
    END IF;
    RETURN QUERY SELECT receipt.id, receipt.duplicate, receipt.status;
  END LOOP;
END $$;

-- Which database this is: tells a caller's connection to another one that has our tables too.
CREATE FUNCTION tenure.home() RETURNS text LANGUAGE sql STABLE AS $$
  SELECT current_database() || ' ' || extract(epoch FROM m.applied_at)
    FROM tenure.migrations m WHERE m.version = 1
$$;

-- -- claim ---------------------------------------------------------------------------------------

-- One (queue, priority, org) with queued rows, and from where on to look at them.
CREATE TYPE tenure.lane AS (
  priority smallint, org text, since_ready bigint, since_id uuid, first_ready bigint
);

-- The lanes of a queue in order, each with its first row's ready_at; one or two steps of
-- jobs_claim a lane, whatever lies in the queue. With `due_only` none that has nothing due.
--
-- `known` is what a worker remembers of the lanes it has seen: {"lanes": [[priority, org, ready_at,
-- id], …]}, sorted. Of those only rows after the remembered place are looked at: before it
-- everything was taken, and while a long transaction anywhere in this database keeps vacuum from
-- removing what was taken, walking over it would cost more and more. The place trails the clock by
-- two seconds, because a job enqueued in somebody's transaction appears behind what has been
-- claimed meanwhile; what appears later still, a worker finds when it asks without `known`, which
-- it does at least every few seconds. No guarantee rests on the place.
--
-- A walk that stops at its bound ends with a row without first_ready: go on from there.
-- Its callers force its plans.
CREATE FUNCTION tenure.lanes(in_queue text, known jsonb, due_only boolean, moment bigint)
RETURNS tenure.lane[] LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
  none CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
  remembered CONSTANT jsonb := coalesce(known -> 'lanes', '[]');
  many CONSTANT integer := jsonb_array_length(remembered);
  n integer := 0;
  next_priority smallint;
  next_org text COLLATE "C";  -- of the remembered lane we come to next; NULL when there is none
  next_ready bigint;
  at_priority smallint := coalesce((known ->> 'from_priority')::smallint, 0);
  at_org text COLLATE "C" := coalesce(known ->> 'from_org', '');
  lane tenure.lane;
  seen tenure.lane[] := '{}';
BEGIN
  FOR look IN 1 .. 4096 LOOP
    WHILE next_org IS NULL AND n < many LOOP
      next_priority := (remembered -> n ->> 0)::smallint;
      next_org := remembered -> n ->> 1;
      IF (next_priority, next_org) <= (at_priority, at_org) THEN
        next_org := NULL;
        n := n + 1;
      END IF;
    END LOOP;
    IF next_org IS NULL THEN
      SELECT j.priority, j.org, j.ready_at INTO lane.priority, lane.org, lane.first_ready
        FROM tenure.jobs j
       WHERE j.status = 'queued' AND j.waits = 0 AND j.queue = in_queue
         AND (j.priority, j.org) > (at_priority, at_org)
       ORDER BY j.priority, j.org, j.ready_at LIMIT 1;
    ELSE
      SELECT j.priority, j.org, j.ready_at INTO lane.priority, lane.org, lane.first_ready
        FROM tenure.jobs j
       WHERE j.status = 'queued' AND j.waits = 0 AND j.queue = in_queue
         AND (j.priority, j.org) > (at_priority, at_org)
         AND (j.priority, j.org) < (next_priority, next_org)
       ORDER BY j.priority, j.org, j.ready_at LIMIT 1;
    END IF;
    IF FOUND THEN  -- one that is not remembered
      lane.since_ready := -1;
      lane.since_id := none;
    ELSIF next_org IS NOT NULL THEN
      next_ready := (remembered -> n ->> 2)::bigint;
      lane.priority := next_priority;
      lane.org := next_org;
      lane.since_ready := least(next_ready, moment - 2000);
      lane.since_id := CASE WHEN lane.since_ready = next_ready
                            THEN (remembered -> n ->> 3)::uuid ELSE none END;
      SELECT j.ready_at INTO lane.first_ready FROM tenure.jobs j
       WHERE j.status = 'queued' AND j.waits = 0 AND j.queue = in_queue
         AND j.priority = lane.priority AND j.org = lane.org
         AND (j.ready_at, j.id) > (lane.since_ready, lane.since_id)
       ORDER BY j.ready_at, j.id LIMIT 1;
      next_org := NULL;
      n := n + 1;
    ELSE
      RETURN seen;
    END IF;
    at_priority := lane.priority;
    at_org := lane.org;
    IF lane.first_ready <= moment OR (lane.first_ready IS NOT NULL AND NOT due_only) THEN
      seen := seen || lane;
    END IF;
  END LOOP;
  lane.first_ready := NULL;
  RETURN seen || lane;
END $$;

-- Lanes with due rows, looked at from their beginning: what a claim with a memory passes over.
CREATE FUNCTION tenure.due_lanes(in_queue text, now_ms bigint) RETURNS SETOF tenure.lane
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  SELECT l.* FROM unnest(tenure.lanes(in_queue, '{}', true, coalesce(now_ms, tenure.clock()))) l
   WHERE l.first_ready IS NOT NULL;
END $$;

-- Grant leases: up to `mosts` of each queue and `total` in all; due, not paused, by priority,
-- then orgs in turn, then due time, then id. `memory` holds for each queue what the worker
-- remembers: the lanes as above, "turns" (priority -> org served last), "rewind" (when the
-- queue's own differs, a job has gone back to an old place: the lanes are forgotten).
--
-- Granted jobs come back with their lease_no. Besides: rows with lease_no 0 are of types not in
-- `types`, due `later_ms` later now; one with lease_no -1 a queue says where it stands: ready_at
-- is the time of this claim, attempts 1 when everything due was granted, type the rewind, and
-- (priority, org) from where on to look next time when the walk over its lanes was cut.
-- A claim that finds nothing takes no lock and writes nothing.
CREATE FUNCTION tenure.claim(by_worker integer, queues text[], mosts integer[], total integer,
  memory jsonb, types text[], later_ms bigint, audit text, now_ms bigint)
RETURNS TABLE (id uuid, lease_no integer, type text, payload json, attempts integer,
  max_attempts integer, crashes integer, timeout_ms bigint, queue text, priority tenure.priority,
  category text, org text, project text, actor_type text, actor_id text, request_id text,
  correlation_id text, traceparent text, key text, parent uuid, scheduled_at bigint,
  created_at bigint, ready_at bigint) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  picked uuid[] := '{}';
  got uuid[];
  granted integer;
  room integer;
  is_paused boolean;
  rewind bigint;
  known jsonb;
  due tenure.lane[];
  cut tenure.lane;
BEGIN
  FOR n IN 1 .. cardinality(queues) LOOP
    room := least(mosts[n], total - cardinality(picked));
    CONTINUE WHEN room <= 0;
    known := coalesce(memory -> queues[n], '{}');
    SELECT q.paused_at IS NOT NULL, q.rewind_no INTO is_paused, rewind
      FROM tenure.queues q WHERE q.name = queues[n];
    CONTINUE WHEN is_paused;
    rewind := coalesce(rewind, 0);
    IF rewind <> coalesce((known ->> 'rewind')::bigint, 0) THEN
      known := jsonb_build_object('turns', known -> 'turns');
    END IF;
    due := tenure.lanes(queues[n], known, true, moment);
    cut := NULL;
    IF cardinality(due) > 0 AND due[cardinality(due)].first_ready IS NULL THEN
      cut := due[cardinality(due)];
      due := due[:cardinality(due) - 1];
    END IF;
    IF cardinality(due) > 0 THEN
      IF picked = '{}' THEN
        -- Nobody may declare this worker dead between here and the commit; it may renew.
        PERFORM 1 FROM tenure.workers w WHERE w.no = by_worker AND w.dead_at IS NULL FOR KEY SHARE;
        IF NOT FOUND THEN
          RETURN;
        END IF;
      END IF;
      got := tenure.pick(queues[n], due, coalesce(known -> 'turns', '{}'), room, moment);
      picked := picked || got;
      room := room - cardinality(got);
    END IF;
    lease_no := -1;
    type := rewind;
    attempts := (room > 0)::integer;
    queue := queues[n];
    priority := cut.priority;
    org := cut.org;
    ready_at := moment;
    RETURN NEXT;
  END LOOP;
  IF picked = '{}' THEN
    RETURN;
  END IF;
  RETURN QUERY
  WITH granted AS (
    UPDATE tenure.jobs j
       SET status = 'in_progress', lease_no = j.lease_no + 1, worker = by_worker,
           attempts = j.attempts + 1, started_at = moment, updated_at = moment
     WHERE j.id = ANY (picked) AND (types IS NULL OR j.type = ANY (types))
    RETURNING j.id, j.lease_no, j.type, j.payload, j.attempts, j.max_attempts, j.crashes,
      j.timeout_ms, j.queue, j.priority, j.category, j.org, j.project, j.actor_type, j.actor_id,
      j.request_id, j.correlation_id, j.traceparent, j.key, j.parent, j.scheduled_at,
      j.created_at, j.ready_at
  ), noted AS (
    INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
      actor_id, request_id, correlation_id, worker)
    SELECT moment, 'job.started', g.id, g.type, g.attempts, g.lease_no, g.org, g.project,
           g.actor_type, g.actor_id, g.request_id, g.correlation_id, by_worker
      FROM granted g WHERE audit = 'all'
  )
  SELECT * FROM granted g;
  GET DIAGNOSTICS granted = ROW_COUNT;
  IF granted < cardinality(picked) THEN
    -- Types this worker does not know: out of the way for a while, so that they neither block
    -- the lane's head nor are walked again and again.
    RETURN QUERY
    UPDATE tenure.jobs j SET ready_at = moment + later_ms
     WHERE j.id = ANY (picked) AND j.status = 'queued'
    RETURNING j.id, 0, j.type, j.payload, j.attempts, j.max_attempts, j.crashes, j.timeout_ms,
      j.queue, j.priority, j.category, j.org, j.project, j.actor_type, j.actor_id, j.request_id,
      j.correlation_id, j.traceparent, j.key, j.parent, j.scheduled_at, j.created_at, j.ready_at;
  END IF;
END $$;

-- Lock due rows of a queue: lane by lane in order of priority; among the orgs of one priority
-- equal shares, starting after the one served last, and then what some leave to the others. Rows
-- another claim is just taking are passed over, never waited for.
CREATE FUNCTION tenure.pick(in_queue text, due tenure.lane[], turns jsonb, most integer,
  moment bigint) RETURNS uuid[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  picked uuid[] := '{}';
  tier smallint;
  hungry tenure.lane[];
  again tenure.lane[];
  lane tenure.lane;
  share integer;
  got integer;
  ids uuid[];
BEGIN
  IF cardinality(due) = 1 THEN  -- mostly
    lane := due[1];
    RETURN ARRAY(
      SELECT j.id FROM tenure.jobs j
       WHERE j.status = 'queued' AND j.waits = 0 AND j.queue = in_queue
         AND j.priority = lane.priority AND j.org = lane.org AND j.ready_at <= moment
         AND (j.ready_at, j.id) > (lane.since_ready, lane.since_id)
       ORDER BY j.ready_at, j.id LIMIT most FOR UPDATE SKIP LOCKED);
  END IF;
  FOR tier IN SELECT DISTINCT l.priority FROM unnest(due) l ORDER BY 1 LOOP
    hungry := ARRAY(
      SELECT l FROM unnest(due) l WHERE l.priority = tier
       ORDER BY l.org COLLATE "C" <= coalesce(turns ->> tier::text, '') COLLATE "C",
                l.org COLLATE "C");
    WHILE cardinality(hungry) > 0 AND cardinality(picked) < most LOOP
      share := greatest(1, (most - cardinality(picked)) / cardinality(hungry));
      again := '{}';
      FOREACH lane IN ARRAY hungry LOOP
        share := least(share, most - cardinality(picked));
        EXIT WHEN share = 0;
        SELECT array_agg(p.id), count(*), max(p.ready_at) INTO ids, got, lane.since_ready
          FROM (SELECT j.id, j.ready_at FROM tenure.jobs j
                 WHERE j.status = 'queued' AND j.waits = 0 AND j.queue = in_queue
                   AND j.priority = lane.priority AND j.org = lane.org AND j.ready_at <= moment
                   AND (j.ready_at, j.id) > (lane.since_ready, lane.since_id)
                 ORDER BY j.ready_at, j.id LIMIT share FOR UPDATE SKIP LOCKED) p;
        IF got = share THEN
          lane.since_id := ids[got];
          again := again || lane;
        END IF;
        picked := picked || ids;
      END LOOP;
      hungry := again;
    END LOOP;
  END LOOP;
  RETURN picked;
END $$;

-- The soonest first row of any lane, in milliseconds from now; `memory` as for the claim.
CREATE FUNCTION tenure.next_due(queues text[], memory jsonb, now_ms bigint) RETURNS bigint
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  soonest bigint;
BEGIN
  FOR n IN 1 .. cardinality(queues) LOOP
    CONTINUE WHEN EXISTS (
      SELECT 1 FROM tenure.queues q WHERE q.name = queues[n] AND q.paused_at IS NOT NULL);
    soonest := least(soonest, (
      SELECT min(l.first_ready)
        FROM unnest(tenure.lanes(queues[n], memory -> queues[n], false, moment)) l));
  END LOOP;
  RETURN CASE WHEN soonest IS NOT NULL THEN greatest(0, soonest - moment) END;
END $$;

-- -- finish --------------------------------------------------------------------------------------

-- A run that has passed the fence, and how it ended.
CREATE TYPE tenure.ended AS (
  id uuid, lease_no integer, duration_ms bigint, outcome text, status text, event text,
  result json, error text, error_code text, error_place text, delay_ms bigint, refund integer,
  crash boolean, key text, org text, queue text, type text
);

-- Runs of one (queue, type, outcome) whose durations fall into one bucket of the histogram.
CREATE TYPE tenure.tally AS (
  queue text, type text, outcome text, bucket integer, jobs bigint, lasted bigint
);

-- Upper bounds in ms: 5 10 25 50 100 500 1000 5000 10000 30000 60000 300000, then all above.
CREATE FUNCTION tenure.bucket(lasted bigint) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN lasted <= 5 THEN 0 WHEN lasted <= 10 THEN 1 WHEN lasted <= 25 THEN 2
              WHEN lasted <= 50 THEN 3 WHEN lasted <= 100 THEN 4 WHEN lasted <= 500 THEN 5
              WHEN lasted <= 1000 THEN 6 WHEN lasted <= 5000 THEN 7 WHEN lasted <= 10000 THEN 8
              WHEN lasted <= 30000 THEN 9 WHEN lasted <= 60000 THEN 10 WHEN lasted <= 300000 THEN 11
              ELSE 12 END
$$;

-- The common batch: runs that completed, without follow-ups. What still holds its lease leaves
-- the hot table, its history and event are written by the same statement. A job that history has
-- already (an enqueue that came late had stored it once more) fails the batch: tenure.finish
-- takes such a one. Returns what was NOT accepted: mostly nothing. `coalesce` keeps the look-up on
-- the primary key: by jobs_held each row would cost a walk over everything the worker holds.
CREATE FUNCTION tenure.finish_completed(by_worker integer, ids uuid[], lease_nos integer[],
  durations bigint[], results json, audit text, now_ms bigint)
RETURNS TABLE (id uuid, lease_no integer) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  done record;
BEGIN
  WITH gone AS (
    DELETE FROM tenure.jobs j
     USING ROWS FROM (unnest(ids, lease_nos, durations), json_array_elements(results))
             AS r(id, lease_no, duration_ms, result)
     WHERE j.id = r.id AND j.lease_no = r.lease_no AND coalesce(j.worker, 0) = by_worker
    RETURNING j.id, j.type, j.queue, j.priority, j.org, j.lease_no, j.attempts, j.max_attempts,
      j.crashes, j.timeout_ms, j.category, j.project, j.actor_type, j.actor_id, j.request_id,
      j.correlation_id, j.traceparent, j.key, j.parent, j.scheduled_at, j.created_at, j.started_at,
      j.payload, CASE WHEN json_typeof(r.result) <> 'null' THEN r.result END AS result, j.error,
      j.error_code, j.progress, r.duration_ms
  ), kept AS (
    INSERT INTO tenure.history (id, type, status, queue, priority, org, lease_no, worker, attempts,
      max_attempts, crashes, timeout_ms, category, project, actor_type, actor_id, request_id,
      correlation_id, traceparent, key, parent, scheduled_at, created_at, started_at,
      completed_at, payload, result, error, error_code, progress)
    SELECT g.id, g.type, 'completed', g.queue, g.priority, g.org, g.lease_no, by_worker, g.attempts,
      g.max_attempts, g.crashes, g.timeout_ms, g.category, g.project, g.actor_type, g.actor_id,
      g.request_id, g.correlation_id, g.traceparent, g.key, g.parent, g.scheduled_at, g.created_at,
      g.started_at, moment, g.payload, g.result, g.error, g.error_code, g.progress
      FROM gone g
  ), noted AS (
    INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
      actor_id, request_id, correlation_id, worker)
    SELECT moment, 'job.succeeded', g.id, g.type, g.attempts, g.lease_no, g.org, g.project,
      g.actor_type, g.actor_id, g.request_id, g.correlation_id, by_worker
      FROM gone g WHERE audit = 'all'
  ), counted AS (
    SELECT g.queue, g.type, tenure.bucket(g.duration_ms) AS bucket, count(*) AS jobs,
           sum(g.duration_ms)::bigint AS lasted
      FROM gone g GROUP BY 1, 2, 3
  )
  SELECT ARRAY(SELECT ROW(c.queue, c.type, 'completed', c.bucket, c.jobs, c.lasted)::tenure.tally
                 FROM counted c) AS tallies,
         array_agg(g.id) AS ids, count(*) AS jobs, bool_or(g.key IS NOT NULL) AS keyed
    INTO done FROM gone g;
  PERFORM tenure.roll_up(by_worker, moment, done.tallies);
  IF done.keyed THEN
    UPDATE tenure.keys k
       SET status = 'succeeded', expires_at = moment + k.ttl_ms, result_ref = h.id, error_ref = NULL
      FROM tenure.history h
     WHERE h.id = ANY (done.ids) AND h.key IS NOT NULL
       AND k.org = h.org AND k.key = h.key AND k.job_id = h.id;
  END IF;
  IF EXISTS (SELECT 1 FROM tenure.steps) THEN
    DELETE FROM tenure.steps s WHERE s.job_id = ANY (done.ids);
  END IF;
  IF EXISTS (SELECT 1 FROM tenure.edges e WHERE NOT e.met) THEN
    PERFORM tenure.release(done.ids, moment);
  END IF;
  IF done.jobs IS DISTINCT FROM cardinality(ids) THEN
    RETURN QUERY SELECT r.id, r.lease_no FROM unnest(ids, lease_nos) r(id, lease_no)
     WHERE NOT EXISTS (SELECT 1 FROM tenure.history h
                        WHERE h.id = ANY (done.ids) AND h.id = r.id AND h.lease_no = r.lease_no);
  END IF;
END $$;

-- Any batch. Rows are [id, lease_no, duration_ms, outcome, status, event, result, error,
-- error_code, error_place, delay_ms, refund, crash limit]; `children` are the follow-ups of
-- completed runs, [{"id": …, "jobs": […]}, …]. Returns what was not accepted. A run whose
-- follow-ups cannot be stored has failed, its neighbours have not; when `strict`, that is the
-- caller's error.
CREATE FUNCTION tenure.finish(by_worker integer, rows json, children json, strict boolean,
  audit text, now_ms bigint)
RETURNS TABLE (id uuid, lease_no integer) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  runs tenure.ended[] := tenure.pass_fence(by_worker, rows);
  family record;
  refusal text;
BEGIN
  FOR family IN
    SELECT c.id, c.jobs FROM json_to_recordset(children) AS c(id uuid, jobs json)
     WHERE EXISTS (SELECT 1 FROM unnest(runs) r WHERE r.id = c.id AND r.status = 'completed')
  LOOP
    SELECT e.status INTO refusal
      FROM tenure.enqueue_jobs(family.jobs, false, audit, moment, NOT strict) e
     WHERE e.id IS NULL;
    CONTINUE WHEN NOT FOUND;
    IF strict THEN
      RAISE EXCEPTION USING ERRCODE = 'TN001', MESSAGE = refusal;
    END IF;
    runs := ARRAY(
      SELECT CASE WHEN r.id <> family.id THEN r
                  ELSE ROW(r.id, r.lease_no, r.duration_ms, 'failed', 'failed', 'job.failed',
                           NULL, 'its follow-up jobs were refused: ' || refusal, 'BAD_CHILDREN',
                           NULL, NULL, 0, false, r.key, r.org, r.queue, r.type)::tenure.ended END
        FROM unnest(runs) r);
  END LOOP;
  -- A handler's own transaction counts elsewhere: until its commit the worker's row is not free.
  PERFORM tenure.end_runs(by_worker, runs, audit, moment,
                          CASE WHEN strict THEN -1 - pg_backend_pid() % 64 ELSE by_worker END);
  RETURN QUERY
  SELECT (e.value ->> 0)::uuid, (e.value ->> 1)::integer FROM json_array_elements(rows) e
  EXCEPT SELECT r.id, r.lease_no FROM unnest(runs) r;
END $$;

-- THE FENCE. Only rows whose job still carries this lease under this worker come back, and they
-- are locked: nothing can change between this check and the writes that follow. A job asked to
-- be cancelled does not go back to the queue: it is cancelled instead. Of the same run sent twice
-- in one batch the first word counts.
CREATE FUNCTION tenure.pass_fence(by_worker integer, rows json) RETURNS tenure.ended[]
LANGUAGE sql AS $$
  SELECT ARRAY(
    SELECT ROW(j.id, j.lease_no, (r.value ->> 2)::bigint, r.value ->> 3,
               CASE WHEN j.crashes + 1 >= (r.value ->> 12)::integer THEN 'dead_letter'
                    WHEN j.cancel_at IS NOT NULL AND r.value ->> 4 = 'queued' THEN 'cancelled'
                    ELSE r.value ->> 4 END,
               CASE WHEN j.crashes + 1 >= (r.value ->> 12)::integer THEN 'job.deadlettered'
                    WHEN j.cancel_at IS NOT NULL AND r.value ->> 4 = 'queued' THEN 'job.cancelled'
                    ELSE r.value ->> 5 END,
               CASE WHEN json_typeof(r.value -> 6) <> 'null' THEN r.value -> 6 END, r.value ->> 7,
               CASE WHEN j.crashes + 1 >= (r.value ->> 12)::integer THEN 'poison'
                    ELSE r.value ->> 8 END,
               r.value ->> 9, (r.value ->> 10)::bigint, coalesce((r.value ->> 11)::integer, 0),
               r.value ->> 12 IS NOT NULL, j.key, j.org, j.queue, j.type)::tenure.ended
      FROM (SELECT DISTINCT ON ((e.value ->> 0)::uuid, e.value ->> 1)
                   (e.value ->> 0)::uuid AS id, (e.value ->> 1)::integer AS lease_no, e.value
              FROM json_array_elements(rows) WITH ORDINALITY e
             ORDER BY (e.value ->> 0)::uuid, e.value ->> 1, e.ordinality) r
      JOIN tenure.jobs j ON j.id = r.id
     WHERE j.lease_no = r.lease_no AND coalesce(j.worker, 0) = by_worker
     ORDER BY j.id
       FOR UPDATE OF j)
$$;

-- What has passed the fence: write its consequences.
CREATE FUNCTION tenure.end_runs(by_worker integer, runs tenure.ended[], audit text, moment bigint,
  counted_by integer) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
    actor_id, request_id, correlation_id, worker, data)
  SELECT moment, r.event, j.id, j.type, j.attempts, j.lease_no, j.org, j.project, j.actor_type,
         j.actor_id, j.request_id, j.correlation_id, by_worker,
         CASE WHEN r.error IS NOT NULL OR r.delay_ms IS NOT NULL THEN
           json_build_object('error', r.error, 'code', r.error_code, 'delay_ms', r.delay_ms) END
    FROM unnest(runs) r JOIN tenure.jobs j ON j.id = r.id
   WHERE audit = 'all' OR r.outcome <> 'completed';
  PERFORM tenure.leave(by_worker, runs, moment, counted_by);
  -- Everything else stays hot: queued again (retry, snooze, release, crash) or dead.
  -- A release keeps its place in the queue; a retry and a snooze get a new ready_at.
  -- A rescue is nobody's finish: the late one of the worker it was taken from stays refused.
  UPDATE tenure.jobs j
     SET status = r.status,
         lease_no = j.lease_no + 1,
         finish_no = CASE WHEN r.outcome = 'rescued' THEN j.finish_no ELSE j.lease_no END,
         worker = NULL,
         attempts = j.attempts - r.refund,
         crashes = j.crashes + r.crash::integer,
         ready_at = CASE WHEN r.delay_ms IS NULL THEN j.ready_at ELSE moment + r.delay_ms END,
         scheduled_at = CASE WHEN r.delay_ms IS NULL THEN j.scheduled_at ELSE moment + r.delay_ms END,
         completed_at = CASE WHEN r.status IN ('failed', 'dead_letter') THEN moment END,
         error = coalesce(r.error, j.error),
         error_code = coalesce(r.error_code, j.error_code),
         error_place = coalesce(r.error_place, j.error_place),
         cancel_at = NULL, cancel_reason = NULL,
         updated_at = moment
    FROM unnest(runs) r
   WHERE j.id = r.id AND r.status NOT IN ('completed', 'cancelled');
  -- Back at an old place, behind where claims have got to: they must look there again.
  IF EXISTS (SELECT 1 FROM unnest(runs) r WHERE r.status = 'queued' AND r.delay_ms IS NULL) THEN
    PERFORM 1 FROM tenure.queues q
      WHERE q.name IN (SELECT r.queue FROM unnest(runs) r
                        WHERE r.status = 'queued' AND r.delay_ms IS NULL)
      ORDER BY q.name FOR UPDATE;
    UPDATE tenure.queues q SET rewind_no = q.rewind_no + 1
     WHERE q.name IN (SELECT r.queue FROM unnest(runs) r
                       WHERE r.status = 'queued' AND r.delay_ms IS NULL);
  END IF;
  PERFORM tenure.settle(runs, moment);
END $$;

-- completed, cancelled: out of the hot table, into history, under the number they finished with.
-- A key's status is written once, when its job ends; its time to live starts then.
CREATE FUNCTION tenure.leave(by_worker integer, runs tenure.ended[], moment bigint,
  counted_by integer) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  WITH gone AS (
    DELETE FROM tenure.jobs j USING unnest(runs) r
     WHERE j.id = r.id AND r.status IN ('completed', 'cancelled')
    RETURNING j.*, r.status AS ended_as, r.outcome, r.result AS returned, r.error AS last_error,
              r.error_code AS last_code)
  INSERT INTO tenure.history (id, type, status, queue, priority, org, lease_no, worker, attempts,
    max_attempts, crashes, timeout_ms, category, project, actor_type, actor_id, request_id,
    correlation_id, traceparent, key, parent, scheduled_at, created_at, started_at,
    completed_at, payload, result, error, error_code, progress)
  SELECT g.id, g.type, g.ended_as, g.queue, g.priority, g.org, g.lease_no,
    CASE WHEN g.outcome <> 'rescued' THEN by_worker END, g.attempts,
    g.max_attempts, g.crashes, g.timeout_ms, g.category, g.project, g.actor_type, g.actor_id,
    g.request_id, g.correlation_id, g.traceparent, g.key, g.parent, g.scheduled_at, g.created_at,
    g.started_at, moment, g.payload, g.returned, coalesce(g.last_error, g.error),
    coalesce(g.last_code, g.error_code), g.progress
    FROM gone g
  ON CONFLICT (id) DO NOTHING;  -- an enqueue that came late had stored it once more
  UPDATE tenure.keys k
     SET status = CASE r.status WHEN 'completed' THEN 'succeeded' WHEN 'dead_letter' THEN 'dead'
                                ELSE 'failed' END,
         expires_at = moment + k.ttl_ms,
         result_ref = CASE WHEN r.status = 'completed' THEN r.id END,
         error_ref = CASE WHEN r.status <> 'completed' THEN r.id END
    FROM unnest(runs) r
   WHERE r.key IS NOT NULL AND r.status <> 'queued'
     AND k.org = r.org AND k.key = r.key AND k.job_id = r.id;
  DELETE FROM tenure.steps s USING unnest(runs) r
   WHERE s.job_id = r.id AND r.status IN ('completed', 'cancelled');
  PERFORM tenure.roll_up(counted_by, moment, ARRAY(
    SELECT ROW(r.queue, r.type, r.outcome, tenure.bucket(r.duration_ms), count(*),
               sum(r.duration_ms)::bigint)::tenure.tally
      FROM unnest(runs) r GROUP BY r.queue, r.type, r.outcome, tenure.bucket(r.duration_ms)));
END $$;

CREATE FUNCTION tenure.add_up(a bigint[], b bigint[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT ARRAY(SELECT x.a + x.b FROM unnest(a, b) WITH ORDINALITY x(a, b, n) ORDER BY x.n)
$$;

-- One upsert per (queue, type, outcome) of a batch, however many jobs it holds.
CREATE FUNCTION tenure.roll_up(by_worker integer, moment bigint, tallies tenure.tally[])
RETURNS void LANGUAGE sql AS $$
  INSERT INTO tenure.rollups AS t (grain, start, worker, queue, type, outcome, count, duration_ms,
                                   buckets)
  SELECT 'minute', moment / 60000 * 60000, by_worker, r.queue, r.type, r.outcome,
         sum(r.jobs)::bigint, sum(r.lasted)::bigint,
         ARRAY(SELECT coalesce(sum(b.jobs), 0)::bigint
                 FROM generate_series(0, 12) n LEFT JOIN unnest(tallies) b
                   ON b.bucket = n AND b.queue = r.queue AND b.type = r.type
                  AND b.outcome = r.outcome
                GROUP BY n ORDER BY n)
    FROM unnest(tallies) r
   GROUP BY r.queue, r.type, r.outcome ORDER BY r.queue, r.type, r.outcome
  ON CONFLICT (grain, start, worker, queue, type, outcome) DO UPDATE
     SET count = t.count + excluded.count, duration_ms = t.duration_ms + excluded.duration_ms,
         buckets = tenure.add_up(t.buckets, excluded.buckets)
$$;

-- -- whoever waited ------------------------------------------------------------------------------

-- Jobs that waited for these completed ones have one need less each; without any left they are
-- runnable now. An edge is met once, by whoever gets to it first, so counting down is exact.
CREATE FUNCTION tenure.release(completed uuid[], moment bigint) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  waiting uuid[];
BEGIN
  WITH met AS (
    UPDATE tenure.edges e SET met = true
     WHERE e.needs = ANY (completed) AND NOT e.met RETURNING e.job)
  SELECT array_agg(m.job) INTO waiting FROM met m;
  RETURN tenure.count_down(waiting, moment);
END $$;

CREATE FUNCTION tenure.count_down(waiting uuid[], moment bigint) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF waiting IS NULL THEN
    RETURN 0;
  END IF;
  PERFORM 1 FROM tenure.jobs j WHERE j.id = ANY (waiting) ORDER BY j.id FOR UPDATE;
  UPDATE tenure.jobs j
     SET waits = j.waits - w.met, updated_at = moment,
         ready_at = CASE WHEN j.waits = w.met THEN greatest(j.ready_at, moment) ELSE j.ready_at END
    FROM (SELECT u.job, count(*)::integer AS met FROM unnest(waiting) u(job) GROUP BY u.job) w
   WHERE j.id = w.job;
  RETURN cardinality(waiting);
END $$;

-- Release what waited for the runs that completed; cancel what was to end with those that died,
-- and then what was to end with these.
CREATE FUNCTION tenure.settle(runs tenure.ended[], moment bigint) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  left_over tenure.ended[] := runs;
  doomed uuid[];
BEGIN
  WHILE EXISTS (SELECT 1 FROM tenure.edges e WHERE NOT e.met) LOOP
    PERFORM tenure.release(
      ARRAY(SELECT r.id FROM unnest(left_over) r WHERE r.status = 'completed'), moment);
    doomed := ARRAY(
      SELECT DISTINCT e.job FROM unnest(left_over) r
        JOIN tenure.edges e ON e.needs = r.id AND NOT e.met
        JOIN tenure.jobs j ON j.id = e.job
       WHERE r.status IN ('failed', 'dead_letter', 'cancelled')
         AND j.status = 'queued' AND j.after_failed = 'cancel');
    EXIT WHEN doomed = '{}';
    left_over := tenure.withdraw(doomed, ARRAY['queued'], 'job.cancelled',
      'a job it was to run after has failed', 'dependency_failed', 'system', 'tenure', moment);
  END LOOP;
END $$;

-- The janitor's walk over unmet edges, a bounded page after (job, needs): what a finish could not
-- see, because edge and finish committed at the same time. How many changed, and where it stands.
CREATE FUNCTION tenure.settle_dependants(after_job uuid, after_needs uuid, most integer, now_ms bigint)
RETURNS TABLE (changed integer, job uuid, needs uuid) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  page record;
  waiting uuid[];
  doomed uuid[];
BEGIN
  SELECT array_agg(e.job ORDER BY e.job, e.needs) AS jobs,
         array_agg(e.needs ORDER BY e.job, e.needs) AS needs INTO page
    FROM (SELECT e.job, e.needs FROM tenure.edges e
           WHERE NOT e.met AND (e.job, e.needs) > (after_job, after_needs)
           ORDER BY e.job, e.needs LIMIT most) e;
  IF page.jobs IS NULL THEN
    RETURN QUERY SELECT 0, NULL::uuid, NULL::uuid;
    RETURN;
  END IF;
  WITH met AS (
    UPDATE tenure.edges e SET met = true FROM unnest(page.jobs, page.needs) p(job, needs)
     WHERE e.needs = p.needs AND e.job = p.job AND NOT e.met
       AND EXISTS (SELECT 1 FROM tenure.history h
                    WHERE h.id = p.needs AND h.status = 'completed') RETURNING e.job)
  SELECT array_agg(m.job) INTO waiting FROM met m;
  PERFORM tenure.count_down(waiting, moment);
  doomed := ARRAY(
    SELECT DISTINCT p.job FROM unnest(page.jobs, page.needs) p(job, needs)
      JOIN tenure.jobs j ON j.id = p.job AND j.after_failed = 'cancel'
     WHERE NOT EXISTS (SELECT 1 FROM tenure.jobs n WHERE n.id = p.needs
                                               AND n.status IN ('queued', 'in_progress'))
       AND NOT EXISTS (SELECT 1 FROM tenure.history n
                        WHERE n.id = p.needs AND n.status = 'completed'));
  PERFORM tenure.settle(
    tenure.withdraw(doomed, ARRAY['queued'], 'job.cancelled',
      'a job it was to run after has failed', 'dependency_failed', 'system', 'tenure', moment),
    moment);
  RETURN QUERY SELECT coalesce(cardinality(waiting), 0) + cardinality(doomed),
    CASE WHEN cardinality(page.jobs) = most THEN page.jobs[most] END,
    CASE WHEN cardinality(page.jobs) = most THEN page.needs[most] END;
END $$;

-- -- what a running handler writes ---------------------------------------------------------------

-- Fenced under the lock on the job's row. A job that gets on is no poison: its crashes are
-- forgotten.
CREATE FUNCTION tenure.save_step(in_job uuid, in_lease_no integer, step text, returned json,
  now_ms bigint) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM 1 FROM tenure.jobs j
    WHERE j.id = in_job AND j.lease_no = in_lease_no AND j.worker IS NOT NULL FOR UPDATE;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  INSERT INTO tenure.steps (job_id, name, result, lease_no, at)
  VALUES (in_job, step, returned, in_lease_no, coalesce(now_ms, tenure.clock()))
  ON CONFLICT (job_id, name) DO UPDATE
     SET result = excluded.result, lease_no = excluded.lease_no, at = excluded.at;
  UPDATE tenure.jobs j SET crashes = 0 WHERE j.id = in_job AND j.crashes > 0;
  RETURN true;
END $$;

-- -- leases --------------------------------------------------------------------------------------

-- Declare a worker dead and put its jobs back, unless it has renewed since `seen_beat`, or it is
-- later than `not_after` by this server's clock: a stall proves nothing about the others. Jobs in
-- `started` (all, when NULL) are charged a crash; at `crash_limit` they are dead letters.
CREATE FUNCTION tenure.rescue(dead integer, seen_beat bigint, started uuid[], crash_limit integer,
  why text, not_after bigint, audit text, now_ms bigint)
RETURNS TABLE (requeued integer, poisoned integer) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  runs tenure.ended[];
BEGIN
  -- Somebody holds its row: a renewal or a claim under way, or a stranger. No proof of a death.
  PERFORM 1 FROM tenure.workers w WHERE w.no = dead FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  UPDATE tenure.workers w SET dead_at = moment, dead_reason = why
   WHERE w.no = dead AND w.beat = seen_beat AND w.dead_at IS NULL
     AND (not_after IS NULL OR tenure.clock() <= not_after);
  IF NOT FOUND THEN
    RETURN;
  END IF;
  runs := tenure.pass_fence(dead, (
    SELECT coalesce(json_agg(json_build_array(
             j.id, j.lease_no, 0, 'rescued', 'queued', 'job.rescued', NULL,
             CASE WHEN started IS NULL OR j.id = ANY (started) THEN why END,
             CASE WHEN started IS NULL OR j.id = ANY (started) THEN 'crashed' END,
             NULL, NULL, 0,
             CASE WHEN started IS NULL OR j.id = ANY (started) THEN crash_limit END)), '[]')
      FROM tenure.jobs j WHERE j.worker = dead));
  PERFORM tenure.end_runs(dead, runs, audit, moment, dead);
  RETURN QUERY
  SELECT count(*) FILTER (WHERE r.status <> 'dead_letter')::integer,
         count(*) FILTER (WHERE r.status = 'dead_letter')::integer FROM unnest(runs) r;
END $$;

-- Sign off, unless something is held. A claim of ours may be under way still, its client gone: it
-- has the row, so it is waited for, and then seen.
CREATE FUNCTION tenure.retire(leaving integer, now_ms bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM 1 FROM tenure.workers w WHERE w.no = leaving FOR UPDATE;
  UPDATE tenure.workers w
     SET dead_at = coalesce(now_ms, tenure.clock()), dead_reason = 'signed off'
   WHERE w.no = leaving AND w.dead_at IS NULL
     AND NOT EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.worker = w.no);
END $$;

-- -- operators -----------------------------------------------------------------------------------

-- Lock these jobs and say what they are: hot first, then history, because jobs move that way.
-- Another org's job is as absent as one that never was.
CREATE FUNCTION tenure.look_up(ids uuid[], in_org text)
RETURNS TABLE (id uuid, status text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  SELECT j.id, j.status::text FROM tenure.jobs j
   WHERE j.id = ANY (ids) AND (in_org IS NULL OR j.org = in_org) ORDER BY j.id FOR UPDATE;
  RETURN QUERY
  SELECT h.id, h.status::text FROM tenure.history h
   WHERE h.id = ANY (ids) AND (in_org IS NULL OR h.org = in_org);
END $$;

CREATE FUNCTION tenure.note(ids uuid[], what text, why text, by_type text, by_id text, moment bigint)
RETURNS void LANGUAGE sql AS $$
  INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
    actor_id, request_id, correlation_id, data)
  SELECT moment, what, j.id, j.type, j.attempts, j.lease_no, j.org, j.project, by_type, by_id,
         j.request_id, j.correlation_id,
         CASE WHEN why <> '' THEN json_build_object('reason', why) END
    FROM tenure.jobs j WHERE j.id = ANY (ids) ORDER BY j.id
$$;

-- Jobs that leave without having run to an end, through the same door as finished ones.
CREATE FUNCTION tenure.withdraw(ids uuid[], allowed text[], what text, why text, code text,
  by_type text, by_id text, moment bigint) RETURNS tenure.ended[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  runs tenure.ended[];
BEGIN
  runs := ARRAY(
    SELECT ROW(j.id, j.lease_no, 0, 'cancelled', 'cancelled', what, NULL, why, code, NULL, NULL, 0,
               false, j.key, j.org, j.queue, j.type)::tenure.ended
      FROM tenure.jobs j WHERE j.id = ANY (ids) AND j.status = ANY (allowed)
     ORDER BY j.id FOR UPDATE);
  IF cardinality(runs) > 0 THEN
    PERFORM tenure.note(ARRAY(SELECT r.id FROM unnest(runs) r), what, why, by_type, by_id, moment);
    PERFORM tenure.leave(0, runs, moment, 0);
  END IF;
  RETURN runs;
END $$;

-- queued -> cancelled at once; in_progress -> a request the handler will see.
CREATE FUNCTION tenure.cancel(ids uuid[], in_org text, why text, by_type text, by_id text,
  now_ms bigint)
RETURNS TABLE (id uuid, verdict text) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  seen record;
BEGIN
  SELECT array_agg(l.id) FILTER (WHERE l.status = 'queued') AS queued,
         array_agg(l.id) FILTER (WHERE l.status = 'in_progress') AS running,
         array_agg(l.id) AS ids, array_agg(l.status) AS statuses
    INTO seen FROM tenure.look_up(ids, in_org) l;
  IF seen.queued IS NOT NULL THEN
    PERFORM tenure.settle(tenure.withdraw(seen.queued, ARRAY['queued'], 'job.cancelled', why,
                                          'cancelled', by_type, by_id, moment), moment);
  END IF;
  IF seen.running IS NOT NULL THEN
    UPDATE tenure.jobs j SET cancel_at = moment, cancel_reason = why, updated_at = moment
     WHERE j.id = ANY (seen.running);
    PERFORM tenure.note(seen.running, 'job.cancel_requested', why, by_type, by_id, moment);
  END IF;
  RETURN QUERY
  SELECT s.id, CASE s.status WHEN 'queued' THEN 'done' WHEN 'in_progress' THEN 'requested'
                             ELSE s.status END
    FROM unnest(seen.ids, seen.statuses) s(id, status);
END $$;

-- failed, dead_letter -> queued under the same id, attempts and crashes 0; its key lives again
-- with it. One that had expired and was pruned is taken again, if nobody else has it by now.
CREATE FUNCTION tenure.replay(ids uuid[], in_org text, new_payload json, by_type text, by_id text,
  lost_key_ttl_ms bigint, now_ms bigint)
RETURNS TABLE (id uuid, verdict text) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  seen record;
BEGIN
  SELECT array_agg(l.id) FILTER (WHERE l.status IN ('failed', 'dead_letter')) AS dead,
         array_agg(l.id) AS ids, array_agg(l.status) AS statuses
    INTO seen FROM tenure.look_up(ids, in_org) l;
  IF seen.dead IS NOT NULL THEN
    PERFORM tenure.note(seen.dead, 'job.replayed',
                        CASE WHEN new_payload IS NULL THEN '' ELSE 'edited' END, by_type, by_id, moment);
    UPDATE tenure.jobs j
       SET status = 'queued', attempts = 0, crashes = 0, ready_at = moment, scheduled_at = moment,
           completed_at = NULL, started_at = NULL, progress = NULL,
           payload = coalesce(new_payload, j.payload), updated_at = moment
     WHERE j.id = ANY (seen.dead);
    UPDATE tenure.keys k SET status = NULL, expires_at = NULL, error_ref = NULL
      FROM tenure.jobs j
     WHERE j.id = ANY (seen.dead) AND k.org = j.org AND k.key = j.key AND k.job_id = j.id;
    INSERT INTO tenure.keys (org, key, job_id, first_seen_at, last_seen_at, ttl_ms)
    SELECT j.org, j.key, j.id, moment, moment, lost_key_ttl_ms FROM tenure.jobs j
     WHERE j.id = ANY (seen.dead) AND j.key IS NOT NULL ORDER BY j.org, j.key
    ON CONFLICT DO NOTHING;
    IF new_payload IS NOT NULL THEN
      DELETE FROM tenure.steps s WHERE s.job_id = ANY (seen.dead);
    END IF;
  END IF;
  RETURN QUERY
  SELECT s.id, CASE WHEN s.status IN ('failed', 'dead_letter') THEN 'done' ELSE s.status END
    FROM unnest(seen.ids, seen.statuses) s(id, status);
END $$;

-- failed, dead_letter -> cancelled.
CREATE FUNCTION tenure.discard(ids uuid[], in_org text, why text, by_type text, by_id text,
  now_ms bigint)
RETURNS TABLE (id uuid, verdict text) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  seen record;
BEGIN
  SELECT array_agg(l.id) FILTER (WHERE l.status IN ('failed', 'dead_letter')) AS dead,
         array_agg(l.id) AS ids, array_agg(l.status) AS statuses
    INTO seen FROM tenure.look_up(ids, in_org) l;
  IF seen.dead IS NOT NULL THEN
    PERFORM tenure.settle(tenure.withdraw(seen.dead, ARRAY['failed', 'dead_letter'],
      'job.discarded', why, 'discarded', by_type, by_id, moment), moment);
  END IF;
  RETURN QUERY
  SELECT s.id, CASE WHEN s.status IN ('failed', 'dead_letter') THEN 'done' ELSE s.status END
    FROM unnest(seen.ids, seen.statuses) s(id, status);
END $$;

-- -- partitions ----------------------------------------------------------------------------------
-- Owned by whoever migrates and run with that role's rights: a worker needs no DDL of its own.
-- They wait for a lock at most half a second, once: an upkeep that has to queue holds up everybody
-- behind it. What could not be done is left to the next pass.

-- The partitions of the days around `now_ms`; how many were made. Rows that have gone to the
-- partition for everything else meanwhile are moved.
CREATE FUNCTION tenure.add_partitions(now_ms bigint) RETURNS integer LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms'
SET timezone = 'UTC' AS $$
DECLARE
  first_day bigint := coalesce(now_ms, tenure.clock()) / 86400000;
  made integer := 0;
  name text;
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtext('tenure.add_partitions')) THEN
    RETURN 0;
  END IF;
  FOR day IN first_day - 1 .. first_day + 3 LOOP
    name := to_char(to_timestamp(day * 86400), 'YYYYMMDD');
    IF to_regclass('tenure.history_' || name) IS NULL THEN
      EXECUTE format('CREATE TABLE tenure.%I (LIKE tenure.history INCLUDING ALL)', 'history_' || name);
      EXECUTE format('WITH moved AS (DELETE FROM tenure.history_other WHERE id >= %L AND id < %L '
        'RETURNING *) INSERT INTO tenure.%I SELECT * FROM moved', tenure.first_id(day),
        tenure.first_id(day + 1), 'history_' || name);
      EXECUTE format('ALTER TABLE tenure.history ATTACH PARTITION tenure.%I '
        'FOR VALUES FROM (%L) TO (%L)', 'history_' || name, tenure.first_id(day),
        tenure.first_id(day + 1));
      made := made + 1;
    END IF;
    IF to_regclass('tenure.events_' || name) IS NULL THEN
      EXECUTE format('CREATE TABLE tenure.%I (LIKE tenure.events INCLUDING ALL)', 'events_' || name);
      EXECUTE format('WITH moved AS (DELETE FROM tenure.events_other WHERE at >= %L AND at < %L '
        'RETURNING *) INSERT INTO tenure.%I SELECT * FROM moved', day::bigint * 86400000,
        (day + 1)::bigint * 86400000, 'events_' || name);
      EXECUTE format('ALTER TABLE tenure.events ATTACH PARTITION tenure.%I '
        'FOR VALUES FROM (%L) TO (%L)', 'events_' || name, day::bigint * 86400000, (day + 1)::bigint * 86400000);
      made := made + 1;
    END IF;
  END LOOP;
  RETURN made;
EXCEPTION WHEN lock_not_available THEN
  RETURN 0;
END $$;

-- The smallest id of a day.
CREATE FUNCTION tenure.first_id(day bigint) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
  SELECT (lpad(to_hex(day * 86400000), 12, '0') || repeat('0', 20))::uuid
$$;

-- Drop the partitions of which nothing is to be kept: history whose last completion was before
-- `keep_history` (no task among `own_terms`, nobody waiting for a result of theirs), events of
-- days that ended before `keep_events`. How many of each.
CREATE FUNCTION tenure.drop_partitions(keep_history bigint, keep_events bigint, own_terms text[])
RETURNS TABLE (history integer, events integer) LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
DECLARE
  part record;
  look text;
  wanted boolean;
BEGIN
  history := 0;
  events := 0;
  IF pg_try_advisory_xact_lock(hashtext('tenure.drop_partitions')) THEN
    FOR part IN
      SELECT c.relname, (to_date(right(c.relname, 8), 'YYYYMMDD') - date '1970-01-01')::bigint AS day,
             c.relname LIKE 'history%' AS finished
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
       WHERE i.inhparent IN ('tenure.history'::regclass, 'tenure.events'::regclass)
         AND c.relname ~ '_[0-9]{8}$' ORDER BY c.relname
    LOOP
      CONTINUE WHEN (part.day + 1) * 86400000 >=
                    CASE WHEN part.finished THEN keep_history ELSE keep_events END;
      IF part.finished THEN
        look := format('SELECT EXISTS (SELECT 1 FROM tenure.%I h WHERE h.completed_at >= $1 '
          'OR h.type = ANY ($2) OR EXISTS (SELECT 1 FROM tenure.edges e JOIN tenure.jobs j '
          'ON j.id = e.job WHERE e.needs = h.id))', part.relname);
        EXECUTE look INTO wanted USING keep_history, own_terms;
        CONTINUE WHEN wanted;
      END IF;
      BEGIN
        IF part.finished THEN  -- an old job may be ending this moment: nobody writes, look again
          LOCK TABLE ONLY tenure.history IN ACCESS EXCLUSIVE MODE;
          EXECUTE look INTO wanted USING keep_history, own_terms;
          CONTINUE WHEN wanted;
        END IF;
        EXECUTE format('DROP TABLE tenure.%I', part.relname);
      EXCEPTION WHEN lock_not_available THEN
        EXIT;
      END;
      history := history + part.finished::integer;
      events := events + (NOT part.finished)::integer;
    END LOOP;
  END IF;
  RETURN NEXT;
END $$;

-- They run with their owner's rights, so not everybody who may look into the schema may call them.
REVOKE ALL ON FUNCTION tenure.add_partitions, tenure.drop_partitions FROM PUBLIC;
