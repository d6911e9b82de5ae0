"""A session over several ranks. Rank 0 has the socket, and lets the others hear each operation, in the order in which
it computes them (`serve.py`, one folder above). All of them have the same adapters, optimizers and windows, to the bit,
after each operation.

__main__.py  one rank: `python -m core.train.session.ranks RUN_DIR [FD]`
crew.py      what the ranks of a session do together: shares of examples and answers, agreement, sums
"""
