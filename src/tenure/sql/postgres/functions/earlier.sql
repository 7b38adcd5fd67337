-- What an earlier version has made goes first, but for what people may have built on: that is replaced.
DO $$
DECLARE
  old record;
BEGIN
  FOR old IN
    SELECT p.oid::regprocedure AS routine FROM pg_proc p
     WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'tenure.jobs'::regclass)
       AND p.proname IN (
         'add_edges', 'add_partitions', 'add_queues', 'add_up', 'audited', 'bucket', 'cancel',
         'check_needs', 'claim', 'claim_jobs', 'complete_runs', 'count_down', 'count_jobs',
         'count_queues', 'count_runs', 'dead_groups', 'death', 'discard', 'dismiss', 'disown',
         'doom', 'drop_day', 'drop_partitions', 'due_lanes', 'end_keys', 'end_runs',
         'enqueue_job', 'enqueue_job_and_hint', 'enqueue_jobs', 'event_writers', 'finish',
         'finish_completed', 'finish_runs', 'finished', 'floored', 'followers', 'hold_keys',
         'lanes', 'leave', 'look_up', 'next_death', 'next_due', 'note', 'old_days', 'pass_fence',
         'pick', 'prune_dead', 'prune_edges', 'prune_events', 'prune_history', 'reachable',
         'read_jobs', 'reap', 'refuse_circles', 'refuse_field', 'refuse_fields', 'refuse_jobs',
         'release', 'replay', 'rescue', 'rescue_jobs', 'retire', 'roll_up', 'round_up',
         'save_step', 'settle', 'settle_dependants', 'sign_off', 'stay', 'still_wanted',
         'store_jobs', 'store_step', 'survey', 'take_key', 'take_keys', 'take_turn', 'walk',
         'walk_later', 'withdraw')
  LOOP
    EXECUTE format('DROP ROUTINE %s', old.routine);
  END LOOP;
END $$;

DROP TYPE IF EXISTS tenure.candidate, tenure.death_group, tenure.ended, tenure.harvest, tenure.key_end, tenure.lane,
  tenure.new_job, tenure.tally;
