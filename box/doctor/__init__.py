"""`eft doctor`: what this box has, what is wrong with it, and what to do about it."""
