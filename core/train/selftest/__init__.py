"""A device against the CPU's exact arithmetic, before anything is trained on it (core/hardware/selftest.py)."""
