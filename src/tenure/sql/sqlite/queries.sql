-- Tenure's statements on SQLite, in the order of store.py.
--
-- How SQLite differs: one writer at a time (BEGIN IMMEDIATE behind a file lock), so no row locks
-- and no SKIP LOCKED; batches travel as one JSON text and are opened by json_each, because a
-- loop of single statements would need Python's GIL between rows while the write lock is held.
-- `:now` is read after the lock is held. Temporary tables live in memory, one set a connection:
--   picked(id)      what the running claim has chosen
--   ended(id, …)    the finishes of the running batch that passed the fence
-- A function of ours, in Python: tenure_death(type, status, code, place), the handle of a death.

-- name: temporary_tables
CREATE TEMP TABLE IF NOT EXISTS picked (id TEXT PRIMARY KEY NOT NULL) WITHOUT ROWID;
CREATE TEMP TABLE IF NOT EXISTS ended (
  id TEXT PRIMARY KEY NOT NULL, lease_no INTEGER, duration_ms INTEGER, outcome TEXT,
  status TEXT, event TEXT, result TEXT, error TEXT, error_code TEXT, error_place TEXT,
  delay_ms INTEGER, refund INTEGER, crash INTEGER, loss INTEGER, taken INTEGER, traceback TEXT,
  attempts INTEGER, started_at INTEGER, key TEXT, org TEXT, queue TEXT, type TEXT
) WITHOUT ROWID;

-- For dead jobs of a time when deaths had no handle.
-- name: name_deaths
UPDATE tenure_jobs SET death = tenure_death(type, status, error_code, error_place)
 WHERE completed_at IS NOT NULL AND death = '';

-- name: add_queue
INSERT INTO tenure_queues (name, created_at) VALUES (:queue, :now) ON CONFLICT DO NOTHING;

-- Keys before jobs: whoever inserts the key owns it. An expired key changes hands; for who asks without
-- a time to live (`:over` is the end of time) one of any job that has ended.
-- Rows are [id, payload, delay_ms, at_ms, key]; sorted by key so that batches agree on an order.
-- name: enqueue_keys
INSERT INTO tenure_keys (org, key, job_id, first_seen_at, last_seen_at, ttl_ms)
SELECT :org, value ->> 4, value ->> 0, :now, :now, :key_ttl_ms
  FROM json_each(:rows) WHERE value ->> 4 IS NOT NULL ORDER BY value ->> 4, key
ON CONFLICT (org, key) DO UPDATE SET
  job_id        = iif(expires_at <= :over, excluded.job_id, job_id),
  first_seen_at = iif(expires_at <= :over, :now, first_seen_at),
  status        = iif(expires_at <= :over, NULL, status),
  result_ref    = iif(expires_at <= :over, NULL, result_ref),
  error_ref     = iif(expires_at <= :over, NULL, error_ref),
  ttl_ms        = iif(expires_at <= :over, excluded.ttl_ms, ttl_ms),
  expires_at    = iif(expires_at <= :over, NULL, expires_at),
  last_seen_at  = :now;

-- Which jobs own the keys of a batch: [id sent, id that owns the key, its status].
-- name: enqueue_owners
SELECT r.value ->> 0, k.job_id,
       coalesce((SELECT 'in_progress' FROM tenure_leases WHERE id = k.job_id),
                (SELECT status FROM tenure_jobs WHERE id = k.job_id),
                (SELECT status FROM tenure_history WHERE id = k.job_id),
                CASE k.status WHEN 'dead' THEN 'dead_letter' WHEN 'failed' THEN 'failed'
                              ELSE 'completed' END)
  FROM json_each(:rows) r JOIN tenure_keys k ON k.org = :org AND k.key = r.value ->> 4;

-- One group of jobs that share their terms; a key's row is inserted by the key's owner only.
-- name: enqueue_jobs
INSERT INTO tenure_jobs (id, type, status, queue, priority, org, ready_at, waits, max_attempts,
  timeout_ms, category, project, actor_type, actor_id, request_id, correlation_id, traceparent,
  key, parent, after_failed, scheduled_at, asked_at, created_at, updated_at, payload)
SELECT value ->> 0, :type, 'queued', :queue, :priority, :org,
       max(coalesce(value ->> 3, :now + value ->> 2), :now), 0, :max_attempts,
       :timeout_ms, :category, :project, :actor_type, :actor_id,
       :request_id, :correlation_id, :traceparent,
       value ->> 4, :parent, :after_failed, coalesce(value ->> 3, :now + value ->> 2),
       coalesce(value ->> 3, iif(value ->> 2 > 0, :now + value ->> 2, NULL)), :now, :now, value -> 1
  FROM json_each(:rows)
 WHERE value ->> 4 IS NULL
    OR value ->> 0 = (SELECT job_id FROM tenure_keys WHERE org = :org AND key = value ->> 4);

-- Into their places; those that have to wait for others are taken out again by count_waits.
-- name: enqueue_due
INSERT INTO tenure_due (queue, priority, org, ready_at, id)
SELECT :queue, :priority, :org, :now, value ->> 0
  FROM json_each(:rows)
 WHERE coalesce(value ->> 3, :now + value ->> 2) <= :now AND (value ->> 4 IS NULL
    OR value ->> 0 = (SELECT job_id FROM tenure_keys WHERE org = :org AND key = value ->> 4));

-- name: enqueue_later
INSERT INTO tenure_later (queue, ready_at, id)
SELECT :queue, coalesce(value ->> 3, :now + value ->> 2), value ->> 0
  FROM json_each(:rows)
 WHERE coalesce(value ->> 3, :now + value ->> 2) > :now AND (value ->> 4 IS NULL
    OR value ->> 0 = (SELECT job_id FROM tenure_keys WHERE org = :org AND key = value ->> 4));

-- The audit line of each job just inserted.
-- name: enqueue_events
INSERT INTO tenure_events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
  actor_id, request_id, correlation_id, data)
SELECT :now, 'job.enqueued', value ->> 0, :type, 0, 0, :org, :project, :actor_type, :actor_id,
       :request_id, :correlation_id, :remark
  FROM json_each(:rows)
 WHERE value ->> 4 IS NULL
    OR value ->> 0 = (SELECT job_id FROM tenure_keys WHERE org = :org AND key = value ->> 4);

-- The same for jobs that are due now and have no key, which most are: a row is one text, id (26
-- characters) and payload. Opening a JSON array for each value would take longer than storing it.
-- name: enqueue_plain_jobs
INSERT INTO tenure_jobs (id, type, status, queue, priority, org, ready_at, waits, max_attempts,
  timeout_ms, category, project, actor_type, actor_id, request_id, correlation_id, traceparent,
  parent, after_failed, scheduled_at, created_at, updated_at, payload)
SELECT substr(value, 1, 26), :type, 'queued', :queue, :priority, :org, :now, 0, :max_attempts,
       :timeout_ms, :category, :project, :actor_type, :actor_id, :request_id, :correlation_id,
       :traceparent, :parent, :after_failed, :now, :now, :now, substr(value, 27)
  FROM json_each(:rows);

-- name: enqueue_plain_due
INSERT INTO tenure_due (queue, priority, org, ready_at, id)
SELECT :queue, :priority, :org, :now, substr(value, 1, 26) FROM json_each(:rows);

-- name: enqueue_plain_events
INSERT INTO tenure_events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
  actor_id, request_id, correlation_id, data)
SELECT :now, 'job.enqueued', substr(value, 1, 26), :type, 0, 0, :org, :project, :actor_type,
       :actor_id, :request_id, :correlation_id, :remark
  FROM json_each(:rows);

-- Edges of jobs just inserted; one whose need has completed already is met from the start.
-- Rows are [job, needs].
-- name: enqueue_edges
INSERT INTO tenure_edges (needs, job, met)
SELECT value ->> 1, value ->> 0, value ->> 2
       OR EXISTS (SELECT 1 FROM tenure_history WHERE id = value ->> 1 AND status = 'completed')
  FROM json_each(:edges) WHERE EXISTS (SELECT 1 FROM tenure_jobs WHERE id = value ->> 0)
ON CONFLICT DO NOTHING;

-- How many needs are unmet; a job whose last one is met becomes runnable now. The trigger takes it
-- out of its queue, or puts it in.
-- name: count_waits
UPDATE tenure_jobs
   SET waits = (SELECT count(*) FROM tenure_edges WHERE job = tenure_jobs.id AND met = 0),
       ready_at = max(ready_at, :now), updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND status = 'queued';

-- One job without a key, which is what `task.enqueue` mostly sends: the same three rows without
-- opening JSON (38 instead of 61 us a job). Nothing when the id is stored already.
-- name: enqueue_job
INSERT INTO tenure_jobs (id, type, status, queue, priority, org, ready_at, waits, max_attempts,
  timeout_ms, category, project, actor_type, actor_id, request_id, correlation_id, traceparent,
  parent, after_failed, scheduled_at, asked_at, created_at, updated_at, payload)
SELECT :id, :type, 'queued', :queue, :priority, :org, max(:due, :now), 0, :max_attempts,
  :timeout_ms, :category, :project, :actor_type, :actor_id, :request_id, :correlation_id,
  :traceparent, :parent, :after_failed, :due, :asked, :now, :now, :payload
 WHERE NOT EXISTS (SELECT 1 FROM tenure_history WHERE id = :id)
ON CONFLICT (id) DO NOTHING;

-- name: enqueue_job_due
INSERT INTO tenure_due (queue, priority, org, ready_at, id)
VALUES (:queue, :priority, :org, :now, :id);

-- name: enqueue_job_later
INSERT INTO tenure_later (queue, ready_at, id) VALUES (:queue, :due, :id);

-- name: enqueue_job_event
INSERT INTO tenure_events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
  actor_id, request_id, correlation_id, data)
VALUES (:now, 'job.enqueued', :id, :type, 0, 0, :org, :project, :actor_type, :actor_id,
  :request_id, :correlation_id, :remark);

-- Which ids are stored already, live or finished? An error, or a call repeated because its reply
-- was lost.
-- name: enqueue_stored
SELECT value FROM json_each(:ids)
 WHERE EXISTS (SELECT 1 FROM tenure_jobs WHERE id = value)
    OR EXISTS (SELECT 1 FROM tenure_history WHERE id = value);

-- Takes the write lock and finds nothing: the first statement in a caller's transaction. After an
-- add_queue of that name, which no queue has, it leaves a page that is written and says the same.
-- name: enqueue_lock
DELETE FROM tenure_queues WHERE name = '';

-- name: register
INSERT INTO tenure_workers (id, host, boot, pid, pid_started, lease_ms, started_at, seen_at, meta)
VALUES (:id, :host, :boot, :pid, :pid_started, :lease_ms, :now, :now, :meta) RETURNING no;

-- name: worker_alive
SELECT 1 FROM tenure_workers WHERE no = :worker AND id = :worker_id AND dead_at IS NULL;

-- name: paused_queues
SELECT name FROM tenure_queues WHERE paused_at IS NOT NULL;

-- Whether a queue is paused, and whether jobs whose time has come, or suspects, wait in it.
-- name: claim_others
SELECT EXISTS (SELECT 1 FROM tenure_queues WHERE name = :queue AND paused_at IS NOT NULL),
       EXISTS (SELECT 1 FROM tenure_later WHERE queue = :queue AND ready_at <= :now),
       EXISTS (SELECT 1 FROM tenure_suspects WHERE queue = :queue AND ready_at <= :now);

-- Jobs whose time has come, into their lanes: a bounded number, the first ones first. No job is
-- written to.
-- name: claim_promote
INSERT INTO tenure_due (queue, priority, org, ready_at, id)
SELECT j.queue, j.priority, j.org, l.ready_at, l.id
  FROM (SELECT ready_at, id FROM tenure_later WHERE queue = :queue AND ready_at <= :now
         ORDER BY ready_at, id LIMIT :most) l
  CROSS JOIN tenure_jobs j ON j.id = l.id;

-- name: claim_promoted
DELETE FROM tenure_later WHERE queue = :queue AND ready_at <= :now AND (ready_at, id) IN
  (SELECT ready_at, id FROM tenure_later WHERE queue = :queue AND ready_at <= :now
    ORDER BY ready_at, id LIMIT :most);

-- The priorities that have due rows, by skipping through tenure_due: ≤ 10 seeks.
-- name: claim_priorities
WITH RECURSIVE lane (priority) AS (
  SELECT min(priority) FROM tenure_due WHERE queue = :queue
  UNION ALL
  SELECT (SELECT min(priority) FROM tenure_due WHERE queue = :queue AND priority > lane.priority)
    FROM lane WHERE lane.priority IS NOT NULL)
SELECT priority FROM lane WHERE priority IS NOT NULL;

-- The orgs of one (queue, priority) after :org. One seek per org, at most :most, whatever lies in the
-- queue.
-- name: claim_orgs
WITH RECURSIVE tenant (org) AS (
  SELECT min(org) FROM tenure_due WHERE queue = :queue AND priority = :priority AND org > :org
  UNION ALL
  SELECT (SELECT min(org) FROM tenure_due
           WHERE queue = :queue AND priority = :priority AND org > tenant.org)
    FROM tenant WHERE tenant.org IS NOT NULL LIMIT :most)
SELECT org FROM tenant WHERE org IS NOT NULL;

-- The type of the first job of a lane.
-- name: claim_first_type
SELECT j.type FROM (SELECT id FROM tenure_due
                     WHERE queue = :queue AND priority = :priority AND org = :org
                     ORDER BY ready_at, id LIMIT 1) d CROSS JOIN tenure_jobs j ON j.id = d.id;

-- Whether a lane has anything after a place.
-- name: claim_behind
SELECT 1 FROM tenure_due
 WHERE queue = :queue AND priority = :priority AND org = :org
   AND (ready_at, id) > (:since, :since_id) LIMIT 1;

-- Choose the first rows of one lane.
-- name: claim_pick
INSERT INTO temp.picked
SELECT id FROM tenure_due WHERE queue = :queue AND priority = :priority AND org = :org
 ORDER BY ready_at, id LIMIT :most OFFSET :skip;

-- The rows of a lane after a place, and of which type their jobs are, for a lane in which others have
-- jobs too; a bounded number.
-- name: claim_walk
SELECT d.ready_at, d.id, j.type
  FROM (SELECT ready_at, id FROM tenure_due
         WHERE queue = :queue AND priority = :priority AND org = :org
           AND (ready_at, id) > (:since, :since_id) ORDER BY ready_at, id LIMIT :most) d
  CROSS JOIN tenure_jobs j ON j.id = d.id;

-- name: claim_pick_these
INSERT INTO temp.picked SELECT value FROM json_each(:ids);

-- name: claim_pick_suspects
INSERT INTO temp.picked
SELECT s.id FROM tenure_suspects s CROSS JOIN tenure_jobs j ON j.id = s.id
 WHERE s.queue = :queue AND s.ready_at <= :now
   AND (:types IS NULL OR j.type IN (SELECT value FROM json_each(:types)))
 ORDER BY s.ready_at, s.id LIMIT :most;

-- The soonest job that was to run later, after the time up to which claims have looked.
-- name: next_due
SELECT min(ready_at) FROM (
  SELECT min(ready_at) AS ready_at FROM tenure_later WHERE queue = :queue AND ready_at > :since
  UNION ALL
  SELECT min(ready_at) FROM tenure_suspects WHERE queue = :queue AND ready_at > :since);

-- What was picked, as it will be once granted (the write lock is held: nothing comes between), as
-- one JSON text: a row a job would cost more to hand over than to read. A large payload is left
-- out of it and read by itself.
-- name: claim_read
SELECT json_group_array(json_array(
         j.id, lease_no + 1, type, iif(length(payload) > :large, '', payload), attempts + 1,
         max_attempts, crashes, timeout_ms, queue, priority, category, org, project, actor_type,
         actor_id, request_id, correlation_id, traceparent, key,
         parent, scheduled_at, created_at, ready_at, losses))
  FROM temp.picked p CROSS JOIN tenure_jobs j ON j.id = p.id;

-- name: claim_large
SELECT payload FROM tenure_jobs WHERE id = :id;

-- Not for this claim after all.
-- name: claim_unpick
DELETE FROM temp.picked WHERE id IN (SELECT value FROM json_each(:ids));

-- Picked rows are the first of their lane: out of the queue goes everything up to the last of them.
-- name: claim_leave
DELETE FROM tenure_due
 WHERE queue = :queue AND priority = :priority AND org = :org AND (ready_at, id) <= (:ready_at, :id);

-- Or, where they are not, one by one.
-- name: claim_leave_these
DELETE FROM tenure_due WHERE (queue, priority, org, ready_at, id) IN
  (SELECT queue, priority, org, ready_at, j.id
     FROM temp.picked p CROSS JOIN tenure_jobs j ON j.id = p.id);

-- name: claim_leave_suspects
DELETE FROM tenure_suspects WHERE (queue, ready_at, id) IN
  (SELECT queue, ready_at, j.id FROM temp.picked p CROSS JOIN tenure_jobs j ON j.id = p.id);

-- name: claim_grant
INSERT INTO tenure_leases (id, worker, lease_no, attempts, started_at)
SELECT j.id, :worker, lease_no + 1, attempts + 1, :now
  FROM temp.picked p CROSS JOIN tenure_jobs j ON j.id = p.id;

-- name: claim_events
INSERT INTO tenure_events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
  actor_id, request_id, correlation_id, worker)
SELECT :now, 'job.started', j.id, type, attempts + 1, lease_no + 1, org, project, actor_type,
       actor_id, request_id, correlation_id, :worker
  FROM temp.picked p CROSS JOIN tenure_jobs j ON j.id = p.id;

-- THE FENCE. Only runs that still hold this very lease under this worker get into `ended`; the
-- write lock is held, so nothing can change between this check and the writes below. A number alone
-- is not a worker: after a restore another one may have it.
-- A job asked to be cancelled does not go back to the queue: it is cancelled instead. What has died
-- too often is dead: of its own crashes (poison), or of its workers' (lost).
-- Rows are [id, lease_no, duration_ms, outcome, status, event, result, error, error_code,
-- error_place, delay_ms, refund, crash limit, loss limit, traceback].
-- name: finish_fence
INSERT OR IGNORE INTO temp.ended
SELECT f.id, f.lease_no, f.row ->> 2, iif(f.fate IS NULL, f.row ->> 3, 'dead'),
       CASE WHEN f.fate IS NOT NULL THEN 'dead_letter'
            WHEN f.cancel_at IS NOT NULL AND f.row ->> 4 = 'queued' THEN 'cancelled'
            ELSE f.row ->> 4 END,
       CASE WHEN f.fate IS NOT NULL THEN 'job.deadlettered'
            WHEN f.cancel_at IS NOT NULL AND f.row ->> 4 = 'queued' THEN 'job.cancelled'
            ELSE f.row ->> 5 END,
       f.row ->> 6, f.row ->> 7, coalesce(f.fate, f.row ->> 8), f.row ->> 9, f.row ->> 10,
       coalesce(f.row ->> 11, 0), f.row ->> 12 IS NOT NULL, f.row ->> 13 IS NOT NULL,
       f.row ->> 3 = 'rescued', f.row ->> 14, f.attempts, f.started_at, f.key, f.org, f.queue, f.type
  FROM (SELECT l.id, l.lease_no, l.attempts, l.started_at, j.cancel_at, j.key, j.org, j.queue, j.type,
               e.value AS row,
               CASE WHEN j.crashes + 1 >= e.value ->> 12 THEN 'poison'
                    WHEN j.losses + 1 >= e.value ->> 13 THEN 'lost' END AS fate
          FROM json_each(:rows) e
          CROSS JOIN tenure_leases l ON l.id = e.value ->> 0
          CROSS JOIN tenure_jobs j ON j.id = l.id
         WHERE l.lease_no = e.value ->> 1 AND l.worker = :worker
           AND EXISTS (SELECT 1 FROM tenure_workers WHERE no = :worker AND id = :worker_id)) f;

-- The same fence for a batch that only completed, which most do: nothing is decided per row, and a
-- row is one text, id (26 characters), lease_no (10), duration_ms (12), result (the rest, if any):
-- opening a JSON array per row would take as long as everything else here.
-- name: finish_fence_completed
INSERT OR IGNORE INTO temp.ended
SELECT l.id, l.lease_no, CAST(substr(e.value, 37, 12) AS INTEGER), 'completed', 'completed',
       'job.succeeded', nullif(substr(e.value, 49), ''),
       NULL, NULL, NULL, NULL, 0, 0, 0, 0, NULL, l.attempts, l.started_at, j.key, j.org, j.queue,
       j.type
  FROM json_each(:rows) e
  CROSS JOIN tenure_leases l ON l.id = substr(e.value, 1, 26)
  CROSS JOIN tenure_jobs j ON j.id = l.id
 WHERE l.lease_no = CAST(substr(e.value, 27, 10) AS INTEGER) AND l.worker = :worker
   AND EXISTS (SELECT 1 FROM tenure_workers WHERE no = :worker AND id = :worker_id);

-- name: finish_accepted
SELECT id, lease_no FROM temp.ended;

-- Of the runs that did not pass: was this very finish accepted before (its reply was lost)?
-- name: finish_repeated
SELECT value ->> 0, value ->> 1 FROM json_each(:runs) e
 WHERE EXISTS (SELECT 1 FROM tenure_workers WHERE no = :worker AND id = :worker_id)
   AND (EXISTS (SELECT 1 FROM tenure_history h
                 WHERE h.id = e.value ->> 0 AND h.lease_no = e.value ->> 1 AND h.worker = :worker)
        OR EXISTS (SELECT 1 FROM tenure_jobs j
                    WHERE j.id = e.value ->> 0 AND j.finish_no = e.value ->> 1));

-- name: settled
SELECT 1 FROM tenure_history
 WHERE id = :id AND lease_no = :lease_no AND status = 'completed';

-- name: finish_events
INSERT INTO tenure_events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
  actor_id, request_id, correlation_id, worker, data)
SELECT :now, e.event, j.id, j.type, e.attempts, e.lease_no, j.org, j.project, j.actor_type,
       j.actor_id, j.request_id, j.correlation_id, :worker,
       iif(e.error IS NULL AND e.delay_ms IS NULL, NULL,
           json_object('error', e.error, 'code', e.error_code, 'delay_ms', e.delay_ms))
  FROM temp.ended e CROSS JOIN tenure_jobs j ON j.id = e.id
 WHERE :audit = 'all' OR e.outcome <> 'completed';

-- The leases end, whatever comes next.
-- name: finish_leases
DELETE FROM tenure_leases WHERE id IN (SELECT id FROM temp.ended);

-- completed, cancelled: out of the hot table, into history, under the number they finished with. A
-- traceback stays with its error.
-- name: finish_history
INSERT INTO tenure_history (id, type, status, queue, priority, org, lease_no, worker, attempts,
  max_attempts, crashes, timeout_ms, category, project, actor_type, actor_id, request_id,
  correlation_id, traceparent, key, parent, scheduled_at, created_at, updated_at, started_at,
  completed_at, payload, result, error, error_code, progress, losses, asked_at, traceback)
SELECT j.id, j.type, e.status, j.queue, j.priority, j.org, e.lease_no,
  iif(e.taken, NULL, :worker), e.attempts,
  j.max_attempts, j.crashes, j.timeout_ms, j.category, j.project, j.actor_type, j.actor_id,
  j.request_id, j.correlation_id, j.traceparent, j.key, j.parent, j.scheduled_at, j.created_at,
  :now, e.started_at, :now, j.payload, e.result, coalesce(e.error, j.error),
  coalesce(e.error_code, j.error_code), j.progress, j.losses, j.asked_at,
  coalesce(e.traceback, iif(e.error IS NULL OR e.error = j.error, j.traceback, NULL))
  FROM temp.ended e CROSS JOIN tenure_jobs j ON j.id = e.id
 WHERE e.status IN ('completed', 'cancelled');

-- name: finish_leave
DELETE FROM tenure_jobs
 WHERE id IN (SELECT id FROM temp.ended WHERE status IN ('completed', 'cancelled'));

-- Everything else stays hot: queued again (retry, snooze, release, crash) or dead. An error brings its
-- own place and traceback, or has none.
-- A release keeps its place in the queue; a retry and a snooze get a new ready_at. The trigger puts
-- them into the queue, so their leases have ended before.
-- The IN keeps the walk on the primary key: without it all of the hot table is scanned.
-- A rescue is nobody's finish: the late one of the worker it was taken from stays refused.
-- name: finish_stay
UPDATE tenure_jobs
   SET status = e.status,
       lease_no = e.lease_no + 1,
       finish_no = iif(e.taken, finish_no, e.lease_no),
       attempts = e.attempts - e.refund,
       started_at = e.started_at,
       crashes = crashes + e.crash,
       losses = losses + e.loss,
       ready_at = iif(e.delay_ms IS NULL, ready_at, :now + e.delay_ms),
       scheduled_at = iif(e.delay_ms IS NULL, scheduled_at, :now + e.delay_ms),
       completed_at = iif(e.status IN ('failed', 'dead_letter'), :now, NULL),
       error = coalesce(e.error, tenure_jobs.error),
       error_code = coalesce(e.error_code, tenure_jobs.error_code),
       error_place = iif(e.error IS NULL, tenure_jobs.error_place, e.error_place),
       traceback = iif(e.error IS NULL, tenure_jobs.traceback, e.traceback),
       death = iif(e.status IN ('failed', 'dead_letter'),
                   tenure_death(tenure_jobs.type, e.status,
                                coalesce(e.error_code, tenure_jobs.error_code),
                                iif(e.error IS NULL, tenure_jobs.error_place, e.error_place)), ''),
       cancel_at = NULL, cancel_reason = NULL,
       updated_at = :now
  FROM temp.ended e
 WHERE tenure_jobs.id IN (SELECT id FROM temp.ended WHERE status NOT IN ('completed', 'cancelled'))
   AND e.id = tenure_jobs.id;

-- A key's status is written once, when its job ends; its time to live starts then. Without one it is
-- free whatever the clock says later.
-- name: finish_keys
UPDATE tenure_keys
   SET status = CASE e.status WHEN 'completed' THEN 'succeeded' WHEN 'dead_letter' THEN 'dead'
                              ELSE 'failed' END,
       expires_at = iif(ttl_ms = 0, 0, :now + ttl_ms),
       result_ref = iif(e.status = 'completed', e.id, NULL),
       error_ref = iif(e.status = 'completed', NULL, e.id)
  FROM temp.ended e
 WHERE (tenure_keys.org, tenure_keys.key) IN
         (SELECT org, key FROM temp.ended WHERE key IS NOT NULL AND status <> 'queued')
   AND e.key IS NOT NULL AND tenure_keys.org = e.org AND tenure_keys.key = e.key
   AND tenure_keys.job_id = e.id;

-- name: any_steps
SELECT 1 FROM tenure_steps LIMIT 1;

-- name: finish_steps
DELETE FROM tenure_steps WHERE job_id IN
  (SELECT id FROM temp.ended WHERE status IN ('completed', 'cancelled'));

-- Whoever was cancelled waits no more.
-- name: finish_waiting
UPDATE tenure_edges SET met = 1
 WHERE met = 0 AND job IN (SELECT id FROM temp.ended WHERE status = 'cancelled');

-- name: anything_waits
SELECT 1 FROM tenure_edges WHERE met = 0 LIMIT 1;

-- What waited for the jobs that have just completed.
-- name: finish_met
UPDATE tenure_edges SET met = 1
 WHERE met = 0 AND needs IN (SELECT id FROM temp.ended WHERE status = 'completed')
RETURNING job;

-- What cannot run any more because of how a need has ended, and how: a need that was cancelled or
-- discarded will never complete; one that has failed may be replayed, and only who was told to end
-- with it does.
-- name: finish_doomed
SELECT j.id, max(e.status <> 'cancelled') FROM temp.ended e
 CROSS JOIN tenure_edges d ON d.needs = e.id AND d.met = 0
 CROSS JOIN tenure_jobs j ON j.id = d.job
 WHERE j.status = 'queued'
   AND (e.status = 'cancelled'
        OR (e.status IN ('failed', 'dead_letter') AND j.after_failed = 'cancel'))
 GROUP BY j.id;

-- The janitor's walk over unmet edges, a bounded page after (:job, :needs): what a finish did not
-- see. [job, needs, status of the need, what the job does when its need has died]
-- name: unmet_edges
SELECT d.job, d.needs,
       coalesce((SELECT status FROM tenure_jobs WHERE id = d.needs),
                (SELECT status FROM tenure_history WHERE id = d.needs), 'gone'),
       (SELECT after_failed FROM tenure_jobs WHERE id = d.job)
  FROM tenure_edges d
 WHERE d.met = 0 AND (d.job, d.needs) > (:job, :needs) ORDER BY d.job, d.needs LIMIT :most;

-- name: meet_edges
UPDATE tenure_edges SET met = 1
 WHERE met = 0 AND (needs, job) IN (SELECT value ->> 1, value ->> 0 FROM json_each(:edges));

-- name: results
SELECT d.needs, coalesce(h.status, iif(l.id IS NULL, j.status, 'in_progress'), 'gone'), h.result
  FROM tenure_edges d LEFT JOIN tenure_history h ON h.id = d.needs
                      LEFT JOIN tenure_jobs j ON j.id = d.needs
                      LEFT JOIN tenure_leases l ON l.id = d.needs
 WHERE d.job = :job ORDER BY d.needs;

-- name: steps
SELECT name, result FROM tenure_steps WHERE job_id = :job;

-- Fenced under the write lock: the job must still be held under this very number by this worker.
-- name: save_step
INSERT INTO tenure_steps (job_id, name, result, lease_no, at)
SELECT id, :name, :result, lease_no, :now FROM tenure_leases
 WHERE id = :job AND lease_no = :lease_no AND worker = :worker
   AND EXISTS (SELECT 1 FROM tenure_workers WHERE no = :worker AND id = :worker_id)
ON CONFLICT (job_id, name) DO UPDATE SET result = excluded.result, lease_no = excluded.lease_no,
  at = excluded.at;

-- A job that gets on is neither poison nor lost: a finished step forgets its crashes and losses.
-- name: forgive_deaths
UPDATE tenure_jobs SET crashes = 0, losses = 0 WHERE id = :job AND (crashes > 0 OR losses > 0);

-- One upsert per (queue, type, outcome) of the batch, however many jobs it holds; each row is put
-- into its bucket once (0.6 us a job; thirteen sums over all rows: 1.1).
-- name: finish_rollups
INSERT INTO tenure_rollups
SELECT 'minute', :now / 60000 * 60000, :worker, queue, type, outcome, sum(jobs), sum(lasted),
       sum(iif(bucket = 0, jobs, 0)), sum(iif(bucket = 1, jobs, 0)),
       sum(iif(bucket = 2, jobs, 0)), sum(iif(bucket = 3, jobs, 0)),
       sum(iif(bucket = 4, jobs, 0)), sum(iif(bucket = 5, jobs, 0)),
       sum(iif(bucket = 6, jobs, 0)), sum(iif(bucket = 7, jobs, 0)),
       sum(iif(bucket = 8, jobs, 0)), sum(iif(bucket = 9, jobs, 0)),
       sum(iif(bucket = 10, jobs, 0)), sum(iif(bucket = 11, jobs, 0)),
       sum(iif(bucket = 12, jobs, 0))
  FROM (SELECT queue, type, outcome, count(*) AS jobs, sum(duration_ms) AS lasted,
               CASE WHEN duration_ms <= 5 THEN 0 WHEN duration_ms <= 10 THEN 1
                    WHEN duration_ms <= 25 THEN 2 WHEN duration_ms <= 50 THEN 3
                    WHEN duration_ms <= 100 THEN 4 WHEN duration_ms <= 500 THEN 5
                    WHEN duration_ms <= 1000 THEN 6 WHEN duration_ms <= 5000 THEN 7
                    WHEN duration_ms <= 10000 THEN 8 WHEN duration_ms <= 30000 THEN 9
                    WHEN duration_ms <= 60000 THEN 10 WHEN duration_ms <= 300000 THEN 11
                    ELSE 12 END AS bucket
          FROM temp.ended GROUP BY queue, type, outcome, bucket)
 WHERE true GROUP BY queue, type, outcome
ON CONFLICT DO UPDATE SET count = count + excluded.count,
  duration_ms = duration_ms + excluded.duration_ms,
  b0 = b0 + excluded.b0, b1 = b1 + excluded.b1, b2 = b2 + excluded.b2, b3 = b3 + excluded.b3,
  b4 = b4 + excluded.b4, b5 = b5 + excluded.b5, b6 = b6 + excluded.b6, b7 = b7 + excluded.b7,
  b8 = b8 + excluded.b8, b9 = b9 + excluded.b9, b10 = b10 + excluded.b10,
  b11 = b11 + excluded.b11, b12 = b12 + excluded.b12;

-- name: progress
UPDATE tenure_jobs SET progress = r.value ->> 2, updated_at = :now
  FROM json_each(:rows) r
  CROSS JOIN tenure_leases l ON l.id = r.value ->> 0
 WHERE tenure_jobs.id = l.id AND l.lease_no = r.value ->> 1 AND l.worker = :worker
   AND EXISTS (SELECT 1 FROM tenure_workers WHERE no = :worker AND id = :worker_id)
RETURNING id, (SELECT lease_no FROM tenure_leases WHERE id = tenure_jobs.id);

-- By the id as well: in a backup that was restored, the number may be another worker's.
-- name: renew
UPDATE tenure_workers SET beat = beat + 1, seen_at = :now, meta = coalesce(:meta, meta)
 WHERE no = :worker AND id = :worker_id AND dead_at IS NULL RETURNING no;

-- name: held
SELECT id, lease_no FROM tenure_leases WHERE worker = :worker;

-- name: cancel_requests
SELECT j.id, coalesce(j.cancel_reason, '')
  FROM tenure_jobs j INDEXED BY tenure_jobs_cancel CROSS JOIN tenure_leases l ON l.id = j.id
 WHERE j.cancel_at IS NOT NULL AND l.worker = :worker;

-- name: workers
SELECT no, id, host, boot, pid, pid_started, beat, lease_ms, started_at, seen_at, dead_at,
       dead_reason, meta, coalesce(held.jobs, 0)
  FROM tenure_workers LEFT JOIN (SELECT worker, count(*) AS jobs FROM tenure_leases
                                  WHERE :count GROUP BY worker) held ON held.worker = no
 ORDER BY no;

-- A worker is declared dead only if it has not renewed since the rescuer looked.
-- name: rescue_declare
UPDATE tenure_workers SET dead_at = :now, dead_reason = :reason
 WHERE no = :worker AND id = :worker_id AND beat = :beat AND dead_at IS NULL RETURNING no;

-- A worker that leaves keeps its row, so that the audit trail can name it.
-- name: retire
UPDATE tenure_workers SET dead_at = :now, dead_reason = 'signed off'
 WHERE no = :worker AND id = :worker_id AND dead_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM tenure_leases WHERE worker = :worker);

-- Whose turn it is: one pass in so many milliseconds for all workers, whoever asks first. A time far
-- ahead is a clock that was set back.
-- name: take_turn
INSERT INTO tenure_upkeep (name, at) VALUES (:name, :now)
ON CONFLICT (name) DO UPDATE SET at = :now
  WHERE at NOT BETWEEN :now - :every_ms + 1 AND :now + :every_ms
RETURNING at;

-- name: end_turn
UPDATE tenure_upkeep SET note = :note WHERE name = :name;

-- name: turns
SELECT name, at, note FROM tenure_upkeep;

-- What the owner has laid down.
-- name: settings
SELECT name, value FROM tenure_settings;

-- name: audit_floor
SELECT value FROM tenure_settings WHERE name = 'audit';

-- name: lay_down
INSERT INTO tenure_settings (name, value, set_at, set_by) VALUES (:name, :value, :now, :by)
ON CONFLICT (name) DO UPDATE SET value = :value, set_at = :now, set_by = :by;

-- name: take_back
DELETE FROM tenure_settings WHERE name = :name;

-- name: queue_names
SELECT name, paused_at IS NOT NULL FROM tenure_queues ORDER BY name;

-- What a person or a program reads of a job: of a hot row with the lease of a running one, or of a
-- finished one. `{source}` is a table, or one of the walks below.
-- name: job_hot
SELECT j.id, j.type, iif(l.id IS NULL, j.status, 'in_progress'), j.queue, j.priority, j.category,
       j.payload, j.result, j.error, j.error_code, coalesce(l.attempts, j.attempts),
       j.max_attempts, j.crashes, coalesce(l.lease_no, j.lease_no), w.id,
       w.seen_at + w.lease_ms, j.scheduled_at, j.created_at,
       max(j.updated_at, coalesce(l.started_at, 0)), coalesce(l.started_at, j.started_at),
       j.completed_at, j.timeout_ms, j.org, j.project, j.actor_type, j.actor_id,
       coalesce(j.request_id, j.id), coalesce(j.correlation_id, j.id), j.traceparent, j.key,
       j.progress, j.parent, j.cancel_at, j.error_place, j.losses, j.asked_at, j.death, j.traceback,
       j.after_failed,
       (SELECT json_group_array(needs) FROM tenure_edges WHERE job = j.id)
  FROM {source} LEFT JOIN tenure_leases l ON l.id = j.id
                LEFT JOIN tenure_workers w ON w.no = l.worker

-- name: job_history
SELECT j.id, j.type, j.status, j.queue, j.priority, j.category, j.payload, j.result, j.error,
       j.error_code, j.attempts, j.max_attempts, j.crashes, j.lease_no, NULL,
       NULL, j.scheduled_at, j.created_at, j.updated_at, j.started_at,
       j.completed_at, j.timeout_ms, j.org, j.project, j.actor_type, j.actor_id,
       coalesce(j.request_id, j.id), coalesce(j.correlation_id, j.id), j.traceparent, j.key,
       j.progress, j.parent, NULL, NULL, j.losses, j.asked_at, NULL, j.traceback, NULL,
       (SELECT json_group_array(needs) FROM tenure_edges WHERE job = j.id)
  FROM {source}

-- name: hot
tenure_jobs j

-- name: finished
tenure_history j

-- name: job_by_id
WHERE j.id = :id AND (:org IS NULL OR j.org = :org);

-- The walks of a listing, newest first: what they go through, from :before down to where so many rows
-- have been looked at, which are narrowed on the way. No subquery where one table will do: it would
-- hand on every column of every row, ten times the work.
-- name: walk_hot
tenure_jobs j

-- name: walk_dead
tenure_jobs j INDEXED BY tenure_jobs_dead

-- name: walk_all_dead
(SELECT * FROM tenure_jobs WHERE id IN (
   SELECT id FROM (SELECT id FROM tenure_jobs INDEXED BY tenure_jobs_dead
                    WHERE completed_at IS NOT NULL AND status = 'failed' AND id < :before
                    ORDER BY id DESC LIMIT :walk)
   UNION ALL
   SELECT id FROM (SELECT id FROM tenure_jobs INDEXED BY tenure_jobs_dead
                    WHERE completed_at IS NOT NULL AND status = 'dead_letter' AND id < :before
                    ORDER BY id DESC LIMIT :walk))
  ORDER BY id DESC LIMIT :walk) j

-- name: walk_held
(SELECT * FROM tenure_jobs WHERE id IN
  (SELECT id FROM tenure_leases WHERE id < :before ORDER BY id DESC LIMIT :walk)) j

-- name: walk_finished
tenure_history j

-- name: walk_cancelled
tenure_history j INDEXED BY tenure_history_cancelled

-- name: job_order
ORDER BY j.id DESC LIMIT :most;

-- Where a walk has looked at so many rows; none when it comes to its end before.
-- name: walk_end
SELECT j.id FROM {source} {where}ORDER BY j.id DESC LIMIT 1 OFFSET :walk - 1;

-- The owners of a key, in any org.
-- name: key_owners
SELECT job_id FROM tenure_keys WHERE key = :key AND (:org IS NULL OR org = :org) LIMIT :walk;

-- Dead jobs by what they died of: a step of tenure_jobs_death from group to group, :groups at most.
-- name: death_after
SELECT queue, type, death FROM (
  SELECT * FROM (SELECT queue, type, death FROM tenure_jobs INDEXED BY tenure_jobs_death
    WHERE completed_at IS NOT NULL AND queue = :queue AND type = :type AND death > :death
    ORDER BY death LIMIT 1)
  UNION ALL
  SELECT * FROM (SELECT queue, type, death FROM tenure_jobs INDEXED BY tenure_jobs_death
    WHERE completed_at IS NOT NULL AND queue = :queue AND type > :type
    ORDER BY type, death LIMIT 1)
  UNION ALL
  SELECT * FROM (SELECT queue, type, death FROM tenure_jobs INDEXED BY tenure_jobs_death
    WHERE completed_at IS NOT NULL AND queue > :queue ORDER BY queue, type, death LIMIT 1)) LIMIT 1;

-- One such group, as many of it as are counted, on the index alone; the newest is the sample.
-- name: dead_group
SELECT j.type, j.status, coalesce(j.error_code, ''), coalesce(j.error_place, ''),
       (SELECT count(*) FROM (SELECT 1 FROM tenure_jobs INDEXED BY tenure_jobs_death
         WHERE completed_at IS NOT NULL AND queue = :queue AND type = :type AND death = :death
         LIMIT :most)),
       (SELECT completed_at FROM tenure_jobs INDEXED BY tenure_jobs_death
         WHERE completed_at IS NOT NULL AND queue = :queue AND type = :type AND death = :death
         ORDER BY completed_at LIMIT 1), j.completed_at, j.id, j.error
  FROM (SELECT id FROM tenure_jobs INDEXED BY tenure_jobs_death
         WHERE completed_at IS NOT NULL AND queue = :queue AND type = :type AND death = :death
         ORDER BY completed_at DESC, id DESC LIMIT 1) g
  CROSS JOIN tenure_jobs j ON j.id = g.id;

-- The same of one org: each row is looked at.
-- name: dead_group_of_org
SELECT j.type, j.status, coalesce(j.error_code, ''), coalesce(j.error_place, ''), g.jobs, g.first,
       g.last, g.sample, j.error
  FROM (SELECT count(*) AS jobs, min(completed_at) AS first, max(completed_at) AS last, id AS sample
          FROM (SELECT completed_at, id, org FROM tenure_jobs INDEXED BY tenure_jobs_death
                 WHERE completed_at IS NOT NULL AND queue = :queue AND type = :type AND death = :death
                 ORDER BY completed_at DESC LIMIT :most)
         WHERE org = :org) g
  CROSS JOIN tenure_jobs j ON j.id = g.sample;

-- Jobs that wait for dead ones, among so many that wait, and the first of them.
-- name: waiting_for_the_dead
SELECT count(DISTINCT d.job), d.job, d.needs, n.status, min(d.job || d.needs)
  FROM (SELECT job, needs FROM tenure_edges WHERE met = 0 LIMIT :most) d
 CROSS JOIN tenure_jobs n ON n.id = d.needs AND n.completed_at IS NOT NULL;

-- name: events_of_job
SELECT e.seq, e.kind, e.at, e.job_id, e.type, e.attempt, e.lease_no, e.org, e.project,
       e.actor_type, e.actor_id, coalesce(e.request_id, e.job_id),
       coalesce(e.correlation_id, e.job_id), w.id, e.data
  FROM tenure_events e LEFT JOIN tenure_workers w ON w.no = e.worker
 WHERE e.job_id = :job_id AND e.seq > :after AND (:org IS NULL OR e.org = :org)
 ORDER BY e.seq LIMIT :most;

-- name: events_all
SELECT e.seq, e.kind, e.at, e.job_id, e.type, e.attempt, e.lease_no, e.org, e.project,
       e.actor_type, e.actor_id, coalesce(e.request_id, e.job_id),
       coalesce(e.correlation_id, e.job_id), w.id, e.data
  FROM tenure_events e LEFT JOIN tenure_workers w ON w.no = e.worker
 WHERE e.seq > :after AND (:org IS NULL OR e.org = :org)
 ORDER BY e.seq LIMIT :most;

-- name: last_event
SELECT coalesce(max(seq), 0) FROM tenure_events;

-- Of one queue: due, later, waiting, running, dead, first ready_at; each counted up to :most.
-- name: queue_counts
SELECT :queue, d.jobs + l.due + s.due, l.later + s.later, w.jobs, 0, x.jobs,
       nullif(min(coalesce(d.first, 1 << 62), coalesce(l.first, 1 << 62), coalesce(s.first, 1 << 62)),
              1 << 62), :now
  FROM (SELECT count(*) AS jobs, min(ready_at) AS first FROM
         (SELECT ready_at FROM tenure_due WHERE queue = :queue LIMIT :most)) d,
       (SELECT count(*) FILTER (WHERE ready_at <= :now) AS due,
               count(*) FILTER (WHERE ready_at > :now) AS later, min(ready_at) AS first FROM
         (SELECT ready_at FROM (SELECT ready_at FROM tenure_later
                                 WHERE queue = :queue AND ready_at <= :now LIMIT :most)
          UNION ALL
          SELECT ready_at FROM (SELECT ready_at FROM tenure_later
                                 WHERE queue = :queue AND ready_at > :now LIMIT :most))) l,
       (SELECT count(*) FILTER (WHERE ready_at <= :now) AS due,
               count(*) FILTER (WHERE ready_at > :now) AS later, min(ready_at) AS first FROM
         (SELECT ready_at FROM tenure_suspects WHERE queue = :queue LIMIT :most)) s,
       (SELECT count(*) AS jobs FROM
         (SELECT 1 FROM tenure_jobs WHERE waits > 0 AND queue = :queue LIMIT :most)) w,
       (SELECT count(*) AS jobs FROM
         (SELECT 1 FROM tenure_jobs INDEXED BY tenure_jobs_death
           WHERE completed_at IS NOT NULL AND queue = :queue LIMIT :most)) x;

-- The first due time of a (queue, priority), as far as :most orgs tell: two seeks an org.
-- name: first_ready
WITH RECURSIVE tenant (org) AS (
  SELECT min(org) FROM tenure_due WHERE queue = :queue AND priority = :priority
  UNION ALL
  SELECT (SELECT min(org) FROM tenure_due
           WHERE queue = :queue AND priority = :priority AND org > tenant.org)
    FROM tenant WHERE tenant.org IS NOT NULL LIMIT :most)
SELECT min((SELECT min(ready_at) FROM tenure_due
             WHERE queue = :queue AND priority = :priority AND org = tenant.org)) FROM tenant;

-- name: running_counts
SELECT queue, 0, 0, 0, count(*), 0, NULL, :now
  FROM tenure_leases l CROSS JOIN tenure_jobs j ON j.id = l.id GROUP BY queue;

-- name: queue_switches
SELECT name, paused_at, paused_by, pause_reason FROM tenure_queues ORDER BY name;

-- For doctor: jobs that do not stand in exactly one place (see schema.sql), and places of no job.
-- name: misplaced
SELECT (SELECT count(*) FROM tenure_jobs j
         WHERE EXISTS (SELECT 1 FROM tenure_due r
                        WHERE r.queue = j.queue AND r.priority = j.priority AND r.org = j.org
                          AND r.ready_at = j.ready_at AND r.id = j.id)
             + EXISTS (SELECT 1 FROM tenure_later r
                        WHERE r.queue = j.queue AND r.ready_at = j.ready_at AND r.id = j.id)
             + EXISTS (SELECT 1 FROM tenure_suspects r
                        WHERE r.queue = j.queue AND r.ready_at = j.ready_at AND r.id = j.id)
             + EXISTS (SELECT 1 FROM tenure_leases l WHERE l.id = j.id)
             + (j.waits > 0) + (j.completed_at IS NOT NULL) <> 1)
     + (SELECT count(*) FROM tenure_due WHERE id NOT IN (SELECT id FROM tenure_jobs))
     + (SELECT count(*) FROM tenure_later WHERE id NOT IN (SELECT id FROM tenure_jobs))
     + (SELECT count(*) FROM tenure_suspects WHERE id NOT IN (SELECT id FROM tenure_jobs))
     + (SELECT count(*) FROM tenure_leases WHERE id NOT IN (SELECT id FROM tenure_jobs));

-- Among the first so many of each kind.
-- name: unknown_types
SELECT j.type, count(*)
  FROM (SELECT id FROM (SELECT id FROM tenure_due LIMIT :walk)
        UNION ALL SELECT id FROM (SELECT id FROM tenure_later LIMIT :walk)
        UNION ALL SELECT id FROM (SELECT id FROM tenure_suspects LIMIT :walk)
        UNION ALL SELECT id FROM (SELECT id FROM tenure_jobs WHERE waits > 0 LIMIT :walk)) q
  CROSS JOIN tenure_jobs j ON j.id = q.id
 WHERE j.type NOT IN (SELECT value FROM json_each(:types)) GROUP BY j.type;

-- name: rollups
SELECT start, queue, type, outcome, sum(count), sum(duration_ms), sum(b0), sum(b1), sum(b2),
       sum(b3), sum(b4), sum(b5), sum(b6), sum(b7), sum(b8), sum(b9), sum(b10), sum(b11), sum(b12)
  FROM (SELECT * FROM tenure_rollups WHERE grain IN ('minute', 'hour') AND start >= :since
        UNION ALL
        SELECT * FROM tenure_rollups WHERE grain = 'total')
 GROUP BY start, queue, type, outcome;

-- Each counted up to :most; completed ones among twice as many, cancelled ones may lie in between.
-- name: totals
SELECT 'queued', (SELECT count(*) FROM (SELECT 1 FROM tenure_due LIMIT :most))
               + (SELECT count(*) FROM (SELECT 1 FROM tenure_later LIMIT :most))
               + (SELECT count(*) FROM (SELECT 1 FROM tenure_suspects LIMIT :most))
               + (SELECT count(*) FROM (SELECT 1 FROM tenure_jobs WHERE waits > 0 LIMIT :most))
UNION ALL SELECT 'in_progress', count(*) FROM (SELECT 1 FROM tenure_leases LIMIT :most)
UNION ALL SELECT 'failed', count(*) FROM (SELECT 1 FROM tenure_jobs INDEXED BY tenure_jobs_dead
            WHERE completed_at IS NOT NULL AND status = 'failed' LIMIT :most)
UNION ALL SELECT 'dead_letter', count(*) FROM (SELECT 1 FROM tenure_jobs INDEXED BY tenure_jobs_dead
            WHERE completed_at IS NOT NULL AND status = 'dead_letter' LIMIT :most)
UNION ALL SELECT 'cancelled', count(*) FROM (
            SELECT 1 FROM tenure_history INDEXED BY tenure_history_cancelled
             WHERE status = 'cancelled' LIMIT :most)
UNION ALL SELECT 'completed', count(*) FILTER (WHERE status = 'completed') FROM (
            SELECT status FROM tenure_history LIMIT 2 * :most);

-- Operators. Each takes ids and says what became of each: the status is read first (the write
-- lock is held), then one statement changes those that may change.
-- name: statuses
SELECT j.id, iif(l.id IS NULL, j.status, 'in_progress'), j.org
  FROM tenure_jobs j LEFT JOIN tenure_leases l ON l.id = j.id
 WHERE j.id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT h.id, h.status, h.org FROM tenure_history h
 WHERE h.id IN (SELECT value FROM json_each(:ids));

-- name: operator_events
INSERT INTO tenure_events (at, kind, job_id, type, attempt, lease_no, org, project, actor_type,
  actor_id, request_id, correlation_id, data)
SELECT :now, :kind, j.id, type, coalesce(l.attempts, j.attempts), coalesce(l.lease_no, j.lease_no),
       org, project, :actor_type, :actor_id, request_id, correlation_id, :data
  FROM tenure_jobs j LEFT JOIN tenure_leases l ON l.id = j.id
 WHERE j.id IN (SELECT value FROM json_each(:ids));

-- A cancelled or discarded job leaves through the same door as a finished one. A discarded one keeps
-- the error it died of: why it was given up, its event tells.
-- name: operator_end
INSERT INTO temp.ended (id, lease_no, duration_ms, outcome, status, error, error_code, attempts,
                        started_at, key, org, queue, type)
SELECT id, lease_no, 0, 'cancelled', 'cancelled',
       iif(completed_at IS NULL, :reason, coalesce(error, :reason)), :code, attempts,
       started_at, key, org, queue, type
  FROM tenure_jobs WHERE id IN (SELECT value FROM json_each(:ids));

-- name: operator_leave_due
DELETE FROM tenure_due WHERE (queue, priority, org, ready_at, id) IN
  (SELECT queue, priority, org, ready_at, id FROM tenure_jobs
    WHERE id IN (SELECT value FROM json_each(:ids)));

-- name: operator_leave_later
DELETE FROM tenure_later WHERE (queue, ready_at, id) IN
  (SELECT queue, ready_at, id FROM tenure_jobs WHERE id IN (SELECT value FROM json_each(:ids)));

-- name: operator_leave_suspects
DELETE FROM tenure_suspects WHERE (queue, ready_at, id) IN
  (SELECT queue, ready_at, id FROM tenure_jobs WHERE id IN (SELECT value FROM json_each(:ids)));

-- name: request_cancel
UPDATE tenure_jobs SET cancel_at = :now, cancel_reason = :reason, updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids));

-- name: replay
UPDATE tenure_jobs
   SET status = 'queued', attempts = 0, crashes = 0, losses = 0, ready_at = :now,
       scheduled_at = :now, completed_at = NULL, started_at = NULL, progress = NULL, death = '',
       payload = coalesce(:payload, payload), updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids));

-- The key of a replayed job lives again with it.
-- name: replay_keys
UPDATE tenure_keys SET status = NULL, expires_at = NULL, error_ref = NULL
 WHERE (org, key, job_id) IN (SELECT org, key, id FROM tenure_jobs
                               WHERE id IN (SELECT value FROM json_each(:ids)));

-- A key that had expired and was pruned is taken again, if nobody else has it by now.
-- name: replay_lost_keys
INSERT INTO tenure_keys (org, key, job_id, first_seen_at, last_seen_at, ttl_ms)
SELECT org, key, id, :now, :now, :key_ttl_ms FROM tenure_jobs
 WHERE key IS NOT NULL AND id IN (SELECT value FROM json_each(:ids))
ON CONFLICT DO NOTHING;

-- name: replay_steps
DELETE FROM tenure_steps WHERE job_id IN (SELECT value FROM json_each(:ids));

-- name: pause
INSERT INTO tenure_queues (name, created_at, paused_at, paused_by, pause_reason)
VALUES (:queue, :now, :now, :by, :reason)
ON CONFLICT (name) DO UPDATE SET paused_at = :now, paused_by = :by, pause_reason = :reason;

-- name: resume
UPDATE tenure_queues SET paused_at = NULL, paused_by = NULL, pause_reason = NULL
 WHERE name = :queue;

-- name: queue_event
INSERT INTO tenure_events (at, kind, org, actor_type, actor_id, data)
VALUES (:now, :kind, 'default', :actor_type, :actor_id, :data);

-- Retention, one bounded batch each. History by task and age: walks tenure_history_age. A result
-- stays while a job that ran after it may still read it.
-- name: prune_types
WITH RECURSIVE task (type) AS (
  SELECT min(type) FROM tenure_history
  UNION ALL
  SELECT (SELECT min(type) FROM tenure_history WHERE type > task.type)
    FROM task WHERE task.type IS NOT NULL)
SELECT type FROM task WHERE type IS NOT NULL;

-- name: prune_history
DELETE FROM tenure_history WHERE id IN
  (SELECT id FROM tenure_history h WHERE type = :type AND completed_at < :before
      AND NOT EXISTS (SELECT 1 FROM tenure_edges d CROSS JOIN tenure_jobs j ON j.id = d.job
                       WHERE d.needs = h.id)
    ORDER BY completed_at LIMIT :most);

-- Keep the last N of a task: everything older goes, a bounded batch at a time, though not before the
-- owner's floor.
-- name: prune_history_last
DELETE FROM tenure_history WHERE id IN
  (SELECT id FROM (SELECT id FROM tenure_history WHERE type = :type AND completed_at < :before
                    ORDER BY completed_at DESC LIMIT :most OFFSET :last) h
    WHERE NOT EXISTS (SELECT 1 FROM tenure_edges d CROSS JOIN tenure_jobs j ON j.id = d.job
                       WHERE d.needs = h.id));

-- Dead jobs of one group that are past their time, oldest first; or, to keep the last N of a task, the
-- newest of it. Those somebody waits for stay: they may yet be replayed.
-- name: prune_dead_old
SELECT id, completed_at FROM tenure_jobs j INDEXED BY tenure_jobs_death
 WHERE completed_at IS NOT NULL AND queue = :queue AND type = :type AND death = :death
   AND completed_at < :before
   AND NOT EXISTS (SELECT 1 FROM tenure_edges d CROSS JOIN tenure_jobs w ON w.id = d.job
                    WHERE d.needs = j.id)
 ORDER BY completed_at LIMIT :most;

-- name: prune_dead_newest
SELECT id, completed_at FROM tenure_jobs INDEXED BY tenure_jobs_death
 WHERE completed_at IS NOT NULL AND queue = :queue AND type = :type AND death = :death
 ORDER BY completed_at DESC LIMIT :most;

-- name: prune_dead
DELETE FROM tenure_jobs WHERE id IN (SELECT value FROM json_each(:ids)) AND completed_at IS NOT NULL
   AND NOT EXISTS (SELECT 1 FROM tenure_edges d CROSS JOIN tenure_jobs w ON w.id = d.job
                    WHERE d.needs = tenure_jobs.id);

-- name: prune_steps
DELETE FROM tenure_steps WHERE job_id IN (SELECT value FROM json_each(:ids))
   AND job_id NOT IN (SELECT id FROM tenure_jobs WHERE id IN (SELECT value FROM json_each(:ids)));

-- Edges of jobs that are no more: the next page of jobs that have some.
-- name: prune_edges_page
SELECT job FROM tenure_edges WHERE job > :job ORDER BY job LIMIT :most;

-- name: prune_edges
DELETE FROM tenure_edges WHERE job IN
  (SELECT value FROM json_each(:ids)
    WHERE NOT EXISTS (SELECT 1 FROM tenure_jobs WHERE id = value)
      AND NOT EXISTS (SELECT 1 FROM tenure_history WHERE id = value));

-- Among twice as many as may go: those of a clock that was ahead stay for long, and nobody is to wait
-- behind them.
-- name: prune_events
DELETE FROM tenure_events WHERE seq IN
  (SELECT seq FROM (SELECT seq, at FROM tenure_events ORDER BY seq LIMIT 2 * :most)
    WHERE at < :before AND seq < (SELECT max(seq) FROM tenure_events) ORDER BY seq LIMIT :most);

-- name: prune_keys
DELETE FROM tenure_keys WHERE (org, key) IN
  (SELECT org, key FROM tenure_keys WHERE expires_at <= :now LIMIT :most);

-- name: prune_workers
DELETE FROM tenure_workers WHERE no IN
  (SELECT no FROM tenure_workers WHERE dead_at < :before
      AND no NOT IN (SELECT worker FROM tenure_leases) LIMIT :most);

-- Minutes older than a day become hours, hours older than 90 days the total, in the same
-- transaction that removes them: sums never fall.
-- name: fold_rollups
INSERT INTO tenure_rollups
SELECT :coarse, iif(:coarse = 'total', 0, start / 3600000 * 3600000), 0, queue, type, outcome,
       sum(count), sum(duration_ms), sum(b0), sum(b1), sum(b2), sum(b3), sum(b4), sum(b5),
       sum(b6), sum(b7), sum(b8), sum(b9), sum(b10), sum(b11), sum(b12)
  FROM tenure_rollups WHERE grain = :fine AND start < :before
 GROUP BY iif(:coarse = 'total', 0, start / 3600000 * 3600000), queue, type, outcome
ON CONFLICT DO UPDATE SET count = count + excluded.count,
  duration_ms = duration_ms + excluded.duration_ms,
  b0 = b0 + excluded.b0, b1 = b1 + excluded.b1, b2 = b2 + excluded.b2, b3 = b3 + excluded.b3,
  b4 = b4 + excluded.b4, b5 = b5 + excluded.b5, b6 = b6 + excluded.b6, b7 = b7 + excluded.b7,
  b8 = b8 + excluded.b8, b9 = b9 + excluded.b9, b10 = b10 + excluded.b10,
  b11 = b11 + excluded.b11, b12 = b12 + excluded.b12;

-- name: drop_folded
DELETE FROM tenure_rollups WHERE grain = :fine AND start < :before;
