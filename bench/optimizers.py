"""Each optimizer's step and state against a library's: `python -m bench.optimizers [--device cuda] [--runs 5]`.

The parameters are four blocks of a 576-wide Llama, 14 million, with the same random gradients for both. One figure is
the time of a step, ours and the peer's in turn in one process (on a CPU its processor time); the other is the bytes of
the state. The peer is torch
itself, torchao, bitsandbytes, lion-pytorch or pytorch-optimizer; of those that are not installed, a line says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

import torch
from pydantic import TypeAdapter
from torch import nn

from bench.report import finish, hardware, in_turn, seconds, show
from core.spec.axes.optimizer import Optimizer
from core.train.optim.groups import ParameterGroup
from core.train.optim.optimizers import build_optimizer

WIDTH, INNER, BLOCKS = 576, 1536, 4
RATE, RANK = 1e-3, 128
READ: TypeAdapter[Any] = TypeAdapter(Optimizer)
ARMS = [arm.model_fields["type"].default for arm in get_args(get_args(Optimizer)[0])]


class NoPeer(Exception):
    """No library has the algorithm."""


def parameters(device: torch.device) -> dict[str, nn.Parameter]:
    """The same weights and gradients at every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(WIDTH, WIDTH), (192, WIDTH), (192, WIDTH), (WIDTH, WIDTH), (INNER, WIDTH), (INNER, WIDTH)]
    shapes += [(WIDTH, INNER)]
    found: dict[str, nn.Parameter] = {}
    for block in range(BLOCKS):
        for number, shape in enumerate(shapes):
            parameter = nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
            parameter.grad = (torch.randn(shape, generator=generator) * 1e-3).to(device)
            found[f"block{block}.{number}"] = parameter
    return found


def ours(name: str, trained: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    options = {"rank": RANK} if name in ("galore", "apollo") else {}
    names = frozenset(trained)
    group = ParameterGroup(names, decays=True, hidden=names)
    return build_optimizer(READ.validate_python({"type": name, "learning_rate": RATE, **options}), [group], trained)


def peer(name: str, trained: dict[str, nn.Parameter]) -> tuple[str, torch.optim.Optimizer]:
    """(what it is, the optimizer). ImportError where its library is not installed, NoPeer where there is none."""
    found: Any = list(trained.values())
    match name:
        case "adamw":
            return "torch AdamW, foreach", torch.optim.AdamW(found, lr=RATE, foreach=True)
        case "sgd":
            return "torch SGD, foreach", torch.optim.SGD(found, lr=RATE, momentum=0.9, foreach=True)
        case "muon":
            return "torch Muon", torch.optim.Muon(found, lr=RATE)
        case "adafactor":
            from transformers.optimization import Adafactor

            return "transformers Adafactor", Adafactor(found, lr=RATE, relative_step=False, scale_parameter=True)
        case "adamw_8bit" | "adamw_4bit":
            import torchao.optim

            kind: Any = torchao.optim.AdamW8bit if name == "adamw_8bit" else torchao.optim.AdamW4bit
            return f"torchao {kind.__name__}", kind(found, lr=RATE)
        case "lion":
            from lion_pytorch import Lion  # type: ignore[import-not-found,unused-ignore]

            return "lion-pytorch", Lion(found, lr=RATE)
        case "ademamix" | "adalomo" | "galore":
            import pytorch_optimizer  # type: ignore[import-not-found,unused-ignore]

            if name == "ademamix":
                return "pytorch-optimizer AdEMAMix", pytorch_optimizer.AdEMAMix(found, lr=RATE)
            if name == "galore":
                groups: Any = [
                    {"params": found, "rank": RANK, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"}
                ]
                return "pytorch-optimizer GaLore", pytorch_optimizer.GaLore(groups, lr=RATE)
            raise NoPeer("pytorch-optimizer's AdaLomo steps inside the backward")
        case "badam":
            raise NoPeer("the library badam wraps a model and an optimizer, and is no step by itself")
        case "sophia_g":
            raise NoPeer("pytorch-optimizer has Sophia-H, whose estimate is another one")
        case _:
            raise NoPeer("no library with a permissive licence has this algorithm")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that it keeps, those inside of other objects and tensor subclasses too."""
    seen: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor and hasattr(value, "__tensor_flatten__"):
                for inner in value.__tensor_flatten__()[0]:
                    look(getattr(value, inner))
            else:
                seen[id(value)] = value.nbytes
        elif isinstance(value, dict):
            for inner in value.values():
                look(inner)
        elif hasattr(value, "__dict__"):
            look(vars(value))

    for state in optimizer.state.values():
        look(dict(state))
    return sum(seen.values())


def clock(optimizer: torch.optim.Optimizer, device: torch.device, times: int) -> Callable[[], float]:
    """Milliseconds of a step (bench.report.seconds); the first ones, which make the state or compile, do not count."""
    for _ in range(2):
        optimizer.step()

    def measure() -> float:
        began = seconds(device.type)
        for _ in range(times):
            optimizer.step()
        return (seconds(device.type) - began) / times * 1e3

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS, help="these optimizers")
    parser.add_argument("--times", type=int, default=3, help="steps of one figure")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    print(f"{hardware()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {device}")
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.only:
        trained = parameters(device)
        mine = ours(name, trained)
        measure = clock(mine, device, arguments.times)
        own = state_bytes(mine) / sum(p.numel() for p in trained.values())
        try:
            what, other = peer(name, parameters(device))
            theirs = clock(other, device, arguments.times)
        except (ImportError, NoPeer) as error:
            found: dict[str, Any] = {"ours": measure(), "peer": None, "why": str(error)}
            print(f"{name:<52} ours {found['ours']:10.4g} ms   no peer: {error}", flush=True)
        else:
            found = in_turn(measure, theirs, arguments.runs) | {"what": what}
            show(f"{name} against {what}", found, "ms")
            found["peer_state"] = state_bytes(other) / sum(p.numel() for p in trained.values())
            print(f"{'':<52} state {own:.3f} bytes a parameter, peer {found['peer_state']:.3f}", flush=True)
        results[name] = found | {"state": own}
    finish(results)


if __name__ == "__main__":
    main()
