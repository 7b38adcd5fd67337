-- compatible from: 1
--
-- Who is to blame for a death (losses), jobs whose time has to come apart from those that are due,
-- what a job died of, what the owner lays down, one pass of upkeep for the whole fleet, a primary key
-- for every table. Whatever 0002_promises.online.sql has done before is not done again.

ALTER TABLE tenure.migrations ADD COLUMN pack text COLLATE "C" NOT NULL DEFAULT 'tenure';
ALTER TABLE tenure.migrations DROP CONSTRAINT migrations_pkey, ADD PRIMARY KEY (pack, version);

ALTER TABLE tenure.jobs
  ADD COLUMN IF NOT EXISTS losses integer NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS promoted boolean NOT NULL DEFAULT false,
  ADD COLUMN IF NOT EXISTS asked_at bigint,
  ADD COLUMN IF NOT EXISTS death text COLLATE "C" NOT NULL DEFAULT '',
  ADD COLUMN IF NOT EXISTS traceback text;

DROP INDEX tenure.jobs_claim;
ALTER INDEX IF EXISTS tenure.jobs_claim_new RENAME TO jobs_claim;
CREATE INDEX IF NOT EXISTS jobs_claim ON tenure.jobs (queue, priority, org, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND crashes = 0 AND losses < 3
    AND (ready_at <= created_at OR promoted);
CREATE INDEX IF NOT EXISTS jobs_later ON tenure.jobs (queue, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND crashes = 0 AND losses < 3
    AND ready_at > created_at AND NOT promoted;
CREATE INDEX IF NOT EXISTS jobs_suspect ON tenure.jobs (queue, ready_at, id)
  WHERE status = 'queued' AND waits = 0 AND (crashes > 0 OR losses >= 3);
CREATE INDEX IF NOT EXISTS jobs_death ON tenure.jobs (queue, type, death, completed_at, id)
  WHERE completed_at IS NOT NULL;

UPDATE tenure.jobs SET death = left(encode(sha256(convert_to(concat_ws(
         '|', type, status, coalesce(error_code, ''), coalesce(error_place, '')), 'UTF8')), 'hex'), 16)
 WHERE completed_at IS NOT NULL AND death = '';

ALTER TABLE tenure.history
  ADD COLUMN losses integer NOT NULL DEFAULT 0,
  ADD COLUMN asked_at bigint,
  ADD COLUMN traceback text;

CREATE UNIQUE INDEX IF NOT EXISTS keys_by_key ON tenure.keys (key, org);
ALTER TABLE tenure.keys DROP CONSTRAINT keys_pkey,
  ADD CONSTRAINT keys_pkey PRIMARY KEY USING INDEX keys_by_key;

ALTER TABLE tenure.events ADD PRIMARY KEY (seq, at);
DROP INDEX tenure.events_order;

CREATE TABLE tenure.settings (
  name    text COLLATE "C" PRIMARY KEY,
  value   text NOT NULL,
  set_at  bigint NOT NULL,
  set_by  text NOT NULL
);

CREATE TABLE tenure.upkeep (
  name   text COLLATE "C" PRIMARY KEY,
  at     bigint NOT NULL DEFAULT 0,
  value  bigint NOT NULL DEFAULT 0,
  note   text NOT NULL DEFAULT '{}'
);

INSERT INTO tenure.upkeep (name) VALUES ('partitions'), ('retention'), ('events');

CREATE FUNCTION tenure.shown(ms bigint) RETURNS timestamptz LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN ms > 253402300799999 THEN timestamptz '9999-12-31 23:59:59.999Z'
              WHEN ms < -62135596800000 THEN timestamptz '0001-01-01 00:00:00Z'
              ELSE to_timestamp(ms / 1000.0) END
$$;

CREATE OR REPLACE VIEW tenure.job_queue AS
SELECT j.id, j.type, j.status, j.queue, j.priority, j.org AS org_id, j.project AS project_id,
       tenure.shown(j.scheduled_at) AS scheduled_at,
       w.id AS lease_owner, tenure.shown(w.seen_at + w.lease_ms) AS lease_until,
       j.lease_no, j.payload, j.key AS idempotency_key, j.attempts, j.max_attempts AS max_retries,
       j.crashes, j.error, j.error_code, tenure.shown(j.created_at) AS created_at,
       tenure.shown(j.updated_at) AS updated_at,
       tenure.shown(j.started_at) AS started_at,
       tenure.shown(j.completed_at) AS completed_at,
       j.result, j.progress, j.category, j.actor_type, j.actor_id,
       coalesce(j.request_id, j.id::text) AS request_id,
       coalesce(j.correlation_id, j.id::text) AS correlation_id, j.traceparent, j.parent,
       j.losses
  FROM tenure.jobs j LEFT JOIN tenure.workers w ON w.no = j.worker
UNION ALL
SELECT h.id, h.type, h.status, h.queue, h.priority, h.org, h.project,
       tenure.shown(h.scheduled_at), NULL, NULL, h.lease_no, h.payload, h.key,
       h.attempts, h.max_attempts, h.crashes, h.error, h.error_code,
       tenure.shown(h.created_at), tenure.shown(h.completed_at),
       tenure.shown(h.started_at), tenure.shown(h.completed_at),
       h.result, h.progress, h.category, h.actor_type, h.actor_id,
       coalesce(h.request_id, h.id::text), coalesce(h.correlation_id, h.id::text),
       h.traceparent, h.parent, h.losses
  FROM tenure.history h;

-- Finished jobs and events are removed by functions of the owner's alone.
DO $$
DECLARE
  held record;
BEGIN
  FOR held IN
    SELECT c.oid::regclass AS name, a.grantee::regrole AS role
      FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
     WHERE c.oid IN ('tenure.history'::regclass, 'tenure.history_other'::regclass,
                     'tenure.events_other'::regclass)
       AND a.privilege_type = 'DELETE' AND a.grantee NOT IN (0, c.relowner)
  LOOP
    EXECUTE format('REVOKE DELETE ON %s FROM %s', held.name, held.role);
  END LOOP;
END $$;
