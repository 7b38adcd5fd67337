-- The statements of programs of schema 1, as they were: a fleet is upgraded while some still run.

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
    parent, after_failed, scheduled_at, created_at, updated_at, payload)
  SELECT r.id, %(type)s, 'queued', %(queue)s, %(priority)s, %(org)s,
    t.now + coalesce(r.delay_ms, 0),
    %(max_attempts)s, %(timeout_ms)s, %(category)s, %(project)s, %(actor_type)s, %(actor_id)s,
    %(request_id)s, %(correlation_id)s, %(traceparent)s, %(parent)s::uuid, %(after_failed)s,
    t.now + coalesce(r.delay_ms, 0), t.now, t.now, r.payload
    FROM ROWS FROM (unnest(%(ids)s::uuid[]), unnest(%(delays)s::bigint[]),
                    json_array_elements(%(payloads)s::json)) AS r(id, delay_ms, payload),
         (SELECT coalesce(%(now)s, tenure.clock()) AS now) t
   WHERE NOT EXISTS (SELECT 1 FROM unnest(%(ids)s::uuid[]) i(id)
                      WHERE EXISTS (SELECT 1 FROM tenure.history h WHERE h.id = i.id))
  RETURNING id, created_at),
noted AS (
  INSERT INTO tenure.events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
    actor_id, request_id, correlation_id, data)
  SELECT j.created_at, 'job.enqueued', j.id, %(type)s, 0, 0, %(org)s, %(project)s, %(actor_type)s,
    %(actor_id)s, %(request_id)s, %(correlation_id)s, %(remark)s::json
    FROM job j WHERE %(audit)s = 'all' OR %(remark)s IS NOT NULL)
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
SELECT * FROM tenure.claim(%(worker)s, %(queues)s, %(mosts)s, %(total)s, %(memory)s::jsonb,
  %(types)s::text[], %(later_ms)s, %(audit)s, %(now)s);

-- name: next_due
SELECT tenure.next_due(%(queues)s, %(memory)s::jsonb, %(now)s);

-- name: due_lanes
SELECT priority, org, first_ready FROM tenure.due_lanes(%(queue)s, %(now)s);

-- Returns what was not accepted.
-- name: finish_completed
SELECT id, lease_no FROM tenure.finish_completed(%(worker)s, %(ids)s::uuid[], %(lease_nos)s::integer[],
  %(durations)s::bigint[], %(results)s::json, %(audit)s, %(now)s);

-- The same.
-- name: finish
SELECT id, lease_no FROM tenure.finish(%(worker)s, %(rows)s::json, %(children)s::json, %(strict)s,
  %(audit)s, %(now)s);

-- Of the rows that did not pass the fence: was this very finish accepted before?
-- name: finish_repeated
SELECT r.id, r.lease_no FROM unnest(%(ids)s::uuid[], %(lease_nos)s::integer[]) r(id, lease_no)
 WHERE EXISTS (SELECT 1 FROM tenure.history h
                WHERE h.id = r.id AND h.lease_no = r.lease_no AND h.worker = %(worker)s)
    OR EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.id = r.id AND j.finish_no = r.lease_no);

-- name: progress
UPDATE tenure.jobs j
   SET progress = r.progress, updated_at = coalesce(%(now)s, tenure.clock())
  FROM json_to_recordset(%(rows)s::json) AS r(id uuid, lease_no integer, progress json)
 WHERE j.id = r.id AND j.lease_no = r.lease_no AND coalesce(j.worker, 0) = %(worker)s
RETURNING j.id, j.lease_no;

-- name: steps
SELECT name, result FROM tenure.steps WHERE job_id = %(job)s::uuid;

-- name: save_step
SELECT tenure.save_step(%(job)s::uuid, %(lease_no)s, %(name)s, %(result)s::json, %(now)s);

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
  UPDATE tenure.workers SET beat = beat + 1, seen_at = coalesce(%(now)s, tenure.clock())
   WHERE no = %(worker)s AND dead_at IS NULL RETURNING no)
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
SELECT requeued, poisoned FROM tenure.rescue(%(worker)s, %(beat)s, %(started)s::uuid[], %(limit)s,
  %(reason)s, %(not_after)s, %(audit)s, %(now)s);

-- name: retire
SELECT tenure.retire(%(worker)s, %(now)s);

-- name: queue_names
SELECT name, paused_at IS NOT NULL FROM tenure.queues ORDER BY name;

-- What a person or a program reads of a job; `j` is the hot row.
-- name: job_hot
SELECT j.id, j.type, j.status, j.queue, j.priority, j.category, j.payload, j.result, j.error,
       j.error_code, j.attempts, j.max_attempts, j.crashes, j.lease_no, w.id,
       w.seen_at + w.lease_ms, j.scheduled_at, j.created_at, j.updated_at, j.started_at,
       j.completed_at, j.timeout_ms, j.org, j.project, j.actor_type, j.actor_id, j.request_id,
       j.correlation_id, j.traceparent, j.key, j.progress, j.parent, j.cancel_at, j.error_place,
       ARRAY(SELECT needs FROM tenure.edges WHERE job = j.id ORDER BY needs)
  FROM tenure.jobs j LEFT JOIN tenure.workers w ON w.no = j.worker

-- The same columns of a finished job.
-- name: job_history
SELECT j.id, j.type, j.status, j.queue, j.priority, j.category, j.payload, j.result, j.error,
       j.error_code, j.attempts, j.max_attempts, j.crashes, j.lease_no, NULL,
       NULL, j.scheduled_at, j.created_at, j.completed_at, j.started_at,
       j.completed_at, j.timeout_ms, j.org, j.project, j.actor_type, j.actor_id, j.request_id,
       j.correlation_id, j.traceparent, j.key, j.progress, j.parent, NULL, NULL,
       ARRAY(SELECT needs FROM tenure.edges WHERE job = j.id ORDER BY needs)
  FROM tenure.history j

-- name: job_by_id
WHERE j.id = %(id)s::uuid AND (%(org)s::text IS NULL OR j.org = %(org)s);

-- The narrowing of a listing, appended to either of the two above; newest first. A condition is
-- put in only when it is asked for: what is always there could not be planned for.
-- name: job_order
ORDER BY j.id DESC LIMIT %(most)s;

-- Dead jobs by what went wrong: type, error code and the place it was raised; the newest is the
-- sample.
-- name: dead_groups
SELECT g.type, g.status, g.code, g.place, g.jobs, g.first, g.last, g.sample, j.error
  FROM (SELECT type, status, coalesce(error_code, '') AS code, coalesce(error_place, '') AS place,
               count(*) AS jobs, min(completed_at) AS first, max(completed_at) AS last,
               (array_agg(id ORDER BY id DESC))[1] AS sample
          FROM tenure.jobs
         WHERE completed_at IS NOT NULL
           AND (%(status)s::text IS NULL OR status = %(status)s)
           AND (%(type)s::text IS NULL OR type = %(type)s)
           AND (%(queue)s::text IS NULL OR queue = %(queue)s)
           AND (%(org)s::text IS NULL OR org = %(org)s)
           AND (%(place)s::text IS NULL OR error_place = %(place)s)
         GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC LIMIT %(most)s) g
  JOIN tenure.jobs j ON j.id = g.sample ORDER BY g.jobs DESC, g.last DESC;

-- name: events_of_job
SELECT e.seq, e.kind, e.at, e.job_id, e.type, e.attempt, e.lease_no, e.org, e.project,
       e.actor_type, e.actor_id, e.request_id, e.correlation_id, w.id, e.data
  FROM tenure.events e LEFT JOIN tenure.workers w ON w.no = e.worker
 WHERE e.job_id = %(job_id)s::uuid AND e.seq > %(after)s
   AND (%(org)s::text IS NULL OR e.org = %(org)s)
 ORDER BY e.seq LIMIT %(most)s;

-- name: events_all
SELECT e.seq, e.kind, e.at, e.job_id, e.type, e.attempt, e.lease_no, e.org, e.project,
       e.actor_type, e.actor_id, e.request_id, e.correlation_id, w.id, e.data
  FROM tenure.events e LEFT JOIN tenure.workers w ON w.no = e.worker
 WHERE e.seq > %(after)s AND (%(org)s::text IS NULL OR e.org = %(org)s)
 ORDER BY e.seq LIMIT %(most)s;

-- Per queue: due, later, waiting, running, dead, first ready_at. Index-only for the backlog.
-- name: queue_counts
SELECT queue, count(*) FILTER (WHERE ready_at <= t.now), count(*) FILTER (WHERE ready_at > t.now),
       0, 0, 0, min(ready_at), t.now
  FROM tenure.jobs, (SELECT coalesce(%(now)s, tenure.clock()) AS now) t
 WHERE status = 'queued' AND waits = 0 GROUP BY queue, t.now
UNION ALL
SELECT queue, 0, 0, count(*), 0, 0, NULL, 0 FROM tenure.jobs WHERE waits > 0 GROUP BY queue
UNION ALL
SELECT queue, 0, 0, 0, count(*), 0, NULL, 0
  FROM tenure.jobs WHERE worker IS NOT NULL GROUP BY queue
UNION ALL
SELECT queue, 0, 0, 0, 0, count(*), NULL, 0
  FROM tenure.jobs WHERE completed_at IS NOT NULL GROUP BY queue;

-- name: queue_switches
SELECT name, paused_at, paused_by, pause_reason FROM tenure.queues ORDER BY name;

-- name: unknown_types
SELECT type, count(*) FROM tenure.jobs
 WHERE status = 'queued' AND type <> ALL (%(types)s::text[]) GROUP BY type;

-- name: rollups
SELECT start, queue, type, outcome, sum(count)::bigint, sum(duration_ms)::bigint,
       ARRAY(SELECT sum(b.n)::bigint
               FROM tenure.rollups r, unnest(r.buckets) WITH ORDINALITY b(n, place)
              WHERE (r.start, r.queue, r.type, r.outcome) = (t.start, t.queue, t.type, t.outcome)
              GROUP BY b.place ORDER BY b.place)
  FROM tenure.rollups t WHERE start >= %(since)s OR grain = 'total'
 GROUP BY start, queue, type, outcome;

-- name: totals
SELECT 'queued', count(*) FROM tenure.jobs WHERE status = 'queued'
UNION ALL SELECT 'in_progress', count(*) FROM tenure.jobs WHERE worker IS NOT NULL
UNION ALL SELECT status, count(*) FROM tenure.jobs WHERE completed_at IS NOT NULL GROUP BY status
UNION ALL SELECT status, count(*) FROM tenure.history GROUP BY status;

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

-- name: drop_partitions
SELECT history, events FROM tenure.drop_partitions(%(keep_history)s, %(keep_events)s,
  %(types)s::text[]);

-- The tasks that have history: one step of history_age each, in each partition.
-- name: prune_types
WITH RECURSIVE task (type) AS (
  SELECT min(type) FROM tenure.history
  UNION ALL
  SELECT (SELECT min(h.type) FROM tenure.history h WHERE h.type > task.type)
    FROM task WHERE task.type IS NOT NULL)
SELECT type FROM task WHERE type IS NOT NULL;

-- By task and age: walks history_age. A result stays while a job that ran after it may still read
-- it.
-- name: prune_history
WITH gone AS (
  DELETE FROM tenure.history WHERE id = ANY (ARRAY(
    SELECT h.id FROM tenure.history h
     WHERE h.type = %(type)s AND h.completed_at < %(before)s
       AND NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs j ON j.id = d.job
                        WHERE d.needs = h.id)
     ORDER BY h.completed_at LIMIT %(most)s))
  RETURNING 1)
SELECT count(*) FROM gone;

-- Keep the last N of a task: everything older goes, a bounded batch at a time.
-- name: prune_history_last
WITH gone AS (
  DELETE FROM tenure.history WHERE id = ANY (ARRAY(
    SELECT h.id FROM (SELECT id FROM tenure.history WHERE type = %(type)s
                       ORDER BY completed_at DESC LIMIT %(most)s OFFSET %(last)s) h
     WHERE NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs j ON j.id = d.job
                        WHERE d.needs = h.id)))
  RETURNING 1)
SELECT count(*) FROM gone;

-- Dead jobs somebody waits for stay: they may yet be replayed.
-- name: prune_dead
WITH gone AS (
  DELETE FROM tenure.jobs WHERE id = ANY (ARRAY(
    SELECT id FROM tenure.jobs j
     WHERE completed_at IS NOT NULL AND status IN ('failed', 'dead_letter')
       AND type <> ALL (%(types)s::text[]) AND completed_at < %(before)s
       AND NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs w ON w.id = d.job
                        WHERE d.needs = j.id)
     LIMIT %(most)s FOR UPDATE SKIP LOCKED))
  RETURNING 1)
SELECT count(*) FROM gone;

-- name: prune_dead_type
WITH gone AS (
  DELETE FROM tenure.jobs WHERE id = ANY (ARRAY(
    SELECT id FROM tenure.jobs j
     WHERE completed_at IS NOT NULL AND status IN ('failed', 'dead_letter')
       AND type = %(type)s AND completed_at < %(before)s
       AND NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs w ON w.id = d.job
                        WHERE d.needs = j.id)
     LIMIT %(most)s FOR UPDATE SKIP LOCKED))
  RETURNING 1)
SELECT count(*) FROM gone;

-- name: prune_dead_last
WITH gone AS (
  DELETE FROM tenure.jobs WHERE id = ANY (ARRAY(
    SELECT j.id FROM (SELECT id FROM tenure.jobs
                       WHERE completed_at IS NOT NULL AND status IN ('failed', 'dead_letter')
                         AND type = %(type)s
                       ORDER BY completed_at DESC LIMIT %(most)s OFFSET %(last)s
                         FOR UPDATE SKIP LOCKED) j
     WHERE NOT EXISTS (SELECT 1 FROM tenure.edges d JOIN tenure.jobs w ON w.id = d.job
                        WHERE d.needs = j.id)))
  RETURNING 1)
SELECT count(*) FROM gone;

-- Steps and edges of jobs that are no more.
-- name: prune_steps
WITH gone AS (
  DELETE FROM tenure.steps WHERE job_id = ANY (ARRAY(
    SELECT DISTINCT s.job_id FROM tenure.steps s
     WHERE NOT EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.id = s.job_id) LIMIT %(most)s))
  RETURNING 1)
SELECT count(*) FROM gone;

-- name: prune_edges
WITH gone AS (
  DELETE FROM tenure.edges e USING (
    SELECT needs, job FROM tenure.edges o
     WHERE NOT EXISTS (SELECT 1 FROM tenure.jobs j WHERE j.id = o.job)
       AND NOT EXISTS (SELECT 1 FROM tenure.history h WHERE h.id = o.job) LIMIT %(most)s) gone
   WHERE e.needs = gone.needs AND e.job = gone.job
  RETURNING 1)
SELECT count(*) FROM gone;

-- name: prune_events
WITH gone AS (
  DELETE FROM tenure.events_other WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM tenure.events_other WHERE at < %(before)s ORDER BY seq LIMIT %(most)s))
  RETURNING 1)
SELECT count(*) FROM gone;

-- name: prune_keys
WITH gone AS (
  DELETE FROM tenure.keys k USING (
    SELECT org, key FROM tenure.keys WHERE expires_at <= %(now)s ORDER BY org, key LIMIT %(most)s
       FOR UPDATE SKIP LOCKED) gone
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
-- that removes them: sums never fall.
-- name: fold_rollups
WITH fine AS (
  DELETE FROM tenure.rollups WHERE grain = %(fine)s AND start < %(before)s RETURNING *),
spread AS (
  SELECT CASE WHEN %(coarse)s = 'total' THEN 0 ELSE f.start / 3600000 * 3600000 END AS start,
         f.queue, f.type, f.outcome, b.place, sum(b.n)::bigint AS n
    FROM fine f, unnest(f.buckets) WITH ORDINALITY b(n, place) GROUP BY 1, 2, 3, 4, 5),
summed AS (
  SELECT CASE WHEN %(coarse)s = 'total' THEN 0 ELSE f.start / 3600000 * 3600000 END AS start,
         f.queue, f.type, f.outcome, sum(f.count)::bigint AS count,
         sum(f.duration_ms)::bigint AS duration_ms
    FROM fine f GROUP BY 1, 2, 3, 4)
INSERT INTO tenure.rollups AS t (grain, start, worker, queue, type, outcome, count, duration_ms,
                                 buckets)
SELECT %(coarse)s, s.start, 0, s.queue, s.type, s.outcome, s.count, s.duration_ms,
       ARRAY(SELECT p.n FROM spread p
              WHERE (p.start, p.queue, p.type, p.outcome) = (s.start, s.queue, s.type, s.outcome)
              ORDER BY p.place)
  FROM summed s ORDER BY s.start, s.queue, s.type, s.outcome
ON CONFLICT (grain, start, worker, queue, type, outcome) DO UPDATE
   SET count = t.count + excluded.count, duration_ms = t.duration_ms + excluded.duration_ms,
       buckets = tenure.add_up(t.buckets, excluded.buckets);
