"""What holds for every stage: one table, and a stage more is a row more.

A step's update does not depend on how the step is cut into batches, or whether its rows are padded or packed; a run
that is asked to leave at every micro-step ends with the bits of one that was not; an evaluation of the rows of a step
has the step's figures; and the first loss is the one that can be computed by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import REFERENCE
from core.train.kernels.float32 import quickest
from tests.support.preferences import judged, preferences
from tests.support.rewards import margins, solutions
from tests.support.trainer import PLAIN, events, pairs, run, weights, write_rows, write_run
from tests.train.test_activations import InWindow

ROWS = 12
WEIGHTS, FIGURES = 5e-5, 2e-5
"""Differences that other orders of float32 sums make: of weights that move by 1e-2 (2e-5 was the worst of the CPUs that
were tried), and of figures relative."""


@dataclass(frozen=True)
class Case:
    stage: dict[str, Any]
    format: str = "preference"
    first_loss: float | None = None
    """Before the first update, whatever the rows are."""
    margin: str = "rewards/margins"
    """A figure of each step beside the loss; a difference where it can be one."""
    reference: bool = False

    @property
    def rows(self) -> list[dict[str, Any]]:
        match self.format:
            case "kto":
                return judged(ROWS)
            case "stepwise":
                return solutions(ROWS)
            case "text":
                return [{"text": row["prompt"] + row["chosen"]} for row in preferences(ROWS)]
            case "prompt_completion":
                return pairs(ROWS)
            case _:
                return margins(ROWS)


STAGES = {
    "cpt": Case({"type": "cpt"}, format="text", margin="perplexity"),
    "dft": Case({"type": "sft", "loss": "dft"}, format="prompt_completion", margin="nll_loss"),
    "reward": Case({"type": "reward", "center_rewards_coefficient": 0.1}, margin="margin"),
    "process_reward": Case({"type": "process_reward"}, format="stepwise", margin="accuracy"),
    "last step": Case({"type": "process_reward", "last_step_only": True}, format="stepwise", margin="accuracy"),
    "dpo": Case({"type": "dpo"}, first_loss=math.log(2), reference=True),
    "dpo with nll": Case({"type": "dpo", "nll_weight": 0.5, "label_smoothing": 0.1}),
    "ipo": Case({"type": "dpo", "loss": "ipo", "beta": 0.5}, first_loss=1 / (4 * 0.5**2)),
    "kto_pair": Case({"type": "dpo", "loss": "kto_pair"}, first_loss=0.5),
    "simpo": Case({"type": "simpo"}),
    "orpo": Case({"type": "orpo"}),
    "kto": Case({"type": "kto"}, format="kto", first_loss=0.5, reference=True),
}
CLOCKS = {"tokens_per_second", "memory_bytes"}
CUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({"type": "rows"}, {"per_device_train_batch_size": ROWS}),
    "packed, in parts": ({"type": "packed", "tokens_per_batch": 160}, {"gradient_accumulation_steps": 8}),
}
APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompts apart": ({"type": "packed", "tokens_per_batch": 1280, "share_prompts": False}, {}),
}
"""The prompt of a pair is in a packed batch once, unless the job says otherwise, as it does here for some stages."""


def write(folder: Path, model: Path, case: Case, *, held_out: bool = False, **axes: Any) -> Path:
    rows = write_rows(folder.with_suffix(".jsonl"), case.rows)
    source = {"type": "path", "path": str(rows), "format": case.format}
    axes["training"] = {"max_steps": 2, "max_length": 64, "precision": "fp32"} | axes.get("training", {})
    return write_run(
        folder,
        model,
        rows,
        data={"train": source, "rendering": PLAIN} | ({"eval": source} if held_out else {}),
        stage=case.stage,
        method={"type": "lora", "r": 4},
        optimizer={"learning_rate": 5e-3},
        schedule={"type": "linear", "warmup_ratio": 0.0},
        **axes,
    )


@pytest.mark.parametrize("name", STAGES)
def test_an_update_does_not_depend_on_the_cut(tmp_path: Path, tiny_dir: Path, name: str) -> None:
    case = STAGES[name]
    found = {}
    cuts = CUTS | (APART if name in ("dpo with nll", "reward") else {})
    for cut, (batching, training) in cuts.items():
        axes = {"batching": batching} if batching else {}
        folder = write(
            tmp_path / cut, tiny_dir, case, held_out=cut == "whole", training=training, **axes,
            **({"evaluation": {"type": "held_out"}} if cut == "whole" else {}),
        )  # fmt: skip
        assert run(folder) == EXIT_OK, events(folder)[-1]
        found[cut] = folder
    if case.format == "preference":
        prompts = {cut: events(folder, "run_record")[0]["record"]["packing"] for cut, folder in found.items()}
        assert prompts["packed, in parts"]["prompts"]["computed"] == "once"
        assert prompts["packed, in parts"]["prompts"]["saved_tokens"] > 100
        assert "prompts apart" not in found or prompts["prompts apart"]["prompts"]["computed"] == "for each answer"
    whole = events(found["whole"], "metrics")
    first, held = whole[0]["values"], events(found["whole"], "evaluation")[0]["values"]
    figures = {figure.removeprefix("eval_") for figure in held}
    assert len(whole) == 2 and {"loss", case.margin} <= first.keys()
    assert {"loss", case.margin} <= figures or name == "dft"  # whose held-out cross-entropy is told as a perplexity
    for figure in figures & first.keys():
        if not figure.endswith("accuracies"):  # equal rewards, but for rounding
            assert held[f"eval_{figure}"] == pytest.approx(first[figure], rel=FIGURES, abs=FIGURES), figure
    if case.first_loss is not None:
        assert first["loss"] == pytest.approx(case.first_loss, rel=1e-5)
    expected = adapter(found["whole"])
    for cut in cuts.keys() - {"whole"}:
        for here, there in zip(events(found[cut], "metrics"), whole, strict=True):
            for figure in ("loss", "grad_norm", case.margin):
                rel = 10 * FIGURES if figure == case.margin else FIGURES
                assert here["values"][figure] == pytest.approx(there["values"][figure], rel=rel, abs=1e-5), cut
        for parameter, value in adapter(found[cut]).items():
            torch.testing.assert_close(value, expected[parameter], rtol=0, atol=WEIGHTS, msg=f"{cut}: {parameter}")


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "artifacts" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("name", ["cpt", "dft", "reward", "process_reward", "dpo", "kto"])
def test_leaving_at_every_micro_step_changes_no_bit(tmp_path: Path, tiny_dir: Path, name: str) -> None:
    """The reference is computed once and read by every later attempt; what KTO finds out before a step is in the
    checkpoint."""
    training = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "precision": "bf16"}
    case = STAGES[name]
    axes: dict[str, Any] = {"training": training, "batching": {"type": "rows"}}
    if name in ("dpo", "reward", "kto"):  # prompts are computed once
        axes["batching"] = {"type": "packed", "tokens_per_batch": 80}
    calm = write(tmp_path / "calm", tiny_dir, case, **axes)
    assert run(calm) == EXIT_OK, events(calm)[-1]
    attempts: list[Path] = []
    codes = []
    while not codes or codes[-1] == EXIT_CHECKPOINTED:
        folder = write(tmp_path / f"{len(attempts)}", tiny_dir, case, resume_from=attempts[::-1], **axes)
        codes.append(run(folder, InWindow(folder, 2 + len(attempts) % 3 if name == "kto" else 1)))
        attempts.append(folder)
        assert len(attempts) < 12
    assert codes[-1] == EXIT_OK and len(codes) > 3, codes
    left = [event["micro_step"] for folder in attempts for event in events(folder, "checkpoint")]
    assert {0, 1} <= set(left), left
    products = events(calm, "run_record")[0]["record"]["precision"]["products"]
    assert products == quickest()
    phases = [[event["phase"] for event in events(folder, "phase")] for folder in attempts]
    assert ["reference" in told for told in phases] == [case.reference] + [False] * (len(attempts) - 1)
    if case.reference:
        assert {(folder / REFERENCE).read_bytes() for folder in [*attempts, calm]} == {(calm / REFERENCE).read_bytes()}
    steps = {event["step"]: event["values"] for folder in attempts for event in events(folder, "metrics")}
    for event in events(calm, "metrics"):
        for figure in event["values"].keys() - CLOCKS:
            assert steps[event["step"]][figure] == event["values"][figure], figure
    assert weights(attempts[-1]) == weights(calm)


def test_the_reference_is_of_the_rows_that_are_trained(tmp_path: Path, tiny_dir: Path) -> None:
    """A short run over many rows computes few of them; their numbers are those of a run that computes all."""
    found = {}
    for name, steps in {"short": 2, "long": 6}.items():
        training = {"max_steps": steps, "per_device_train_batch_size": 2}
        folder = write(tmp_path / name, tiny_dir, STAGES["dpo"], training=training)
        assert run(folder) == EXIT_OK, events(folder)[-1]
        found[name] = load_file(folder / REFERENCE)["train"]
        record = events(folder, "run_record")[0]["record"]["reference"]
        assert record["training_rows"] == min(2 * steps, ROWS)
    computed = ~found["short"].isnan().any(dim=1)
    assert int(computed.sum()) == 4 and not found["long"].isnan().any()
    torch.testing.assert_close(found["short"][computed], found["long"][computed])
