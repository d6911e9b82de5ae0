"""Training data without torch: what a row is, and what is wrong with it."""
