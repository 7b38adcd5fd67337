-- Takes 0001_initial back: every object of ours and all jobs with them. The schema goes too, unless
-- somebody else has put something into it, or it is not ours to drop.

DROP VIEW tenure.job_queue;

DROP TABLE tenure.jobs, tenure.history, tenure.keys, tenure.events, tenure.rollups, tenure.steps,
  tenure.edges, tenure.workers, tenure.queues, tenure.migrations;

DROP SEQUENCE tenure.events_seq, tenure.flushes;

DROP ROUTINE tenure.add_partitions, tenure.add_up, tenure.bucket, tenure.cancel, tenure.claim,
  tenure.clock, tenure.count_down, tenure.discard, tenure.drop_partitions, tenure.due_lanes,
  tenure.end_runs, tenure.enqueue, tenure.enqueue_job, tenure.enqueue_job_and_hint,
  tenure.enqueue_jobs, tenure.finish, tenure.finish_completed, tenure.first_id, tenure.home,
  tenure.lanes, tenure.leave, tenure.look_up, tenure.new_id, tenure.next_due, tenure.note,
  tenure.pass_fence, tenure.pick, tenure.refuse_change, tenure.refuse_jobs, tenure.release,
  tenure.replay, tenure.rescue, tenure.retire, tenure.roll_up, tenure.save_step, tenure.settle,
  tenure.settle_dependants, tenure.ulid, tenure.withdraw;

DROP DOMAIN tenure.priority, tenure.hot_status, tenure.end_status, tenure.grain;

DROP TYPE tenure.new_job, tenure.lane, tenure.ended, tenure.tally;

DO $$
BEGIN
  DROP SCHEMA tenure;
EXCEPTION
  WHEN dependent_objects_still_exist OR insufficient_privilege THEN
    RAISE NOTICE 'the schema stays: %', SQLERRM;
END $$;
