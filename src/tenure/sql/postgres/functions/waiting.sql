-- -- whoever waited ------------------------------------------------------------------------------

-- Jobs that waited for these completed ones have one need less each; without any left they are
-- runnable now. An edge is met once, by whoever gets to it first, so counting down is exact.
CREATE FUNCTION tenure.release(completed uuid[], moment bigint) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  waiting uuid[];
BEGIN
  IF coalesce(cardinality(completed), 0) = 0 THEN
    RETURN 0;
  END IF;
  PERFORM 1 FROM tenure.jobs j
    WHERE j.id = ANY (ARRAY(SELECT e.job FROM tenure.edges e
                             WHERE e.needs = ANY (completed) AND NOT e.met))
    ORDER BY j.id FOR UPDATE;
  WITH met AS (
    UPDATE tenure.edges e SET met = true
     WHERE e.needs = ANY (completed) AND NOT e.met RETURNING e.job)
  SELECT array_agg(m.job) INTO waiting FROM met m;
  RETURN tenure.count_down(waiting, moment);
END $$;

-- Their rows are locked.
CREATE FUNCTION tenure.count_down(waiting uuid[], moment bigint) RETURNS integer LANGUAGE plpgsql
SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
  IF waiting IS NULL THEN
    RETURN 0;
  END IF;
  UPDATE tenure.jobs j
     SET waits = j.waits - w.met, updated_at = moment,
         ready_at = CASE WHEN j.waits = w.met THEN greatest(j.ready_at, moment) ELSE j.ready_at END,
         promoted = j.waits = w.met AND j.ready_at <= moment
    FROM (SELECT u.met, j.at
            FROM (SELECT u.job, count(*)::integer AS met FROM unnest(waiting) u(job) GROUP BY u.job) u
            CROSS JOIN LATERAL (SELECT j.ctid AS at FROM tenure.jobs j WHERE j.id = u.job LIMIT 1) j) w
   WHERE j.ctid = w.at;
  RETURN cardinality(waiting);
END $$;

-- All that waits for these jobs, and for those.
CREATE FUNCTION tenure.followers(ids uuid[]) RETURNS uuid[] LANGUAGE sql STABLE
SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_seqscan = off SET jit = off AS $$
  WITH RECURSIVE follower (id) AS (
    SELECT e.job FROM unnest(ids) i(id) CROSS JOIN LATERAL (
           SELECT e.job FROM tenure.edges e WHERE e.needs = i.id AND NOT e.met OFFSET 0) e
    UNION
    SELECT e.job FROM follower f CROSS JOIN LATERAL (
           SELECT e.job FROM tenure.edges e WHERE e.needs = f.id AND NOT e.met OFFSET 0) e)
  SELECT ARRAY(SELECT f.id FROM follower f)
$$;

-- What cannot run any more because of how these have ended, locked and noted: a need that was
-- cancelled or discarded will never complete; one that has failed may be replayed, and only who was
-- told to end with it does. Then whatever waits for those.
CREATE FUNCTION tenure.doom(runs tenure.ended[], moment bigint) RETURNS tenure.ended[]
LANGUAGE plpgsql
SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  released uuid[];
  failed uuid[];
  cancelled uuid[];
BEGIN
  IF NOT EXISTS (SELECT 1 FROM tenure.edges e WHERE NOT e.met)
     OR NOT EXISTS (SELECT 1 FROM unnest(runs) r
                     WHERE r.status IN ('failed', 'dead_letter', 'cancelled')) THEN
    RETURN '{}';
  END IF;
  failed := ARRAY(
    SELECT e.job FROM unnest(runs) r CROSS JOIN LATERAL (
           SELECT e.job FROM tenure.edges e WHERE e.needs = r.id AND NOT e.met OFFSET 0) e
     CROSS JOIN LATERAL (SELECT j.after_failed FROM tenure.jobs j WHERE j.id = e.job LIMIT 1) j
     WHERE r.status IN ('failed', 'dead_letter') AND j.after_failed = 'cancel');
  cancelled := tenure.followers(
    failed || ARRAY(SELECT r.id FROM unnest(runs) r WHERE r.status = 'cancelled'));
  released := ARRAY(  -- by those that have completed: locked with the others, in one order
    SELECT e.job FROM unnest(runs) r CROSS JOIN LATERAL (
           SELECT e.job FROM tenure.edges e WHERE e.needs = r.id AND NOT e.met OFFSET 0) e
     WHERE r.status = 'completed');
  PERFORM 1 FROM tenure.jobs j WHERE j.id = ANY (failed || cancelled || released)
    ORDER BY j.id FOR UPDATE;
  RETURN tenure.withdraw(failed, '{queued}', 'job.cancelled',
           'a job it was to run after has failed', 'dependency_failed', 'system', 'tenure', moment)
      || tenure.withdraw(ARRAY(SELECT c FROM unnest(cancelled) c WHERE c <> ALL (failed)),
           '{queued}', 'job.cancelled', 'a job it was to run after was cancelled',
           'dependency_cancelled', 'system', 'tenure', moment);
END $$;

-- Of these jobs, which are locked, those that can leave now with all that waits for them, which is locked
-- too: whoever holds one of those may be waiting for us.
CREATE FUNCTION tenure.reachable(ids uuid[], held uuid[]) RETURNS uuid[] LANGUAGE plpgsql
SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_seqscan = off SET jit = off AS $$
DECLARE
  tail CONSTANT uuid[] := tenure.followers(ids);
  missing uuid[];
BEGIN
  held := held || ARRAY(SELECT j.id FROM tenure.jobs j WHERE j.id = ANY (tail)
                         ORDER BY j.id FOR UPDATE SKIP LOCKED);
  missing := ARRAY(SELECT j.id FROM tenure.jobs j WHERE j.id = ANY (tail)
                   EXCEPT SELECT h FROM unnest(held) h);
  IF missing = '{}' THEN
    RETURN ids;
  END IF;
  RETURN ARRAY(SELECT i FROM unnest(ids) i WHERE NOT tenure.followers(ARRAY[i]) && missing);
END $$;

-- The janitor's walk over unmet edges, a bounded page after (job, needs): what a finish could not
-- see, because edge and finish committed at the same time. How many changed, and where it stands.
-- Jobs that somebody holds are left to the next walk.
CREATE FUNCTION tenure.settle_dependants(after_job uuid, after_needs uuid, most integer, now_ms bigint)
RETURNS TABLE (changed integer, job uuid, needs uuid) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  page record;
  held uuid[];
  waiting uuid[];
  failed uuid[];
  leaving uuid[];
  ends record;
  runs tenure.ended[];
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
  -- How the needs of this page have ended: those that still may complete are not among them.
  SELECT array_agg(p.job) FILTER (WHERE n.how = 'completed') AS met_jobs,
         array_agg(p.needs) FILTER (WHERE n.how = 'completed') AS met_needs,
         array_agg(p.job) FILTER (WHERE n.how = 'dead') AS failed,
         array_agg(p.job) FILTER (WHERE n.how = 'cancelled') AS cancelled,
         array_agg(p.job) FILTER (WHERE n.how = 'gone') AS gone
    INTO ends
    FROM unnest(page.jobs, page.needs) p(job, needs)
    LEFT JOIN LATERAL (SELECT n.completed_at IS NOT NULL AS dead FROM tenure.jobs n
                        WHERE n.id = p.needs LIMIT 1) j ON true
    LEFT JOIN LATERAL (SELECT h.status FROM tenure.history h
                        WHERE j.dead IS NULL AND h.id = p.needs LIMIT 1) h ON true
    CROSS JOIN LATERAL (SELECT CASE WHEN j.dead THEN 'dead' WHEN j.dead IS NULL
                                    THEN coalesce(h.status::text, 'gone') END AS how) n;
  held := ARRAY(
    SELECT j.id FROM tenure.jobs j
     WHERE j.id = ANY (ends.met_jobs || ends.failed || ends.cancelled || ends.gone)
       AND j.status = 'queued' ORDER BY j.id FOR UPDATE SKIP LOCKED);
  WITH met AS (
    UPDATE tenure.edges e SET met = true
      FROM unnest(ends.met_jobs, ends.met_needs) p(job, needs)
     WHERE e.needs = p.needs AND e.job = p.job AND NOT e.met AND p.job = ANY (held)
    RETURNING e.job)
  SELECT array_agg(m.job) INTO waiting FROM met m;
  PERFORM tenure.count_down(waiting, moment);
  failed := ARRAY(
    SELECT j.id FROM tenure.jobs j
     WHERE j.id = ANY (held) AND j.id = ANY (ends.failed) AND j.after_failed = 'cancel');
  leaving := tenure.reachable(failed || ARRAY(
    SELECT h FROM unnest(held) h WHERE h = ANY (ends.cancelled || ends.gone)), held);
  runs := tenure.withdraw(ARRAY(SELECT l FROM unnest(leaving) l WHERE l = ANY (failed)),
            '{queued}', 'job.cancelled', 'a job it was to run after has failed',
            'dependency_failed', 'system', 'tenure', moment);
  runs := runs || tenure.withdraw(ARRAY(SELECT l FROM unnest(leaving) l WHERE l <> ALL (failed)),
            '{queued}', 'job.cancelled', 'a job it was to run after was cancelled, or is no more',
            'dependency_cancelled', 'system', 'tenure', moment);
  runs := runs || tenure.doom(runs, moment);
  PERFORM tenure.leave(runs, moment);
  PERFORM tenure.count_runs(runs, moment);
  RETURN QUERY SELECT coalesce(cardinality(waiting), 0) + cardinality(runs),
    CASE WHEN cardinality(page.jobs) = most THEN page.jobs[most] END,
    CASE WHEN cardinality(page.jobs) = most THEN page.needs[most] END;
END $$;
