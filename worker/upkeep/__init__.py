"""What the leading worker does for the installation: leases, cleaning, disk budgets."""
