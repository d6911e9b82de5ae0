"""Which parameters train: one file a method."""
