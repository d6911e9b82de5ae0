"""The asynchronous client, of which `python client/unasync.py` writes the synchronous one, eft/sync/."""
