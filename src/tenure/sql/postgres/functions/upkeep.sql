-- -- upkeep --------------------------------------------------------------------------------------
-- What removes finished jobs and events, and what changes tables, is owned by whoever migrates and
-- runs with that role's rights: a worker needs no DDL and cannot shorten the trail. The owner's floors
-- (tenure.settings) hold whatever a worker asks for.
-- Upkeep waits for a lock a tenth of a second, once: whoever queues for one holds up everybody
-- behind. What could not be done is left to the next pass.

-- Whose turn it is: one pass in so many milliseconds for the whole fleet, whoever asks first. Not by
-- an advisory lock, which any login could hold. A time far ahead is a clock that was set back.
CREATE FUNCTION tenure.take_turn(in_name text, every_ms bigint, now_ms bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  moment bigint := coalesce(now_ms, tenure.clock());
BEGIN
  PERFORM 1 FROM tenure.upkeep u
    WHERE u.name = in_name AND u.at NOT BETWEEN moment - every_ms + 1 AND moment + every_ms
    FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  UPDATE tenure.upkeep u SET at = moment WHERE u.name = in_name;
  RETURN true;
END $$;

-- The newest time up to which the owner lets something be removed, when `asked` for.
CREATE FUNCTION tenure.floored(in_name text, asked bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT least(asked, (SELECT tenure.clock() - s.value::bigint FROM tenure.settings s
                        WHERE s.name = in_name))
$$;

-- The partitions of the days around `now_ms`; how many were made. Rows that have gone to the
-- partition for everything else meanwhile are moved.
CREATE FUNCTION tenure.add_partitions(now_ms bigint) RETURNS integer LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms'
SET timezone = 'UTC' AS $$
DECLARE
  first_day bigint := coalesce(now_ms, tenure.clock()) / 86400000;
  made integer := 0;
  name text;
BEGIN
  PERFORM 1 FROM tenure.upkeep u WHERE u.name = 'partitions' FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
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
        'FOR VALUES FROM (%L) TO (%L)', 'events_' || name, day::bigint * 86400000,
        (day + 1)::bigint * 86400000);
      made := made + 1;
    END IF;
  END LOOP;
  RETURN made;
EXCEPTION WHEN lock_not_available THEN
  RETURN 0;
END $$;

-- The partitions of which nothing needs to be kept by their days: history that began before
-- `keep_history`, events of days that ended before `keep_events`. Oldest first.
CREATE FUNCTION tenure.old_days(keep_history bigint, keep_events bigint)
RETURNS TABLE (partition text) LANGUAGE sql STABLE
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
  SELECT p.relname FROM (
    SELECT c.relname::text, right(c.relname, 8) AS day, c.relname LIKE 'history%' AS finished
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent IN ('tenure.history'::regclass, 'tenure.events'::regclass)
       AND c.relname ~ '_[0-9]{8}$') p
   WHERE (to_date(p.day, 'YYYYMMDD') - date '1970-01-01' + 1)::bigint * 86400000
         < CASE WHEN p.finished THEN tenure.floored('keep_history', keep_history)
                ELSE tenure.floored('keep_events', keep_events) END
   ORDER BY p.day, p.relname
$$;

-- Whether anything of a day of history is to be kept: a completion since, a task with terms of its own,
-- a job that waits for one of its jobs. One or two steps of an index a task, however long the day was.
CREATE FUNCTION tenure.still_wanted(partition text, since bigint, own_terms text[]) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
  day CONSTANT bigint := to_date(right(partition, 8), 'YYYYMMDD') - date '1970-01-01';
  task text;
  newest bigint;
BEGIN
  LOOP
    EXECUTE format('SELECT min(h.type) FROM tenure.%I h WHERE $1 IS NULL OR h.type > $1', partition)
      INTO task USING task;
    EXIT WHEN task IS NULL;
    EXECUTE format('SELECT max(h.completed_at) FROM tenure.%I h WHERE h.type = $1', partition)
      INTO newest USING task;
    IF newest >= since OR task = ANY (own_terms) THEN
      RETURN true;
    END IF;
  END LOOP;
  RETURN EXISTS (
    SELECT 1 FROM tenure.edges e
     WHERE e.needs >= tenure.first_id(day) AND e.needs < tenure.first_id(day + 1)
       AND EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.id = e.job));
END $$;

-- Drop one day, in a transaction of its own: 'dropped', 'wanted', or 'held' when somebody keeps us
-- from it. An old job may be ending this moment: when nobody writes any more, look again.
CREATE FUNCTION tenure.drop_day(partition text, keep_history bigint, keep_events bigint,
  own_terms text[]) RETURNS text LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $$
DECLARE
  finished CONSTANT boolean := partition LIKE 'history%';
  since CONSTANT bigint := tenure.floored('keep_history', keep_history);
BEGIN
  IF NOT EXISTS (SELECT 1 FROM tenure.old_days(keep_history, keep_events) o
                  WHERE o.partition = drop_day.partition)
     OR (finished AND tenure.still_wanted(partition, since, own_terms)) THEN
    RETURN 'wanted';
  END IF;
  IF finished THEN
    LOCK TABLE ONLY tenure.history IN ACCESS EXCLUSIVE MODE;
    IF tenure.still_wanted(partition, since, own_terms) THEN
      RETURN 'wanted';
    END IF;
  ELSE
    LOCK TABLE ONLY tenure.events IN ACCESS EXCLUSIVE MODE;
  END IF;
  EXECUTE format('DROP TABLE tenure.%I', partition);
  RETURN 'dropped';
EXCEPTION WHEN lock_not_available THEN
  RETURN 'held';
END $$;

-- Finished jobs row by row, by task and age (walks history_age), or all but the last `keep_last`. A result
-- stays while a job that ran after it may still read it, and is passed over: it must not hide the rest.
CREATE FUNCTION tenure.prune_history(in_type text, before bigint, keep_last integer, most integer)
RETURNS bigint LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
  past CONSTANT bigint := tenure.floored('keep_history', before);
  old uuid[];
  gone bigint;
BEGIN
  IF keep_last IS NULL THEN
    old := ARRAY(SELECT h.id FROM tenure.history h WHERE h.type = in_type AND h.completed_at < past
                    AND NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs j ON j.id = d.job
                                     WHERE d.needs = h.id)
                  ORDER BY h.completed_at LIMIT most);
  ELSE
    old := ARRAY(SELECT h.id FROM (SELECT h.id FROM tenure.history h WHERE h.type = in_type
                                      AND (past IS NULL OR h.completed_at < past)
                                    ORDER BY h.completed_at DESC OFFSET keep_last) h
                  WHERE NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs j ON j.id = d.job
                                     WHERE d.needs = h.id) LIMIT most);
  END IF;
  DELETE FROM tenure.history h
   WHERE h.id = ANY (old)
     AND NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs j ON j.id = d.job
                      WHERE d.needs = h.id);
  GET DIAGNOSTICS gone = ROW_COUNT;
  RETURN gone;
END $$;

-- Dead jobs past their time, of these tasks or of all others; or of a task all but the last so many. One
-- step of jobs_death a group where none is. Those somebody waits for stay: they may yet be replayed.
CREATE FUNCTION tenure.prune_dead(in_types text[], others boolean, before bigint, keep_last integer,
  most integer) RETURNS bigint LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
  at tenure.death_group;
  old uuid[] := '{}';
BEGIN
  SELECT j.queue, j.type, j.death INTO at FROM tenure.jobs j
   WHERE j.completed_at IS NOT NULL ORDER BY j.queue, j.type, j.death LIMIT 1;
  WHILE at.queue IS NOT NULL AND (keep_last IS NOT NULL OR cardinality(old) < most) LOOP
    IF (at.type = ANY (in_types)) <> others THEN
      old := old || ARRAY(
        SELECT j.id FROM tenure.jobs j
         WHERE j.completed_at IS NOT NULL AND j.queue = at.queue AND j.type = at.type
           AND j.death = at.death AND (keep_last IS NOT NULL OR j.completed_at < before)
           AND (keep_last IS NOT NULL OR NOT EXISTS (
                 SELECT 1 FROM tenure.edges d JOIN tenure.jobs w ON w.id = d.job
                  WHERE d.needs = j.id))
         ORDER BY CASE WHEN keep_last IS NOT NULL THEN -j.completed_at ELSE j.completed_at END
         LIMIT most + coalesce(keep_last, 0));
    END IF;
    at := tenure.next_death(at.queue, at.type, at.death);
  END LOOP;
  IF keep_last IS NOT NULL THEN
    old := ARRAY(SELECT j.id FROM tenure.jobs j WHERE j.id = ANY (old)
                  ORDER BY j.completed_at DESC, j.id DESC LIMIT most OFFSET keep_last);
  END IF;
  old := ARRAY(
    SELECT j.id FROM tenure.jobs j
     WHERE j.id = ANY (old) AND j.completed_at IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs w ON w.id = d.job
                        WHERE d.needs = j.id)
     ORDER BY j.id LIMIT most FOR UPDATE SKIP LOCKED);
  DELETE FROM tenure.steps s WHERE s.job_id = ANY (old);
  DELETE FROM tenure.jobs j WHERE j.id = ANY (old);
  RETURN cardinality(old);
END $$;

-- Edges of jobs that are no more: the next page of jobs that have some, after `after_job`. How many
-- went, and where the walk stands; NULL at its end.
CREATE FUNCTION tenure.prune_edges(after_job uuid, most integer)
RETURNS TABLE (gone bigint, job uuid) LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_seqscan = off
SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  page uuid[] := ARRAY(SELECT e.job FROM tenure.edges e WHERE e.job > after_job
                        ORDER BY e.job LIMIT most);
BEGIN
  DELETE FROM tenure.edges e WHERE e.job = ANY (ARRAY(
    SELECT DISTINCT p.job FROM unnest(page) p(job)
     WHERE NOT EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.id = p.job)
       AND NOT EXISTS (SELECT 1 FROM tenure.history h WHERE h.id = p.job)));
  GET DIAGNOSTICS gone = ROW_COUNT;
  job := CASE WHEN cardinality(page) = most THEN page[most] END;
  RETURN NEXT;
END $$;

-- Events outside the partitions by day, which go as a whole.
CREATE FUNCTION tenure.prune_events(before bigint, most integer) RETURNS bigint LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  past CONSTANT bigint := tenure.floored('keep_events', before);
  gone bigint;
BEGIN
  DELETE FROM tenure.events_other e
   WHERE e.seq = ANY (ARRAY(SELECT o.seq FROM (SELECT o.seq, o.at FROM tenure.events_other o
                                                ORDER BY o.seq LIMIT 5 * most) o
                             WHERE o.at < past LIMIT most));
  GET DIAGNOSTICS gone = ROW_COUNT;
  RETURN gone;
END $$;

-- They run with their owner's rights, so not everybody who may look into the schema may call them.
REVOKE ALL ON FUNCTION tenure.add_partitions, tenure.old_days, tenure.drop_day, tenure.prune_history,
  tenure.prune_events FROM PUBLIC;

-- -- events --------------------------------------------------------------------------------------

-- The last number an event has drawn, and then who may still be writing: their numbers are not all
-- visible, and no event up to `last` can appear any more once all of them have ended. An INSERT locks
-- the table before it draws a number, so this is exact; held snapshots do not matter. A prepared
-- transaction keeps its lock.
CREATE FUNCTION tenure.event_writers() RETURNS TABLE (last bigint, writers text[])
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  last := coalesce(pg_sequence_last_value('tenure.events_seq'), 0);
  writers := ARRAY(
    SELECT l.virtualtransaction FROM pg_locks l
     WHERE l.locktype = 'relation' AND l.relation = 'tenure.events'::regclass AND l.granted
       AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
       AND l.mode = 'RowExclusiveLock');
  RETURN NEXT;
END $$;
