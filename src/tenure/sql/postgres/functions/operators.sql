-- -- operators -----------------------------------------------------------------------------------

-- Lock these jobs and say what they are: hot first, then history, because jobs move that way. Runs
-- before others, as a finish locks them; with the others, where they may leave, what waits for them.
-- Another org's job is as absent as one that never was.
CREATE FUNCTION tenure.look_up(ids uuid[], in_org text, leaving boolean)
RETURNS TABLE (id uuid, status text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  ours uuid[] := ARRAY(SELECT j.id FROM tenure.jobs j
                        WHERE j.id = ANY (ids) AND (in_org IS NULL OR j.org = in_org));
BEGIN
  PERFORM 1 FROM tenure.jobs j WHERE j.id = ANY (ours) AND j.worker IS NOT NULL
    ORDER BY j.id FOR UPDATE;
  PERFORM 1 FROM tenure.jobs j
    WHERE j.id = ANY (ours || CASE WHEN leaving THEN tenure.followers(ours) ELSE '{}' END)
    ORDER BY j.id FOR UPDATE;
  RETURN QUERY
  SELECT j.id, j.status::text FROM tenure.jobs j WHERE j.id = ANY (ours);
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

-- Jobs that leave without having run to an end, noted, for the same door as finished ones. A
-- discarded one keeps the error it died of: why it was given up, its event tells.
CREATE FUNCTION tenure.withdraw(ids uuid[], allowed text[], what text, why text, code text,
  by_type text, by_id text, moment bigint) RETURNS tenure.ended[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  runs tenure.ended[] := ARRAY(
    SELECT ROW(j.id, j.lease_no, 0, 'cancelled', 'cancelled', what, NULL,
               CASE WHEN j.completed_at IS NULL THEN why ELSE coalesce(j.error, why) END, code,
               NULL, NULL, 0, false, false, j.key, j.org, j.queue, j.type, NULL, false, 0, 0)::tenure.ended
      FROM tenure.jobs j WHERE j.id = ANY (ids) AND j.status = ANY (allowed)
     ORDER BY j.id FOR UPDATE);
BEGIN
  IF cardinality(runs) > 0 THEN
    PERFORM tenure.note(ARRAY(SELECT r.id FROM unnest(runs) r), what, why, by_type, by_id, moment);
  END IF;
  RETURN runs;
END $$;

-- The same with what cannot run without them: gone, and counted.
CREATE FUNCTION tenure.dismiss(runs tenure.ended[], moment bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  everything tenure.ended[] := runs || tenure.doom(runs, moment);
BEGIN
  PERFORM tenure.leave(everything, moment);
  PERFORM tenure.count_runs(everything, moment);
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
    INTO seen FROM tenure.look_up(ids, in_org, true) l;
  IF seen.queued IS NOT NULL THEN
    PERFORM tenure.dismiss(tenure.withdraw(seen.queued, '{queued}', 'job.cancelled', why,
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

-- failed, dead_letter -> queued under the same id, attempts, crashes and losses 0; its key lives
-- again with it. One that had expired and was pruned is taken again, if nobody else has it by now.
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
    INTO seen FROM tenure.look_up(ids, in_org, false) l;
  IF seen.dead IS NOT NULL THEN
    PERFORM tenure.note(seen.dead, 'job.replayed',
                        CASE WHEN new_payload IS NULL THEN '' ELSE 'edited' END, by_type, by_id, moment);
    UPDATE tenure.jobs j
       SET status = 'queued', attempts = 0, crashes = 0, losses = 0, ready_at = moment,
           scheduled_at = moment, promoted = true, completed_at = NULL, started_at = NULL,
           progress = NULL, death = '', payload = coalesce(new_payload, j.payload),
           updated_at = moment
     WHERE j.id = ANY (seen.dead);
    INSERT INTO tenure.keys AS k (org, key, job_id, first_seen_at, last_seen_at, ttl_ms)
    SELECT j.org, j.key, j.id, moment, moment, lost_key_ttl_ms FROM tenure.jobs j
     WHERE j.id = ANY (seen.dead) AND j.key IS NOT NULL ORDER BY j.org, j.key
    ON CONFLICT (org, key) DO UPDATE SET status = NULL, expires_at = NULL, error_ref = NULL
      WHERE k.job_id = excluded.job_id;
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
    INTO seen FROM tenure.look_up(ids, in_org, true) l;
  IF seen.dead IS NOT NULL THEN
    PERFORM tenure.dismiss(tenure.withdraw(seen.dead, '{failed,dead_letter}', 'job.discarded', why,
                                           'discarded', by_type, by_id, moment), moment);
  END IF;
  RETURN QUERY
  SELECT s.id, CASE WHEN s.status IN ('failed', 'dead_letter') THEN 'done' ELSE s.status END
    FROM unnest(seen.ids, seen.statuses) s(id, status);
END $$;
