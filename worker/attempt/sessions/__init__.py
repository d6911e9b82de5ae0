"""Sessions at a worker: the line to their child, a bridge for each from its log, and guests of one child."""
