"""Episodes of several turns: what an environment replies to the model, and how it becomes tokens."""
