-- -- for programs of schema 1 --------------------------------------------------------------------
-- They run on while a fleet is upgraded. Their calls name no worker's id, and remember nothing.

CREATE FUNCTION tenure.claim(by_worker integer, queues text[], mosts integer[], total integer,
  memory jsonb, types text[], later_ms bigint, audit text, now_ms bigint)
RETURNS TABLE (id uuid, lease_no integer, type text, payload json, attempts integer,
  max_attempts integer, crashes integer, timeout_ms bigint, queue text, priority tenure.priority,
  category text, org text, project text, actor_type text, actor_id text, request_id text,
  correlation_id text, traceparent text, key text, parent uuid, scheduled_at bigint,
  created_at bigint, ready_at bigint) LANGUAGE sql AS $$
  WITH healthy AS MATERIALIZED (
    SELECT c.* FROM tenure.workers w CROSS JOIN LATERAL tenure.claim_jobs(by_worker, w.id, queues,
             mosts, total, '{}', types, false, audit, now_ms) c WHERE w.no = by_worker),
  room AS MATERIALIZED (  -- what those have left
    SELECT array_agg(r.queue) AS queues, array_agg(r.most) AS mosts, total - sum(r.taken)::integer AS total
      FROM (SELECT a.queue, a.most - count(h.id)::integer AS most, count(h.id) AS taken
              FROM unnest(queues, mosts) a(queue, most)
              LEFT JOIN healthy h ON h.queue = a.queue AND h.lease_no > 0
             GROUP BY a.queue, a.most) r),
  suspects AS MATERIALIZED (
    SELECT c.* FROM room r JOIN tenure.workers w ON w.no = by_worker CROSS JOIN LATERAL
           tenure.claim_jobs(by_worker, w.id, r.queues, r.mosts, r.total, '{}', types, true, audit,
             now_ms) c WHERE r.total > 0 AND c.lease_no > 0)
  SELECT c.id, c.lease_no, CASE WHEN c.lease_no > 0 THEN c.type ELSE c.payload ->> 0 END, c.payload,
         c.attempts, c.max_attempts, c.crashes, c.timeout_ms, c.queue, c.priority, c.category, c.org,
         c.project, c.actor_type, c.actor_id, c.request_id, c.correlation_id, c.traceparent, c.key,
         c.parent, c.scheduled_at, c.created_at, c.ready_at
    FROM (SELECT * FROM healthy UNION ALL SELECT * FROM suspects) c
$$;

CREATE FUNCTION tenure.finish_completed(by_worker integer, ids uuid[], lease_nos integer[],
  durations bigint[], results json, audit text, now_ms bigint)
RETURNS TABLE (id uuid, lease_no integer) LANGUAGE sql AS $$
  SELECT * FROM tenure.complete_runs(by_worker, NULL, ids, lease_nos, durations, results, audit,
                                        now_ms)
$$;

CREATE FUNCTION tenure.finish(by_worker integer, rows json, children json, strict boolean,
  audit text, now_ms bigint) RETURNS TABLE (id uuid, lease_no integer) LANGUAGE sql AS $$
  SELECT * FROM tenure.finish_runs(by_worker, NULL, rows, children, strict, audit, now_ms)
$$;

CREATE FUNCTION tenure.save_step(in_job uuid, in_lease_no integer, step text, returned json,
  now_ms bigint) RETURNS boolean LANGUAGE sql AS $$
  SELECT coalesce((SELECT tenure.store_step(w.no, w.id, in_job, in_lease_no, step, returned, now_ms)
                     FROM tenure.jobs j JOIN tenure.workers w ON w.no = j.worker
                    WHERE j.id = in_job), false)
$$;

CREATE FUNCTION tenure.rescue(dead integer, seen_beat bigint, started uuid[], crash_limit integer,
  why text, not_after bigint, audit text, now_ms bigint)
RETURNS TABLE (requeued integer, poisoned integer) LANGUAGE sql AS $$
  SELECT r.requeued, r.lost FROM tenure.workers w CROSS JOIN LATERAL tenure.rescue_jobs(
           dead, w.id, seen_beat, started, 10, why, not_after, audit, now_ms) r
   WHERE w.no = dead
$$;

CREATE FUNCTION tenure.retire(leaving integer, now_ms bigint) RETURNS void LANGUAGE sql AS $$
  SELECT tenure.sign_off(w.no, w.id, now_ms) FROM tenure.workers w WHERE w.no = leaving
$$;

-- Days go by tenure.drop_day.
CREATE FUNCTION tenure.drop_partitions(keep_history bigint, keep_events bigint, own_terms text[])
RETURNS TABLE (history integer, events integer) LANGUAGE sql AS $$
  SELECT 0, 0
$$;

SELECT tenure.add_partitions(NULL);
