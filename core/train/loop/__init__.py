"""A batch run, step by step, and what it tells of it."""
