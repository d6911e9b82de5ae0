"""From a file to batches."""
