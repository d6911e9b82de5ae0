"""From Tinker's words to sessions: each of its models is a session with one adapter, found by its name."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.deps import AppState
from api.http.once import Once, answer
from api.sessions.service import Sent, Sessions, checked_operation
from api.tinker import bases
from api.tinker.bases import NamedBase
from api.tinker.forms import bodies, plain
from api.tinker.forms.messages import PassRequest, read_targets
from core.db.tables import SessionSave
from core.errors import NotFound, SpecError
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.sessions import idle, records, saves
from core.jobs.lifecycle.sessions.limits import SessionQuota
from core.jobs.lifecycle.sessions.records import FoundSession
from core.spec.session import tensors

ADAPTER = "default"
IDLE_SECONDS = 15.0
"""A client may hold several models, each of them a session: the slot of one that rests is free soon."""
KINDS = {"weights": "w", "sampler_weights": "s", "external_weights": "x"}
"""Kinds of saved weights by the beginning of their folders; `u`: without a name of the caller's."""
ALL = f"tinker {'_' * 32} %"
RUNS = f"tinker {'_' * 32} m%"
"""Names of sessions, in SQL: those of models have an `m` before their number, those of samplers an `s`."""
_RUN = re.compile(r"([0-9a-f]{32}):train:([0-9]{1,10})")
_PATH = re.compile(rf"tinker://([^/]+)/({'|'.join(KINDS)})/({bodies.SAVED_NAME})")
SESSION = re.compile(r"[0-9a-f]{32}")
CLONE = 10**9
"""Numbers of requests that each client of a sampling session has."""
_CLIPS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}
_OPTIONS: dict[str, dict[str, str]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "gspo": _CLIPS,
    "dro": {"beta": "beta"},
}
"""Losses, and the names of their options here."""
_DEFAULTS: dict[str, dict[str, float]] = {"cispo": {"clip_low": 0.0, "clip_high": 4.0}}


@dataclass(frozen=True, slots=True)
class SamplerId:
    """A sampling session: the session that computes, the saved weights (None: the base alone), and what tells it apart
    from others of the same two, whose requests have numbers of their own."""

    host: str
    source: str | None = None
    name: str | None = None
    mark: str | None = None

    def __str__(self) -> str:
        return ":".join(part for part in (self.host, self.source, self.name, self.mark) if part)

    def lane(self, clone: int) -> str:
        """Where the requests of one of its clients have their numbers."""
        return "tinker-" + hashlib.sha256(f"{self}/{clone}".encode()).hexdigest()[:48]

    @classmethod
    def read(cls, text: str) -> SamplerId:
        match text.split(":"):
            case [host]:
                return cls(host)
            case [host, mark]:
                return cls(host, mark=mark)
            case [host, source, name]:
                return cls(host, source, name)
            case [host, source, name, mark]:
                return cls(host, source, name, mark)
        raise NotFound("there is no such sampling session", field="sampling_session_id")


class Door:
    """Tinker's requests of one caller."""

    def __init__(self, app: AppState, actor: Actor) -> None:
        self.app, self.actor = app, actor
        self.sessions = Sessions(app.database, app.settings, app.layout)

    # --- models

    def run(self, model_id: str) -> FoundSession:
        """The session of a model. Raises NotFound."""
        found = _RUN.fullmatch(model_id)
        if found is not None:
            with self.app.database.read() as session:
                if (known := records.named(session, self.actor, named(found[1], f"m{int(found[2])}"))) is not None:
                    return known
        raise NotFound(f"there is no model `{model_id[:100]}` in this project", field="model_id")

    def create(self, wish: bodies.NewRun) -> str:
        if wish.optimizer_config is not None and wish.optimizer_config.get("type") != "adamw":
            raise SpecError("the optimizer is `adamw`", field="optimizer_config.type", code="invalid_value")
        lora = wish.lora_config
        if not (lora.train_mlp and lora.train_attn):
            words = "an adapter is on all linear layers here: leave train_mlp and train_attn true"
            raise SpecError(words, field="lora_config", code="invalid_value")
        base = self.app.settings.model_roots, wish.base_model
        host = self._open(wish.session_id, f"m{wish.model_seq_id}", bases.named(*base), wish.user_metadata)
        method = {"type": "lora", "r": lora.rank, "lora_alpha": 32.0}
        return self._first(host, {"op": "create", "model": ADAPTER, "method": method, "seed": lora.seed or 0})

    def load(self, wish: bodies.LoadWish) -> str:
        """Put saved weights into a new model, or into one that is there."""
        source, row = self.saved(wish.path)
        folder = self.folder(source.row.id, row.folder)
        if wish.model_id is not None:
            host, seq = self.run(wish.model_id).row.id, wish.seq_id
        elif wish.session_id is not None and wish.model_seq_id is not None:
            base = bases.of_session(source.row.spec)
            host, seq = self._open(wish.session_id, f"m{wish.model_seq_id}", base, wish.user_metadata), 0
        else:
            raise SpecError(
                "give `model_id`, or `session_id` and `model_seq_id`", field="model_id", code="invalid_value"
            )
        asked = {"op": "load", "model": ADAPTER, "folder": str(folder), "with_optimizer": wish.optimizer}
        return self._send(host, seq, asked) if wish.model_id is not None else self._first(host, asked)

    def passed(self, asked: PassRequest) -> str:
        """A forward pass, with gradients or without."""
        host = self.run(asked.model_id).row.id
        operation = {
            "op": "forward" if asked.forward_only else "forward_backward",
            "model": ADAPTER,
            "loss": _loss(asked.loss, asked.options),
        }
        columns = {name.replace("target_tokens", "targets"): wide for name, wide in asked.columns.items() if wide}
        return self._send(host, asked.seq_id, operation, _arrays(asked), columns=columns)

    def step(self, wish: bodies.StepWish) -> str:
        adam = wish.adam_params
        operation = {
            "op": "step",
            "model": ADAPTER,
            "learning_rate": adam.learning_rate,
            "max_grad_norm": adam.grad_clip_norm or None,
            "weight_decay": adam.weight_decay,
            "betas": [adam.beta1, adam.beta2],
            "eps": adam.eps,
        }
        return self._send(self.run(wish.model_id).row.id, wish.seq_id, operation)

    def save(self, wish: bodies.SaveWish | bodies.SamplerSave, kind: str, recipients: list[str] | None = None) -> str:
        """Save under the caller's name. Raises Conflict where that is taken."""
        assert wish.path is not None
        host, folder = self.run(wish.model_id).row.id, f"{KINDS[kind]}-{wish.seq_id}"
        if not wish.overwrite:
            with self.app.database.read() as session:
                saves.check_label(session, host, kind, wish.path, wish.seq_id)
        ticket = self.keep(host, wish.seq_id, folder)
        with self.app.database.write() as session:
            saves.note(
                session,
                self.actor,
                host,
                int(ticket.rpartition(".")[2]),
                folder=folder,
                kind=kind,
                label=wish.path,
                about=_in_words(wish.user_metadata),
                ttl_seconds=wish.ttl_seconds,
                recipients=recipients,
            )
        return ticket

    def keep(self, host: str, seq: int, folder: str) -> str:
        """Save without a name of the caller's."""
        return self._send(host, seq, {"op": "save", "model": ADAPTER, "name": folder})

    # --- saved weights

    def saved(self, path: str) -> tuple[FoundSession, SessionSave]:
        """Session and row of saved weights, those that other projects have published too. Raises NotFound."""
        found = _PATH.fullmatch(path)
        if found is None:
            words = f"a path is tinker://MODEL_ID/KIND/NAME, with one of {', '.join(KINDS)} as KIND"
            raise SpecError(words, field="path", code="invalid_value")
        try:
            return self.saved_as(found[1], found[2], found[3])
        except NotFound:
            run = _RUN.fullmatch(found[1])
            if run is None:
                raise
            with self.app.database.read() as session:
                given = saves.published(session, named(run[1], f"m{int(run[2])}"), found[2], found[3])
            if given is None:
                raise
            return given

    def saved_as(self, model_id: str, kind: str, label: str) -> tuple[FoundSession, SessionSave]:
        source = self.run(model_id)
        with self.app.database.read() as session:
            row = saves.newest(session, source.row.id, kind, label)
        if row is None:
            raise NotFound(f"nothing is saved as `tinker://{model_id}/{kind}/{label[:100]}`", field="path")
        return source, row

    def folder(self, session_id: str, name: str) -> Path:
        return self.app.layout.saved(session_id, name)

    # --- sampling

    def sampler(self, wish: bodies.NewSampler) -> SamplerId:
        """A sampling session over saved weights, or over the base alone. The same request again is the same one."""
        mark = hashlib.sha256(f"{wish.session_id}/{wish.sampling_session_seq_id}".encode()).hexdigest()[:16]
        if wish.model_path is not None:
            source, row = self.saved(wish.model_path)
            host = source.row.id
            if source.row.project_id != self.actor.project_id or Status(source.job.status) in FINAL:
                host = self._host(wish, bases.of_session(source.row.spec))
            return SamplerId(host, source.row.id, row.folder, mark)
        if wish.base_model is None:
            raise SpecError("give `base_model` or `model_path`", field="base_model", code="invalid_value")
        return SamplerId(self._host(wish, bases.named(self.app.settings.model_roots, wish.base_model)), mark=mark)

    def _host(self, wish: bodies.NewSampler, base: NamedBase) -> str:
        """The session that computes for a sampler: one of this client that has the base, or a new one."""
        if SESSION.fullmatch(wish.session_id):
            with self.app.database.read() as session:
                for known in records.beginning(session, self.actor, named(wish.session_id, "")):
                    if Status(known.job.status) not in FINAL and bases.of_session(known.row.spec).shown == base.shown:
                        return known.row.id
        return self._open(wish.session_id, f"s{wish.sampling_session_seq_id}", base)

    def sample(self, wish: bodies.SampleWish) -> str:
        sampler = SamplerId.read(wish.sampling_session_id)
        rows = _prompt(wish)
        operation = _generate(wish, len(rows))
        if sampler.source is not None and sampler.name is not None:
            operation["folder"] = str(self.folder(sampler.source, sampler.name))
        clone, seq = divmod(wish.seq_id, CLONE)
        arrays: dict[str, list[float]] = {"tokens": rows, "lengths": [len(rows)]}
        columns = None
        if wish.target_prompt_logprobs is not None:
            arrays["targets"], wide = read_targets(wish.target_prompt_logprobs, len(rows))
            columns = {"targets": wide}
        return self._send(sampler.host, seq, operation, arrays, lane=sampler.lane(clone), columns=columns)

    # --- sessions

    def heard(self, session_id: str) -> None:
        """A client lives. One that has made no model yet has no session of ours."""
        if SESSION.fullmatch(session_id):
            idle.heard(self.app.database, self.actor, named(session_id, ""))

    def finish(self, session_id: str) -> None:
        """Close the sessions of a client that has ended; what they saved stays."""
        if not SESSION.fullmatch(session_id):
            raise NotFound("there is no such session", field="session_id")
        with self.app.database.write() as session:
            for found in records.beginning(session, self.actor, named(session_id, "")):
                records.close(session, self.actor, found.row.id)

    def _open(self, session_id: str, part: str, base: NamedBase, about: dict[str, Any] | None = None) -> str:
        """The session of this name, made if it is not there. The same request again is the same session."""
        if not SESSION.fullmatch(session_id):
            raise NotFound("there is no such session: `create_session` makes one", field="session_id")
        name = named(session_id, part)
        metadata = _in_words(about) | {bases.SHOWN: base.shown}
        document = {
            "name": name,
            "model": base.model,
            "precision": self.app.settings.tinker_precision,
            "exact": self.app.settings.tinker_exact,
            "idle_seconds": IDLE_SECONDS,
            "resources": {"gpus": _gpus(metadata.get(bases.GPUS), self.app.settings.tinker_gpus)},
            "metadata": metadata,
        }
        with self.app.database.read() as session:
            if (known := records.named(session, self.actor, name)) is not None:
                return known.row.id
        spec, job = self.sessions.checked(self.actor, document)
        once = Once(f"tinker {name}", "/api/v1", b"")
        made = answer(
            self.app,
            self.actor,
            once,
            document,
            lambda session: self.sessions.create(session, self.actor, spec, job),
            status=201,
        )
        return str(json.loads(bytes(made.body))["id"])

    def _first(self, host: str, operation: dict[str, Any]) -> str:
        """The operation that a model begins with. One that a quota refuses leaves no empty session behind."""
        try:
            return self._send(host, 0, operation)
        except SessionQuota:
            with self.app.database.write() as session:
                if records.find(session, self.actor, host, lock=True).row.positions == 0:
                    records.close(session, self.actor, host)
            raise

    def _send(
        self,
        host: str,
        seq: int,
        operation: dict[str, Any],
        arrays: dict[str, list[float]] | None = None,
        lane: str | None = None,
        columns: dict[str, int] | None = None,
    ) -> str:
        body = tensors.pack(arrays, columns=columns) if arrays else b""
        _, row = self.sessions.accept(self.actor, host, Sent(seq, checked_operation(operation), body, lane))
        return f"{host}.{row.position}"


def model_id(found: FoundSession) -> str:
    """Tinker's id of the model that a session holds."""
    session_id, part = parts(found)
    return f"{session_id}:train:{part[1:]}"


def tinker_path(found: FoundSession, row: SessionSave) -> str:
    """Tinker's path of what a session has saved."""
    return f"tinker://{model_id(found)}/{row.kind}/{row.label}"


def base_model(found: FoundSession) -> str:
    return bases.of_session(found.row.spec).shown


def named(session_id: str, part: str) -> str:
    """Name of a session of ours by that of the SDK."""
    return f"tinker {session_id} {part}"


def parts(found: FoundSession) -> tuple[str, str]:
    """The reverse."""
    _, session_id, part = str(found.job.name).split(" ", 2)
    return session_id, part


def _in_words(metadata: dict[str, Any] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (metadata or {}).items()}


def _gpus(asked: str | None, otherwise: int) -> int:
    if asked is None:
        return otherwise
    if not asked.isascii() or not asked.isdecimal() or not 1 <= len(asked) <= 9:
        words = f"`{bases.GPUS}` is a number of GPUs, such as `2`; this is `{asked[:30]}`"
        raise SpecError(words, field=f"user_metadata.{bases.GPUS}", code="invalid_value")
    return int(asked)


def _loss(name: str, options: dict[str, Any]) -> dict[str, Any]:
    if name not in _OPTIONS:
        words = f"there is no loss `{name[:60]}` here; there are {', '.join(_OPTIONS)}"
        raise SpecError(words, field="loss_fn", code="invalid_value")
    known = _OPTIONS[name]
    if odd := sorted(options.keys() - known):
        raise SpecError(f"`{name}` has no option `{odd[0][:60]}`", field="loss_fn_config", code="invalid_value")
    return {"type": name} | _DEFAULTS.get(name, {}) | {known[key]: value for key, value in options.items()}


def _arrays(asked: PassRequest) -> dict[str, list[float]]:
    """Examples one after another. SpecError where inputs have not one number for each token."""
    if not asked.rows:
        raise SpecError("a request has at least one datum", field="data", code="invalid_value")
    names = set(asked.inputs[0])
    arrays: dict[str, list[float]] = {"tokens": [], "lengths": [], **{name: [] for name in sorted(names)}}
    for place, (row, inputs) in enumerate(zip(asked.rows, asked.inputs, strict=True)):
        if set(inputs) != names:
            words = f"datum {place} has other loss_fn_inputs than the first one"
            raise SpecError(words, field=f"data.{place}.loss_fn_inputs", code="invalid_value")
        for name, values in inputs.items():
            count = len(values) // (asked.columns.get(name) or 1)
            if count != len(row):
                words = f"datum {place}: `{name}` is of {count} tokens, and the input has {len(row)}"
                raise SpecError(words, field=f"data.{place}.loss_fn_inputs.{name}", code="invalid_value")
            arrays[name] += values
        arrays["tokens"] += row
        arrays["lengths"].append(len(row))
    if "target_tokens" not in arrays:
        raise SpecError("`target_tokens` is missing", field="data.0.loss_fn_inputs", code="invalid_value")
    arrays["targets"] = arrays.pop("target_tokens")
    return arrays


def _prompt(wish: bodies.SampleWish) -> list[float]:
    rows: list[float] = [*plain.tokens(wish.prompt.chunks, "prompt.chunks")]
    if not rows:
        raise SpecError("the prompt has no tokens", field="prompt", code="invalid_value")
    return rows


def _generate(wish: bodies.SampleWish, length: int) -> dict[str, Any]:
    if wish.prompt_alt_tokens_k:
        raise SpecError("`prompt_alt_tokens_k` is not computed here", field="prompt_alt_tokens_k", code="invalid_value")
    if wish.record_stability_info:
        words = "`record_stability_info` is not kept here: the loss stable_reinforce is missing"
        raise SpecError(words, field="record_stability_info", code="invalid_value")
    last = wish.prompt_logprobs_last_n
    if last is not None and not (wish.prompt_logprobs and last < length):
        words = f"it needs `prompt_logprobs`, and is 1 to {length - 1} for a prompt of {length} tokens; this is {last}"
        raise SpecError(words, field="prompt_logprobs_last_n", code="invalid_value")
    params = wish.sampling_params
    if params.max_tokens is None:
        raise SpecError("give `max_tokens`", field="sampling_params.max_tokens", code="invalid_value")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    texts = [one for one in stop or [] if isinstance(one, str)]
    ends = None if stop is None or texts else [one for one in stop if isinstance(one, int)]
    by_request = hashlib.sha256(f"{wish.sampling_session_id}/{wish.seq_id}".encode()).digest()
    return {
        "op": "generate",
        "max_tokens": params.max_tokens,
        "num_samples": wish.num_samples,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "stop": texts,
        "stop_token_ids": ends,
        "seed": params.seed if params.seed is not None else int.from_bytes(by_request[:7], "big"),
        "prompt_logprobs": bool(wish.prompt_logprobs),
        "prompt_top": wish.topk_prompt_logprobs,
        "sample_top": wish.topk_sample_logprobs,
        "prompt_last": last,
    }
