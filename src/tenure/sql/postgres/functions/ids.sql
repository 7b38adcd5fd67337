-- What Tenure does to its tables on PostgreSQL, in the order of store.py. Each public function is
-- one transaction; each is called by one statement of queries.sql. `tenure migrate` makes all of them
-- anew with every version.
--
-- The functions that touch many rows switch joins and scans of whole tables off for themselves: a
-- batch is looked up by id, whatever the statistics of a table that is empty one moment and holds a
-- million rows the next make the planner believe. And with them the compiler: before version 18 a
-- plan that cannot do without what is switched off looks dear enough to be compiled (finish of 6
-- jobs: 240 instead of 1 ms). There being one good plan for any size, it is made once a session:
-- by default most were made anew at each call (enqueue with a key: 1.15 instead of 0.51 ms).
-- A row of a batch finds its job by `id = ANY (…)` or in a subquery with LIMIT 1, which no planner
-- turns around: a join, planned while the table was empty, was a walk over all of jobs_pkey (a finish
-- of 500 took 73 instead of 7 ms), and a session keeps its plans.
-- #variable_conflict use_column: a bare name is a column; variables have names of their own.

-- -- ids and time --------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tenure.clock() RETURNS bigint LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
  SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
$$;

-- A new ULID as uuid: 48 bits of time, the rest random. For jobs enqueued from SQL.
CREATE OR REPLACE FUNCTION tenure.new_id(at_ms bigint) RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
  SELECT (lpad(to_hex(at_ms), 12, '0') || right(replace(gen_random_uuid()::text, '-', ''), 20))::uuid
$$;

-- The smallest id of a day.
CREATE OR REPLACE FUNCTION tenure.first_id(day bigint) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
  SELECT (lpad(to_hex(day * 86400000), 12, '0') || repeat('0', 20))::uuid
$$;

-- The 26 characters that programs and people call a job by.
CREATE OR REPLACE FUNCTION tenure.ulid(id uuid) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
  SELECT string_agg(substr('0123456789ABCDEFGHJKMNPQRSTVWXYZ',
                           substring(b.bits FROM n * 5 + 1 FOR 5)::bit(5)::int + 1, 1), '' ORDER BY n)
    FROM (SELECT (B'00' || ('x' || replace(id::text, '-', ''))::bit(128)) AS bits) b,
         generate_series(0, 25) AS n
$$;

-- What is written to the audit trail: what a program asks for, or more where the owner says so.
CREATE FUNCTION tenure.audited(asked text) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN asked = 'all' THEN asked
              ELSE coalesce((SELECT s.value FROM tenure.settings s WHERE s.name = 'audit'), asked) END
$$;
