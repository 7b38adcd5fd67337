-- -- what a running handler writes ---------------------------------------------------------------

-- Fenced under the lock on the job's row. A job that gets on is neither poison nor lost: its crashes
-- and losses are forgotten.
CREATE FUNCTION tenure.store_step(by_worker integer, by_id text, in_job uuid, in_lease_no integer,
  step text, returned json, now_ms bigint) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM 1 FROM tenure.jobs j
    WHERE j.id = in_job AND j.lease_no = in_lease_no AND j.worker = by_worker
      AND EXISTS (SELECT 1 FROM tenure.workers w WHERE w.no = by_worker AND w.id = by_id)
    FOR UPDATE;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  INSERT INTO tenure.steps (job_id, name, result, lease_no, at)
  VALUES (in_job, step, returned, in_lease_no, coalesce(now_ms, tenure.clock()))
  ON CONFLICT (job_id, name) DO UPDATE
     SET result = excluded.result, lease_no = excluded.lease_no, at = excluded.at;
  UPDATE tenure.jobs j SET crashes = 0, losses = 0
   WHERE j.id = in_job AND (j.crashes > 0 OR j.losses > 0);
  RETURN true;
END $$;

-- -- leases --------------------------------------------------------------------------------------

-- Declare a worker dead and put its jobs back, unless it has renewed since `seen_beat`, or it is
-- later than `not_after` by this server's clock: a stall proves nothing about the others. Jobs in
-- `started` (all, when NULL) have lost their worker once more; at `loss_limit` they are dead letters.
CREATE FUNCTION tenure.rescue_jobs(dead integer, dead_id text, seen_beat bigint, started uuid[],
  loss_limit integer, why text, not_after bigint, audit text, now_ms bigint)
RETURNS TABLE (requeued integer, lost integer, set_aside uuid[]) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  runs tenure.ended[];
BEGIN
  -- Somebody holds its row: a renewal or a claim under way, or a stranger. No proof of a death.
  PERFORM 1 FROM tenure.workers w WHERE w.no = dead AND w.id = dead_id FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  UPDATE tenure.workers w SET dead_at = moment, dead_reason = why
   WHERE w.no = dead AND w.beat = seen_beat AND w.dead_at IS NULL
     AND (not_after IS NULL OR tenure.clock() <= not_after);
  IF NOT FOUND THEN
    RETURN;
  END IF;
  runs := tenure.pass_fence(dead, dead_id, (
    SELECT coalesce(json_agg(json_build_array(
             j.id, j.lease_no, 0, 'rescued', 'queued', 'job.rescued', NULL,
             CASE WHEN started IS NULL OR j.id = ANY (started) THEN why END,
             CASE WHEN started IS NULL OR j.id = ANY (started) THEN 'lost' END,
             NULL, NULL, 0, NULL,
             CASE WHEN started IS NULL OR j.id = ANY (started) THEN loss_limit END)), '[]')
      FROM tenure.jobs j WHERE j.worker = dead), true, dead);
  PERFORM tenure.end_runs(dead, runs, audit, moment);
  RETURN QUERY
  SELECT count(*) FILTER (WHERE r.status <> 'dead_letter')::integer,
         count(*) FILTER (WHERE r.status = 'dead_letter')::integer,
         ARRAY(SELECT r.id FROM unnest(runs) r WHERE r.status = 'dead_letter' ORDER BY r.id)
    FROM unnest(runs) r;
END $$;

-- Sign off, unless something is held. A claim of ours may be under way still, its client gone: it
-- has the row, so it is waited for, and then seen.
CREATE FUNCTION tenure.sign_off(leaving integer, leaving_id text, now_ms bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM 1 FROM tenure.workers w WHERE w.no = leaving AND w.id = leaving_id FOR UPDATE;
  UPDATE tenure.workers w
     SET dead_at = coalesce(now_ms, tenure.clock()), dead_reason = 'signed off'
   WHERE w.no = leaving AND w.id = leaving_id AND w.dead_at IS NULL
     AND NOT EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.worker = w.no);
END $$;
