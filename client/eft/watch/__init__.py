"""`eft watch` on a terminal: world.py (what is known), look.py (asks the server), frame.py (draws), screen.py (the
terminal)."""
