"""The contract of the run folder: what a worker and its child write and read on disk."""
