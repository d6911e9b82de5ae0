"""Sessions: a training loop that runs elsewhere, and calls forward, backward and step one by one."""
