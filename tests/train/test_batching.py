"""Orders are pure functions that give each row once; packed rows are the same rows: logits, gradients, whole runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import DataError
from core.plan.compatibility import cells, check
from core.plan.rules.axes import values_of
from core.spec.axes.optimizer import AdamW
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train import policy
from core.train.attention.probe import prepare_packing
from core.train.base.events import EventWriter
from core.train.batch import IGNORE_INDEX
from core.train.data.dataset import TokenDataset
from core.train.data.loaders import RowLoader
from core.train.data.order import BatchOrder, GroupedOrder, PackedOrder, TokenOrder
from core.train.data.packing import best_fit, spread
from core.train.data.truncate import truncate
from core.train.engine import build_engine
from core.train.feed import build_loader, read_data
from core.train.model.load import load_model
from core.train.run import Run
from core.train.stages.sft import SupervisedFineTuning
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.support.losses import by_kernels, summed
from tests.support.trainer import pairs, write_rows, write_run

KINDS = ("rows", "grouped", "tokens", "packed")

SHARES = SupervisedFineTuning().shares


def make(kind: str, lengths: list[int], batch: int, accumulation: int, seed: int, rank: int = 0, world: int = 1) -> Any:
    sizes = {"batch_size": batch, "accumulation": accumulation, "seed": seed, "rank": rank, "world": world}
    match kind:
        case "rows":
            return BatchOrder(len(lengths), **sizes)
        case "grouped":
            return GroupedOrder(lengths, **sizes)
        case "tokens":
            return TokenOrder(lengths, **sizes)
        case _:
            return PackedOrder(lengths, **sizes)


lengths_of_rows = st.lists(st.integers(1, 60), min_size=1, max_size=80)
sizes = st.integers(1, 3)


def batch_size(kind: str, seed: int) -> int:
    return 1 + seed % 5 if kind in ("rows", "grouped") else 20 + seed % 100


# --- orders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(lengths=lengths_of_rows, accumulation=sizes, world=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_every_row_is_one_ranks_once_an_epoch(
    kind: str, lengths: list[int], accumulation: int, world: int, seed: int
) -> None:
    size = batch_size(kind, seed)
    ranks = [make(kind, lengths, size, accumulation, seed, rank, world) for rank in range(world)]
    assert len({order.steps_of(0) for order in ranks}) == 1
    step = 0
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for _ in range(ranks[0].steps_of(epoch)):
            windows = [order.window(step) for order in ranks]
            assert len({len(window) for window in windows}) == 1, "ranks wait for each other in every batch"
            here = Counter(row for window in windows for rows in window for row in rows)
            assert here == Counter(ranks[0].rows_of(step))
            for rows in (rows for window in windows for rows in window):
                assert rows or len(here) < world * len(windows[0]), "none is empty where there are rows enough"
                assert_fits(kind, [lengths[row] for row in rows], size)
            seen += here
            step += 1
        assert seen == Counter(range(len(lengths)))


def assert_fits(kind: str, held: list[int], size: int) -> None:
    match kind:
        case "rows" | "grouped":
            assert len(held) <= size
        case "tokens":
            assert len(held) <= 1 or max(held) * len(held) <= size
        case _:
            assert len(held) <= 1 or sum(held) <= size


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(lengths=lengths_of_rows, seed=st.integers(0, 1000), step=st.integers(0, 200))
def test_a_step_is_a_function_of_seed_and_number(kind: str, lengths: list[int], seed: int, step: int) -> None:
    """Asked at once or after all the steps before; and cut into halves it has the same rows."""
    size = 2 * batch_size(kind, seed)
    straight, once = make(kind, lengths, size, 2, seed), make(kind, lengths, size, 2, seed)
    for before in range(step):
        straight.window(before)
    assert straight.window(step) == once.window(step)
    halved = make(kind, lengths, size // 2, 4, seed)
    assert list(halved.rows_of(step)) == list(once.rows_of(step))
    assert Counter(row for rows in halved.window(step) for row in rows) == Counter(once.rows_of(step))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(lengths=lengths_of_rows, world=st.integers(2, 4), seed=st.integers(0, 1000), data=st.data())
def test_every_rank_goes_on_where_it_was(
    kind: str, lengths: list[int], world: int, seed: int, data: st.DataObject
) -> None:
    """From a state of its own, after any batch: what is left to it are the rows that it has not learned yet."""
    size = 2 * batch_size(kind, seed)
    step = data.draw(st.integers(0, 2))
    left: Counter[int] = Counter()
    for rank in range(world):
        order = make(kind, lengths, size, 2, seed, rank, world)
        done = data.draw(st.integers(0, len(order.window(step))))
        again = make(kind, lengths, size, 2, seed, rank, world)
        again.load_state_dict(order.state_dict())
        same = again.translate(step, done)
        assert same is not None
        behind = [row for rows in again.window(step)[same:] for row in rows]
        assert behind == [row for rows in order.window(step)[done:] for row in rows]
        left.update(behind)
        left.update(row for rows in order.window(step)[:done] for row in rows)
    assert left == Counter(order.rows_of(step))


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_and_seeds_differ_and_steps_add_up(kind: str) -> None:
    lengths = [3 + (7 * n) % 40 for n in range(200)]
    order = make(kind, lengths, 8 if kind in ("rows", "grouped") else 256, 2, 1)
    first, second = order.steps_of(0), order.steps_of(1)
    assert order.total_steps(2.0, None) == first + second
    assert order.total_steps(0.5, None) == -(-first // 2)
    assert order.total_steps(9.0, 7) == 7
    assert order.locate(first) == (1, 0)
    assert order.epochs_after(first) == 1.0
    epochs = [[list(order.rows_of(at)) for at in range(start, start + first)] for start in (0, first)]
    assert epochs[0] != epochs[1]
    other = make(kind, lengths, order.batch_size, 2, 2)
    assert [list(other.rows_of(at)) for at in range(first)] != epochs[0]


def test_little_padding_and_full_lines() -> None:
    generator = np.random.default_rng(0)
    lengths = [int(n) for n in np.clip(generator.lognormal(4.8, 0.7, 3000), 5, 1024)]
    tokens = TokenOrder(lengths, batch_size=4096, accumulation=1, seed=3)
    windows = [rows for step in range(tokens.steps_of(0)) for rows in tokens.window(step)]
    slots = sum(len(rows) * max(lengths[row] for row in rows) for rows in windows)
    assert 1 - sum(lengths) / slots < 0.03
    packed = PackedOrder(lengths, batch_size=4096, accumulation=1, seed=3)
    assert packed.steps_of(0) <= -(-sum(lengths) // 4096) + 2
    grouped = GroupedOrder(lengths, batch_size=16, accumulation=1, seed=3)
    (first,) = grouped.window(0)
    assert max(lengths[row] for row in first) == max(lengths)


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_of_rows, capacity=st.integers(1, 150), multiple=st.integers(1, 4))
def test_bins(lengths: list[int], capacity: int, multiple: int) -> None:
    rows = range(len(lengths))
    tight, even = best_fit(rows, lengths, capacity), spread(rows, lengths, capacity, multiple=multiple)
    for bins in (tight, even):
        assert sorted(row for held in bins for row in held) == list(rows)
        assert all(len(held) == 1 or sum(lengths[row] for row in held) <= capacity for held in bins)
    fewest = max(1, -(-sum(min(length, capacity) for length in lengths) // capacity))
    assert len(tight) <= 2 * fewest + 1


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_is_refused(kind: str) -> None:
    lengths = [3 + n % 9 for n in range(50)]
    order = make(kind, lengths, 16, 2, 1)
    order.load_state_dict(make(kind, lengths, 8, 4, 1).state_dict())
    others = [make(kind, lengths, 16, 4, 1), make(kind, lengths, 16, 2, 2), make(kind, lengths[1:], 16, 2, 1)]
    others += [make(other, lengths, 16, 2, 1) for other in KINDS if other != kind]
    others += [make(kind, lengths, 8, 2, 1, 0, 2)]
    others += [] if kind == "rows" else [make(kind, lengths[::-1], 16, 2, 1)]
    for other in others:
        with pytest.raises(ValueError, match="its"):
            order.load_state_dict(other.state_dict())


# --- truncation ------------------------------------------------------------------------------------------


def token_rows(*lengths: int, prompt: int = 0) -> TokenDataset:
    """Ids count on over all rows; the first `prompt` tokens of each are not learned."""
    ends = np.cumsum(lengths)
    starts = ends - np.array(lengths)
    learned = np.ones(int(ends[-1]), dtype=np.bool_)
    for start in starts:
        learned[start : start + prompt] = False
    return TokenDataset(np.arange(ends[-1], dtype=np.int32), learned, starts, ends, np.arange(1, len(lengths) + 1))


def shown(dataset: TokenDataset) -> list[list[int]]:
    return [dataset[row][0].tolist() for row in range(len(dataset))]


def test_cut_and_split() -> None:
    whole = token_rows(3, 10, 4)
    cut, report = truncate(whole, 4, "cut_right")
    assert shown(cut) == [[0, 1, 2], [3, 4, 5, 6], [13, 14, 15, 16]]
    assert (report.truncated, report.longest, report.tokens, report.label_tokens) == (1, 10, 11, 8)
    cut, _ = truncate(whole, 4, "cut_left")
    assert shown(cut)[1] == [9, 10, 11, 12]
    assert cut[1][1].tolist() == [False, True, True, True]
    cut, report = truncate(whole, 4, "split")
    assert shown(cut)[1:4] == [[3, 4, 5, 6], [6, 7, 8, 9], [9, 10, 11, 12]]
    assert (report.rows, report.pieces, report.truncated) == (5, 3, 1)
    assert report.label_tokens == sum(whole.label_counts), "each token is learned once"
    assert [int(line) for line in cut.lines] == [1, 2, 2, 2, 3]


def test_rows_with_nothing_left_and_refusals() -> None:
    cut, report = truncate(token_rows(6, 20, prompt=5), 8, "cut_right")
    assert (len(cut), report.dropped) == (2, 0)
    with pytest.raises(DataError, match="no row has anything to learn"):
        truncate(token_rows(6, 20, prompt=5), 5, "cut_right")
    _, report = truncate(token_rows(6, 20, prompt=5), 5, "split")
    assert (report.rows, report.dropped) == (4 + 1, 0)
    with pytest.raises(DataError, match=r"1 rows are longer .* \(line 2 has 20\)"):
        truncate(token_rows(6, 20), 8, "refuse")
    assert len(truncate(token_rows(6, 8), 8, "refuse")[0]) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 20), st.integers(0, 5))
def test_splitting_learns_every_token_once(lengths: list[int], limit: int, prompt: int) -> None:
    whole = token_rows(*lengths, prompt=prompt)
    expected = sorted(int(i) for row in range(len(whole)) for i, on in zip(*whole[row], strict=True) if on)
    if not expected:
        return
    cut, report = truncate(whole, limit, "split")
    assert sorted(int(i) for row in range(len(cut)) for i, on in zip(*cut[row], strict=True) if on) == expected
    assert max(cut.lengths) <= limit
    assert report.label_tokens == len(expected) == sum(cut.label_counts)


def test_collate_and_pack_hold_the_same() -> None:
    dataset = token_rows(5, 2, 9, prompt=1)
    padded, packed = dataset.collate([2, 0, 1], 0), dataset.pack([2, 0, 1])
    assert (padded.tokens, padded.slots, packed.tokens, packed.slots) == (16, 27, 16, 16)
    assert padded.label_counts() == packed.label_counts() == [8, 4, 1]
    assert padded.label_tokens == packed.label_tokens == 13
    assert packed.position_ids is not None and packed.boundaries is not None
    assert packed.position_ids[0].tolist() == [*range(9), *range(5), *range(2)]
    assert packed.boundaries.tolist() == [0, 9, 14, 16]
    rows = [row[:length].tolist() for row, length in zip(padded.labels, padded.lengths, strict=True)]
    assert packed.labels[0].tolist() == [label for row in rows for label in row]
    assert packed.labels[0, [0, 9, 14]].tolist() == [IGNORE_INDEX] * 3


@pytest.mark.parametrize(("cell", "refused"), list(cells("batching", "truncation", "streaming")))
def test_every_cell_of_the_table_that_is_allowed_makes_batches(
    cell: dict[str, str], refused: tuple[Any, ...], tiny_dir: Path, tmp_path: Path
) -> None:
    """Those that are refused are refused at the door: tests/service/test_api_jobs.py."""
    if refused:
        return
    rows = write_rows(tmp_path / "rows.jsonl", pairs(9))
    batching: Any = (
        {"type": "rows", "group_by_length": True} if cell["batching"] == "rows by length" else cell["batching"]
    )
    if batching in ("tokens", "packed"):
        batching = {"type": batching, "tokens_per_batch": 64}
    training = {"truncation": cell["truncation"], "max_length": 64, "max_steps": 3, "per_device_train_batch_size": 2}
    data = {"train": str(rows), "streaming": cell["streaming"] == "yes"}
    folder = write_run(tmp_path / "run", tiny_dir, rows, data=data, batching=batching, training=training)
    order = RunOrder.model_validate_json((folder / ORDER_FILE).read_bytes())
    assert check(order.spec) == () and values_of(order.spec).items() >= cell.items()
    here = Run(order, folder, EventWriter(folder / "events.jsonl"))
    loader, steps = build_loader(here, read_data(here, load_tokenizer(tiny_dir)), SHARES, 0)
    assert steps == 3
    for step in range(steps):
        window = loader.batches(step)
        made = [make_batch() for make_batch in window.batches]
        assert sum(batch.label_tokens for batch in made) == window.totals["label_tokens"] > 0
        assert all(batch.packed == (cell["batching"] == "packed") for batch in made)


@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_batch_is_a_pass_that_teaches_nothing(
    packed: bool, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank computes that has no rows: a loss of 0, gradients of 0, and every parameter has its part in it."""
    dataset = token_rows(5, 4, prompt=1)
    orders = [make("rows", dataset.lengths, 1, 1, 0, rank, 4) for rank in range(4)]
    windows = [RowLoader(dataset, order, SHARES, packed=packed, pad_token_id=0).batches(0) for order in orders]
    assert [window.totals for window in windows] == [{"label_tokens": 7}] * 4
    assert [len(window.batches) for window in windows] == [1] * 4
    batches = [make_batch() for window in windows for make_batch in window.batches]
    assert sorted(batch.label_tokens for batch in batches) == [0, 0, 3, 4]
    model = load_model(tiny_dir, torch.float32)
    engine = build_engine(model, AdamW(learning_rate=0.1))
    if packed:
        prepare_packing(engine)
    (blank, *_) = [batch for batch in batches if batch.label_tokens == 0]
    monkeypatch.setattr(policy, "WHOLE_LOGITS_BYTES", -1)  # the chunked form, although the head is trained
    for loss_of in (summed, by_kernels):
        loss = loss_of(engine, blank)
        assert loss.total.item() == 0.0
        engine.backward(loss.total / windows[0].totals["label_tokens"])
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None and not gradient.any() for gradient in gradients)
        engine.optimizer.zero_grad()
