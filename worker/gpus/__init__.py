"""This box's GPUs: memory, load, other users, self-tests."""
