# Written by client/unasync.py from ../aio/sessions.py: change that one.
"""Sessions: your own training loop, computed on the box."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from eft.errors import EftClientError, OperationFailed
from eft.http import paths, tensors
from eft.http.responses import Param
from eft.sync.transport import Transport

Raw = dict[str, Any]
WAIT_SECONDS = 30
"""How long one request waits for a result."""
DEFAULT = "default"
"""Name of the adapter of operations that name none."""


@dataclass(frozen=True)
class OperationResult:
    """What an operation came to."""

    values: Raw
    """Its numbers, such as `loss`."""
    arrays: dict[str, Any]
    """Its numpy arrays, such as `logprobs`: flat, one number a token."""
    position: int
    """Its place in the session's log."""

    @property
    def loss(self) -> float:
        return float(self.values["loss"])


class TrainingSession:
    """A session on the server, opened when it is entered and closed when it is left.

    Every operation is computed exactly once, whatever is restarted meanwhile: it is sent under a number of its own, and
    again under the same one where no answer came.
    """

    def __init__(self, transport: Transport, spec: Raw, method: Raw | None, patience: float) -> None:
        """`patience`: seconds for which a server may be away."""
        self._transport, self._spec, self._method, self._patience = transport, spec, method, patience
        self.id = ""
        self._seq = 0

    def __enter__(self) -> TrainingSession:
        opened: Raw = self._transport.json("POST", "/sessions", body=self._spec)
        self.id = opened["id"]
        if self._method is not None:
            try:
                self.create(DEFAULT, self._method)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def create(self, model: str, method: Raw | str = "lora", **options: Any) -> OperationResult:
        """Add an adapter. Options: `optimizer`, `seed`."""
        written = {"type": method} if isinstance(method, str) else method
        return self.ask({"op": "create", "model": model, "method": written, **options})

    def forward(
        self, batch: tensors.Batch, *, loss: Raw | str = "cross_entropy", model: str = DEFAULT
    ) -> OperationResult:
        """Loss and log-probabilities, without gradients."""
        return self.ask({"op": "forward", "model": model, "loss": loss}, batch)

    def forward_backward(
        self, batch: tensors.Batch, *, loss: Raw | str = "cross_entropy", model: str = DEFAULT
    ) -> OperationResult:
        """Loss and log-probabilities; the gradients add up until `step`."""
        return self.ask({"op": "forward_backward", "model": model, "loss": loss}, batch)

    def step(self, learning_rate: float = 1e-4, *, model: str = DEFAULT, **options: Any) -> OperationResult:
        """Update the weights. Options: `max_grad_norm`, `weight_decay`, `betas`, `eps`."""
        return self.ask({"op": "step", "model": model, "learning_rate": learning_rate, **options})

    def zero_grad(self, *, model: str = DEFAULT) -> OperationResult:
        return self.ask({"op": "zero_grad", "model": model})

    def logprobs(
        self, batch: tensors.Batch, *, model: str | None = DEFAULT, folder: str | None = None
    ) -> OperationResult:
        """Log-probability of each target; `model` None: under the base alone. `folder`: under a saved adapter."""
        return self.ask({"op": "logprobs", **_reader(model, folder)}, batch)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        model: str | None = DEFAULT,
        folder: str | None = None,
        **options: Any,
    ) -> OperationResult:
        """Answers to prompts of token ids; `model` None: of the base alone. `folder`: of a saved adapter. Options:
        `num_samples`, `temperature`, `top_p`, `top_k`, `stop`, `seed`, `prompt_logprobs`, `prompt_top`, `prompt_last`.
        """
        batch = [{"tokens": prompt} for prompt in prompts]
        return self.ask({"op": "generate", "max_tokens": max_tokens, **_reader(model, folder), **options}, batch)

    def save(self, name: str, *, model: str = DEFAULT) -> OperationResult:
        """Write the adapter and its optimizer on the box."""
        return self.ask({"op": "save", "model": model, "name": name})

    def load(self, folder: str, *, model: str = DEFAULT, with_optimizer: bool = False) -> OperationResult:
        """Put what `save` wrote in the place of an adapter."""
        return self.ask({"op": "load", "model": model, "folder": folder, "with_optimizer": with_optimizer})

    def ask(self, operation: Mapping[str, Any], batch: tensors.Batch | None = None) -> OperationResult:
        """Send any operation and wait for its result. Raises OperationFailed."""
        self._seq += 1
        about = {"seq": str(self._seq), "operation": json.dumps(dict(operation))}
        body = tensors.pack({} if batch is None else tensors.flat(batch), about)
        path = f"{paths.session(self.id)}/operations"

        def send() -> tuple[Raw, dict[str, Any]]:
            return self._exchange("POST", path, body)

        view, arrays = self._transport.persist(send, self._patience)
        while view["status"] == "waiting":
            if view["session_status"] in ("closed", "failed"):
                raise EftClientError(f"session {self.id} is {view['session_status']}: {view['reason']}")
            place = f"{path}/{view['position']}"

            def look(place: str = place) -> tuple[Raw, dict[str, Any]]:
                return self._exchange("GET", place, None)

            view, arrays = self._transport.persist(look, self._patience)
        if view["error"] is not None:
            raise OperationFailed(view["error"]["message"], view["error"]["code"], view["error"].get("field"))
        return OperationResult(view["result"], arrays, view["position"])

    def status(self) -> Raw:
        found: Raw = self._transport.json("GET", paths.session(self.id))
        return found

    def close(self) -> Raw:
        """End the session; what it saved stays."""
        closed: Raw = self._transport.json("POST", f"{paths.session(self.id)}/close", idempotent=True)
        return closed

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[Raw, dict[str, Any]]:
        headers = {"Accept": tensors.MEDIA_TYPE} | ({} if body is None else {"Content-Type": tensors.MEDIA_TYPE})
        params: dict[str, Param] = {"wait": WAIT_SECONDS}
        answer = self._transport.request(
            method, path, params=params, content=body, headers=headers, timeout=WAIT_SECONDS + 30.0
        )
        metadata, arrays = tensors.unpack(answer.content)
        view: Raw = json.loads(metadata["operation"])
        return view, arrays


class Sessions:
    """`client.sessions`: those of the project, also of other programs."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self, *, status: Sequence[str] = (), mine: bool = False, limit: int = 200) -> list[Raw]:
        """Newest first, at most `limit`. `mine`: only those that the caller has opened."""
        found: list[Raw] = []
        after: str | None = None
        while len(found) < limit:
            params: dict[str, Param] = {"limit": min(200, limit - len(found)), "after": after}
            params |= {"status": list(status) or None, "mine": "true" if mine else None}
            page: Raw = self._transport.json("GET", "/sessions", params=params)
            found += page["data"]
            after = page["next"]
            if after is None:
                break
        return found

    def get(self, session_id: str) -> Raw:
        found: Raw = self._transport.json("GET", paths.session(session_id))
        return found

    def park(self, session_id: str) -> Raw:
        """Free the session's slot; the next operation brings it back."""
        return self._ask(session_id, "park")

    def close(self, session_id: str) -> Raw:
        """End the session; what it saved stays."""
        return self._ask(session_id, "close")

    def _ask(self, session_id: str, verb: str) -> Raw:
        answer: Raw = self._transport.json("POST", f"{paths.session(session_id)}/{verb}", idempotent=True)
        return answer


def _reader(model: str | None, folder: str | None) -> Raw:
    """The adapter that an operation reads."""
    return {"model": model} if folder is None else {"folder": folder}
