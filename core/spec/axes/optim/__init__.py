"""Arms of the optimizer and schedule axes."""
