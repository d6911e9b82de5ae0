"""One attempt at a job: its child process from spawn to outcome."""
