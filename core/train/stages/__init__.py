"""What is learned from a row: one file a stage."""
