"""Model folders as somebody might put them onto a hub who means no good, or has a broken disk.

`cases.py` makes them, each by a name; `runs.py` takes each through preparing, planning, previewing and training.
"""
