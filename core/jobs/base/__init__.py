"""The ground floor of jobs: states and their one writer, slots, shares, the doorbell."""
