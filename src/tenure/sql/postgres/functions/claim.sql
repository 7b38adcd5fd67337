-- -- claim ---------------------------------------------------------------------------------------
-- A queued job that waits for nothing but a worker stands in one of three indexes, and says so in
-- every statement here, or the planner could not know:
--   jobs_claim    status = 'queued' AND waits = 0 AND crashes = 0 AND losses < 3
--                   AND (ready_at <= created_at OR promoted)
--   jobs_later    the same with ready_at > created_at AND NOT promoted: its time has to come
--   jobs_suspect  status = 'queued' AND waits = 0 AND (crashes > 0 OR losses >= 3): to run alone

-- One (queue, priority, org) with rows, and from where on to look at them. `mixed`: rows that are not
-- for this worker have been seen there.
CREATE TYPE tenure.lane AS (
  priority smallint, org text, since_ready bigint, since_id uuid, mixed boolean
);

-- What is locked for a claim, and what its worker should remember (see tenure.claim_jobs).
CREATE TYPE tenure.harvest AS (ids uuid[], report jsonb);

-- A row that was looked at, and whether its type is one that the claim asks for.
CREATE TYPE tenure.candidate AS (id uuid, ready_at bigint, type text, fits boolean);

-- The lanes of one priority of a queue, beginning after the org whose turn was last, until there are
-- `most`; one or two steps of jobs_claim a lane, whatever lies in it.
--
-- `stones` is what a worker remembers of lanes it has seen: [[org, ready_at, id], …], sorted; with a
-- fourth element those that are mixed, and by how much else the place is to trail.
-- Of those only rows after the remembered place are looked at: before it everything was taken or is
-- not for this worker, and while a long transaction anywhere in this database keeps vacuum from
-- removing what was taken, walking over it would cost more and more. The place trails the clock by
-- two seconds, because a job enqueued in somebody's transaction appears behind what has been claimed
-- meanwhile; what appears later still, a worker finds when it asks without places, which it does at
-- least every few seconds. No guarantee rests on the place.
--
-- Every bound that is to end a scan is a scalar one: before version 18 a second row comparison does
-- not, and a claim walked over all that lay in the next lane. Its callers force its plans.
CREATE FUNCTION tenure.lanes(in_queue text, tier smallint, turn text, stones jsonb, most integer,
  moment bigint) RETURNS tenure.lane[] LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
  none CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
  n integer;
  at_org text COLLATE "C";
  past text COLLATE "C";   -- the end of this leg of the walk; NULL: that of the tier
  stone text COLLATE "C";  -- the remembered org we come to next
  lane tenure.lane;
  seen tenure.lane[] := '{}';
BEGIN
  lane.priority := tier;
  FOR leg IN CASE WHEN turn = '' THEN 2 ELSE 1 END .. 2 LOOP
    n := 0;
    at_org := CASE leg WHEN 1 THEN turn ELSE '' END;
    past := CASE WHEN leg = 2 AND turn <> '' THEN turn || chr(1) END;
    LOOP
      stone := stones -> n ->> 0;
      WHILE stone <= at_org LOOP
        n := n + 1;
        stone := stones -> n ->> 0;
      END LOOP;
      IF coalesce(stone, past) IS NULL THEN  -- no text is the last one in every encoding
        SELECT j.org INTO lane.org FROM tenure.jobs j
         WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
           AND (j.ready_at <= j.created_at OR j.promoted)
           AND j.queue = in_queue AND j.priority = tier AND j.org > at_org
         ORDER BY j.org LIMIT 1;
      ELSE
        SELECT j.org INTO lane.org FROM tenure.jobs j
         WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
           AND (j.ready_at <= j.created_at OR j.promoted)
           AND j.queue = in_queue AND j.priority = tier AND j.org > at_org
           AND j.org < least(stone, past)
         ORDER BY j.org LIMIT 1;
      END IF;
      IF FOUND THEN  -- one that is not remembered
        lane.since_ready := -1;
        lane.since_id := none;
        lane.mixed := false;
      ELSIF stone < coalesce(past, stone || chr(1)) THEN
        lane.org := stone;
        lane.mixed := (stones -> n -> 3) IS NOT NULL;
        lane.since_ready := least((stones -> n ->> 1)::bigint,
                                  moment - coalesce((stones -> n ->> 3)::bigint, 2000));
        lane.since_id := CASE WHEN lane.since_ready = (stones -> n ->> 1)::bigint
                              THEN (stones -> n ->> 2)::uuid ELSE none END;
        PERFORM 1 FROM tenure.jobs j
          WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
            AND (j.ready_at <= j.created_at OR j.promoted)
            AND j.queue = in_queue AND j.priority = tier AND j.org = stone
            AND (j.ready_at, j.id) > (lane.since_ready, lane.since_id)
          LIMIT 1;
      ELSE
        EXIT;
      END IF;
      at_org := lane.org;
      IF FOUND THEN
        seen := seen || lane;
        IF cardinality(seen) >= most THEN
          RETURN seen;
        END IF;
      END IF;
      EXIT WHEN leg = 2 AND at_org = turn;
    END LOOP;
  END LOOP;
  RETURN seen;
END $$;

-- Lock due rows of one priority's lanes: equal shares in turn, and then what some leave to the
-- others. Rows another claim is just taking are passed over, never waited for.
CREATE FUNCTION tenure.pick(in_queue text, due tenure.lane[], most integer, types text[])
RETURNS tenure.harvest LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  basket tenure.harvest;
  hungry tenure.lane[] := due;
  again tenure.lane[];
  lane tenure.lane;
  share integer;
  got tenure.harvest;
  last bigint;
BEGIN
  basket.ids := '{}';
  WHILE cardinality(hungry) > 0 AND cardinality(basket.ids) < most LOOP
    share := greatest(1, (most - cardinality(basket.ids)) / cardinality(hungry));
    again := '{}';
    FOREACH lane IN ARRAY hungry LOOP
      share := least(share, most - cardinality(basket.ids));
      EXIT WHEN share = 0;
      got.ids := NULL;
      IF NOT lane.mixed THEN
        SELECT array_agg(p.id), max(p.ready_at) INTO got.ids, last
          FROM (SELECT j.id, j.ready_at FROM tenure.jobs j
                 WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
                   AND (j.ready_at <= j.created_at OR j.promoted)
                   AND j.queue = in_queue AND j.priority = lane.priority AND j.org = lane.org
                   AND (j.ready_at, j.id) > (lane.since_ready, lane.since_id)
                   AND (types IS NULL OR j.type = ANY (types))
                 ORDER BY j.ready_at, j.id LIMIT share FOR UPDATE SKIP LOCKED) p;
        IF cardinality(got.ids) = share AND cardinality(hungry) > 1 THEN
          lane.since_ready := last;
          lane.since_id := got.ids[share];
          again := again || lane;
        END IF;
      END IF;
      IF got.ids IS NULL THEN  -- it is mixed, or had rows and none of them was for us
        got := tenure.walk(in_queue, lane, share, types);
        basket.report := coalesce(basket.report, '[]') || got.report;
      END IF;
      basket.ids := basket.ids || got.ids;
    END LOOP;
    hungry := again;
  END LOOP;
  RETURN basket;
END $$;

-- The same in a lane in which others have jobs too: at most 4,000 rows are looked at, and those of
-- the others are only read.
CREATE FUNCTION tenure.walk(in_queue text, lane tenure.lane, most integer, types text[])
RETURNS tenure.harvest LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  basket tenure.harvest := tenure.reap(ARRAY(
    SELECT ROW(j.id, j.ready_at, j.type, types IS NULL OR j.type = ANY (types))::tenure.candidate
      FROM tenure.jobs j
     WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
       AND (j.ready_at <= j.created_at OR j.promoted)
       AND j.queue = in_queue AND j.priority = lane.priority AND j.org = lane.org
       AND (j.ready_at, j.id) > (lane.since_ready, lane.since_id)
     ORDER BY j.ready_at, j.id LIMIT 4000), most);
BEGIN
  basket.report := basket.report || jsonb_build_object('lane', jsonb_build_array(
    lane.priority, lane.org));
  RETURN basket;
END $$;

-- Jobs of a queue that were to run later and whose time has come, in the same way.
CREATE FUNCTION tenure.walk_later(in_queue text, place jsonb, most integer, types text[],
  moment bigint) RETURNS tenure.harvest LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  since bigint := CASE WHEN place IS NULL THEN -1
                       ELSE least((place ->> 0)::bigint, moment - 2000) END;
  since_id uuid := CASE WHEN since = (place ->> 0)::bigint THEN (place ->> 1)::uuid
                        ELSE '00000000-0000-0000-0000-000000000000' END;
BEGIN
  RETURN tenure.reap(ARRAY(
    SELECT ROW(j.id, j.ready_at, j.type, types IS NULL OR j.type = ANY (types))::tenure.candidate
      FROM tenure.jobs j
     WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
       AND j.ready_at > j.created_at AND NOT j.promoted
       AND j.queue = in_queue AND j.ready_at <= moment AND (j.ready_at, j.id) > (since, since_id)
     ORDER BY j.ready_at, j.id LIMIT 4000), most);
END $$;

-- Lock what fits of what was looked at. There is a place to go on from when all that fits was locked.
CREATE FUNCTION tenure.reap(crop tenure.candidate[], most integer) RETURNS tenure.harvest
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  basket tenure.harvest;
  last CONSTANT tenure.candidate := crop[cardinality(crop)];
  wanted CONSTANT uuid[] := ARRAY(SELECT c.id FROM unnest(crop) c WHERE c.fits);
BEGIN
  basket.ids := ARRAY(
    SELECT j.id FROM tenure.jobs j
     WHERE j.id = ANY (wanted[:most]) AND j.status = 'queued' AND j.waits = 0
     ORDER BY j.id FOR UPDATE SKIP LOCKED);
  SELECT jsonb_build_object(
           'place', CASE WHEN cardinality(basket.ids) = cardinality(wanted) AND last.id IS NOT NULL
                         THEN jsonb_build_array(last.ready_at, last.id) END,
           'more', cardinality(crop) = 4000 OR cardinality(wanted) > most,
           'passed', coalesce(jsonb_object_agg(p.type, p.jobs), '{}'))
    INTO basket.report
    FROM (SELECT c.type, count(*) AS jobs FROM unnest(crop) c WHERE NOT c.fits GROUP BY c.type) p;
  RETURN basket;
END $$;

-- Suspects that are due: they run alone, so neither lanes nor turns matter.
CREATE FUNCTION tenure.round_up(in_queue text, room integer, types text[], moment bigint)
RETURNS tenure.harvest LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  basket tenure.harvest;
BEGIN
  IF NOT EXISTS (SELECT 1 FROM tenure.queues q
                  WHERE q.name = in_queue AND q.paused_at IS NOT NULL) THEN
    basket.report := '[0]';
    basket.ids := ARRAY(
      SELECT j.id FROM tenure.jobs j
       WHERE j.status = 'queued' AND j.waits = 0 AND (j.crashes > 0 OR j.losses >= 3)
         AND j.queue = in_queue AND j.ready_at <= moment AND (types IS NULL OR j.type = ANY (types))
       ORDER BY j.ready_at, j.id LIMIT room FOR UPDATE SKIP LOCKED);
  END IF;
  RETURN basket;
END $$;

-- One queue's part of a claim: lock up to `room` due rows; `known` is what the worker remembers of the
-- queue. No ids: it is paused. The report begins with the queue's rewind.
CREATE FUNCTION tenure.survey(in_queue text, known jsonb, room integer, types text[],
  moment bigint, promoting boolean) RETURNS tenure.harvest LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  basket tenure.harvest;
  low CONSTANT smallint := coalesce((known ->> 'low')::smallint, 11);
  high CONSTANT smallint := coalesce((known ->> 'high')::smallint, 11);
  queue record;
  tiers smallint[];
  tier smallint;
  seen tenure.lane[];
  wanted integer;
  crop tenure.harvest;
BEGIN
  -- The priorities it has rows of: mostly those remembered, and none below, above or in between.
  SELECT q.paused_at IS NOT NULL AS paused, coalesce(q.rewind_no, 0) AS rewind,
         low < high OR EXISTS (
           SELECT 1 FROM tenure.jobs j
            WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
              AND (j.ready_at <= j.created_at OR j.promoted)
              AND j.queue = in_queue AND j.priority < low) OR EXISTS (
           SELECT 1 FROM tenure.jobs j
            WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
              AND (j.ready_at <= j.created_at OR j.promoted)
              AND j.queue = in_queue AND j.priority > high) AS others,
         EXISTS (
           SELECT 1 FROM tenure.jobs j
            WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
              AND j.ready_at > j.created_at AND NOT j.promoted
              AND j.queue = in_queue AND j.ready_at <= moment
              AND j.ready_at > CASE
                    WHEN known -> 'later' IS NULL
                      OR coalesce(q.rewind_no, 0) <> coalesce((known ->> 'rewind')::bigint, 0) THEN -1
                    ELSE least((known -> 'later' ->> 0)::bigint, moment - 2000) END) AS later,
         EXISTS (
           SELECT 1 FROM tenure.jobs j
            WHERE j.status = 'queued' AND j.waits = 0 AND (j.crashes > 0 OR j.losses >= 3)
              AND j.queue = in_queue AND j.ready_at <= moment) AS suspects
    INTO queue FROM (SELECT 1) one LEFT JOIN tenure.queues q ON q.name = in_queue;
  IF queue.paused THEN
    RETURN NULL;
  ELSIF queue.rewind <> coalesce((known ->> 'rewind')::bigint, 0) THEN
    known := jsonb_build_object('turns', known -> 'turns');
  END IF;
  tiers := CASE WHEN low <= 10 THEN ARRAY[low] ELSE '{}' END;
  IF queue.others THEN
    tiers := ARRAY(
      SELECT p::smallint FROM generate_series(1, 10) p
       WHERE known -> 'lanes' ? p::text OR (
             SELECT true FROM tenure.jobs j
              WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
                AND (j.ready_at <= j.created_at OR j.promoted)
                AND j.queue = in_queue AND j.priority = p::smallint LIMIT 1));
  END IF;
  basket.ids := '{}';
  basket.report := jsonb_build_array(queue.rewind);
  FOREACH tier IN ARRAY tiers LOOP
    EXIT WHEN cardinality(basket.ids) >= room;
    wanted := least(room - cardinality(basket.ids), 256);
    seen := tenure.lanes(in_queue, tier, coalesce(known -> 'turns' ->> tier::text, ''),
                         known -> 'lanes' -> tier::text, wanted, moment);
    CONTINUE WHEN cardinality(seen) = 0;
    crop := tenure.pick(in_queue, seen, room - cardinality(basket.ids), types);
    basket.ids := basket.ids || crop.ids;
    IF crop.report IS NOT NULL THEN  -- some had nothing for us: how far we have looked
      basket.report := basket.report || crop.report;
      IF cardinality(seen) >= wanted THEN
        basket.report := basket.report || jsonb_build_object(
          'cut', jsonb_build_array(tier, seen[cardinality(seen)].org));
      END IF;
    END IF;
  END LOOP;
  IF queue.suspects THEN
    basket.report := basket.report || '{"suspects": true}'::jsonb;
  END IF;
  IF queue.later AND promoting THEN
    crop := tenure.walk_later(in_queue, known -> 'later', 1000, types, moment);
    IF cardinality(basket.ids) + cardinality(crop.ids) > room THEN
      -- More than there is room for: into their lanes, where priority and turn decide.
      UPDATE tenure.jobs j SET promoted = true WHERE j.id = ANY (crop.ids);
      RETURN tenure.survey(in_queue, known, room, types, moment, false);
    END IF;
    basket.ids := basket.ids || crop.ids;
    basket.report := basket.report || crop.report;
  END IF;
  RETURN basket;
END $$;

-- Grant leases: up to `mosts` of each queue and `total` in all; due, not paused, of these types (NULL:
-- any), by priority, then orgs in turn, then due time, then id; `suspects`: of those instead. `memory`
-- holds for each queue what the worker remembers: "lanes" (priority -> stones, see tenure.lanes) and
-- "low", "high" (the first and last such priority), "later" ([ready_at, id]: what was to run later is
-- taken up to there), "turns" (priority -> org served last), "rewind" (when the queue's own differs, a
-- job has gone back to an old place: places are forgotten).
--
-- Granted jobs come back with their lease_no. Besides, a row with lease_no -1 for each queue that is
-- not paused says where it stands: ready_at is the time of this claim, attempts 1 when there was room
-- to spare, payload the report: [rewind, …], then an object for each lane (without "lane": for what was
-- to run later) that had rows which are not for this worker: how far it is done with, whether there is
-- more, what was passed over; {"cut": [priority, org]} where lanes after that org were not looked at
-- because of such ones; {"suspects": true} when there are some. A claim that finds nothing takes no
-- lock and writes nothing.
CREATE FUNCTION tenure.claim_jobs(by_worker integer, by_id text, queues text[], mosts integer[],
  total integer, memory jsonb, types text[], suspects boolean, audit text, now_ms bigint)
RETURNS TABLE (id uuid, lease_no integer, type text, payload json, attempts integer,
  max_attempts integer, crashes integer, timeout_ms bigint, queue text, priority tenure.priority,
  category text, org text, project text, actor_type text, actor_id text, request_id text,
  correlation_id text, traceparent text, key text, parent uuid, scheduled_at bigint,
  created_at bigint, ready_at bigint, losses integer) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  trail CONSTANT text := CASE WHEN audit = 'all' THEN audit ELSE tenure.audited(audit) END;
  picked uuid[] := '{}';
  room integer;
  basket tenure.harvest;
  looked text[] := '{}';   -- queues, and for each whether there was room to spare, and its report
  spare integer[] := '{}';
  reports jsonb[] := '{}';
BEGIN
  FOR n IN 1 .. cardinality(queues) LOOP
    room := least(mosts[n], total - cardinality(picked));
    CONTINUE WHEN room <= 0;
    IF suspects THEN
      basket := tenure.round_up(queues[n], room, types, moment);
    ELSE
      basket := tenure.survey(queues[n], coalesce(memory -> queues[n], '{}'), room, types, moment,
                              true);
    END IF;
    CONTINUE WHEN basket.ids IS NULL;
    picked := picked || basket.ids;
    looked := looked || queues[n];
    spare := spare || (cardinality(basket.ids) < room)::integer;
    reports := array_append(reports, basket.report);
  END LOOP;
  IF picked <> '{}' THEN
    -- Nobody may declare this worker dead between here and the commit; it may renew. A dead one gets
    -- no report: it would take what it did not get for taken.
    PERFORM 1 FROM tenure.workers w
      WHERE w.no = by_worker AND w.id = by_id AND w.dead_at IS NULL FOR KEY SHARE;
    IF NOT FOUND THEN
      RETURN;
    END IF;
  END IF;
  FOR n IN 1 .. cardinality(looked) LOOP
    lease_no := -1;
    attempts := spare[n];
    queue := looked[n];
    ready_at := moment;
    payload := reports[n];
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
     WHERE j.id = ANY (picked)
    RETURNING j.id, j.lease_no, j.type, j.payload, j.attempts, j.max_attempts, j.crashes,
      j.timeout_ms, j.queue, j.priority, j.category, j.org, j.project, j.actor_type, j.actor_id,
      j.request_id, j.correlation_id, j.traceparent, j.key, j.parent, j.scheduled_at,
      j.created_at, j.ready_at, j.losses
  ), noted AS (
    INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
      actor_id, request_id, correlation_id, worker)
    SELECT moment, 'job.started', g.id, g.type, g.attempts, g.lease_no, g.org, g.project,
           g.actor_type, g.actor_id, g.request_id, g.correlation_id, by_worker
      FROM granted g WHERE trail = 'all'
  )
  SELECT * FROM granted g;
END $$;

-- How long until the next job of these queues is due that was to run later, in milliseconds. `since`
-- (queue -> time) says up to when claims have looked: what was due by then and is still here is not
-- for this worker, or there was no room for it.
CREATE FUNCTION tenure.next_due(queues text[], since jsonb, now_ms bigint) RETURNS bigint
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
  looked bigint;
  soonest bigint;
BEGIN
  FOR n IN 1 .. cardinality(queues) LOOP
    CONTINUE WHEN EXISTS (
      SELECT 1 FROM tenure.queues q WHERE q.name = queues[n] AND q.paused_at IS NOT NULL);
    looked := CASE jsonb_typeof(since -> queues[n])
                WHEN 'number' THEN (since ->> queues[n])::bigint ELSE -1 END;
    soonest := least(soonest, (
      SELECT j.ready_at FROM tenure.jobs j
       WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
         AND j.ready_at > j.created_at AND NOT j.promoted
         AND j.queue = queues[n] AND j.ready_at > looked ORDER BY j.ready_at LIMIT 1), (
      SELECT j.ready_at FROM tenure.jobs j
       WHERE j.status = 'queued' AND j.waits = 0 AND (j.crashes > 0 OR j.losses >= 3)
         AND j.queue = queues[n] AND j.ready_at > looked ORDER BY j.ready_at LIMIT 1));
  END LOOP;
  RETURN CASE WHEN soonest IS NOT NULL THEN greatest(0, soonest - moment) END;
END $$;

-- Lanes with due rows, and what was to run later and is due (priority 0), looked at from their
-- beginning: what a claim with a memory passes over.
CREATE FUNCTION tenure.due_lanes(in_queue text, now_ms bigint)
RETURNS TABLE (priority smallint, org text, first_ready bigint) LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
BEGIN
  FOR tier IN 1 .. 10 LOOP
    RETURN QUERY
    SELECT l.priority, l.org, (
             SELECT j.ready_at FROM tenure.jobs j
              WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
                AND (j.ready_at <= j.created_at OR j.promoted)
                AND j.queue = in_queue AND j.priority = l.priority AND j.org = l.org
              ORDER BY j.ready_at LIMIT 1)
      FROM unnest(tenure.lanes(in_queue, tier::smallint, '', NULL, 256, moment)) l;
  END LOOP;
  RETURN QUERY
  SELECT 0::smallint, '', j.ready_at FROM tenure.jobs j
   WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
     AND j.ready_at > j.created_at AND NOT j.promoted
     AND j.queue = in_queue AND j.ready_at <= moment
   ORDER BY j.ready_at LIMIT 1;
END $$;
