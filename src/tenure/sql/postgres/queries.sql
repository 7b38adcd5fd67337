-- Tenure's statements on PostgreSQL, in the order of store.py. What changes anything and takes
-- more than one step is a function (functions/); here it is only called.
--
-- How PostgreSQL differs: many writers, so rows are locked (FOR UPDATE, in id order) and a claim
-- passes over what another one holds (SKIP LOCKED). Batches travel as arrays or one JSON text.
-- Ids go in as uuid and come back as uuid; the driver's side turns them into ULIDs.

-- name: add_queue
INSERT INTO tenure.queues (name, created_at)
VALUES (%(queue)s, coalesce(%(now)s, tenure.clock())) ON CONFLICT DO NOTHING;

-- One job without a key, which is what `task.enqueue` mostly sends. How many were stored.
-- name: enqueue_job
SELECT tenure.enqueue_job(%(id)s::uuid, %(type)s, %(queue)s, %(priority)s::smallint, %(org)s,
  %(at_ms)s::bigint, %(delay_ms)s::bigint, %(max_attempts)s::integer, %(timeout_ms)s::bigint,
  %(category)s, %(project)s, %(actor_type)s, %(actor_id)s, %(request_id)s, %(correlation_id)s,
  %(traceparent)s, %(parent)s::uuid, %(after_failed)s, %(payload)s::json, %(remark)s::json,
  %(audit)s, %(now)s::bigint);

-- The same, and its hint after it.
-- name: enqueue_job_and_hint
CALL tenure.enqueue_job_and_hint(%(id)s::uuid, %(type)s, %(queue)s, %(priority)s::smallint, %(org)s,
  %(at_ms)s::bigint, %(delay_ms)s::bigint, %(max_attempts)s::integer, %(timeout_ms)s::bigint,
  %(category)s, %(project)s, %(actor_type)s, %(actor_id)s, %(request_id)s, %(correlation_id)s,
  %(traceparent)s, %(parent)s::uuid, %(after_failed)s, %(payload)s::json, %(remark)s::json,
  %(audit)s, %(now)s::bigint, %(channel)s, NULL);

-- Many jobs of the same terms without keys and dependencies: ids, delays (NULL: none) and payloads
-- side by side. None of them when history has one; an error when a live one has an id of theirs.
-- name: enqueue_plain
WITH job AS (
  INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, max_attempts,
    timeout_ms, category, project, actor_type, actor_id, request_id, correlation_id, traceparent,
    parent, after_failed, scheduled_at, asked_at, created_at, updated_at, payload)
  SELECT r.id, %(type)s, 'queued', %(queue)s, %(priority)s, %(org)s,
    t.now + coalesce(r.delay_ms, 0),
    %(max_attempts)s, %(timeout_ms)s, %(category)s, %(project)s, %(actor_type)s, %(actor_id)s,
    %(request_id)s, %(correlation_id)s, %(traceparent)s, %(parent)s::uuid, %(after_failed)s,
    t.now + coalesce(r.delay_ms, 0), CASE WHEN r.delay_ms > 0 THEN t.now + r.delay_ms END, t.now,
    t.now, r.payload
    FROM ROWS FROM (unnest(%(ids)s::uuid[]), unnest(%(delays)s::bigint[]),
                    json_array_elements(%(payloads)s::json)) AS r(id, delay_ms, payload),
         (SELECT coalesce(%(now)s, tenure.clock()) AS now) t
   WHERE tenure.finished(%(ids)s::uuid[]) = '{}'
  RETURNING id, created_at),
named AS (  -- a backup may have been restored since the sender saw the name committed
  INSERT INTO tenure.queues (name, created_at)
  SELECT %(queue)s, t.now FROM (SELECT coalesce(%(now)s, tenure.clock()) AS now) t
   WHERE NOT EXISTS (SELECT 1 FROM tenure.queues q WHERE q.name = %(queue)s)
  ON CONFLICT DO NOTHING),
noted AS (
  INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
    actor_id, request_id, correlation_id, data)
  SELECT j.created_at, 'job.enqueued', j.id, %(type)s, 0, 0, %(org)s, %(project)s, %(actor_type)s,
    %(actor_id)s, %(request_id)s, %(correlation_id)s, %(remark)s::json
    FROM job j WHERE tenure.audited(%(audit)s) = 'all' OR %(remark)s IS NOT NULL)
SELECT count(*) FROM job;

-- name: enqueue_jobs
SELECT id, duplicate, status
  FROM tenure.enqueue_jobs(%(jobs)s::json, %(again)s, %(audit)s, %(now)s, true);

-- The same on a caller's connection: no row, and nothing done, when that is another database.
-- name: enqueue_here
SELECT id, duplicate, status
  FROM tenure.enqueue_jobs(%(jobs)s::json, %(again)s, %(audit)s, %(now)s, false)
 WHERE tenure.home() = %(home)s;

-- name: home
SELECT tenure.home();

-- The same worker row once more when the reply to its first insert was lost.
-- name: register
INSERT INTO tenure.workers AS w
  (id, host, boot, pid, pid_started, lease_ms, started_at, seen_at, meta)
SELECT %(id)s, %(host)s, %(boot)s, %(pid)s, %(pid_started)s, %(lease_ms)s, t.now, t.now,
       %(meta)s::json FROM (SELECT coalesce(%(now)s, tenure.clock()) AS now) t
ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at RETURNING w.no;

-- name: claim
SELECT * FROM tenure.claim_jobs(%(worker)s, %(worker_id)s, %(queues)s, %(mosts)s, %(total)s,
  %(memory)s::jsonb, %(types)s::text[], %(suspects)s, %(audit)s, %(now)s);

-- name: next_due
SELECT tenure.next_due(%(queues)s, %(since)s::jsonb, %(now)s);

-- name: due_lanes
SELECT priority, org, first_ready FROM tenure.due_lanes(%(queue)s, %(now)s);

-- Returns what was not accepted.
-- name: finish_completed
SELECT id, lease_no FROM tenure.complete_runs(%(worker)s, %(worker_id)s, %(ids)s::uuid[],
  %(lease_nos)s::integer[], %(durations)s::bigint[], %(results)s::json, %(audit)s, %(now)s);

-- The same.
-- name: finish
SELECT id, lease_no FROM tenure.finish_runs(%(worker)s, %(worker_id)s, %(rows)s::json,
  %(children)s::json, %(strict)s, %(audit)s, %(now)s);

-- Of the rows that did not pass the fence: was this very finish accepted before? Its first try may
-- have been committed and not be on disk, or not on the standby: `flush` waits until it is.
-- name: finish_repeated
SELECT r.id, r.lease_no FROM unnest(%(ids)s::uuid[], %(lease_nos)s::integer[]) r(id, lease_no)
 WHERE EXISTS (SELECT 1 FROM tenure.workers w WHERE w.no = %(worker)s AND w.id = %(worker_id)s)
   AND ((SELECT h.lease_no = r.lease_no AND h.worker = %(worker)s FROM tenure.history h
          WHERE h.id = r.id LIMIT 1)
        OR (SELECT j.finish_no = r.lease_no FROM tenure.jobs j WHERE j.id = r.id LIMIT 1));

-- Nothing is counted: the commit of this waits for everything that was committed before.
-- name: flush
SELECT setval('tenure.flushes', 1);

-- name: settled
SELECT 1 FROM tenure.history h
 WHERE h.id = %(id)s::uuid AND h.lease_no = %(lease_no)s AND h.status = 'completed';

-- name: progress
UPDATE tenure.jobs j
   SET progress = r.progress, updated_at = coalesce(%(now)s, tenure.clock())
  FROM json_to_recordset(%(rows)s::json) AS r(id uuid, lease_no integer, progress json)
 WHERE j.id = ANY (%(ids)s::uuid[]) AND j.id = r.id AND j.lease_no = r.lease_no
   AND coalesce(j.worker, 0) = %(worker)s
   AND EXISTS (SELECT 1 FROM tenure.workers w WHERE w.no = %(worker)s AND w.id = %(worker_id)s)
RETURNING j.id, j.lease_no;

-- name: steps
SELECT name, result FROM tenure.steps WHERE job_id = %(job)s::uuid;

-- name: save_step
SELECT tenure.store_step(%(worker)s, %(worker_id)s, %(job)s::uuid, %(lease_no)s, %(name)s,
  %(result)s::json, %(now)s);

-- name: results
SELECT d.needs, coalesce(h.status, j.status, 'gone'), h.result
  FROM tenure.edges d LEFT JOIN tenure.history h ON h.id = d.needs
                      LEFT JOIN tenure.jobs j ON j.id = d.needs
 WHERE d.job = %(job)s::uuid ORDER BY d.needs;

-- name: anything_waits
SELECT 1 FROM tenure.edges WHERE NOT met LIMIT 1;

-- name: settle_dependants
SELECT changed, job, needs FROM tenure.settle_dependants(
  %(job)s::uuid, %(needs)s::uuid, %(most)s, %(now)s);

-- The worker is alive, and what it holds: one row each, one of NULLs when that is nothing, none
-- when it was declared dead.
-- name: renew
WITH alive AS (
  UPDATE tenure.workers SET beat = beat + 1, seen_at = coalesce(%(now)s, tenure.clock()),
                            meta = coalesce(%(meta)s::json, meta)
   WHERE no = %(worker)s AND id = %(worker_id)s AND dead_at IS NULL RETURNING no)
SELECT j.id, j.lease_no, CASE WHEN j.cancel_at IS NOT NULL THEN coalesce(j.cancel_reason, '') END
  FROM alive a LEFT JOIN tenure.jobs j ON j.worker = a.no;

-- name: cancel_requests
SELECT id, coalesce(cancel_reason, '') FROM tenure.jobs
 WHERE worker = %(worker)s AND cancel_at > 0;  -- not IS NOT NULL: for jobs_cancel, always

-- name: workers
SELECT w.no, w.id, w.host, w.boot, w.pid, w.pid_started, w.beat, w.lease_ms, w.started_at,
       w.seen_at, w.dead_at, w.dead_reason, w.meta,
       CASE WHEN %(count)s THEN (SELECT count(*) FROM tenure.jobs j WHERE j.worker = w.no) ELSE 0 END
  FROM tenure.workers w ORDER BY w.no;

-- name: clock
SELECT tenure.clock();

-- name: rescue
SELECT requeued, lost, set_aside FROM tenure.rescue_jobs(%(worker)s, %(worker_id)s, %(beat)s,
  %(started)s::uuid[], %(limit)s, %(reason)s, %(not_after)s, %(audit)s, %(now)s);

-- name: retire
SELECT tenure.sign_off(%(worker)s, %(worker_id)s, %(now)s);

-- name: take_turn
SELECT tenure.take_turn(%(name)s, %(every_ms)s, %(now)s);

-- name: end_turn
UPDATE tenure.upkeep SET note = %(note)s WHERE name = %(name)s;

-- name: turns
SELECT name, at, note FROM tenure.upkeep;

-- Who has a lock on a day of history or events, or on all of them; the oldest transactions first. Of
-- other roles' sessions not everybody may see since when; prepared transactions have no session.
-- name: lock_holders
SELECT l.pid, a.usename, a.application_name,
       extract(epoch FROM clock_timestamp() - a.xact_start)::double precision
  FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
   AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
   AND l.relation IN (to_regclass('tenure.' || %(partition)s),
                      to_regclass('tenure.' || split_part(%(partition)s, '_', 1)))
 ORDER BY a.xact_start, l.pid LIMIT 1;

-- What the owner has laid down.
-- name: settings
SELECT name, value FROM tenure.settings;

-- name: lay_down
INSERT INTO tenure.settings (name, value, set_at, set_by)
VALUES (%(name)s, %(value)s, tenure.clock(), session_user)
ON CONFLICT (name) DO UPDATE SET value = excluded.value, set_at = excluded.set_at,
  set_by = excluded.set_by;

-- name: take_back
DELETE FROM tenure.settings WHERE name = %(name)s;

-- name: queue_names
SELECT name, paused_at IS NOT NULL FROM tenure.queues ORDER BY name;

-- What a person or a program reads of a job: of a hot row, or of a finished one. `{source}` is a
-- table, or one of the walks below.
-- name: job_hot
SELECT j.id, j.type, j.status, j.queue, j.priority, j.category, j.payload, j.result, j.error,
       j.error_code, j.attempts, j.max_attempts, j.crashes, j.lease_no, w.id,
       w.seen_at + w.lease_ms, j.scheduled_at, j.created_at, j.updated_at, j.started_at,
       j.completed_at, j.timeout_ms, j.org, j.project, j.actor_type, j.actor_id, j.request_id,
       j.correlation_id, j.traceparent, j.key, j.progress, j.parent, j.cancel_at, j.error_place,
       j.losses, j.asked_at, j.death, j.traceback, j.after_failed,
       ARRAY(SELECT needs FROM tenure.edges WHERE job = j.id ORDER BY needs)
  FROM {source} LEFT JOIN tenure.workers w ON w.no = j.worker

-- name: job_history
SELECT j.id, j.type, j.status, j.queue, j.priority, j.category, j.payload, j.result, j.error,
       j.error_code, j.attempts, j.max_attempts, j.crashes, j.lease_no, NULL,
       NULL, j.scheduled_at, j.created_at, j.completed_at, j.started_at,
       j.completed_at, j.timeout_ms, j.org, j.project, j.actor_type, j.actor_id, j.request_id,
       j.correlation_id, j.traceparent, j.key, j.progress, j.parent, NULL, NULL,
       j.losses, j.asked_at, NULL, j.traceback, NULL,
       ARRAY(SELECT needs FROM tenure.edges WHERE job = j.id ORDER BY needs)
  FROM {source}

-- name: hot
tenure.jobs j

-- name: finished
tenure.history j

-- name: job_by_id
WHERE j.id = %(id)s::uuid AND (%(org)s::text IS NULL OR j.org = %(org)s);

-- The walks of a listing, newest first: at most so many rows, which are then narrowed. A condition is
-- put in only when it is asked for: what is always there could not be planned for.
-- name: walk_hot
(SELECT * FROM tenure.jobs w WHERE w.id < %(before)s::uuid ORDER BY w.id DESC LIMIT %(walk)s) j

-- name: walk_dead
(SELECT * FROM tenure.jobs w
  WHERE w.completed_at IS NOT NULL AND w.status = %(status)s AND w.id < %(before)s::uuid
  ORDER BY w.id DESC LIMIT %(walk)s) j

-- name: walk_all_dead
(SELECT * FROM ((SELECT * FROM tenure.jobs w
                  WHERE w.completed_at IS NOT NULL AND w.status = 'failed'
                    AND w.id < %(before)s::uuid ORDER BY w.id DESC LIMIT %(walk)s)
                UNION ALL
                (SELECT * FROM tenure.jobs w
                  WHERE w.completed_at IS NOT NULL AND w.status = 'dead_letter'
                    AND w.id < %(before)s::uuid ORDER BY w.id DESC LIMIT %(walk)s)) w
  ORDER BY w.id DESC LIMIT %(walk)s) j

-- name: walk_held
(SELECT * FROM tenure.jobs w WHERE w.worker IS NOT NULL AND w.id < %(before)s::uuid
  ORDER BY w.id DESC LIMIT %(walk)s) j

-- name: walk_finished
(SELECT * FROM tenure.history w WHERE w.id < %(before)s::uuid ORDER BY w.id DESC LIMIT %(walk)s) j

-- name: walk_cancelled
(SELECT * FROM tenure.history w WHERE w.status = 'cancelled' AND w.id < %(before)s::uuid
  ORDER BY w.id DESC LIMIT %(walk)s) j

-- name: job_order
ORDER BY j.id DESC LIMIT %(most)s;

-- Where a walk that found less than a page has stopped: no row when it came to its end. Only ids are
-- asked for, so the index alone is read.
-- name: walk_end
SELECT j.id FROM {source} ORDER BY j.id DESC OFFSET %(walk)s - 1 LIMIT 1;

-- The owners of a key, in any org.
-- name: key_owners
SELECT job_id FROM tenure.keys
 WHERE key = %(key)s AND (%(org)s::text IS NULL OR org = %(org)s) LIMIT %(walk)s;

-- Dead jobs by what they died of, with the newest of each group.
-- name: dead_groups
SELECT g.type, j.status, coalesce(j.error_code, ''), coalesce(j.error_place, ''), g.jobs, g.first,
       g.last, g.sample, j.error
  FROM tenure.dead_groups(%(queue)s, %(type)s, %(org)s, %(most)s) g
 CROSS JOIN LATERAL (SELECT * FROM tenure.jobs j WHERE j.id = g.sample LIMIT 1) j;

-- name: events_of_job
SELECT e.seq, e.kind, e.at, e.job_id, e.type, e.attempt, e.lease_no, e.org, e.project,
       e.actor_type, e.actor_id, e.request_id, e.correlation_id, w.id, e.data
  FROM tenure.events e LEFT JOIN tenure.workers w ON w.no = e.worker
 WHERE e.job_id = %(job_id)s::uuid AND e.seq > %(after)s
   AND (%(org)s::text IS NULL OR e.org = %(org)s)
 ORDER BY e.seq LIMIT %(most)s;

-- Up to the horizon and no further.
-- name: events_all
SELECT e.seq, e.kind, e.at, e.job_id, e.type, e.attempt, e.lease_no, e.org, e.project,
       e.actor_type, e.actor_id, e.request_id, e.correlation_id, w.id, e.data
  FROM tenure.events e LEFT JOIN tenure.workers w ON w.no = e.worker
 WHERE e.seq > %(after)s AND e.seq <= %(final)s AND (%(org)s::text IS NULL OR e.org = %(org)s)
 ORDER BY e.seq LIMIT %(most)s;

-- Up to which number no event can appear any more, as it was last noted; the last number drawn, and
-- who may still be writing since; whether this is a standby, where they cannot be seen.
-- name: event_horizon
SELECT u.value, w.last, w.writers, pg_is_in_recovery()
  FROM tenure.upkeep u, tenure.event_writers() w WHERE u.name = 'events';

-- Who they are; NULLs for a role that may not look into other roles' sessions.
-- name: event_holders
SELECT l.pid, p.gid, coalesce(a.usename, p.owner)::text, a.application_name, a.state,
       extract(epoch FROM coalesce(a.xact_start, p.prepared))::float8
  FROM (SELECT l.pid, max(l.transactionid::text) AS xid FROM pg_locks l
         WHERE l.virtualtransaction = ANY (%(writers)s::text[])
         GROUP BY l.pid, l.virtualtransaction) l
       LEFT JOIN pg_stat_activity a ON a.pid = l.pid
       LEFT JOIN pg_prepared_xacts p
              ON l.pid IS NULL AND l.xid = p.transaction::text
 ORDER BY 6;

-- name: note_horizon
UPDATE tenure.upkeep SET value = %(final)s WHERE name = 'events' AND value < %(final)s;

-- Per queue: due, later, waiting, running, dead, first ready_at; counted up to %(most)s.
-- name: queue_counts
SELECT queue, due, later, waiting, running, dead, first_ready, moment
  FROM tenure.count_queues(%(most)s, %(now)s);

-- name: queue_switches
SELECT name, paused_at, paused_by, pause_reason FROM tenure.queues ORDER BY name;

-- Among the first so many of each kind.
-- name: unknown_types
SELECT q.type, count(*) FROM (
  (SELECT j.type FROM tenure.jobs j
    WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
      AND (j.ready_at <= j.created_at OR j.promoted) LIMIT %(walk)s)
  UNION ALL
  (SELECT j.type FROM tenure.jobs j
    WHERE j.status = 'queued' AND j.waits = 0 AND j.crashes = 0 AND j.losses < 3
      AND j.ready_at > j.created_at AND NOT j.promoted LIMIT %(walk)s)
  UNION ALL
  (SELECT j.type FROM tenure.jobs j
    WHERE j.status = 'queued' AND j.waits = 0 AND (j.crashes > 0 OR j.losses >= 3) LIMIT %(walk)s)
  UNION ALL
  (SELECT j.type FROM tenure.jobs j WHERE j.waits > 0 LIMIT %(walk)s)) q
 WHERE q.type <> ALL (%(types)s::text[]) GROUP BY q.type;

-- name: rollups
SELECT start, queue, type, outcome, sum(count)::bigint, sum(duration_ms)::bigint,
       ARRAY[sum(buckets[1]), sum(buckets[2]), sum(buckets[3]), sum(buckets[4]), sum(buckets[5]),
             sum(buckets[6]), sum(buckets[7]), sum(buckets[8]), sum(buckets[9]), sum(buckets[10]),
             sum(buckets[11]), sum(buckets[12]), sum(buckets[13])]::bigint[]
  FROM (SELECT * FROM tenure.rollups WHERE grain IN ('minute', 'hour') AND start >= %(since)s
        UNION ALL
        SELECT * FROM tenure.rollups WHERE grain = 'total') r
 GROUP BY start, queue, type, outcome;

-- name: totals
SELECT status, jobs FROM tenure.count_jobs(%(most)s);

-- name: cancel
SELECT id, verdict FROM tenure.cancel(%(ids)s::uuid[], %(org)s, %(reason)s, %(actor_type)s,
  %(actor_id)s, %(now)s);

-- name: replay
SELECT id, verdict FROM tenure.replay(%(ids)s::uuid[], %(org)s, %(payload)s::json, %(actor_type)s,
  %(actor_id)s, %(key_ttl_ms)s, %(now)s);

-- name: discard
SELECT id, verdict FROM tenure.discard(%(ids)s::uuid[], %(org)s, %(reason)s, %(actor_type)s,
  %(actor_id)s, %(now)s);

-- name: pause
WITH switched AS (
  INSERT INTO tenure.queues AS q (name, created_at, paused_at, paused_by, pause_reason)
  SELECT %(queue)s, t.now, t.now, %(by)s, %(reason)s
    FROM (SELECT coalesce(%(now)s, tenure.clock()) AS now) t
  ON CONFLICT (name) DO UPDATE SET paused_at = excluded.paused_at,
    paused_by = excluded.paused_by, pause_reason = excluded.pause_reason
  RETURNING q.paused_at)
INSERT INTO tenure.events (at, kind, org, actor_type, actor_id, data)
SELECT s.paused_at, 'queue.paused', 'default', %(actor_type)s, %(actor_id)s, %(data)s::json
  FROM switched s;

-- name: resume
WITH switched AS (
  UPDATE tenure.queues SET paused_at = NULL, paused_by = NULL, pause_reason = NULL
   WHERE name = %(queue)s)
INSERT INTO tenure.events (at, kind, org, actor_type, actor_id, data)
VALUES (coalesce(%(now)s, tenure.clock()), 'queue.resumed', 'default', %(actor_type)s,
        %(actor_id)s, %(data)s::json);

-- Retention. Whole partitions where nothing is kept, by the owner's functions; a bounded batch
-- of rows each for the rest.
-- name: add_partitions
SELECT tenure.add_partitions(%(now)s);

-- Partitions of which nothing needs to be kept by their days, oldest first.
-- name: old_days
SELECT partition FROM tenure.old_days(%(keep_history)s, %(keep_events)s);

-- One of them, in a transaction of its own.
-- name: drop_day
SELECT tenure.drop_day(%(partition)s, %(keep_history)s, %(keep_events)s, %(types)s::text[]);

-- The tasks that have history: one step of history_age each, in each partition.
-- name: prune_types
WITH RECURSIVE task (type) AS (
  SELECT min(type) FROM tenure.history
  UNION ALL
  SELECT (SELECT min(h.type) FROM tenure.history h WHERE h.type > task.type)
    FROM task WHERE task.type IS NOT NULL)
SELECT type FROM task WHERE type IS NOT NULL;

-- By task and age, or all but the last N of a task.
-- name: prune_history
SELECT tenure.prune_history(%(type)s, %(before)s, %(last)s, %(most)s);

-- Dead jobs, with their steps: of all tasks but these, of one task, all but the last N of one.
-- name: prune_dead
SELECT tenure.prune_dead(%(types)s::text[], %(others)s, %(before)s, %(last)s, %(most)s);

-- name: prune_edges
SELECT gone, job FROM tenure.prune_edges(%(job)s::uuid, %(most)s);

-- name: prune_events
SELECT tenure.prune_events(%(before)s, %(most)s);

-- name: prune_keys
WITH gone AS (
  DELETE FROM tenure.keys k USING (
    SELECT org, key FROM tenure.keys WHERE expires_at <= %(now)s ORDER BY expires_at
     LIMIT %(most)s FOR UPDATE SKIP LOCKED) gone
   WHERE k.org = gone.org AND k.key = gone.key
  RETURNING 1)
SELECT count(*) FROM gone;

-- name: prune_workers
WITH gone AS (
  DELETE FROM tenure.workers WHERE no = ANY (ARRAY(
    SELECT w.no FROM tenure.workers w WHERE w.dead_at < %(before)s
       AND NOT EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.worker = w.no) LIMIT %(most)s))
  RETURNING 1)
SELECT count(*) FROM gone;

-- Minutes older than a day become hours, hours older than 90 days the total, by the statement
-- that removes them: sums never fall. The oldest three hours a pass, however long there was none.
-- name: fold_rollups
WITH fine AS (
  DELETE FROM tenure.rollups WHERE grain = %(fine)s AND start < %(before)s
     AND start < (SELECT min(r.start) / 3600000 * 3600000 + 10800000 FROM tenure.rollups r
                   WHERE r.grain = %(fine)s)
  RETURNING *)
INSERT INTO tenure.rollups AS t (grain, start, worker, queue, type, outcome, count, duration_ms,
                                 buckets)
SELECT %(coarse)s, s.start, 0, s.queue, s.type, s.outcome, sum(s.count), sum(s.duration_ms),
       ARRAY[sum(buckets[1]), sum(buckets[2]), sum(buckets[3]), sum(buckets[4]), sum(buckets[5]),
             sum(buckets[6]), sum(buckets[7]), sum(buckets[8]), sum(buckets[9]), sum(buckets[10]),
             sum(buckets[11]), sum(buckets[12]), sum(buckets[13])]::bigint[]
  FROM (SELECT CASE WHEN %(coarse)s = 'total' THEN 0 ELSE f.start / 3600000 * 3600000 END AS start,
               f.queue, f.type, f.outcome, f.count, f.duration_ms, f.buckets FROM fine f) s
 GROUP BY s.start, s.queue, s.type, s.outcome ORDER BY s.start, s.queue, s.type, s.outcome
ON CONFLICT (grain, start, worker, queue, type, outcome) DO UPDATE
   SET count = t.count + excluded.count, duration_ms = t.duration_ms + excluded.duration_ms,
       buckets = tenure.add_up(t.buckets, excluded.buckets);

-- For tests of programs (`tenure.testing.use`): the schema made for one, with all that is in it.
-- name: drop_schema
DROP SCHEMA IF EXISTS tenure CASCADE;
