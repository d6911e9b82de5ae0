"""The verbs of a box and its people: keys, quotas, GPUs, webhooks, workers."""
