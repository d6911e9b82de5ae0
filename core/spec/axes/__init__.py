"""The axes of a job: one tagged union each."""
