"""A job's curves for other programs (`tracking`): one process for each tracker follows the events of an attempt.

The process is the worker's, not the trainer's: a tracker that is away, hangs or crashes costs the run nothing. Each
point is told once, also over attempts that repeat steps after a crash (core/tracking/points.py). The library of a
tracker is a set of tools of its own (core/tools).
"""
