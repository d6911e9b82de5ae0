"""Quantised base models in formats of other libraries, read into ordinary 16-bit folders."""
