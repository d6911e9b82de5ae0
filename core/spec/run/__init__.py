"""What a worker and its children agree on: the run folder, orders, events, exit codes, and names on disk.

    attempt-N/            0700, one folder for each attempt
      run.json            in: a RunOrder (or a PrepareOrder for `python -m core.train.entry.prepare`)
      events.jsonl        out: one JSON object a line, appended and flushed at once: {"seq", "time", "type", …}
      log.txt             out: the child's stdout and stderr
      checkpoints/        out: step-00000050/ …, each complete or not there (core/spec/run/checkpoint_names.py)
      artifacts/          out: what the job hands back, listed in the result event

The worker holds the child's stdin and writes a heartbeat with every renewed lease (core/spec/run/heartbeat.py). When
stdin closes, or the newest heartbeat is older than `fence_seconds`, nobody owns this attempt any more, and the child
ends itself at once with EXIT_FENCED.
SIGTERM means: finish the micro-step, write a checkpoint, leave with EXIT_CHECKPOINTED.
SIGUSR1 means: write the stacks of all threads into log.txt. The worker sends it before it ends a hung child.

A run over several ranks has their launcher as its child (core/train/ranks/launch.py), and all of this holds for the
launcher. The ranks are in its session, it passes heartbeats and signals on, and it exits with the status of the first
rank that failed. Each rank counts the silence by itself, so that none outlives the lease when the launcher stands
still. Only rank 0 writes into the run folder, except for each rank's own part of a checkpoint.
"""
