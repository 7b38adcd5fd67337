-- What 0002_promises would do while everybody waits, done before it while everybody works: one
-- statement at a time, none of them in a transaction, each again after a run that was cut off.
-- `{partition}`: once for each partition of tenure.events.

ALTER TABLE tenure.jobs
  ADD COLUMN IF NOT EXISTS losses integer NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS promoted boolean NOT NULL DEFAULT false,
  ADD COLUMN IF NOT EXISTS asked_at bigint,
  ADD COLUMN IF NOT EXISTS death text COLLATE "C" NOT NULL DEFAULT '',
  ADD COLUMN IF NOT EXISTS traceback text;

UPDATE tenure.jobs SET death = left(encode(sha256(convert_to(concat_ws(
         '|', type, status, coalesce(error_code, ''), coalesce(error_place, '')), 'UTF8')), 'hex'), 16)
 WHERE completed_at IS NOT NULL AND death = '';

CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_claim_new ON tenure.jobs (queue, priority, org, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND crashes = 0 AND losses < 3
    AND (ready_at <= created_at OR promoted);

CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_later ON tenure.jobs (queue, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND crashes = 0 AND losses < 3
    AND ready_at > created_at AND NOT promoted;

CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_suspect ON tenure.jobs (queue, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND (crashes > 0 OR losses >= 3);

CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_death ON tenure.jobs (queue, type, death, completed_at, id)
  WHERE completed_at IS NOT NULL;

CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS keys_by_key ON tenure.keys (key, org);

CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS {partition}_pkey ON tenure.{partition} (seq, at);

ALTER TABLE tenure.{partition} ADD CONSTRAINT {partition}_pkey PRIMARY KEY USING INDEX {partition}_pkey;
