"""Trials of the rewards of a job."""
