"""Held-out rows: what is measured on them, and what follows from it."""
