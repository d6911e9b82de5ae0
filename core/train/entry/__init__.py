"""The child processes: what each does from its start to its exit code."""
