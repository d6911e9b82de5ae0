"""The memory plan of a job."""
