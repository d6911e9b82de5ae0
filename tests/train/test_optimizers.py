"""Optimizers: each against torch's, bitsandbytes' tables or its paper's formula; a resume row and a row of state bytes
for each; part by part as with the state in host memory; and what a spec may say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from pydantic import TypeAdapter
from torch import Tensor, nn

from core.errors import SpecError
from core.plan.optimizers import TrainedTensor, state_of
from core.spec.axes.method import LoRA
from core.spec.axes.optim.optimizers import Lion
from core.spec.axes.optimizer import Optimizer
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.train.base.rng import seed_all
from core.train.batch import Batch
from core.train.checkpoint import engine_state
from core.train.engine import Diverged, Engine, build_engine
from core.train.evaluation.curvature import estimate_curvature
from core.train.kernels import native
from core.train.kernels.adamw import AdamNumbers, QuantisedMeans, pack, quantised_step, unpack
from core.train.logits import label_logits
from core.train.memory.offload.optimizer import OptimizerOffload
from core.train.methods.full import adapt_full
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model
from core.train.optim.blocks import block_of_turn
from core.train.optim.factored import AdafactorOptimizer
from core.train.optim.groups import ParameterGroup, hidden_matrices
from core.train.optim.momentum import SophiaOptimizer, slow_mean_decay
from core.train.optim.optimizers import build_optimizer
from core.train.optim.quantised import maps_4bit, maps_8bit
from tests.support.losses import summed

READ: TypeAdapter[Any] = TypeAdapter(Optimizer)
ARMS = [arm.model_fields["type"].default for arm in get_args(get_args(Optimizer)[0])]
RATES = {"sophia_g": 1e-3, "sgd": 0.1, "adafactor": 0.1, "lion": 1e-3, "adalomo": 0.05, "galore": 0.04}
OPTIONS = {name: {"rank": 16, "update_proj_gap": 2} for name in ("galore", "apollo")} | {
    "apollo_mini": {"update_proj_gap": 2},
    "badam": {"switch_block_every": 2},
    "sophia_g": {"update_period": 2},
}
"""So that the tiny model has matrices to project, and projections change before and after a resume."""


def spec_of(name: str, **options: Any) -> Any:
    rate = RATES.get(name, 1e-2)
    return READ.validate_python({"type": name, "learning_rate": rate, **OPTIONS.get(name, {}), **options})


def made(tiny: Path, name: str, *, full: bool = True, offload: bool = False) -> Engine:
    seed_all(3)
    model = load_model(tiny, torch.float32)
    model = adapt_full(model) if full else adapt_lora(model, LoRA(r=4, lora_alpha=8))
    spec = spec_of(name, weight_decay=0.1)
    updates = OptimizerOffload(model, torch.device("cpu"), optimizer=spec) if offload else None
    return build_engine(model, spec, updates=updates)


def rows(seed: int) -> Batch:
    ids = torch.randint(2, 250, (2, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(ids, labels, (12, 12), 22)


def steps(engine: Engine, *seeds: int) -> list[float]:
    losses = []
    for seed in seeds:
        estimate_curvature(engine, rows(seed))
        loss = summed(engine, rows(seed)).total
        engine.backward(loss / 22)
        engine.step()
        losses.append(float(loss.detach()) / 22)
    engine.updates.synchronize()
    return losses


def weights_of(engine: Engine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.trained_parameters.values()]


# --- each is what it says --------------------------------------------------------------------------------


def alone(name: str, start: Tensor, gradients: list[Tensor], **options: Any) -> Tensor:
    parameter = nn.Parameter(start.clone())
    groups = [ParameterGroup(frozenset({"w"}), decays=True, hidden=frozenset({"w"}))]
    optimizer = build_optimizer(spec_of(name, **options), groups, {"w": parameter})
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def series(*shape: int, count: int = 12) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator), [torch.randn(shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_torchs(decay: float) -> None:
    """But for the order of sums: within 1e-5 of the largest weight after twenty steps. Either goes on with the other's
    state."""
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(*shape, generator=generator) for shape in ((33, 20), (70,), (3, 8, 5), (1, 9))]
    options: dict[str, Any] = {"lr": 0.05, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": decay}
    both = [[torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    ours, theirs = AdafactorOptimizer(both[0], **options), torch.optim.Adafactor(both[1], **options)
    for turn in range(20):
        for one, other in zip(*both, strict=True):
            one.grad = torch.randn(one.shape, generator=generator) * 10.0 ** (turn % 4 - 2)
            other.grad = one.grad.clone()
        ours.step()
        theirs.step()
        if turn == 9:
            states = ours.state_dict(), theirs.state_dict()
            ours.load_state_dict(states[1])
            theirs.load_state_dict(states[0])
    for one, other in zip(*both, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_lion_is_algorithm_2_of_its_paper() -> None:
    start, gradients = series(9)
    x, mean, rate = start.double(), torch.zeros(9, dtype=torch.float64), 1e-3
    for gradient in gradients:
        update = torch.sign(0.9 * mean + 0.1 * gradient.double())
        x = x - rate * (update + 0.1 * x)
        mean = 0.99 * mean + 0.01 * gradient.double()
    torch.testing.assert_close(alone("lion", start, gradients, weight_decay=0.1).double(), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("warmup", [0, 8])
def test_ademamix_is_algorithm_1_of_its_paper(warmup: int) -> None:
    start, gradients = series(9)
    x = start.double()
    fast, slow, square = (torch.zeros(9, dtype=torch.float64) for _ in range(3))
    b1, b2, b3, rate = 0.9, 0.999, 0.9999, 1e-2
    for t, g in enumerate((gradient.double() for gradient in gradients), start=1):
        share = min(1.0, t / warmup) if warmup else 1.0
        log1, log3 = math.log(b1), math.log(b3)
        decay = min(b3, math.exp(log1 * log3 / ((1 - share) * log3 + share * log1))) if share < 1 else b3
        fast, slow = b1 * fast + (1 - b1) * g, decay * slow + (1 - decay) * g
        square = b2 * square + (1 - b2) * g * g
        below = (square / (1 - b2**t)).sqrt() + 1e-8
        x = x - rate * ((fast / (1 - b1**t) + 5.0 * share * slow) / below + 0.1 * x)
    found = alone("ademamix", start, gradients, weight_decay=0.1, warmup_steps=warmup)
    torch.testing.assert_close(found.double(), x, rtol=1e-5, atol=1e-6)
    assert slow_mean_decay(0.9, 0.9999, 0.0) == pytest.approx(0.9)
    assert slow_mean_decay(0.9, 0.9999, 1.0) == pytest.approx(0.9999)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6)])
def test_galore_is_algorithm_2_of_its_paper(shape: tuple[int, int]) -> None:
    """Over a projection that changes at every third step; the means stay."""
    start, gradients = series(*shape, count=5)
    x, rate, scale, b1, b2 = start.double(), 4e-2, 0.25, 0.9, 0.999
    larger = max(shape)
    mean, square = torch.zeros(larger, 2, dtype=torch.float64), torch.zeros(larger, 2, dtype=torch.float64)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double() if shape[0] >= shape[1] else gradient.double().t()
        if (t - 1) % 3 == 0:
            along = torch.linalg.svd(g)[2][:2]
        low = g @ along.t()
        mean, square = b1 * mean + (1 - b1) * low, b2 * square + (1 - b2) * low**2
        moved = (mean / (1 - b1**t)) / ((square / (1 - b2**t)).sqrt() + 1e-8) @ along * scale
        x = x - rate * ((moved if shape[0] >= shape[1] else moved.t()) + 0.1 * x)
    found = alone("galore", start, gradients, weight_decay=0.1, rank=2, update_proj_gap=3)
    torch.testing.assert_close(found.double(), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["apollo", "apollo_mini"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_apollo_is_algorithm_1_of_its_paper(name: str, shape: tuple[int, int]) -> None:
    """With the same random numbers: of the seed of the first parameter, and of the turn of the projection."""
    start, gradients = series(*shape, count=5)
    rank = 2 if name == "apollo" else 1
    x, rate, b1, b2 = start.double(), 1e-2, 0.9, 0.999
    scale = 1.0 if name == "apollo" else math.sqrt(128)
    mean, square = (torch.zeros(9, rank, dtype=torch.float64) for _ in range(2))
    before = 0.0
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double() if shape[0] >= shape[1] else gradient.double().t()
        if (t - 1) % 2 == 0:
            drawn = torch.randn(rank, 6, generator=torch.Generator().manual_seed((t - 1) // 2))
            along = drawn.double() / math.sqrt(rank)
        low = g @ along.t()
        mean, square = b1 * mean + (1 - b1) * low, b2 * square + (1 - b2) * low**2
        moved = (mean / (1 - b1**t)) / ((square / (1 - b2**t)).sqrt() + 1e-8)
        if name == "apollo":
            factor = moved.norm(dim=1, keepdim=True) / low.norm(dim=1, keepdim=True)
        else:
            factor = moved.norm() / low.norm()
        update = g * factor * scale
        if before and float(update.norm()) > 1.01 * before:
            update = update * (1.01 * before / update.norm())
        before = float(update.norm())
        x = x - rate * ((update if shape[0] >= shape[1] else update.t()) + 0.1 * x)
    options = {"rank": rank} if name == "apollo" else {}
    found = alone(name, start, gradients, weight_decay=0.1, update_proj_gap=2, **options)
    torch.testing.assert_close(found.double(), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(9,), (6, 9)])
def test_adalomo_is_algorithm_1_of_its_paper(shape: tuple[int, ...]) -> None:
    start, gradients = series(*shape, count=5)
    x, rate = start.double(), 5e-2
    rows = columns = whole = torch.zeros(())
    for t, g in enumerate((gradient.double() for gradient in gradients), start=1):
        forget = t**-0.8
        if len(shape) == 1:
            whole = (1 - forget) * whole + forget * g**2
            u = g / whole.sqrt()
        else:
            rows = (1 - forget) * rows + forget * (g**2).mean(1)
            columns = (1 - forget) * columns + forget * (g**2).mean(0)
            u = g / (torch.outer(rows, columns) / rows.mean()).sqrt()
        u = u / max(1.0, float(u.square().mean().sqrt()))
        size = max(1e-3, float(x.square().mean().sqrt()))
        x = x * (1 - rate * 0.1) - rate * size * u
    found = alone("adalomo", start, gradients, weight_decay=0.1)
    torch.testing.assert_close(found.double(), x, rtol=1e-5, atol=1e-6)


def test_sophia_is_algorithm_3_of_its_paper() -> None:
    start, gradients = series(9)
    parameter = nn.Parameter(start.clone())
    group = ParameterGroup(frozenset({"w"}), decays=True)
    optimizer = build_optimizer(spec_of("sophia_g", weight_decay=0.1, update_period=3), [group], {"w": parameter})
    assert isinstance(optimizer, SophiaOptimizer)
    x, mean, curvature, clipped = start.double(), *(torch.zeros(9, dtype=torch.float64) for _ in range(2)), 0
    for t, gradient in enumerate(gradients):
        if t % 3 == 0:
            drawn = gradients[-1 - t]
            parameter.grad = drawn.clone()
            optimizer.estimate(22.0)
            curvature = 0.99 * curvature + 0.01 * 22 * drawn.double() ** 2
        parameter.grad = gradient.clone()
        optimizer.step()
        mean = 0.965 * mean + 0.035 * gradient.double()
        update = mean / (0.04 * curvature).clamp(min=1e-12)
        clipped += int((update.abs() > 1).sum())
        x = x * (1 - 1e-3 * 0.1) - 1e-3 * update.clamp(-1, 1)
    assert 0 < clipped < 12 * 9, "both sides of the bound"
    torch.testing.assert_close(parameter.detach().double(), x, rtol=1e-5, atol=1e-6)


def test_the_curvature_is_the_squared_gradient_of_drawn_labels(tiny_dir: Path) -> None:
    """Its mean over many draws is the curvature: of one logit row, p (1 - p) times the squared input."""
    engine, batch = made(tiny_dir, "sophia_g", full=False), rows(1)
    before = torch.get_rng_state()
    estimate_curvature(engine, batch)
    assert torch.equal(before, torch.get_rng_state()), "no draw of the run's own"
    states = {name: engine.optimizer.state[p]["hessian"] for name, p in engine.trained_parameters.items()}
    again = made(tiny_dir, "sophia_g", full=False)
    logits, _ = label_logits(again.model.train(), batch)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(0)).squeeze(-1)
    nn.functional.cross_entropy(logits, drawn).backward()
    for name, parameter in again.trained_parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(states[name], 0.01 * 22 * parameter.grad**2, rtol=1e-4, atol=1e-12)
    estimate_curvature(engine, batch)
    assert engine.micro_steps == 0 and all(p.grad is None for p in engine.trained_parameters.values())


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_badam_is_torchs_adamw_over_one_block_after_the_other(order: Any) -> None:
    start, gradients = series(3, 4, count=8)
    names = ["head", "layers.1.w", "layers.0.w", "layers.0.b"]
    ours = {name: nn.Parameter(start.clone()) for name in names}
    theirs = {name: nn.Parameter(start.clone()) for name in names}
    group = ParameterGroup(frozenset(names), decays=True)
    spec = spec_of("badam", weight_decay=0.1, switch_block_every=2, switch_mode=order)
    optimizer = build_optimizer(spec, [group], ours)
    blocks = {0: ["layers.0.w", "layers.0.b"], 1: ["layers.1.w"], 2: ["head"]}
    turns = [block_of_turn(turn, 3, order) for turn in range(4)]
    assert sorted(turns[:3]) == [0, 1, 2]
    assert order == "random" or turns[:3] == [0, 1, 2][:: 1 if order == "ascending" else -1]
    for turn, block in enumerate(turns):
        alone = torch.optim.AdamW([theirs[name] for name in blocks[block]], lr=1e-2, weight_decay=0.1)
        for gradient in gradients[2 * turn : 2 * turn + 2]:
            assert {name for name in names if ours[name].requires_grad} == set(blocks[block])
            for name in blocks[block]:
                ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
            alone.step()
        for name in names:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)
    numel = {"head": 500, "layers.0.w": 200, "layers.0.b": 9, "layers.1.w": 300}
    tensors = [TrainedTensor((count,), False, name) for name, count in numel.items()]
    assert state_of(spec).bytes(tensors) == 8 * 500 + 4 * 4


def test_muon_is_torchs_for_hidden_matrices_and_adamw_elsewhere(tiny_dir: Path) -> None:
    engine = made(tiny_dir, "muon")
    hidden = hidden_matrices(engine.model)
    assert {name for name in hidden if "embed" in name or "head" in name} == set()
    names = {p: name for name, p in engine.trained_parameters.items()}
    seen = {names[p]: "momentum" in group for group in engine.optimizer.param_groups for p in group["params"]}
    assert seen == {name: name in hidden for name in names.values()}
    start, gradients = series(12, 7)
    parameter = nn.Parameter(start.clone())
    theirs = torch.optim.Muon([parameter], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        parameter.grad = gradient.clone()
        theirs.step()
    assert torch.equal(alone("muon", start, gradients, weight_decay=0.1), parameter.detach())


def test_the_maps_are_those_of_bitsandbytes() -> None:
    cpu = torch.device("cpu")
    assert torch.equal(maps_8bit(cpu)[0], create_dynamic_map(signed=True))
    roots = maps_8bit(cpu)[1]
    assert torch.equal(roots[roots != roots.new_tensor(1.3e-6)], create_dynamic_map(signed=False)[1:])
    assert torch.equal(maps_4bit(cpu)[0], create_dynamic_map(True, 3, 4).unique())


@pytest.mark.parametrize(("bits", "block", "maps"), [(8, 256, maps_8bit), (4, 128, maps_4bit)])
@pytest.mark.parametrize("n", [1024, 1001])
def test_what_is_packed_comes_back_as_its_nearest(bits: int, block: int, maps: Any, n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(2))
    for table, what in zip(maps(torch.device("cpu")), (values, values.abs()), strict=True):
        codes, scales = pack(what, table, block, bits)
        assert codes.numel() == -(-n * bits // 8) and scales.numel() == -(-n // block)
        back = unpack(codes, scales, table, block, bits, n)
        for at in range(0, n, block):
            part, scale = what[at : at + block], what[at : at + block].abs().max()
            nearest = (part[:, None] - (table * scale)[None, :]).abs().min(dim=1).values
            torch.testing.assert_close((back[at : at + block] - part).abs(), nearest, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("bits", "block", "maps"), [(8, 256, maps_8bit), (4, 128, maps_4bit)])
@pytest.mark.parametrize("n", [(1 << 20) + 4096, 5001, 1])
def test_the_compiled_step_is_the_portable_one_to_the_bit(bits: int, block: int, maps: Any, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    start = torch.randn(n, generator=generator)
    results = []
    gradients = [torch.randn(n, generator=generator) * 10.0**-turn for turn in range(4)]
    gradients[1][: n // 2] = 0.0
    for step in (native.adamw_step, quantised_step):
        parameter = start.clone()
        codes = [torch.zeros(-(-n * bits // 8), dtype=torch.uint8) for _ in range(2)]
        scales = [torch.zeros(-(-n // block)) for _ in range(2)]
        means = QuantisedMeans(codes[0], scales[0], codes[1], scales[1], maps(torch.device("cpu")), block, bits)
        group = {"betas": (0.9, 0.999), "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
        for turn, gradient in enumerate(gradients, start=1):
            step(parameter, gradient, means, AdamNumbers.of_step(group, turn))
        results.append((parameter, *codes, *scales))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("name", "tolerance"), [("adamw_8bit", 0.05), ("adamw_4bit", 0.4)])
def test_quantised_adamw_moves_as_adamw_does(name: str, tolerance: float) -> None:
    start, gradients = series(80, 64)
    ours, exact = alone(name, start, gradients), alone("adamw", start, gradients)
    assert float((ours - exact).norm() / (exact - start).norm()) < tolerance
    small, few = series(60, 64)
    torch.testing.assert_close(alone(name, small, few), alone("adamw", small, few), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "bound", "tolerance"), [("adamw_8bit", 2.0, 0.1), ("adamw_4bit", 3.0, 0.7)])
@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_quantised_steps_stay_bounded_whatever_the_size_of_gradients(
    name: str, bound: float, tolerance: float, size: float
) -> None:
    """Gradients of one block differ a thousandfold, and each comes in one step of ten only."""
    generator = torch.Generator().manual_seed(3)
    start = torch.zeros(64, 64)
    sizes = size * torch.exp(torch.randn(start.shape, generator=generator))
    gradients = []
    for _ in range(20):
        comes = torch.rand(start.shape, generator=generator) < 0.1
        gradients.append(torch.randn(start.shape, generator=generator) * sizes * comes)
    gradients[0] = torch.randn(start.shape, generator=generator) * sizes
    before = {"adamw": start, name: start}
    for count in range(1, len(gradients) + 1):
        now = {each: alone(each, start, gradients[:count], learning_rate=1.0, eps=1e-30) for each in before}
        moved = {each: now[each] - before[each] for each in now}
        assert float(moved[name].abs().max()) < bound * max(1.0, float(moved["adamw"].abs().max()))
        before = now
    assert float((before[name] - before["adamw"]).norm() / before["adamw"].norm()) < tolerance


@pytest.mark.parametrize("bits", [8, 4])
def test_a_state_of_a_version_before_goes_on(bits: int) -> None:
    """Their mean of squares was quantised itself, in 8 bits by bitsandbytes' map."""
    start, gradients = series(70, 64, count=6)
    parameter, name = nn.Parameter(start.clone()), f"adamw_{bits}bit"
    groups = [ParameterGroup(frozenset({"w"}), decays=True, hidden=frozenset({"w"}))]
    optimizer = build_optimizer(spec_of(name), groups, {"w": parameter})
    for gradient in gradients[:3]:
        parameter.grad = gradient.clone()
        optimizer.step()
    state, block = optimizer.state[parameter], 256 if bits == 8 else 128
    maps = maps_8bit if bits == 8 else maps_4bit
    table = maps(parameter.device)[1]
    codes, scales = state.pop("exp_avg_sq_root_q"), state.pop("exp_avg_sq_root_q_scale")
    squares = unpack(codes, scales, table, block, bits, start.numel()).square()
    old = create_dynamic_map(signed=False) if bits == 8 else table
    state["exp_avg_sq_q"], state["exp_avg_sq_q_scale"] = pack(squares, old, block, bits)
    for gradient in gradients[3:]:
        parameter.grad = gradient.clone()
        optimizer.step()
    whole = alone(name, start, gradients)
    assert "exp_avg_sq_root_q" in state and "exp_avg_sq_q" not in state
    assert float((parameter.detach() - whole).norm() / (whole - start).norm()) < (0.02 if bits == 8 else 0.2)


# --- rows for each ---------------------------------------------------------------------------------------


def planned(engine: Engine, name: str) -> int:
    """Bytes of the state by the plan."""
    hidden = hidden_matrices(engine.model)
    found = [TrainedTensor(tuple(p.shape), n in hidden, n) for n, p in engine.trained_parameters.items()]
    return state_of(spec_of(name)).bytes(found)


@pytest.mark.parametrize("full", [True, False], ids=["full", "lora"])
@pytest.mark.parametrize("name", ARMS)
def test_resumes_to_the_bit_with_the_state_that_was_planned(
    tiny_dir: Path, tmp_path: Path, name: str, full: bool
) -> None:
    whole = made(tiny_dir, name, full=full)
    losses = steps(whole, 1, 1, 1)
    assert losses[-1] < losses[0]
    if name in ("adamw_8bit", "adamw_4bit") and full:
        assert any("exp_avg_q" in state for state in whole.optimizer.state.values()), "nothing was large enough"
    if "update_proj_gap" in OPTIONS.get(name, {}) and full:
        assert any("projection" in state for state in whole.optimizer.state.values()), "nothing was projected"
    state = sum(t.nbytes for state in whole.optimizer.state.values() for t in state.values())
    assert state <= planned(whole, name) if name == "badam" else state == planned(whole, name)
    engine_state.save(whole, tmp_path)
    steps(whole, 2, 3)
    other = made(tiny_dir, name, full=full)
    steps(other, 7)
    engine_state.load(other, tmp_path)
    steps(other, 2, 3)
    assert all(map(torch.equal, weights_of(whole), weights_of(other)))


@pytest.mark.parametrize("name", [name for name in ARMS if name != "badam"])
def test_in_host_memory_every_bit_is_the_same(tiny_dir: Path, tmp_path: Path, name: str) -> None:
    here, there = made(tiny_dir, name), made(tiny_dir, name, offload=True)
    assert steps(here, 1, 2, 3) == steps(there, 1, 2, 3)
    assert all(map(torch.equal, weights_of(here), weights_of(there)))


@pytest.mark.parametrize("name", ARMS)
def test_a_step_that_is_no_number_changes_nothing(tiny_dir: Path, name: str) -> None:
    engine = made(tiny_dir, name, full=False)
    steps(engine, 1)
    before = weights_of(engine)
    engine.backward(summed(engine, rows(2)).total * math.nan)
    with pytest.raises(Diverged):
        engine.step()
        engine.check()
    assert all(map(torch.equal, before, weights_of(engine)))


# --- the spec --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "field"),
    [
        ({"type": "lion", "eps": 1e-8}, "optimizer.eps"),
        ({"type": "sgd", "betas": [0.9, 0.99]}, "optimizer.betas"),
        ({"type": "adamw", "momentum": 0.9}, "optimizer.momentum"),
        ({"type": "ademamix", "betas": [0.9, 0.99]}, "optimizer.betas[2]"),
    ],
)
def test_an_option_of_another_optimizer_is_refused(written: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job({"model": "a/b", "data": "/rows.jsonl", "optimizer": written})
    assert field in {fault.field for fault in refused.value.faults}, refused.value.faults


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(SpecError, match="momentum"):
        parse_job({"model": "a/b", "data": "/r.jsonl", "optimizer": {"type": "sgd", "momentum": 0.0, "nesterov": True}})


def test_each_optimizer_has_a_rate_of_its_own() -> None:
    job = {"model": "a/b", "data": "/rows.jsonl"}
    rates = {name: resolve(parse_job({**job, "optimizer": name})).optimizer.learning_rate for name in ARMS}
    assert rates["adamw"] == rates["adamw_8bit"] == 2e-4
    assert rates["lion"] == pytest.approx(2e-5)
    assert rates["sgd"] == rates["adafactor"] == 1e-2
    assert isinstance(spec_of("lion"), Lion)
