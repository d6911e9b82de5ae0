"""Sweeps: runs that are ordinary jobs, compared and stopped together."""
