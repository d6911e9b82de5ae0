"""Several ranks: one process a GPU (or CPU slot), all training one model on their shares of every step.

launch.py    the worker's child: starts the ranks, passes signals on, ends all when one has ended (no torch)
__main__.py  one rank: `python -m core.train.ranks RUN_DIR`
begin.py     how a rank begins, of a run or of a session (core/train/session/ranks)
group.py     what ranks do together: sums, agreements, turns
reduce.py    the sum of gradients over the ranks
words.py     what a rank leaves behind for its launcher (no torch)
"""
