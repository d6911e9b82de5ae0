"""Names of the files in a run folder (core/spec/run/__init__.py)."""

ORDER_FILE = "run.json"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "log.txt"
CHECKPOINTS = "checkpoints"
ARTIFACTS = "artifacts"
RUN_RECORD_FILE = "run_record.json"
"""Below the artifacts."""
REFERENCE = "reference.safetensors"
"""Log-probabilities of the rows under the model that training starts from."""
SAVED = "saved"
"""What a session saves, a folder for each name, below the folder of the session."""
ROLLOUTS = "rollouts"
"""Answers that were sampled, a file of JSON lines for each rollout."""
SCORES = "scores"
"""What endpoints have answered about answers, a file for each request."""
UNFINISHED = "tmp-"
"""Prefix of a checkpoint that is being written or removed. Once its writer is dead, it is rubbish."""
RANKS = "ranks-"
"""Prefix of the private folder in which several ranks find each other (core/train/ranks). Once they are dead, it is
rubbish."""


def rollout_file(number: int) -> str:
    """Name of a rollout's file below ROLLOUTS, in the order of their numbers."""
    return f"{number:08d}.jsonl"


def rollout_tokens_file(number: int) -> str:
    """Name of the file beside it with the tokens of its answers: a line an answer, in the same order."""
    return f"tokens-{rollout_file(number)}"
