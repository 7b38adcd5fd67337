-- -- finish --------------------------------------------------------------------------------------

-- A run that has passed the fence (or a job that leaves without one), and how it ended.
CREATE TYPE tenure.ended AS (
  id uuid, lease_no integer, duration_ms bigint, outcome text, status text, event text,
  result json, error text, error_code text, error_place text, delay_ms bigint, refund integer,
  crash boolean, loss boolean, key text, org text, queue text, type text, traceback text,
  taken boolean,     -- by a rescue: nobody's finish
  worker integer,    -- who finished it, for history
  counted integer    -- under whose name it is counted
);

-- Runs of one (worker, queue, type, outcome) whose durations fall into one bucket of the histogram.
CREATE TYPE tenure.tally AS (
  worker integer, queue text, type text, outcome text, bucket integer, jobs bigint, lasted bigint
);

-- How the key of a job ends with it: succeeded, failed, dead.
CREATE TYPE tenure.key_end AS (org text, key text, job_id uuid, status text);

-- The handle of a group of dead jobs: those of one type that died of the same thing.
CREATE FUNCTION tenure.death(type text, status text, code text, place text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT left(encode(sha256(convert_to(
           concat_ws('|', type, status, coalesce(code, ''), coalesce(place, '')), 'UTF8')), 'hex'), 16)
$$;

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
-- already (an enqueue that came late had stored it once more) fails the batch: tenure.finish_runs
-- takes such a one. Returns what was NOT accepted: mostly nothing. `coalesce` keeps the look-up on
-- the primary key: by jobs_held each row would cost a walk over everything the worker holds. No nested
-- loop: the two lists would be compared row by row, 250,000 times for a batch of 500.
CREATE FUNCTION tenure.complete_runs(by_worker integer, by_id text, ids uuid[],
  lease_nos integer[], durations bigint[], results json, audit text, now_ms bigint)
RETURNS TABLE (id uuid, lease_no integer) LANGUAGE plpgsql
SET enable_nestloop = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  trail CONSTANT text := CASE WHEN audit = 'all' THEN audit ELSE tenure.audited(audit) END;
  done record;
BEGIN
  WITH gone AS (
    DELETE FROM tenure.jobs j
     USING ROWS FROM (unnest(ids, lease_nos, durations), json_array_elements(results))
             AS r(id, lease_no, duration_ms, result)
     WHERE j.id = ANY (ids) AND j.id = r.id AND j.lease_no = r.lease_no
       AND coalesce(j.worker, 0) = by_worker
       AND EXISTS (SELECT 1 FROM tenure.workers w
                    WHERE w.no = by_worker AND (by_id IS NULL OR w.id = by_id))
    RETURNING j.id, j.type, j.queue, j.priority, j.org, j.lease_no, j.attempts, j.max_attempts,
      j.crashes, j.losses, j.timeout_ms, j.category, j.project, j.actor_type, j.actor_id,
      j.request_id, j.correlation_id, j.traceparent, j.key, j.parent, j.scheduled_at, j.asked_at,
      j.created_at, j.started_at, j.payload, j.error, j.error_code, j.traceback, j.progress,
      CASE WHEN json_typeof(r.result) <> 'null' THEN r.result END AS result, r.duration_ms
  ), kept AS (
    INSERT INTO tenure.history (id, type, status, queue, priority, org, lease_no, worker, attempts,
      max_attempts, crashes, losses, timeout_ms, category, project, actor_type, actor_id,
      request_id, correlation_id, traceparent, key, parent, scheduled_at, asked_at, created_at,
      started_at, completed_at, payload, result, error, error_code, traceback, progress)
    SELECT g.id, g.type, 'completed', g.queue, g.priority, g.org, g.lease_no, by_worker, g.attempts,
      g.max_attempts, g.crashes, g.losses, g.timeout_ms, g.category, g.project, g.actor_type,
      g.actor_id, g.request_id, g.correlation_id, g.traceparent, g.key, g.parent, g.scheduled_at,
      g.asked_at, g.created_at, g.started_at, moment, g.payload, g.result, g.error, g.error_code,
      g.traceback, g.progress
      FROM gone g
  ), noted AS (
    INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
      actor_id, request_id, correlation_id, worker)
    SELECT moment, 'job.succeeded', g.id, g.type, g.attempts, g.lease_no, g.org, g.project,
      g.actor_type, g.actor_id, g.request_id, g.correlation_id, by_worker
      FROM gone g WHERE trail = 'all'
  ), counted AS (
    SELECT g.queue, g.type, tenure.bucket(g.duration_ms) AS bucket, count(*) AS jobs,
           sum(g.duration_ms)::bigint AS lasted
      FROM gone g GROUP BY 1, 2, 3
  )
  SELECT ARRAY(SELECT ROW(by_worker, c.queue, c.type, 'completed', c.bucket, c.jobs, c.lasted)
                      ::tenure.tally FROM counted c) AS tallies,
         array_agg(g.id) AS ids, array_agg(g.lease_no) AS lease_nos, count(*) AS jobs,
         bool_or(g.key IS NOT NULL) AS keyed
    INTO done FROM gone g;
  IF EXISTS (SELECT 1 FROM tenure.edges e WHERE NOT e.met) THEN
    PERFORM tenure.release(done.ids, moment);
  END IF;
  IF done.keyed THEN
    PERFORM tenure.end_keys(ARRAY(
      SELECT ROW(h.org, h.key, h.id, 'succeeded')::tenure.key_end FROM tenure.history h
       WHERE h.id = ANY (done.ids) AND h.key IS NOT NULL), moment);
  END IF;
  IF EXISTS (SELECT 1 FROM tenure.steps) THEN
    DELETE FROM tenure.steps s WHERE s.job_id = ANY (done.ids);
  END IF;
  PERFORM tenure.roll_up(moment, done.tallies);
  IF done.jobs IS DISTINCT FROM cardinality(ids) THEN
    RETURN QUERY SELECT r.id, r.lease_no FROM unnest(ids, lease_nos) r(id, lease_no)
          EXCEPT SELECT g.id, g.lease_no FROM unnest(done.ids, done.lease_nos) g(id, lease_no);
  END IF;
END $$;

-- Any batch. Rows are [id, lease_no, duration_ms, outcome, status, event, result, error, error_code,
-- error_place, delay_ms, refund, crash limit, loss limit, traceback]; `children` are the
-- follow-ups of completed runs, [{"id": …, "jobs": […]}, …]. Returns what was not accepted. A run
-- whose follow-ups cannot be stored has failed, its neighbours have not: it comes back without a number;
-- when `strict`, that is the caller's error.
CREATE FUNCTION tenure.finish_runs(by_worker integer, by_id text, rows json, children json,
  strict boolean, audit text, now_ms bigint)
RETURNS TABLE (id uuid, lease_no integer) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  -- A handler's own transaction counts elsewhere: until its commit the worker's row is not free.
  runs tenure.ended[] := tenure.pass_fence(by_worker, by_id, rows, false,
    CASE WHEN strict THEN -1 - pg_backend_pid() % 64 ELSE by_worker END);
  family record;
  refusal text;
  disowned uuid[] := '{}';
BEGIN
  IF json_array_length(children) > 0 THEN
    PERFORM tenure.hold_keys(children, runs, moment);
  END IF;
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
    runs := tenure.disown(runs, family.id, refusal);
    disowned := disowned || family.id;
  END LOOP;
  PERFORM tenure.end_runs(by_worker, runs, audit, moment);
  RETURN QUERY
  SELECT (e.value ->> 0)::uuid, (e.value ->> 1)::integer FROM json_array_elements(rows) e
  EXCEPT SELECT r.id, r.lease_no FROM unnest(runs) r;
  RETURN QUERY SELECT d.id, NULL::integer FROM unnest(disowned) d(id);
END $$;

-- Whoever waits for these runs, then keys of follow-ups, of the runs that end and of those that may end
-- with them, in the one order in which rows are locked: whoever holds one of them does not wait for one
-- before it.
CREATE FUNCTION tenure.hold_keys(children json, runs tenure.ended[], moment bigint) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  waiting CONSTANT uuid[] := tenure.followers(ARRAY(SELECT r.id FROM unnest(runs) r));
  held record;
BEGIN
  PERFORM 1 FROM tenure.jobs j WHERE j.id = ANY (waiting) ORDER BY j.id FOR UPDATE;
  FOR held IN
    SELECT k.org COLLATE "C" AS org, k.key COLLATE "C" AS key, min(k.job) AS job, max(k.ttl) AS ttl
      FROM (SELECT coalesce(j.org, 'default') AS org, j.key, j.id::text AS job,
                   coalesce(j.key_ttl_ms, 604800000) AS ttl
              FROM json_to_recordset(children) AS c(id uuid, jobs json)
                   CROSS JOIN LATERAL json_to_recordset(c.jobs)
                     AS j(id uuid, org text, key text, key_ttl_ms bigint)
             WHERE j.key IS NOT NULL
            UNION ALL
            SELECT r.org, r.key, NULL, NULL FROM unnest(runs) r
             WHERE r.key IS NOT NULL AND r.status <> 'queued'
            UNION ALL
            SELECT j.org, j.key, NULL, NULL FROM tenure.jobs j
             WHERE j.id = ANY (waiting) AND j.key IS NOT NULL) k
     GROUP BY 1, 2 ORDER BY 1, 2
  LOOP
    IF held.job IS NULL THEN
      PERFORM 1 FROM tenure.keys k WHERE k.org = held.org AND k.key = held.key FOR NO KEY UPDATE;
    ELSE
      -- Of several with one key the first in its batch is to own it: the owner comes later.
      -- Should none come (refused), nobody has it: not for whoever began before us and waits, either.
      INSERT INTO tenure.keys AS k (org, key, job_id, first_seen_at, last_seen_at, ttl_ms, expires_at)
      VALUES (held.org, held.key, held.job::uuid, moment, moment, held.ttl, 0)
      ON CONFLICT (org, key) DO UPDATE SET last_seen_at = moment;
    END IF;
  END LOOP;
END $$;

-- A run whose follow-ups were refused has failed.
CREATE FUNCTION tenure.disown(runs tenure.ended[], parent uuid, refusal text)
RETURNS tenure.ended[] LANGUAGE sql STABLE AS $$
  SELECT ARRAY(
    SELECT CASE WHEN r.id <> parent THEN r
                ELSE ROW(r.id, r.lease_no, r.duration_ms, 'failed', 'failed', 'job.failed', NULL,
                         'its follow-up jobs were refused: ' || refusal, 'BAD_CHILDREN', NULL, NULL, 0,
                         false, false, r.key, r.org, r.queue, r.type, NULL, false,
                         r.worker, r.counted)::tenure.ended END
      FROM unnest(runs) r)
$$;

-- THE FENCE. Only rows whose job still carries this lease under this worker come back, and they
-- are locked: nothing can change between this check and the writes that follow. A number alone is
-- not a worker: after a restore another one may have it. A job asked to be cancelled does not go back
-- to the queue: it is cancelled instead. Of the same run sent twice in one batch the first word counts.
-- What has died too often is dead: of its own crashes (poison), or of its workers' (lost).
CREATE FUNCTION tenure.pass_fence(by_worker integer, by_id text, rows json, rescued boolean,
  counted_by integer) RETURNS tenure.ended[] LANGUAGE sql AS $$
  SELECT ARRAY(
    SELECT ROW(j.id, j.lease_no, (r.value ->> 2)::bigint,
               CASE WHEN j.fate IS NOT NULL THEN 'dead' ELSE r.value ->> 3 END,
               CASE WHEN j.fate IS NOT NULL THEN 'dead_letter'
                    WHEN j.cancel_at IS NOT NULL AND r.value ->> 4 = 'queued' THEN 'cancelled'
                    ELSE r.value ->> 4 END,
               CASE WHEN j.fate IS NOT NULL THEN 'job.deadlettered'
                    WHEN j.cancel_at IS NOT NULL AND r.value ->> 4 = 'queued' THEN 'job.cancelled'
                    ELSE r.value ->> 5 END,
               CASE WHEN json_typeof(r.value -> 6) <> 'null' THEN r.value -> 6 END, r.value ->> 7,
               coalesce(j.fate, r.value ->> 8), r.value ->> 9, (r.value ->> 10)::bigint,
               coalesce((r.value ->> 11)::integer, 0), r.value ->> 12 IS NOT NULL,
               r.value ->> 13 IS NOT NULL, j.key, j.org, j.queue, j.type, r.value ->> 14, rescued,
               CASE WHEN NOT rescued THEN by_worker END, counted_by)::tenure.ended
      FROM (SELECT DISTINCT ON ((e.value ->> 0)::uuid, e.value ->> 1)
                   (e.value ->> 0)::uuid AS id, (e.value ->> 1)::integer AS lease_no, e.value
              FROM json_array_elements(rows) WITH ORDINALITY e
             ORDER BY (e.value ->> 0)::uuid, e.value ->> 1, e.ordinality) r
      CROSS JOIN LATERAL (
           SELECT j.id, j.lease_no, j.cancel_at, j.key, j.org, j.queue, j.type,
                  CASE WHEN j.crashes + 1 >= (r.value ->> 12)::integer THEN 'poison'
                       WHEN j.losses + 1 >= (r.value ->> 13)::integer THEN 'lost' END AS fate
             FROM tenure.jobs j
            WHERE j.id = r.id AND j.lease_no = r.lease_no AND coalesce(j.worker, 0) = by_worker
            LIMIT 1 FOR UPDATE) j
     WHERE EXISTS (SELECT 1 FROM tenure.workers w
                    WHERE w.no = by_worker AND (by_id IS NULL OR w.id = by_id)))
$$;

-- What has passed the fence: write its consequences.
CREATE FUNCTION tenure.end_runs(by_worker integer, runs tenure.ended[], audit text, moment bigint)
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  trail CONSTANT text := CASE WHEN audit = 'all' THEN audit ELSE tenure.audited(audit) END;
  doomed tenure.ended[] := tenure.doom(runs, moment);
BEGIN
  INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
    actor_id, request_id, correlation_id, worker, data)
  SELECT moment, r.event, j.id, j.type, j.attempts, j.lease_no, j.org, j.project, j.actor_type,
         j.actor_id, j.request_id, j.correlation_id, by_worker,
         CASE WHEN r.error IS NOT NULL OR r.delay_ms IS NOT NULL THEN
           json_build_object('error', r.error, 'code', r.error_code, 'delay_ms', r.delay_ms) END
    FROM unnest(runs) r CROSS JOIN LATERAL (
         SELECT j.id, j.type, j.attempts, j.lease_no, j.org, j.project, j.actor_type, j.actor_id,
                j.request_id, j.correlation_id FROM tenure.jobs j WHERE j.id = r.id LIMIT 1) j
   WHERE trail = 'all' OR r.outcome <> 'completed';
  PERFORM tenure.release(
    ARRAY(SELECT r.id FROM unnest(runs) r WHERE r.status = 'completed'), moment);
  PERFORM tenure.leave(runs || doomed, moment);
  PERFORM tenure.stay(runs, moment);
  PERFORM tenure.count_runs(runs || doomed, moment);
END $$;

-- Everything that has neither completed nor was cancelled stays hot: queued again (retry, snooze,
-- release, crash) or dead. A release keeps its place in the queue; a retry and a snooze get a new
-- ready_at. An error brings its own place and traceback, or has none. A rescue is nobody's finish: the
-- late one of the worker it was taken from stays refused.
CREATE FUNCTION tenure.stay(runs tenure.ended[], moment bigint) RETURNS void LANGUAGE plpgsql
SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  back text[] := ARRAY(  -- at an old place, behind where claims have got to: they must look again
    SELECT DISTINCT r.queue FROM unnest(runs) r WHERE r.status = 'queued' AND r.delay_ms IS NULL);
BEGIN
  UPDATE tenure.jobs j
     SET status = r.status,
         lease_no = j.lease_no + 1,
         finish_no = CASE WHEN r.taken THEN j.finish_no ELSE j.lease_no END,
         worker = NULL,
         attempts = j.attempts - r.refund,
         crashes = j.crashes + r.crash::integer,
         losses = j.losses + r.loss::integer,
         ready_at = CASE WHEN r.delay_ms IS NULL THEN j.ready_at ELSE moment + r.delay_ms END,
         scheduled_at = CASE WHEN r.delay_ms IS NULL THEN j.scheduled_at ELSE moment + r.delay_ms END,
         promoted = CASE WHEN r.delay_ms IS NULL THEN j.promoted ELSE r.delay_ms = 0 END,
         completed_at = CASE WHEN r.status IN ('failed', 'dead_letter') THEN moment END,
         error = coalesce(r.error, j.error),
         error_code = coalesce(r.error_code, j.error_code),
         error_place = CASE WHEN r.error IS NULL THEN j.error_place ELSE r.error_place END,
         traceback = CASE WHEN r.error IS NULL THEN j.traceback ELSE r.traceback END,
         death = CASE WHEN r.status IN ('failed', 'dead_letter') THEN tenure.death(j.type, r.status,
                   coalesce(r.error_code, j.error_code),
                   CASE WHEN r.error IS NULL THEN j.error_place ELSE r.error_place END)
                   ELSE '' END,
         cancel_at = NULL, cancel_reason = NULL,
         updated_at = moment
    FROM (SELECT r.*, j.at FROM unnest(runs) r CROSS JOIN LATERAL (
                 SELECT j.ctid AS at FROM tenure.jobs j WHERE j.id = r.id LIMIT 1) j
           WHERE r.status NOT IN ('completed', 'cancelled')) r
   WHERE j.ctid = r.at;  -- which stands still: it is locked
  IF back <> '{}' THEN
    PERFORM 1 FROM tenure.queues q WHERE q.name = ANY (back) ORDER BY q.name FOR UPDATE;
    UPDATE tenure.queues q SET rewind_no = q.rewind_no + 1 WHERE q.name = ANY (back);
  END IF;
END $$;

-- completed, cancelled: out of the hot table, into history, under the number they finished with. A
-- traceback stays with its error. A key's status is written once, when its job ends; its time to live
-- starts then.
CREATE FUNCTION tenure.leave(runs tenure.ended[], moment bigint) RETURNS void LANGUAGE plpgsql
SET enable_hashjoin = on SET enable_nestloop = off SET enable_mergejoin = off
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  leaving uuid[] := ARRAY(
    SELECT r.id FROM unnest(runs) r WHERE r.status IN ('completed', 'cancelled') ORDER BY r.id);
BEGIN
  WITH gone AS (
    DELETE FROM tenure.jobs j WHERE j.id = ANY (leaving) RETURNING j.*)
  INSERT INTO tenure.history (id, type, status, queue, priority, org, lease_no, worker, attempts,
    max_attempts, crashes, losses, timeout_ms, category, project, actor_type, actor_id, request_id,
    correlation_id, traceparent, key, parent, scheduled_at, asked_at, created_at, started_at,
    completed_at, payload, result, error, error_code, traceback, progress)
  SELECT g.id, g.type, r.status, g.queue, g.priority, g.org, g.lease_no, r.worker, g.attempts,
    g.max_attempts, g.crashes, g.losses, g.timeout_ms, g.category, g.project, g.actor_type,
    g.actor_id, g.request_id, g.correlation_id, g.traceparent, g.key, g.parent, g.scheduled_at,
    g.asked_at, g.created_at, g.started_at, moment, g.payload, r.result,
    coalesce(r.error, g.error), coalesce(r.error_code, g.error_code),
    coalesce(r.traceback, CASE WHEN r.error IS NULL OR r.error = g.error THEN g.traceback END),
    g.progress
    FROM gone g JOIN unnest(runs) r ON r.id = g.id
  ON CONFLICT (id) DO NOTHING;  -- an enqueue that came late had stored it once more
  PERFORM tenure.end_keys(ARRAY(
    SELECT ROW(r.org, r.key, r.id, CASE r.status WHEN 'completed' THEN 'succeeded'
                 WHEN 'dead_letter' THEN 'dead' ELSE 'failed' END)::tenure.key_end
      FROM unnest(runs) r WHERE r.key IS NOT NULL AND r.status <> 'queued'), moment);
  DELETE FROM tenure.steps s WHERE s.job_id = ANY (leaving);
  IF EXISTS (SELECT 1 FROM tenure.edges e WHERE NOT e.met) THEN  -- whoever was cancelled waits no more
    UPDATE tenure.edges e SET met = true WHERE NOT e.met AND e.job = ANY (ARRAY(
      SELECT r.id FROM unnest(runs) r WHERE r.status = 'cancelled'));
  END IF;
END $$;

-- The keys of jobs that have ended, locked in the one order in which everybody locks keys. One without a
-- time to live is free from now on, not from now on by the clock: whoever began before us and waits for
-- it has an earlier one.
CREATE FUNCTION tenure.end_keys(ends tenure.key_end[], moment bigint) RETURNS void LANGUAGE plpgsql
SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
  PERFORM 1 FROM (SELECT e.org, e.key FROM unnest(ends) e
                   ORDER BY e.org COLLATE "C", e.key COLLATE "C") e
    CROSS JOIN LATERAL (SELECT 1 FROM tenure.keys k WHERE k.org = e.org AND k.key = e.key
                         LIMIT 1 FOR NO KEY UPDATE) k;
  UPDATE tenure.keys k
     SET status = e.status,
         expires_at = CASE WHEN k.ttl_ms = 0 THEN 0 ELSE moment + k.ttl_ms END,
         result_ref = CASE WHEN e.status = 'succeeded' THEN e.job_id END,
         error_ref = CASE WHEN e.status <> 'succeeded' THEN e.job_id END
    FROM (SELECT e.status, e.job_id, k.at FROM unnest(ends) e CROSS JOIN LATERAL (
                 SELECT k.ctid AS at FROM tenure.keys k
                  WHERE k.org = e.org AND k.key = e.key AND k.job_id = e.job_id LIMIT 1) k) e
   WHERE k.ctid = e.at;
END $$;

CREATE FUNCTION tenure.add_up(a bigint[], b bigint[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT ARRAY(SELECT x.a + x.b FROM unnest(a, b) WITH ORDINALITY x(a, b, n) ORDER BY x.n)
$$;

-- One upsert per (worker, queue, type, outcome) of a batch, however many jobs it holds. The last thing
-- of a transaction that locks: rollups are shared.
CREATE FUNCTION tenure.roll_up(moment bigint, tallies tenure.tally[]) RETURNS void LANGUAGE sql AS $$
  INSERT INTO tenure.rollups AS t (grain, start, worker, queue, type, outcome, count, duration_ms,
                                   buckets)
  SELECT 'minute', moment / 60000 * 60000, r.worker, r.queue, r.type, r.outcome,
         sum(r.jobs)::bigint, sum(r.lasted)::bigint,
         ARRAY(SELECT coalesce(sum(b.jobs), 0)::bigint
                 FROM generate_series(0, 12) n LEFT JOIN unnest(tallies) b
                   ON b.bucket = n AND b.worker = r.worker AND b.queue = r.queue
                  AND b.type = r.type AND b.outcome = r.outcome
                GROUP BY n ORDER BY n)
    FROM unnest(tallies) r
   GROUP BY r.worker, r.queue, r.type, r.outcome
   ORDER BY r.worker, r.queue COLLATE "C", r.type COLLATE "C", r.outcome COLLATE "C"
  ON CONFLICT (grain, start, worker, queue, type, outcome) DO UPDATE
     SET count = t.count + excluded.count, duration_ms = t.duration_ms + excluded.duration_ms,
         buckets = tenure.add_up(t.buckets, excluded.buckets)
$$;

CREATE FUNCTION tenure.count_runs(runs tenure.ended[], moment bigint) RETURNS void LANGUAGE sql AS $$
  SELECT tenure.roll_up(moment, ARRAY(
    SELECT ROW(r.counted, r.queue, r.type, r.outcome, tenure.bucket(r.duration_ms), count(*),
               sum(r.duration_ms)::bigint)::tenure.tally
      FROM unnest(runs) r
     GROUP BY r.counted, r.queue, r.type, r.outcome, tenure.bucket(r.duration_ms)))
$$;
