"""Operators over quantised weights: one interface, portable torch behind it; later backends share it."""
