"""Operations of a session, computed: a header and tensors in, a result and tensors out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, assert_never

import torch
from torch import Tensor

from core.spec.axes.method import Full
from core.spec.run.folder import SAVED
from core.spec.session.losses import Losses
from core.spec.session.verbs import (
    CreateModel,
    DropModel,
    Forward,
    ForwardBackward,
    Generate,
    LoadModel,
    Logprobs,
    OptimStep,
    Save,
    Verbs,
    ZeroGrad,
)
from core.train.base.out_of_memory import is_out_of_memory
from core.train.batch import Batch
from core.train.checkpoint import store
from core.train.engine import Engine
from core.train.policy import PolicyModel
from core.train.session.adapter import STATE, SessionAdapter
from core.train.session.answers import Answer, Answers
from core.train.session.examples import (
    CHOICES,
    SessionExample,
    batch_of,
    passes,
    read_examples,
    spread,
)
from core.train.session.faults import BadOperation, NoSuchModel, check_finite
from core.train.session.losses import check_loss, logprobs_of, loss_sum, rows_together
from core.train.session.ranks.crew import Crew
from core.train.session.resident import ResidentBase
from core.train.session.sampling import SharedSampler
from core.train.session.shelf import Shelf, check_adapter, method_of
from core.train.stage import Loss, Totals

T = TypeVar("T")


class SessionVerbs:
    """The adapters of a session, and what can be done with them. `between` runs before each pass, and may raise."""

    def __init__(
        self,
        base: ResidentBase,
        shelf: Shelf,
        sampler: SharedSampler,
        folder: Path,
        *,
        seat: int = 0,
        pass_tokens: int,
        between: Callable[[], None],
    ) -> None:
        """`seat`: number of the session among those that share the base."""
        self.base, self.shelf, self.saved, self._seat = base, shelf, folder / SAVED, seat
        self.crew = Crew(base.ranks)
        self._most_tokens, self.between = pass_tokens, between
        self.answers = Answers(self, sampler)
        self.exact = False
        """Each example goes through the model alone, and what is generated is told as a forward pass sees it."""
        self.adapters: dict[str, SessionAdapter] = {}

    @property
    def pass_tokens(self) -> int:
        """Tokens that go through the model at once; a longer example goes alone."""
        return 1 if self.exact else self._most_tokens

    def key(self, model: str) -> str:
        """The name on the base of an adapter of this session. No operation names one so, nor does the shelf."""
        return f"_{self._seat}_{model}"

    def leave(self) -> None:
        """Take all adapters of the session off the base."""
        while self.adapters:
            self.base.drop(self.adapters.popitem()[1].key)

    def do(self, asked: Verbs, tensors: dict[str, Tensor], identity: str | None = None) -> Answer:
        """Compute one operation. BadOperation: nothing has changed. `identity` tells operations apart: one that is
        computed again, after a crash, finds what it has written."""
        return self.guarded(lambda: self._do(asked, tensors, identity))

    def guarded(self, compute: Callable[[], T]) -> T:
        """Compute something. BadOperation where memory has not sufficed."""
        try:
            return compute()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            words = f"out of memory: send fewer or shorter examples at a time ({self.pass_tokens} tokens go through "
            raise BadOperation(words + "the model at once)", code="out_of_memory") from error

    def _do(self, asked: Verbs, tensors: dict[str, Tensor], identity: str | None) -> Answer:
        match asked:
            case CreateModel() | LoadModel() | DropModel() | OptimStep() | ZeroGrad():
                return self.crew.alike(lambda: self._change(asked)), {}
            case Forward():
                return self._forward(asked, tensors)
            case ForwardBackward():
                return self._forward_backward(asked, tensors)
            case Generate():
                return self.answers.one(self.answers.plan(asked, tensors))
            case Logprobs():
                examples = self.examples(tensors)
                if CHOICES in examples[0].values:
                    raise BadOperation("`logprobs` is of one target a token; `forward` takes several", field="targets")
                with self.reading(asked) as engine:
                    found = self.logprobs(engine, examples)
                return {"targets": _targets(examples)}, {"logprobs": spread(examples, found)}
            case Save():
                adapter = self._find(asked.model)
                self.crew.check_in_sync(adapter.engine.trained_parameters)
                return self._save(asked, identity) if self.crew.first else {}, {}
            case _ as never:
                assert_never(never)

    def _change(self, asked: CreateModel | LoadModel | DropModel | OptimStep | ZeroGrad) -> dict[str, Any]:
        match asked:
            case CreateModel():
                self._refuse_known(asked.model)
                made = SessionAdapter.make(
                    self.base, asked.model, self.key(asked.model), asked.method, asked.optimizer, asked.seed
                )
                self.adapters[asked.model] = made
                return made.about()
            case LoadModel():
                return self._load(asked)
            case DropModel():
                self.base.drop(self._find(asked.model).key)
                del self.adapters[asked.model]
                return {"model": asked.model}
            case OptimStep():
                return self._find(asked.model).step(asked)
            case ZeroGrad():
                self._find(asked.model).begin().zero_grad()
                return {"model": asked.model}
            case _ as never:
                assert_never(never)

    # --- passes

    def over(
        self,
        examples: list[SessionExample],
        compute: Callable[[Batch], tuple[float, tuple[Tensor, ...]]],
        together: int = 1,
    ) -> tuple[float, list[list[Tensor]]]:
        """Compute passes over examples, of several ranks each its share. Returns the sum of the losses and, for each
        tensor that a pass comes to ([targets of its examples, …]; none where it has no target), parts by example."""
        mine = self.crew.share([len(one.tokens) for one in examples], together)

        def passed() -> tuple[float, list[Tensor]]:
            chosen, total, parts = [examples[at] for at in mine], 0.0, []
            for places in passes(chosen, self.pass_tokens, together):
                self.between()
                loss, found = compute(batch_of([chosen[at] for at in places], self.base.pad_token_id))
                total += loss
                parts += [found] if found else []
            return total, [torch.cat(each) for each in zip(*parts, strict=True)]

        total, found = self.crew.gathered(passed)
        counts = [int(one.asked.sum()) for one in examples]
        return total, [list(torch.split(each, counts)) for each in found or [torch.zeros(0)]]

    def _forward(self, asked: Forward, tensors: dict[str, Tensor]) -> Answer:
        examples = self.examples(tensors)
        check_loss(asked.loss, examples)
        engine = self._find(asked.model).begin()

        def look(policy: PolicyModel, batch: Batch) -> tuple[Tensor, Tensor]:
            logprobs = logprobs_of(policy, batch)
            return logprobs, loss_sum(asked.loss, logprobs, batch)

        def compute(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
            logprobs, loss = engine.evaluate(batch, look)
            check_finite([loss, logprobs])
            return float(loss.double()), (logprobs,)

        total, (found,) = self.over(examples, compute, rows_together(asked.loss))
        return {"loss": total, "targets": _targets(examples)}, _told(examples, found)

    def _forward_backward(self, asked: ForwardBackward, tensors: dict[str, Tensor]) -> Answer:
        examples = self.examples(tensors)
        check_loss(asked.loss, examples)
        adapter = self._find(asked.model)
        engine = adapter.begin()

        def compute(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
            if not batch.label_tokens:
                return 0.0, ()
            function = _Watched(asked.loss)
            loss = engine.forward(batch, function, {})
            check_finite([loss.total, function.logprobs])
            engine.backward(loss.total)
            return float(loss.sums["loss"]), (function.logprobs,)

        with adapter.whole():
            adapter.draw()
            with self.crew.window(engine):
                total, (found,) = self.over(examples, compute, rows_together(asked.loss))
        result = {"loss": total, "targets": _targets(examples), "micro_steps": engine.micro_steps}
        return result, _told(examples, found)

    def logprobs(self, engine: Engine, examples: list[SessionExample]) -> list[Tensor]:
        def compute(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
            seen = torch.cat(engine.logprobs(batch))
            check_finite([seen])
            return 0.0, (seen,)

        _, (found,) = self.over(examples, compute)
        return found

    # --- adapters and their folders

    def _save(self, asked: Save, identity: str | None) -> dict[str, Any]:
        adapter = self._find(asked.model)
        folder = self.saved / asked.name
        result = adapter.about() | {"name": asked.name, "folder": str(folder)}
        if folder.is_dir():
            about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
            if identity is not None and about["identity"] == identity:
                return result
            raise BadOperation(
                f"this session has saved `{asked.name}` already", field="name", code="session_name_taken"
            )

        def write(making: Path) -> None:
            adapter.begin()
            self.base.write_adapter(adapter.key, making)
            adapter.save(making, STATE, weights=not self.base.whole)
            (making / "about.json").write_text(json.dumps(result | {"identity": identity}), encoding="utf-8")

        store.write(self.saved, asked.name, write)
        return result

    def _load(self, asked: LoadModel) -> dict[str, Any]:
        folder = Path(asked.folder)
        if not self.base.whole:
            check_adapter(folder)
        ours = (folder / f"{STATE}.json").is_file()
        if asked.with_optimizer and not ours:
            words = "this adapter was made elsewhere: it has no state of an optimizer; set `with_optimizer` to false"
            raise BadOperation(words, field="with_optimizer")
        known = self.adapters.get(asked.model)
        if asked.with_optimizer:
            if known is not None:
                known.begin()
                known.load(folder, STATE)
                return known.about()
            self.adapters[asked.model] = SessionAdapter.restore(
                self.base, asked.model, self.key(asked.model), folder, STATE
            )
            return self.adapters[asked.model].about()
        if known is None:
            key = self.key(asked.model)
            method = Full() if self.base.whole else method_of(folder)
            known = SessionAdapter.make(self.base, asked.model, key, method, asked.optimizer, asked.seed)
            try:
                self.base.read_adapter(key, folder)
            except BaseException:
                self.base.drop(key)
                raise
            self.adapters[asked.model] = known
        else:
            self.base.read_adapter(known.key, folder)
        return known.about()

    def examples(self, tensors: dict[str, Tensor]) -> list[SessionExample]:
        return read_examples(tensors, self.base.vocabulary, self.base.longest)

    def _find(self, name: str) -> SessionAdapter:
        if (found := self.adapters.get(name)) is None:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise NoSuchModel(f"the session has no model `{name}`; it has {known}", field="model")
        return found

    def _refuse_known(self, name: str) -> None:
        if name in self.adapters:
            raise BadOperation(f"the session has a model `{name}` already", field="model", code="session_name_taken")

    def adapter_of(self, asked: Generate | Logprobs) -> SessionAdapter | None:
        """An adapter of the session, or a saved one; None: the base alone."""
        if asked.folder is None:
            return None if asked.model is None else self._find(asked.model)
        if self.base.whole:
            words = "the session trains the model itself: load what was saved, or open a session with adapters"
            raise BadOperation(words, field="folder")
        return self.shelf.take(Path(asked.folder))

    def reading(self, asked: Generate | Logprobs) -> Any:
        """A context with the engine of an adapter, of a saved one, or of the base alone."""
        adapter, _ = self.crew.agreed(lambda: self.adapter_of(asked))
        return self.base.alone() if adapter is None else _As(adapter.begin())


class _As:
    """A context that is nothing but its value."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> Engine:
        return self._engine

    def __exit__(self, *_: object) -> None:
        pass


class _Watched:
    """A LossFunction that keeps the log-probabilities it saw."""

    def __init__(self, loss: Losses) -> None:
        self._loss = loss
        self.logprobs: Tensor = torch.zeros(0)

    def __call__(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        logprobs = logprobs_of(policy, batch)
        self.logprobs = logprobs.detach()
        total = loss_sum(self._loss, logprobs, batch)
        return Loss(total, {"loss": total.detach().double()})


def _told(examples: list[SessionExample], found: list[Tensor]) -> dict[str, Tensor]:
    """Log-probabilities of a pass, float32 [tokens] or [tokens, choices], and how many tokens each example has, since
    what was sent is not kept as long as this is."""
    flat, choices = spread(examples, found), examples[0].values.get(CHOICES)
    lengths = torch.tensor([len(example.tokens) for example in examples], dtype=torch.int32)
    return {"logprobs": flat if choices is None else flat.view(-1, choices.shape[1]), "lengths": lengths}


def _targets(examples: list[SessionExample]) -> int:
    return sum(int(example.asked.sum()) for example in examples)
