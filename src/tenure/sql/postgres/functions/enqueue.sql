-- -- enqueue -------------------------------------------------------------------------------------

-- A job of a batch; `owner` is the job that holds its key, itself where it has none.
CREATE TYPE tenure.new_job AS (
  place integer, id uuid, type text, payload json, queue text, priority smallint, org text,
  delay_ms bigint, at_ms bigint, key text, key_ttl_ms bigint, max_attempts integer,
  timeout_ms bigint, category text, project text, actor_type text, actor_id text,
  request_id text, correlation_id text, traceparent text, parent uuid, after uuid[],
  after_failed text, remark json, owner uuid
);

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
  batch tenure.new_job[] := tenure.read_jobs(jobs, moment);
  stored uuid[];
  refusal text;
BEGIN
  stored := tenure.finished(ARRAY(SELECT b.id FROM unnest(batch) b)) || ARRAY(
    SELECT j.id FROM tenure.jobs j WHERE j.id = ANY (ARRAY(SELECT b.id FROM unnest(batch) b)));
  SELECT CASE WHEN coalesce(b.type, '') = '' THEN 'a job without a type: name its task'
              ELSE 'a job''s priority is a number from 1 (first) to 10' END INTO refusal
    FROM unnest(batch) b WHERE coalesce(b.type, '') = '' OR b.priority NOT BETWEEN 1 AND 10 LIMIT 1;
  IF stored <> '{}' AND NOT again THEN
    refusal := format('job %s is stored already: `task.job(…)` makes a new one for each enqueue',
                      tenure.ulid(stored[1]));
  END IF;
  IF refusal IS NULL THEN
    IF NOT EXISTS (SELECT 1 FROM unnest(batch) b WHERE b.after IS NOT NULL) THEN
      batch := tenure.store_jobs(batch, stored, again, audit, moment, alone);
    ELSE
      BEGIN
        batch := tenure.store_jobs(batch, stored, again, audit, moment, alone);
      EXCEPTION WHEN SQLSTATE 'TN001' THEN  -- what was written goes with the block
        refusal := SQLERRM;
      END;
    END IF;
  END IF;
  IF refusal IS NOT NULL THEN
    RETURN QUERY SELECT NULL::uuid, NULL::boolean, refusal;
    RETURN;
  END IF;
  RETURN QUERY
  SELECT b.owner, b.owner <> b.id,
         CASE WHEN b.owner = b.id THEN 'queued'
              ELSE coalesce((SELECT s.status FROM tenure.jobs s WHERE s.id = b.owner),
                            (SELECT s.status FROM tenure.history s WHERE s.id = b.owner),
                            (SELECT CASE k.status WHEN 'dead' THEN 'dead_letter'
                                                  WHEN 'failed' THEN 'failed' ELSE 'completed' END
                               FROM tenure.keys k WHERE k.org = b.org AND k.key = b.key)) END
    FROM unnest(batch) b ORDER BY b.place;
END $$;

-- Those of some ids that history has, by a look-up each, in the one partition where it would be. Not
-- by EXISTS: with a plan made while there is next to nothing, that reads all there is into a hash.
CREATE FUNCTION tenure.finished(ids uuid[]) RETURNS uuid[] LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  RETURN ARRAY(SELECT i.id FROM unnest(ids) i(id)
                WHERE (SELECT true FROM tenure.history h WHERE h.id = i.id LIMIT 1));
END $$;

CREATE FUNCTION tenure.read_jobs(jobs json, moment bigint) RETURNS tenure.new_job[]
LANGUAGE sql VOLATILE AS $$
  SELECT ARRAY(
    SELECT ROW(j.ordinality, m.id, j.type,
               coalesce(j.payload, '{}'), coalesce(j.queue, 'default'), coalesce(j.priority, 5),
               coalesce(j.org, 'default'), coalesce(j.delay_ms, 0), j.at_ms, j.key,
               coalesce(j.key_ttl_ms, 604800000), coalesce(j.max_attempts, 5),
               coalesce(j.timeout_ms, 300000), coalesce(j.category, 'default'), j.project,
               coalesce(j.actor_type, 'system'), coalesce(j.actor_id, 'tenure'), j.request_id,
               j.correlation_id, j.traceparent, j.parent, nullif(j.after, '{}'), j.after_failed,
               j.remark, m.id)::tenure.new_job
      FROM ROWS FROM (json_to_recordset(jobs) AS (
             id uuid, type text, payload json, queue text, priority smallint, org text,
             delay_ms bigint, at_ms bigint, key text, key_ttl_ms bigint, max_attempts integer,
             timeout_ms bigint, category text, project text, actor_type text, actor_id text,
             request_id text, correlation_id text, traceparent text, parent uuid, after uuid[],
             after_failed text, remark json)) WITH ORDINALITY j
           CROSS JOIN LATERAL (SELECT coalesce(j.id, tenure.new_id(moment)) AS id OFFSET 0) m)
$$;

-- Queues, keys, edges, jobs, events; the batch with the owners of its keys. An error, TN001, when
-- a job is to run after one that cannot be waited for.
CREATE FUNCTION tenure.store_jobs(batch tenure.new_job[], stored uuid[], again boolean, audit text,
  moment bigint, alone boolean) RETURNS tenure.new_job[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  needs boolean := EXISTS (SELECT 1 FROM unnest(batch) b WHERE b.after IS NOT NULL);
  added uuid[];
BEGIN
  PERFORM tenure.add_queues(ARRAY(SELECT DISTINCT b.queue FROM unnest(batch) b), moment);
  IF EXISTS (SELECT 1 FROM unnest(batch) b WHERE b.key IS NOT NULL) THEN
    batch := tenure.take_keys(batch, stored, moment, alone);
  END IF;
  IF needs THEN
    PERFORM tenure.add_edges(batch, stored);
  END IF;
  WITH fresh AS (
    INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, waits, max_attempts,
      timeout_ms, category, project, actor_type, actor_id, request_id, correlation_id, traceparent,
      key, parent, after_failed, scheduled_at, asked_at, created_at, updated_at, payload)
    SELECT b.id, b.type, 'queued', b.queue, b.priority, b.org, greatest(d.due, moment),
           CASE WHEN b.after IS NULL THEN 0
                ELSE (SELECT count(*) FROM tenure.edges e WHERE e.job = b.id AND NOT e.met) END,
           b.max_attempts, b.timeout_ms, b.category, b.project, b.actor_type, b.actor_id,
           b.request_id, b.correlation_id, b.traceparent, b.key, b.parent, b.after_failed,
           d.due, CASE WHEN b.at_ms IS NOT NULL OR b.delay_ms > 0 THEN d.due END, moment, moment,
           b.payload
      FROM unnest(batch) b
           CROSS JOIN LATERAL (SELECT coalesce(b.at_ms, moment + b.delay_ms) AS due) d
     WHERE b.owner = b.id AND b.id <> ALL (stored)
     ORDER BY b.id
    ON CONFLICT (id) DO NOTHING
    RETURNING id)
  SELECT array_agg(f.id) INTO added FROM fresh f;
  IF needs THEN
    PERFORM tenure.check_needs(added);
  END IF;
  IF again THEN
    -- The first try may have committed and not be on disk: what this one then says must be.
    PERFORM setval('tenure.flushes', 1);
    -- Or committed, and its job finished, while this one looked away.
    DELETE FROM tenure.jobs j
     WHERE j.id = ANY (added) AND EXISTS (SELECT 1 FROM tenure.history h WHERE h.id = j.id);
    added := ARRAY(SELECT j.id FROM tenure.jobs j WHERE j.id = ANY (added));
  ELSIF coalesce(cardinality(added), 0)
        < (SELECT count(*) FROM unnest(batch) b WHERE b.owner = b.id) THEN
    RAISE unique_violation USING MESSAGE = 'the same id twice, in one batch or in two at once';
  END IF;
  INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
    actor_id, request_id, correlation_id, data)
  SELECT moment, 'job.enqueued', b.id, b.type, 0, 0, b.org, b.project, b.actor_type, b.actor_id,
         b.request_id, b.correlation_id, b.remark
    FROM unnest(batch) b
   WHERE b.owner = b.id AND b.id <> ALL (stored)
     AND (tenure.audited(audit) = 'all' OR b.remark IS NOT NULL)
     AND (NOT again OR b.id = ANY (added));
  RETURN batch;
END $$;

-- New names. In a caller's REPEATABLE READ a name stored since their first statement cannot be seen, and
-- is there all the same.
CREATE FUNCTION tenure.add_queues(names text[], moment bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  fresh text;
BEGIN
  FOR fresh IN
    SELECT n FROM unnest(names) n
     WHERE NOT EXISTS (SELECT 1 FROM tenure.queues q WHERE q.name = n) ORDER BY n
  LOOP
    BEGIN
      INSERT INTO tenure.queues (name, created_at) VALUES (fresh, moment) ON CONFLICT DO NOTHING;
    EXCEPTION WHEN serialization_failure THEN
      NULL;
    END;
  END LOOP;
END $$;

-- Whoever inserts a key owns it; an expired one changes hands, for who asks without a time to live (0) one
-- of any job that has ended; a taken one was seen again. After this
-- each key of the batch has a row that stays until the end of the transaction: retention may be
-- removing expired ones this moment, and a job whose key has no owner would be stored by nobody.
--
-- Where this call is the whole transaction one statement does it, and locks. A caller's lock would
-- last until their commit, and the finish of the key's owner wait for that: there a taken key is
-- only kept from being removed (FOR KEY SHARE), and looked for again when it was.
CREATE FUNCTION tenure.take_keys(batch tenure.new_job[], stored uuid[], moment bigint, alone boolean)
RETURNS tenure.new_job[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  firsts tenure.new_job[] := ARRAY(  -- of each key, in the one order in which keys are locked
    SELECT x.job FROM (
      SELECT DISTINCT ON (o.org, o.key) o.job, o.org, o.key
        FROM (SELECT b AS job, b.org COLLATE "C" AS org, b.key COLLATE "C" AS key, b.place
                FROM unnest(batch) b WHERE b.key IS NOT NULL AND b.id <> ALL (stored)) o
       ORDER BY o.org, o.key, o.place) x);
BEGIN
  IF alone THEN
    INSERT INTO tenure.keys AS k (org, key, job_id, first_seen_at, last_seen_at, ttl_ms)
    SELECT f.org, f.key, f.id, moment, moment, f.key_ttl_ms FROM unnest(firsts) f
    ON CONFLICT (org, key) DO UPDATE SET
      (job_id, first_seen_at, status, result_ref, error_ref, ttl_ms, expires_at) = (
        SELECT CASE WHEN o.over THEN excluded.job_id ELSE k.job_id END,
               CASE WHEN o.over THEN moment ELSE k.first_seen_at END,
               CASE WHEN NOT o.over THEN k.status END, CASE WHEN NOT o.over THEN k.result_ref END,
               CASE WHEN NOT o.over THEN k.error_ref END,
               CASE WHEN o.over THEN excluded.ttl_ms ELSE k.ttl_ms END,
               CASE WHEN NOT o.over THEN k.expires_at END
          FROM (SELECT coalesce(k.expires_at <= moment OR excluded.ttl_ms = 0
                                AND k.expires_at IS NOT NULL, false) AS over) o),
      last_seen_at = moment;
  ELSE
    PERFORM tenure.take_key(f, moment) FROM unnest(firsts) f;
  END IF;
  RETURN ARRAY(
    SELECT ROW(b.place, b.id, b.type, b.payload, b.queue, b.priority, b.org, b.delay_ms, b.at_ms,
               b.key, b.key_ttl_ms, b.max_attempts, b.timeout_ms, b.category, b.project,
               b.actor_type, b.actor_id, b.request_id, b.correlation_id, b.traceparent, b.parent,
               b.after, b.after_failed, b.remark, coalesce(k.job_id, b.owner))::tenure.new_job
      FROM unnest(batch) b LEFT JOIN LATERAL (
           SELECT k.job_id FROM tenure.keys k WHERE k.org = b.org AND k.key = b.key LIMIT 1) k ON true
     ORDER BY b.place);
END $$;

-- One key of a caller's batch, before the next: inserted, taken over where it has expired (nobody waits
-- for its owner, which is done; it may be held in our own name, see tenure.hold_keys), else kept.
CREATE FUNCTION tenure.take_key(mine tenure.new_job, moment bigint) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  FOR attempt IN 1 .. 100 LOOP
    INSERT INTO tenure.keys (org, key, job_id, first_seen_at, last_seen_at, ttl_ms)
    VALUES (mine.org, mine.key, mine.id, moment, moment, mine.key_ttl_ms)
    ON CONFLICT (org, key) DO NOTHING;
    IF FOUND THEN
      RETURN;
    END IF;
    UPDATE tenure.keys k
       SET job_id = mine.id, first_seen_at = moment, last_seen_at = moment, status = NULL,
           result_ref = NULL, error_ref = NULL, ttl_ms = mine.key_ttl_ms, expires_at = NULL
     WHERE k.org = mine.org AND k.key = mine.key
       AND (k.expires_at <= moment OR mine.key_ttl_ms = 0 AND k.expires_at IS NOT NULL);
    IF FOUND THEN
      RETURN;
    END IF;
    PERFORM 1 FROM tenure.keys k WHERE k.org = mine.org AND k.key = mine.key
       AND (k.expires_at IS NULL OR k.expires_at > moment AND mine.key_ttl_ms <> 0) FOR KEY SHARE;
    IF FOUND THEN
      RETURN;
    END IF;
  END LOOP;
  RAISE serialization_failure USING MESSAGE = 'the keys of these jobs are being removed';
END $$;

-- What jobs of a batch are to run after; the owner of a key stands for the job not stored because
-- of it. Met from the start is what has completed; of one that history has forgotten its key tells.
CREATE FUNCTION tenure.add_edges(batch tenure.new_job[], stored uuid[]) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  replaced tenure.new_job[] := ARRAY(SELECT b FROM unnest(batch) b WHERE b.owner <> b.id);
BEGIN
  INSERT INTO tenure.edges (needs, job, met)
  SELECT n.needs, b.id, coalesce((SELECT h.status = 'completed' FROM tenure.history h
                                   WHERE h.id = n.needs AND h.org = b.org LIMIT 1), false)
    FROM unnest(batch) b CROSS JOIN LATERAL unnest(b.after) n(needs)
   WHERE b.owner = b.id AND b.id <> ALL (stored)
  ON CONFLICT DO NOTHING;
  IF cardinality(replaced) > 0 THEN
    INSERT INTO tenure.edges (needs, job, met)
    SELECT r.owner, e.job, coalesce(
             (SELECT k.status = 'succeeded' FROM tenure.keys k WHERE k.org = r.org AND k.key = r.key),
             false) OR coalesce((SELECT h.status = 'completed' FROM tenure.history h
                                  WHERE h.id = r.owner LIMIT 1), false)
      FROM unnest(replaced) r CROSS JOIN LATERAL (
           SELECT e.job FROM tenure.edges e WHERE e.needs = r.id) e
    ON CONFLICT DO NOTHING;
    DELETE FROM tenure.edges e WHERE e.needs = ANY (ARRAY(SELECT r.id FROM unnest(replaced) r));
  END IF;
END $$;

-- What a job is to run after must exist in its own org, or have come with it, and must not have been
-- cancelled: it could never be met.
CREATE FUNCTION tenure.check_needs(added uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  bad record;
BEGIN
  SELECT j.type, e.needs, h.status INTO bad
    FROM unnest(added) a(id)
    CROSS JOIN LATERAL (SELECT e.needs FROM tenure.edges e WHERE e.job = a.id AND NOT e.met OFFSET 0) e
    CROSS JOIN LATERAL (SELECT j.type, j.org FROM tenure.jobs j WHERE j.id = a.id LIMIT 1) j
    LEFT JOIN LATERAL (SELECT n.org FROM tenure.jobs n WHERE n.id = e.needs LIMIT 1) n ON true
    LEFT JOIN LATERAL (SELECT h.status FROM tenure.history h
                        WHERE n.org IS NULL AND h.id = e.needs AND h.org = j.org LIMIT 1) h ON true
   WHERE n.org IS DISTINCT FROM j.org AND h.status IS DISTINCT FROM 'completed'
   LIMIT 1;
  IF bad.status = 'cancelled' THEN
    RAISE EXCEPTION USING ERRCODE = 'TN001', MESSAGE = format(
      'a ''%s'' job is to run after %s, but that one was cancelled and will never complete',
      bad.type, tenure.ulid(bad.needs));
  ELSIF bad.type IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'TN001', MESSAGE = format(
      'a ''%s'' job is to run after %s, but there is no such job: enqueue that one first, or with it '
      'in the same batch', bad.type, tenure.ulid(bad.needs));
  END IF;
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
    parent, after_failed, scheduled_at, asked_at, created_at, updated_at, payload)
  SELECT in_id, in_type, 'queued', in_queue, in_priority, in_org, greatest(due, moment),
         max_attempts, timeout_ms, category, project, actor_type, actor_id, request_id,
         correlation_id, traceparent, parent, after_failed, due,
         CASE WHEN at_ms IS NOT NULL OR delay_ms > 0 THEN due END, moment, moment, payload
   WHERE NOT EXISTS (SELECT 1 FROM tenure.history h WHERE h.id = in_id);
  IF NOT FOUND THEN
    RETURN 0;
  END IF;
  -- Who sends it has seen the name committed; since then a backup may have been restored.
  IF NOT EXISTS (SELECT 1 FROM tenure.queues q WHERE q.name = in_queue) THEN
    PERFORM tenure.add_queues(ARRAY[in_queue], moment);
  END IF;
  IF audit = 'all' OR remark IS NOT NULL OR tenure.audited(audit) = 'all' THEN
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

-- The rules that programs check before they send, for jobs given by SQL: why a field breaks them.
CREATE FUNCTION tenure.refuse_field(field text, value jsonb, moment bigint) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
  kind CONSTANT text := jsonb_typeof(value);
  word CONSTANT text := value #>> '{}';
  longest CONSTANT integer := CASE field WHEN 'key' THEN 512 ELSE 128 END;
  uuid CONSTANT text := '^(?!(f+-?)+$)[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}$';  -- not the last of all
  low bigint;
  high bigint;
BEGIN
  IF kind = 'null' AND field NOT IN ('type', 'payload') THEN
    RETURN NULL;
  ELSIF field IN ('type', 'queue', 'org', 'project', 'key', 'category', 'actor_type', 'actor_id',
                  'request_id', 'correlation_id', 'traceparent', 'after_failed') THEN
    RETURN CASE
      WHEN kind <> 'string' THEN format('%s must be a string', field)
      WHEN length(word) NOT BETWEEN 1 AND longest
        THEN format('%s must have 1 to %s characters', field, longest)
      WHEN word ~ '[\x01-\x1f\x7f-\x9f\u2028\u2029]'
        THEN format('%s must not contain control characters or line breaks', field)
      WHEN field = 'queue' AND (word !~ '^[A-Za-z0-9_.:-]+$' OR word = 'deadletter')
        THEN 'a queue''s name has letters, digits, _ . : - and is not deadletter'
      WHEN field = 'after_failed' AND word NOT IN ('wait', 'cancel')
        THEN 'after_failed is wait or cancel'
      WHEN field = 'actor_type' AND word NOT IN ('user', 'system', 'api_key')
        THEN 'actor_type is user, system or api_key' END;
  ELSIF field IN ('payload', 'remark') THEN
    RETURN CASE
      WHEN kind <> 'object' THEN format('%s must be a JSON object', field)
      WHEN length(value::text) > 67108864 THEN format('%s is too large', field)
      WHEN jsonb_path_exists(value, 'strict $.**{64} ? (@.type() == "array" || @.type() == "object")')
        THEN format('%s is nested deeper than 64 levels; flatten it', field)
      WHEN jsonb_path_exists(value, 'strict $.** ? (@.type() == "number")
                                     ? (@ > 9223372036854775807 || @ < -9223372036854775808)')
        THEN format('%s has a number beyond 64 bits; pass it as a string', field) END;
  ELSIF field = 'after' THEN
    RETURN CASE WHEN kind <> 'array' OR EXISTS (
                       SELECT 1 FROM jsonb_array_elements(value) a
                        WHERE jsonb_typeof(a) <> 'string' OR a #>> '{}' !~* uuid)
                THEN 'after must be an array of job ids (uuid)' END;
  ELSIF field IN ('id', 'parent') THEN
    RETURN CASE WHEN kind <> 'string' OR word !~* uuid
                THEN format('%s must be a job''s id (uuid)', field) END;
  END IF;
  SELECT b.low, b.high INTO low, high
    FROM (VALUES ('priority', 1, 10), ('delay_ms', 0, 315576000000),
                 ('at_ms', moment - 60000, moment + 315576000000), ('key_ttl_ms', 0, 315576000000),
                 ('max_attempts', 1, 1000000), ('timeout_ms', 10, 2592000000))
         b(name, low, high) WHERE b.name = field;
  RETURN CASE
    WHEN low IS NULL THEN format('there is no field %s', field)
    WHEN kind <> 'number' THEN format('%s must be a number', field)
    WHEN word !~ '^-?[0-9]+$' OR word::numeric NOT BETWEEN low AND high
      THEN format('%s must be a whole number from %s to %s', field, low, high) END;
END $$;

CREATE FUNCTION tenure.refuse_fields(jobs jsonb, moment bigint) RETURNS text
LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN jsonb_typeof(jobs) <> 'array' THEN 'jobs are a JSON array of objects'
    WHEN jsonb_array_length(jobs) > 20000 THEN 'at most 20,000 jobs in one call'
    ELSE (
      SELECT format('job %s: %s', e.place, r.why)
        FROM jsonb_array_elements(jobs) WITH ORDINALITY e(job, place)
        CROSS JOIN LATERAL (SELECT CASE
          WHEN jsonb_typeof(e.job) <> 'object' THEN 'not a JSON object'
          ELSE (SELECT f.why FROM jsonb_each(e.job) j(name, value)
                 CROSS JOIN LATERAL (SELECT tenure.refuse_field(j.name, j.value, moment) AS why) f
                 WHERE f.why IS NOT NULL LIMIT 1) END AS why) r
       WHERE r.why IS NOT NULL LIMIT 1) END
$$;

-- Jobs stored already cannot wait for new ones, so a circle can only be within a batch: take away who
-- waits for nobody in it, then whoever waited only for those; who is left waits for ever.
CREATE FUNCTION tenure.refuse_circles(batch tenure.new_job[]) RETURNS text LANGUAGE plpgsql
SET enable_nestloop = off SET jit = off AS $$
DECLARE
  needed integer[];   -- places, side by side with
  waiting integer[];  -- who waits for them, sorted by the first
  first integer[] := array_fill(0, ARRAY[cardinality(batch) + 1]);
  open integer[] := array_fill(0, ARRAY[cardinality(batch)]);
  free integer[];
  taken integer := 0;
  who integer;
BEGIN
  SELECT array_agg(o.place ORDER BY o.place), array_agg(b.place ORDER BY o.place)
    INTO needed, waiting
    FROM unnest(batch) b CROSS JOIN unnest(b.after) n(id)
         JOIN unnest(batch) o ON o.id = n.id;
  IF needed IS NULL THEN
    RETURN NULL;
  END IF;
  FOR n IN 1 .. cardinality(needed) LOOP
    open[waiting[n]] := open[waiting[n]] + 1;
    IF first[needed[n]] = 0 THEN
      first[needed[n]] := n;
    END IF;
  END LOOP;
  free := ARRAY(SELECT p FROM unnest(open) WITH ORDINALITY o(left_over, p) WHERE o.left_over = 0);
  WHILE taken < coalesce(cardinality(free), 0) LOOP
    taken := taken + 1;
    who := first[free[taken]];
    WHILE who > 0 AND needed[who] = free[taken] LOOP
      open[waiting[who]] := open[waiting[who]] - 1;
      IF open[waiting[who]] = 0 THEN
        free := free || waiting[who];
      END IF;
      who := who + 1;
    END LOOP;
  END LOOP;
  RETURN CASE WHEN taken < cardinality(batch) THEN format(
    '%s jobs of this batch wait for each other in a circle: none of them could ever run',
    cardinality(batch) - taken) END;
END $$;

-- For anybody who speaks SQL: SELECT * FROM tenure.enqueue('[{"type": "send_email",
-- "payload": {"to": "a@b.c"}}]'). Everything but the type has a default.
CREATE OR REPLACE FUNCTION tenure.enqueue(jobs jsonb)
RETURNS TABLE (id uuid, duplicate boolean, status text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  moment bigint := tenure.clock();
  refusal text := tenure.refuse_fields(jobs, moment);
  receipt record;
BEGIN
  IF refusal IS NULL THEN
    refusal := tenure.refuse_circles(tenure.read_jobs(jobs::text::json, moment));
  END IF;
  IF refusal IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'TN001', MESSAGE = refusal;
  END IF;
  FOR receipt IN SELECT * FROM tenure.enqueue_jobs(jobs::text::json, false, 'all', NULL, false) LOOP
    IF receipt.id IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = 'TN001', MESSAGE = receipt.status;
    END IF;
    RETURN QUERY SELECT receipt.id, receipt.duplicate, receipt.status;
  END LOOP;
END $$;

-- Which database this is: tells a caller's connection to another one that has our tables too.
CREATE OR REPLACE FUNCTION tenure.home() RETURNS text LANGUAGE sql STABLE AS $$
  SELECT current_database() || ' ' || extract(epoch FROM m.applied_at)
    FROM tenure.migrations m WHERE m.pack = 'tenure' AND m.version = 1
$$;
