"""The synchronous client, written from eft/aio by client/unasync.py."""
