-- -- reading -------------------------------------------------------------------------------------
-- Figures for people are counted up to `most` and no further, so none costs more than a few
-- milliseconds whatever lies in the tables; who gets `most` knows that there are as many or more.

-- Per queue: due, later, waiting, running, dead, and the ready_at of the first due one (among those
-- counted, and the first of each lane where that are not all).
CREATE FUNCTION tenure.count_queues(most integer, now_ms bigint)
RETURNS TABLE (queue text, due bigint, later bigint, waiting bigint, running bigint, dead bigint,
  first_ready bigint, moment bigint) LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  held jsonb := (
    SELECT coalesce(jsonb_object_agg(h.queue, h.jobs), '{}')
      FROM (SELECT j.queue, count(*) AS jobs
              FROM (SELECT j.queue FROM tenure.jobs j WHERE j.worker IS NOT NULL LIMIT 5 * most) j
             GROUP BY j.queue) h);
  ready record;
  delayed record;
BEGIN
  moment := coalesce(now_ms, tenure.clock());
  FOR queue IN SELECT q.name FROM tenure.queues q ORDER BY q.name LOOP
    SELECT count(*) AS jobs, min(x.ready_at) AS first INTO ready
      FROM (SELECT j.ready_at FROM tenure.jobs j
             WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
               AND (j.ready_at <= j.created_at OR j.promoted)
               AND j.queue = count_queues.queue LIMIT most) x;
    SELECT count(*) FILTER (WHERE x.ready_at <= moment) AS due,
           count(*) FILTER (WHERE x.ready_at > moment) AS later, min(x.ready_at) AS first
      INTO delayed
      FROM ((SELECT j.ready_at FROM tenure.jobs j
              WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
                AND j.ready_at > j.created_at AND NOT j.promoted
                AND j.queue = count_queues.queue AND j.ready_at <= moment LIMIT most)
            UNION ALL
            (SELECT j.ready_at FROM tenure.jobs j
              WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
                AND j.ready_at > j.created_at AND NOT j.promoted
                AND j.queue = count_queues.queue AND j.ready_at > moment LIMIT most)
            UNION ALL
            (SELECT j.ready_at FROM tenure.jobs j
              WHERE j.status = 'queued' AND j.waits = 0 AND (j.crashes > 0 OR j.losses >= 3)
                AND j.queue = count_queues.queue LIMIT most)) x;
    due := ready.jobs + delayed.due;
    later := delayed.later;
    waiting := (SELECT count(*) FROM (SELECT 1 FROM tenure.jobs j
                 WHERE j.waits > 0 AND j.queue = count_queues.queue LIMIT most) x);
    running := coalesce((held ->> queue)::bigint, 0);
    dead := (SELECT count(*) FROM (SELECT 1 FROM tenure.jobs j
              WHERE j.completed_at IS NOT NULL AND j.queue = count_queues.queue LIMIT most) x);
    first_ready := least(ready.first, delayed.first);
    IF ready.jobs >= most THEN
      first_ready := least(first_ready, (
        SELECT min(l.first_ready) FROM tenure.due_lanes(count_queues.queue, moment) l));
    END IF;
    RETURN NEXT;
  END LOOP;
END $$;

-- Per status, live and finished.
CREATE FUNCTION tenure.count_jobs(most integer) RETURNS TABLE (status text, jobs bigint)
LANGUAGE sql STABLE SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
  SELECT 'queued', (SELECT count(*) FROM (
    (SELECT 1 FROM tenure.jobs j
      WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
        AND (j.ready_at <= j.created_at OR j.promoted) LIMIT most)
    UNION ALL
    (SELECT 1 FROM tenure.jobs j
      WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
        AND j.ready_at > j.created_at AND NOT j.promoted LIMIT most)
    UNION ALL
    (SELECT 1 FROM tenure.jobs j
      WHERE j.status = 'queued' AND j.waits = 0 AND (j.crashes > 0 OR j.losses >= 3) LIMIT most)
    UNION ALL
    (SELECT 1 FROM tenure.jobs j WHERE j.waits > 0 LIMIT most)) x)
  UNION ALL
  SELECT 'in_progress', (SELECT count(*) FROM (
    SELECT 1 FROM tenure.jobs j WHERE j.worker IS NOT NULL LIMIT most) x)
  UNION ALL
  SELECT s.status, (SELECT count(*) FROM (
    SELECT 1 FROM tenure.jobs j
     WHERE j.completed_at IS NOT NULL AND j.status = s.status LIMIT most) x)
    FROM (VALUES ('failed'), ('dead_letter')) s(status)
  UNION ALL
  SELECT 'cancelled', (SELECT count(*) FROM (
    SELECT 1 FROM tenure.history h WHERE h.status = 'cancelled' LIMIT most) x)
  UNION ALL  -- among twice as many: cancelled ones may lie in between
  SELECT 'completed', (SELECT count(*) FILTER (WHERE x.status = 'completed') FROM (
    SELECT h.status FROM tenure.history h LIMIT 2 * most) x)
$$;

-- Dead jobs of one queue and type that died of the same thing.
CREATE TYPE tenure.death_group AS (queue text, type text, death text);

-- Dead jobs by what they died of: one step of jobs_death from group to group, 1,000 at most, and in
-- each as many as are counted. The newest is the sample. Of all orgs the index alone is counted in;
-- of one org each row is looked at.
CREATE FUNCTION tenure.dead_groups(in_queue text, in_type text, in_org text, most integer)
RETURNS TABLE (queue text, type text, death text, jobs bigint, first bigint, last bigint, sample uuid)
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  at tenure.death_group;
BEGIN
  SELECT j.queue, j.type, j.death INTO at FROM tenure.jobs j
   WHERE j.completed_at IS NOT NULL AND j.queue >= coalesce(in_queue, '')
   ORDER BY j.queue, j.type, j.death LIMIT 1;
  FOR n IN 1 .. 1000 LOOP
    EXIT WHEN at.queue IS NULL OR at.queue <> in_queue;
    queue := at.queue;
    type := at.type;
    death := at.death;
    jobs := 0;
    IF in_type IS NOT NULL AND type <> in_type THEN
      NULL;
    ELSIF in_org IS NULL THEN
      SELECT count(*) INTO jobs
        FROM (SELECT 1 FROM tenure.jobs j
               WHERE j.completed_at IS NOT NULL AND j.queue = at.queue AND j.type = at.type
                 AND j.death = at.death LIMIT most) g;
      SELECT j.completed_at INTO first FROM tenure.jobs j
       WHERE j.completed_at IS NOT NULL AND j.queue = at.queue AND j.type = at.type
         AND j.death = at.death ORDER BY j.completed_at LIMIT 1;
      SELECT j.completed_at, j.id INTO last, sample FROM tenure.jobs j
       WHERE j.completed_at IS NOT NULL AND j.queue = at.queue AND j.type = at.type
         AND j.death = at.death ORDER BY j.completed_at DESC, j.id DESC LIMIT 1;
    ELSE
      SELECT count(*), min(g.completed_at), max(g.completed_at),
             (array_agg(g.id ORDER BY g.completed_at DESC, g.id DESC))[1]
        INTO jobs, first, last, sample
        FROM (SELECT j.completed_at, j.id, j.org FROM tenure.jobs j
               WHERE j.completed_at IS NOT NULL AND j.queue = at.queue AND j.type = at.type
                 AND j.death = at.death
               ORDER BY j.completed_at DESC LIMIT most) g
       WHERE g.org = in_org;
    END IF;
    IF jobs > 0 THEN
      RETURN NEXT;
    END IF;
    at := tenure.next_death(at.queue, at.type, at.death);
  END LOOP;
END $$;

-- The group after this one. Three probes with scalar bounds: see tenure.lanes.
CREATE FUNCTION tenure.next_death(in_queue text, in_type text, in_death text)
RETURNS tenure.death_group LANGUAGE sql STABLE AS $$
  (SELECT j.queue, j.type, j.death FROM tenure.jobs j
    WHERE j.completed_at IS NOT NULL AND j.queue = in_queue AND j.type = in_type
      AND j.death > in_death ORDER BY j.death LIMIT 1)
  UNION ALL
  (SELECT j.queue, j.type, j.death FROM tenure.jobs j
    WHERE j.completed_at IS NOT NULL AND j.queue = in_queue AND j.type > in_type
    ORDER BY j.type, j.death LIMIT 1)
  UNION ALL
  (SELECT j.queue, j.type, j.death FROM tenure.jobs j
    WHERE j.completed_at IS NOT NULL AND j.queue > in_queue
    ORDER BY j.queue, j.type, j.death LIMIT 1)
  LIMIT 1
$$;
