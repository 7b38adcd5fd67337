-- What `tenure doctor` asks a PostgreSQL server (13 and newer). Each is one read-only transaction
-- with a time limit; nothing here changes anything, and all of it may be asked of a standby.
--
-- Statistics of other roles' sessions are NULL without pg_monitor (or pg_read_all_stats): a NULL
-- backend_type is a session we may not look into.

-- name: server
SELECT current_setting('server_version_num')::integer / 10000, current_setting('server_version'),
       pg_is_in_recovery(), current_setting('server_encoding'), current_user::text,
       current_setting('fsync'), current_setting('full_page_writes'),
       current_setting('synchronous_commit'), current_setting('autovacuum'),
       current_setting('track_counts'), current_setting('max_connections')::integer,
       current_setting('superuser_reserved_connections')::integer
         + coalesce(current_setting('reserved_connections', true)::integer, 0),
       extract(epoch FROM clock_timestamp())::float8;

-- Sessions of all databases: they share max_connections.
-- name: connections
SELECT count(*)::integer FROM pg_stat_activity
 WHERE datid IS NOT NULL AND coalesce(backend_type, 'client backend') = 'client backend';

-- name: own_session
SELECT pg_backend_pid();

-- By the catalog: to_regclass fails where the role may not even look into the schema.
-- name: tables
SELECT n.oid IS NOT NULL, coalesce(has_schema_privilege(n.oid, 'USAGE'), false),
       coalesce(has_schema_privilege(n.oid, 'CREATE'), false), m.oid IS NOT NULL,
       coalesce(has_table_privilege(m.oid, 'SELECT'), false),
       coalesce(pg_has_role(m.relowner, 'MEMBER'), false)
  FROM (SELECT %(schema)s::text AS name) wanted LEFT JOIN pg_namespace n ON n.nspname = wanted.name
       LEFT JOIN pg_class m ON m.relnamespace = n.oid AND m.relname = 'migrations';

-- name: version
SELECT coalesce(max(version), 0), coalesce(max(compatible_from), 0) FROM tenure.migrations;

-- What a role lacks of what a worker needs.
-- name: missing_rights
SELECT 'schema', n.nspname::text, 'USAGE' FROM pg_namespace n
 WHERE n.nspname = %(schema)s AND NOT has_schema_privilege(%(role)s, n.oid, 'USAGE')
UNION ALL
SELECT 'table', wanted.name, wanted.privilege
  FROM unnest(%(tables)s::text[], %(privileges)s::text[]) wanted(name, privilege)
       JOIN pg_namespace n ON n.nspname = %(schema)s
       JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.name
 WHERE NOT has_table_privilege(%(role)s, c.oid, wanted.privilege)
UNION ALL
SELECT 'sequence', wanted.name, wanted.privilege
  FROM unnest(%(sequences)s::text[], %(uses)s::text[]) wanted(name, privilege)
       JOIN pg_namespace n ON n.nspname = %(schema)s
       JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.name
 WHERE NOT has_sequence_privilege(%(role)s, c.oid, wanted.privilege)
UNION ALL
SELECT 'function', p.proname::text, 'EXECUTE'
  FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = %(schema)s
 WHERE p.proname = ANY (%(functions)s::text[])
   AND NOT has_function_privilege(%(role)s, p.oid, 'EXECUTE');

-- name: role_exists
SELECT 1 FROM pg_roles WHERE rolname = %(role)s;

-- Transactions of this database that have been open for long. One with a snapshot or a number of
-- its own (xmin, xid) keeps vacuum from removing what was deleted since; other databases' do not.
-- name: long_transactions
SELECT pid, coalesce(usename::text, ''), coalesce(application_name, ''), coalesce(state, ''),
       extract(epoch FROM clock_timestamp() - xact_start)::float8,
       backend_xmin IS NOT NULL OR backend_xid IS NOT NULL, coalesce(left(query, 1000), '')
  FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND backend_type NOT IN ('autovacuum worker', 'parallel worker')
   AND xact_start < clock_timestamp() - make_interval(secs => %(seconds)s)
 ORDER BY xact_start LIMIT 10;

-- name: hidden_sessions
SELECT count(*)::integer FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type IS NULL;

-- name: prepared_transactions
SELECT gid, owner::text, extract(epoch FROM clock_timestamp() - prepared)::float8
  FROM pg_prepared_xacts
 WHERE database = current_database()
   AND prepared < clock_timestamp() - make_interval(secs => %(seconds)s)
 ORDER BY prepared LIMIT 10;

-- A standby that feeds its snapshots back (hot_standby_feedback) holds vacuum here, through its
-- slot or, without one, through its connection. catalog_xmin of logical slots does not touch us.
-- name: standbys
SELECT 'slot', slot_name::text, active, age(xmin) FROM pg_replication_slots
 WHERE xmin IS NOT NULL AND age(xmin) > %(transactions)s
UNION ALL
SELECT 'standby', coalesce(application_name, ''), true, age(backend_xmin) FROM pg_stat_activity
 WHERE backend_type = 'walsender' AND backend_xmin IS NOT NULL
   AND age(backend_xmin) > %(transactions)s
 LIMIT 10;

-- Who keeps others waiting for our tables: for a lock on the table, or on a row of it (which shows
-- as a wait for a transaction). By blocker; pid 0 is a prepared transaction.
-- name: lock_waits
WITH waiting AS (
  SELECT DISTINCT l.pid FROM pg_locks l
   WHERE NOT l.granted AND l.pid <> pg_backend_pid() AND EXISTS (
     SELECT 1 FROM pg_locks o JOIN pg_class c ON c.oid = o.relation
                              JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE o.pid = l.pid AND n.nspname = %(schema)s
        AND o.database = (SELECT oid FROM pg_database WHERE datname = current_database())))
SELECT blocker.pid, coalesce(b.usename::text, ''), coalesce(b.application_name, ''),
       coalesce(b.state, ''), extract(epoch FROM clock_timestamp() - b.xact_start)::float8,
       coalesce(left(b.query, 1000), ''), count(DISTINCT a.pid)::integer,
       max(extract(epoch FROM clock_timestamp() - a.query_start))::float8
  FROM waiting w JOIN pg_stat_activity a ON a.pid = w.pid
       CROSS JOIN LATERAL unnest(pg_blocking_pids(a.pid)) AS blocker(pid)
       LEFT JOIN pg_stat_activity b ON b.pid = blocker.pid
 WHERE coalesce(a.query_start < clock_timestamp() - make_interval(secs => %(seconds)s), true)
   AND blocker.pid NOT IN (SELECT pid FROM waiting)
 GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 8 DESC NULLS LAST LIMIT 10;

-- Open transactions that have written events: see tenure.event_writers.
-- name: event_holders
SELECT l.pid, p.gid, coalesce(a.usename, p.owner)::text, a.application_name, a.state,
       extract(epoch FROM coalesce(a.xact_start, p.prepared))::float8
  FROM (SELECT l.pid, max(l.transactionid::text) AS xid FROM pg_locks l
         WHERE l.virtualtransaction = ANY ((SELECT w.writers FROM tenure.event_writers() w)::text[])
         GROUP BY l.pid, l.virtualtransaction) l
       LEFT JOIN pg_stat_activity a ON a.pid = l.pid
       LEFT JOIN pg_prepared_xacts p
              ON l.pid IS NULL AND l.xid = p.transaction::text
 WHERE coalesce(a.xact_start, p.prepared) <= clock_timestamp() - make_interval(secs => %(seconds)s)
 ORDER BY 6 LIMIT 10;

-- name: dead_tuples
SELECT relname::text, n_live_tup, n_dead_tup,
       extract(epoch FROM clock_timestamp() - greatest(last_autovacuum, last_vacuum))::float8
  FROM pg_stat_all_tables WHERE schemaname = %(schema)s ORDER BY n_dead_tup DESC, relname;

-- name: tables_without_autovacuum
SELECT c.relname::text
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
       CROSS JOIN LATERAL unnest(c.reloptions) AS option(text)
 WHERE option.text LIKE 'autovacuum_enabled=%%' AND NOT split_part(option.text, '=', 2)::boolean
 ORDER BY 1;

-- Partitions of today and tomorrow that are not there.
-- name: missing_partitions
SELECT wanted.name
  FROM (SELECT t.name || to_char((clock_timestamp() AT TIME ZONE 'UTC')::date + d.day, '_YYYYMMDD')
          FROM unnest(ARRAY['history', 'events']) t(name), generate_series(0, 1) d(day)
       ) wanted(name)
 WHERE NOT EXISTS (
   SELECT 1 FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                               JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = wanted.name)
 ORDER BY 1;

-- Counted up to a bound: these may be anything.
-- name: other_rows
SELECT (SELECT count(*) FROM (SELECT 1 FROM tenure.history_other LIMIT %(most)s) h)::integer,
       (SELECT count(*) FROM (SELECT 1 FROM tenure.events_other LIMIT %(most)s) e)::integer;

-- Jobs that wait for dead ones, among so many that wait, and the first of them.
-- name: waiting_for_the_dead
SELECT count(DISTINCT e.job)::integer, tenure.ulid((array_agg(e.job ORDER BY e.job, e.needs))[1]),
       tenure.ulid((array_agg(e.needs ORDER BY e.job, e.needs))[1]),
       (array_agg(n.status ORDER BY e.job, e.needs))[1]::text
  FROM (SELECT e.job, e.needs FROM tenure.edges e WHERE NOT e.met LIMIT %(most)s) e
 CROSS JOIN LATERAL (SELECT n.status FROM tenure.jobs n
                      WHERE n.id = e.needs AND n.completed_at IS NOT NULL LIMIT 1) n;

-- Tables of ours that somebody publishes the changes of, and whose rows nothing identifies: there
-- every UPDATE and DELETE is refused. Asked of the partitions: what becomes of a parent's rows is
-- their affair.
-- name: without_identity
SELECT c.relname::text, min(p.pubname)::text
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
       LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
       LEFT JOIN pg_class parent ON parent.oid = i.inhparent
       JOIN pg_publication_tables t ON t.schemaname = n.nspname
                                   AND t.tablename IN (c.relname, parent.relname)
       JOIN pg_publication p ON p.pubname = t.pubname AND (p.pubupdate OR p.pubdelete)
 WHERE c.relkind = 'r' AND NOT CASE c.relreplident
         WHEN 'f' THEN true WHEN 'n' THEN false
         ELSE EXISTS (SELECT 1 FROM pg_index x WHERE x.indrelid = c.oid
                         AND CASE c.relreplident WHEN 'i' THEN x.indisreplident
                                                 ELSE x.indisprimary END) END
 GROUP BY c.relname ORDER BY 1;

-- Which standbys a commit of ours waits for, of how many, and how many such are there. Without
-- pg_read_all_stats a standby's state is NULL: then each that is there counts.
-- name: synchronous_standbys
SELECT names, coalesce(substring(names FROM '(?i)^\s*(?:first|any)?\s*(\d+)\s*\(')::integer, 1),
       (SELECT count(*)::integer FROM pg_stat_replication
         WHERE coalesce(sync_state, 'sync') IN ('sync', 'quorum'))
  FROM (SELECT current_setting('synchronous_standby_names') AS names) s
 WHERE names <> '' AND NOT pg_is_in_recovery()
   AND current_setting('synchronous_commit') NOT IN ('off', 'local');

-- Slots that nobody reads from, or that are far behind, and how much of the log they keep.
-- name: slots
SELECT s.slot_name::text, s.active, coalesce(s.wal_status, ''), w.kept
  FROM pg_replication_slots s CROSS JOIN LATERAL (
       SELECT pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                                   ELSE pg_current_wal_lsn() END, s.restart_lsn)::bigint AS kept) w
 WHERE (s.database IS NULL OR s.database = current_database()) AND NOT s.temporary
   AND (NOT s.active OR s.wal_status IN ('unreserved', 'lost') OR w.kept > %(bytes)s)
 ORDER BY w.kept DESC NULLS LAST LIMIT 10;
