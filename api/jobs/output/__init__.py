"""What a job leaves to look at: metrics, its log, artifacts."""
