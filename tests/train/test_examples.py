"""Examples of several sequences stay together in truncation, orders, batches and the cache, with their numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from core.data.rows import Labelled, Numbered, Preference
from core.errors import DataError, SpecError
from core.train.batch import IGNORE_INDEX
from core.train.data.cache import TokenCache, TokenisedRows
from core.train.data.dataset import TokenDataset, eval_batches
from core.train.data.loaders import Prelude, RowLoader
from core.train.data.order import BatchOrder, PackedOrder, TokenOrder
from core.train.data.reader import refuse_mixed
from core.train.data.tokenise.chunks import TokenWriter
from core.train.data.tokenise.whole import dataset_of
from core.train.data.truncate import cut_rows
from core.train.examples.example import Example, examples_of
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.render.strings import Rendered
from core.train.vocabulary.tokenizer import load_tokenizer


def answer(prompt: int, tokens: int, first: int) -> Rendered:
    ids = [*range(1, prompt + 1), *range(first, first + tokens)]
    return Rendered(ids, [False] * prompt + [True] * tokens)


def pairs(*sizes: tuple[int, int, int]) -> TokenDataset:
    """Pairs with so many tokens of prompt, chosen and rejected answer; the margin is the pair's number."""
    writer = TokenWriter()
    for number, (prompt, chosen, rejected) in enumerate(sizes):
        sequences = (answer(prompt, chosen, 100), answer(prompt, rejected, 200))
        marks = tuple([float(number)] * len(sequence.ids) for sequence in sequences)
        writer.add(number + 1, Example(sequences, {"margin": float(number)}, {"mark": marks}))
    return dataset_of(writer)


def test_a_pair_is_one_row_of_the_data_set() -> None:
    dataset = pairs((3, 2, 4), (5, 1, 1))
    assert len(dataset) == 2 and dataset.sequences == 2
    assert list(dataset.lengths) == [12, 12] and list(dataset.label_counts) == [6, 2]
    assert [list(dataset.sizes(packed=packed)) for packed in (True, False)] == [[12, 12], [14, 12]]
    assert [list(counts) for counts in dataset.counts(0)] == [[5, 7], [2, 4]]
    assert dataset[1][0].tolist() == [1, 2, 3, 4, 5, 100]


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_has_the_sequences_of_an_example_side_by_side(packed: bool) -> None:
    dataset = pairs((3, 2, 4), (5, 1, 1), (2, 2, 2))
    batch = dataset.pack([2, 0]) if packed else dataset.collate([2, 0], 0)
    assert (batch.sequences, batch.examples, batch.lengths) == (2, 2, (4, 4, 5, 7))
    assert batch.label_counts() == [2, 2, 2, 4] and batch.label_tokens == 10
    assert batch.values["margin"].tolist() == [2.0, 0.0]
    assert batch.token_values["mark"].tolist() == [2.0] * 4 + [0.0] * 6
    labels = batch.labels[batch.labels != IGNORE_INDEX].tolist()
    assert labels == [100, 101, 200, 201, 100, 101, 200, 201, 202, 203]
    moved = batch.to(torch.device("meta"))
    assert moved.values["margin"].shape == (2,) and moved.label_counts() == [2, 2, 2, 4]
    one = dataset.pack([2, 0], [1]) if packed else dataset.collate([2, 0], 0, [1])
    assert (one.sequences, one.lengths) == (1, (4, 7))
    blank = dataset.blank(0, 0, packed=packed)
    assert (blank.label_tokens, blank.label_counts(), blank.examples) == (0, [0, 0], 1)


def test_values_of_sequences_follow_their_sequences() -> None:
    dataset = pairs((3, 2, 4), (5, 1, 1))
    dataset.values["reference"] = np.array([[1, 2], [3, 4]], dtype=np.float32)
    assert dataset.collate([1, 0], 0).values["reference"].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert dataset.collate([1, 0], 0, [1]).values["reference"].tolist() == [[4.0], [2.0]]


def test_a_pair_is_cut_or_left_out_as_a_whole() -> None:
    whole = pairs((3, 2, 4), (8, 1, 2), (2, 2, 2), (1, 2, 9))
    cut, report = cut_rows(whole, 8, "cut_right")
    assert cut.lines.tolist() == [1, 3, 4]
    assert (report.rows, report.truncated, report.dropped, report.longest) == (3, 2, 1, 10)
    assert cut.values["margin"].tolist() == [0.0, 2.0, 3.0]
    assert [list(counts) for counts in cut.counts(2)] == [[3, 8], [2, 7]]

    cut, report = cut_rows(whole, 8, "cut_left")  # both answers go on from the same, shorter prompt
    assert cut.lines.tolist() == [1, 2, 3] and report.dropped == 1  # the last would lose its chosen answer
    assert [cut.sequence(2)[0].tolist(), cut.sequence(3)[0].tolist()] == [
        [3, 4, 5, 6, 7, 8, 100],
        [3, 4, 5, 6, 7, 8, 200, 201],
    ]
    with pytest.raises(DataError, match="line 2 has 10"):
        cut_rows(whole, 8, "refuse")
    with pytest.raises(SpecError, match="belong together"):
        cut_rows(whole, 8, "split")


def test_orders_and_batches_count_both_sequences() -> None:
    dataset = pairs(*[(2 + at % 5, 1 + at % 7, 1 + at % 3) for at in range(40)])
    orders = [
        TokenOrder(dataset.sizes(packed=False), batch_size=64, accumulation=2, seed=1),
        PackedOrder(dataset.sizes(packed=True), batch_size=64, accumulation=2, seed=1),
    ]
    for order, packed in zip(orders, (False, True), strict=True):
        loader = RowLoader(dataset, order, lambda lengths, labels: {"pairs": 1}, packed=packed, pad_token_id=0)
        seen = 0
        for step in range(order.steps_of(0)):
            work = loader.batches(step)
            made = [batch_of() for batch_of in work.batches]
            assert work.totals == {"pairs": sum(batch.examples for batch in made)}
            assert all(batch.slots <= 64 and batch.sequences == 2 for batch in made)
            seen += work.totals["pairs"]
        assert seen == 40


def test_what_is_looked_at_before_a_step_does_not_depend_on_how_it_is_cut() -> None:
    dataset = pairs(*[(2 + at % 5, 1 + at % 7, 1 + at % 3) for at in range(16)])
    found = []
    for size, accumulation in ((8, 1), (2, 4)):
        order = BatchOrder(16, batch_size=size, accumulation=accumulation, seed=1)
        loader = RowLoader(dataset, order, lambda *_: {}, packed=False, pad_token_id=0, prelude=Prelude((1,), 3, 64))
        found.append([batch_of().input_ids.tolist() for batch_of in loader.batches(0).prelude])
    assert found[0] == found[1] and sum(map(len, found[0])) == 8


def test_held_out_pairs_are_all_measured_once() -> None:
    dataset = pairs(*[(2 + at % 5, 1 + at % 7, 1 + at % 3) for at in range(11)])
    batches = list(eval_batches(dataset, 4, 0, most_tokens=64))
    assert sum(batch.examples for batch in batches) == 11 and all(batch.slots <= 64 for batch in batches)


def test_the_cache_keeps_sequences_and_numbers(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path)
    kept = cache.keep("a" * 64, "fingerprint", TokenisedRows(pairs((3, 2, 4), (5, 1, 1)), "preference", 0, 2))
    assert isinstance(kept.dataset.ids, np.memmap) and not cache.faults
    assert kept.dataset.sequences == 2 and list(kept.dataset.lengths) == [12, 12]
    assert kept.dataset.values["margin"].tolist() == [0.0, 1.0]
    assert kept.dataset.collate([1], 0).token_values["mark"].tolist() == [1.0, 1.0]


def test_rows_become_examples(tiny_dir: Path) -> None:
    renderer = Renderer(load_tokenizer(tiny_dir), RenderOptions(row_format="preference"))
    (pair,) = examples_of([Numbered(1, Preference("2+2?", " 4", " 5"))], renderer)
    chosen, rejected = pair.sequences
    border = chosen.learned.index(True)
    assert chosen.ids[:border] == rejected.ids[:border] and chosen.ids != rejected.ids
    judged = examples_of([Numbered(n, Labelled("2+2?", " 4", bool(n))) for n in (1, 0)], renderer)
    assert [example.values for example in judged] == [{"label": 1.0}, {"label": 0.0}]


def test_pairs_are_not_mixed_with_other_rows() -> None:
    with pytest.raises(DataError, match="preference cannot be mixed with others"):
        refuse_mixed({"preference", "messages"})
    refuse_mixed({"messages", "prompt_completion"})
