"""Solutions in judged steps whose last judgement alone is learned."""

from __future__ import annotations

import numpy as np

from core.train.data.dataset import TokenDataset


def last_labels(dataset: TokenDataset) -> TokenDataset:
    """Keep the last label of each sequence only. A row whose end is cut off then has none left and is dropped, as other
    rows without labels are."""
    learned = np.zeros(len(dataset.learned), dtype=np.bool_)
    for start, end in zip(dataset.starts.tolist(), dataset.ends.tolist(), strict=True):
        places = np.flatnonzero(dataset.learned[start:end])
        if len(places):
            learned[start + places[-1]] = True
    found = TokenDataset(
        dataset.ids,
        learned,
        dataset.starts,
        dataset.ends,
        dataset.lines,
        sequences=dataset.sequences,
        values=dataset.values,
        token_values=dataset.token_values,
    )
    found.held = dataset.held
    return found
