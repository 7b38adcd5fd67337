-- Takes 0002_promises back: floors and losses are forgotten, jobs stay. Before it functions/earlier.sql
-- drops the functions of this version, after it the view and the functions of version 1 come back.

DROP VIEW tenure.job_queue;

DROP ROUTINE tenure.clock, tenure.enqueue, tenure.first_id, tenure.home, tenure.new_id, tenure.shown,
  tenure.ulid;

DROP TABLE tenure.settings, tenure.upkeep;

CREATE INDEX events_order ON tenure.events (seq);
ALTER TABLE tenure.events DROP CONSTRAINT events_pkey;

ALTER TABLE tenure.keys DROP CONSTRAINT keys_pkey, ADD PRIMARY KEY (org, key);

ALTER TABLE tenure.history DROP COLUMN losses, DROP COLUMN asked_at, DROP COLUMN traceback;

DROP INDEX tenure.jobs_claim, tenure.jobs_later, tenure.jobs_suspect, tenure.jobs_death;
ALTER TABLE tenure.jobs DROP COLUMN losses, DROP COLUMN promoted, DROP COLUMN asked_at,
  DROP COLUMN death, DROP COLUMN traceback;
CREATE INDEX jobs_claim ON tenure.jobs (queue, priority, org, ready_at, id)
  WHERE status = 'queued' AND waits = 0;

ALTER TABLE tenure.migrations DROP CONSTRAINT migrations_pkey;
ALTER TABLE tenure.migrations DROP COLUMN pack, ADD PRIMARY KEY (version);
