"""The reward `model`: reward models beside the trained one, each with its own tokenizer and chat template.

An answer is rendered as the rows were on which the reward model was trained, and scored by the head's output at its
last token, by the code of that training. The score of an answer does not depend on what is scored beside it but for
rounding, and answers that are the same are scored once, so that they have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig, PeftModel
from torch import nn

from core.data.rows import Message, Preference, Prompt
from core.errors import DataError, ModelError
from core.spec.axes.method import Full
from core.spec.axes.quantization import packing_of
from core.spec.axes.rollout.models import model_rewards
from core.spec.axes.rollout.reward import ModelReward
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.run.orders import RewardModelFolder
from core.spec.settled import method_of
from core.train.base.reading import reading
from core.train.data.dataset import TokenDataset
from core.train.logits import scores_at
from core.train.model.as_trained import load_as_trained
from core.train.model.heads import head_name, head_of_model, pad_token_of, with_head
from core.train.model.load import context_length, load_model
from core.train.model.placement import Placement
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer, renderer_of
from core.train.rollout.sandboxed.programs import AnsweredPrompt, Value
from core.train.run import Run
from core.train.vocabulary.rows import grow
from core.train.vocabulary.tokenizer import load_tokenizer, pad_token

HEAD = "score"
"""Name of the head in transformers' classes over causal models. The heads of encoders, which see padding, have
others."""


class Scorer:
    """A reward model on the device of the run."""

    def __init__(self, run: Run, reward: ModelReward, folder: RewardModelFolder, placement: Placement) -> None:
        """ModelError or SpecError where it cannot be read."""
        self.run, self.reward, self.folder, self.placement = run, reward, folder, placement
        self.tokenizer = load_tokenizer(Path(folder.tokenizer_dir or folder.adapter_dir or folder.model_dir))
        self.renderer = (
            Renderer(self.tokenizer, RenderOptions(row_format="preference"))
            if folder.spec is None
            else renderer_of(folder.spec, "preference", self.tokenizer)
        )
        with torch.random.fork_rng(devices=[]):  # a new head is drawn before it is read: no number of the run's
            model = self._load(pad_token_of(self.tokenizer))
        placement.attention.fit(model)
        self.model = model.to(placement.device).eval().requires_grad_(False)
        self.most = reward.max_length or context_length(self.model)
        self.batch_size = reward.batch_size
        """Answers of a pass at most; fewer once the device had no memory for them."""

    def _load(self, pad: int | None) -> nn.Module:
        folder, dtype = Path(self.folder.model_dir), self.placement.weights
        if self.folder.adapter_dir is None:
            model: Any = with_head(load_model(folder, dtype, head="score"), "score", pad)
        else:
            adapter, spec = Path(self.folder.adapter_dir), self.folder.spec
            quantization = None if spec is None or isinstance(method_of(spec), Full) else packing_of(spec.quantization)
            base: Any = load_as_trained(folder, dtype, quantization)
            with reading("the adapter of a reward model"):
                config: Any = PeftConfig.from_pretrained(str(adapter))
                if rows := getattr(config, "trainable_token_indices", None):
                    grow(base, next(iter(rows.values())))
                model = PeftModel.from_pretrained(with_head(base, "score", pad), str(adapter))
        head: Any = head_of_model(model)
        if (name := head_name(model)) != HEAD or head.weight.shape[0] != 1:
            raise ModelError(
                f"the reward model `{self.folder.reward}` has the head `{name}`; a reward model is a causal model "
                f"whose head is `{HEAD}`, with one number",
                field="stage.reward",
                code="not_a_reward_model",
            )
        head.float()
        found: nn.Module = model
        return found

    def values_of(self, answers: Sequence[Prompt], asked: Sequence[AnsweredPrompt]) -> list[Value]:
        """Each answer's reward, or why it has none; of an episode, whose turns are messages, that of all of it.
        StopRequested."""
        rendered = [self._tokens(answer, one) for answer, one in zip(answers, asked, strict=True)]
        rows = sorted({ids for ids in rendered if not isinstance(ids, str)}, key=lambda ids: (len(ids), ids))
        scores = self._scores(rows)
        found: list[Value] = []
        for ids in rendered:
            score: Value = ids if isinstance(ids, str) else scores[ids]
            if isinstance(score, float) and not np.isfinite(score):
                score = f"the reward model gives {score}, which is not a finite number"
            found.append(score)
        return found

    def _tokens(self, answer: Prompt, asked: AnsweredPrompt) -> tuple[int, ...] | str:
        """The prompt and the answer as the reward model takes them; or why it cannot."""
        row = asked.row
        assert row is not None, "a reward model needs the row as it was written"
        prompt, given = row.prompt, answer
        if isinstance(prompt, str) and not isinstance(given, str):
            prompt = (Message("user", prompt),)
        elif isinstance(given, str) and not isinstance(prompt, str):
            given = (Message("assistant", given),)
        try:
            ids = self.renderer.render_pair(Preference(prompt, given, given, row.tools), asked.line)[0].ids
        except DataError as error:
            return error.message
        if self.most is not None and len(ids) > self.most:
            return f"prompt and answer have {len(ids)} tokens as the reward model counts them, more than {self.most}"
        return tuple(ids)

    def _scores(self, rows: Sequence[tuple[int, ...]]) -> Mapping[tuple[int, ...], float]:
        """The score of each row; rows by their length."""
        found: dict[tuple[int, ...], float] = {}
        while len(found) < len(rows):
            self.run.check_stop()
            some = rows[len(found) : len(found) + self.batch_size]
            try:
                found |= dict(zip(some, self._pass(some), strict=True))
            except torch.OutOfMemoryError:
                if self.batch_size == 1:
                    raise
                self.batch_size //= 2
                self.run.notice(
                    "fewer_scored_at_once",
                    f"the device has no memory to score so many answers with the reward model `{self.folder.reward}`; "
                    f"{self.batch_size} are scored at once from now on. Set the reward's `batch_size` to that",
                )
        return found

    def _pass(self, rows: Sequence[tuple[int, ...]]) -> list[float]:
        """Scores of some rows at once, in float32."""
        ends = np.cumsum([len(ids) for ids in rows])
        flat = np.fromiter((token for ids in rows for token in ids), dtype=np.int32)
        starts, lines = ends - [len(ids) for ids in rows], np.zeros(len(rows), dtype=np.int64)
        dataset = TokenDataset(flat, np.zeros(len(flat), dtype=np.bool_), starts, ends, lines)
        batch = dataset.collate(range(len(rows)), pad_token(self.tokenizer)).to(self.placement.device)
        dtype = self.placement.autocast
        precision = nullcontext() if dtype is None else torch.autocast(self.placement.device.type, dtype)
        with torch.no_grad(), precision:
            scores = scores_at(self.model, batch, batch.last_positions())
        return [float(score) for score in scores.squeeze(-1).tolist()]

    def about(self) -> dict[str, Any]:
        """Its entry in the run record."""
        return {
            "reward": self.folder.reward,
            "job": self.folder.job,
            "sha256": self.folder.sha256,
            "model": self.folder.source,
            "adapter": self.folder.adapter_dir is not None,
            "rendering": self.renderer.describe(),
        }


def build_scorers(run: Run, stage: RolloutStage, placement: Placement) -> dict[str, Scorer]:
    """The reward models of a stage by the names of their rewards. ModelError where one was not prepared, as Scorer."""
    folders = {one.reward: one for one in run.order.reward_models}
    found = {}
    for field, name, reward in model_rewards(stage):
        if name not in folders:
            raise ModelError(
                f"the reward model `{name}` was not prepared for this run; submit the job again",
                field=field,
                code="model_gone",
            )
        found[name] = Scorer(run, reward, folders[name], placement)
    return found
