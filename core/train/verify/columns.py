"""Token sequences as the columns that TRL's collators take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.errors import DataError
from core.train.batch import IGNORE_INDEX

Tokens = tuple[Sequence[int], Sequence[bool]]
"""Ids of a sequence, and which of them are learned."""


def columns(stage: str, sequences: Sequence[Tokens], values: dict[str, float]) -> dict[str, Any]:
    """The columns of an example of one sequence (`sft`), of two (pairs: chosen, rejected), or of an answer and one that
    belongs to another prompt (`kto`). `values`: numbers of the example's own. DataError where TRL has no form for it.
    """
    match stage:
        case "sft" | "cpt":
            (ids, learned), *_ = sequences
            return {"input_ids": list(ids), "labels": _labels(ids, learned)}
        case "dpo":
            prompt, chosen, rejected = _pair(sequences)
            return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        case "reward":
            better, worse = sequences[:2]
            found: dict[str, Any] = {"chosen_ids": list(better[0]), "rejected_ids": list(worse[0])}
            return found | ({"margin": values["margin"]} if "margin" in values else {})
        case "kto":
            prompt, completion, other = _pair(sequences)
            return {
                "prompt_ids": prompt,
                "completion_ids": completion,
                "KL_completion_ids": other,
                "label": bool(values["label"] > 0),
            }
        case "orpo" | "simpo":
            prompt, _, _ = _pair(sequences)
            found = {"prompt": "a", "chosen": "b", "rejected": "c"}  # texts that are looked at, and not used
            found |= {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
            for name, (ids, learned) in zip(("chosen", "rejected"), sequences, strict=False):
                found[f"{name}_input_ids"] = list(ids)
                found[f"{name}_attention_mask"] = [1] * len(ids)
                found[f"{name}_labels"] = _labels(ids, learned)
            return found
        case _:
            raise DataError(f"no columns are known for stage `{stage}`", field="stage")


def _labels(ids: Sequence[int], learned: Sequence[bool]) -> list[int]:
    return [token if wanted else IGNORE_INDEX for token, wanted in zip(ids, learned, strict=True)]


def _pair(sequences: Sequence[Tokens]) -> tuple[list[int], list[int], list[int]]:
    """(prompt, first answer, second answer)."""
    (first, first_learned), (second, second_learned) = sequences[:2]
    prompt, answer = _cut(first, first_learned)
    other_prompt, other = _cut(second, second_learned)
    if prompt != other_prompt:
        words = "the two sequences of an example have different prompts; TRL takes one prompt for both"
        raise DataError(words, field="data.train")
    return prompt, answer, other


def _cut(ids: Sequence[int], learned: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Prompt and answer, which is learned whole. What a template writes behind the answer (a line break, say) is left
    out: nothing is learned there, and no label comes after it."""
    places = [at for at, wanted in enumerate(learned) if wanted]
    start, end = (places[0], places[-1] + 1) if places else (len(ids), len(ids))
    if not all(learned[start:end]):
        words = (
            "an answer has tokens that are not learned (several turns, say); TRL takes every token behind the prompt"
        )
        raise DataError(words, field="data.train")
    return list(ids[:start]), list(ids[start:end])
