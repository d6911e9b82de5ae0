"""Exit codes by which a child tells its worker how an attempt ended."""

EXIT_OK = 0
EXIT_FAILED = 1
"""Failed, after an error event."""
EXIT_DATA_ROOT_LOST = 73
"""The file system that holds the run folder is gone, so that no event can say so. Retried, perhaps on another box."""
EXIT_NO_SPACE = 74
"""A disk is full, perhaps too full for an error event. The job goes on when there is room."""
EXIT_CHECKPOINTED = 75
"""Left on request. The newest checkpoint holds everything needed to go on, if anything was done at all."""
EXIT_FENCED = 76
"""The worker is gone or has lost the lease. Nothing more was written."""
