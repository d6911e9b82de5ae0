"""What holds rows: JSON Lines, JSON, CSV, Parquet; told apart by their first bytes, read in constant memory."""
