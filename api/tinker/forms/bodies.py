"""What Tinker's SDK sends in JSON. Fields that it adds in later versions are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.errors import NotFound, SpecError
from core.spec.load import load_json, storable
from core.spec.session.verbs import MOST_LIKELIEST

Number = Annotated[int, Field(ge=0, lt=2**31)]
SAVED_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,90}"
SavedName = Annotated[str, Field(pattern=f"^{SAVED_NAME}$")]


class Lenient(BaseModel):
    """Base of these bodies."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class LoraConfig(Lenient):
    rank: Annotated[int, Field(ge=1, le=4096)] = 32
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


Ttl = Annotated[int, Field(ge=1, le=10 * 366 * 86_400)]
Metadata = Annotated[dict[str, Any], Field(max_length=31)]


class NewRun(Lenient):
    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: dict[str, Any] | None = None
    user_metadata: Metadata | None = None


class OfSession(Lenient):
    session_id: str


class OfRun(Lenient):
    model_id: str
    seq_id: Number = 0


class AdamParams(Lenient):
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class StepWish(OfRun):
    adam_params: AdamParams


class NamedSave(OfRun):
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWish(NamedSave):
    path: SavedName


class SamplerSave(NamedSave):
    path: SavedName | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"


class ExternalSave(SaveWish):
    age_encryption_recipients: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=32)] | None = (
        None
    )


class LoadWish(Lenient):
    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: Number | None = None
    model_id: str | None = None
    seq_id: Number = 0
    user_metadata: Metadata | None = None


class NewSampler(Lenient):
    session_id: str
    sampling_session_seq_id: Number = 0
    base_model: str | None = None
    model_path: str | None = None


class SamplingWish(Lenient):
    max_tokens: int | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class ChunkedPrompt(Lenient):
    chunks: list[dict[str, Any]]


class PlainTensor(Lenient):
    data: list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleWish(Lenient):
    sampling_session_id: str
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: ChunkedPrompt
    sampling_params: SamplingWish = SamplingWish()
    prompt_logprobs: bool | None = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: PlainTensor | None = None
    record_stability_info: bool = False


class NewTtl(Lenient):
    ttl_seconds: Ttl | None = None


class SavedPath(Lenient):
    tinker_path: str


class Ticket(Lenient):
    request_id: str

    def place(self) -> tuple[str, int]:
        """Session and position of the operation. Raises NotFound."""
        host, _, position = self.request_id.partition(".")
        if not position.isdecimal() or len(position) > 9:
            raise NotFound("there is no such request", field="request_id")
        return host, int(position)


class Joined(Lenient):
    sampling_session_id: str


class PolledSampler(Joined):
    cloned_sampler_id: Annotated[int, Field(ge=0, lt=2**63)] = 0


class Polled(Lenient):
    target: PolledSampler
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None


class CopyWish(Lenient):
    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: str | None = None


class Moved(Lenient):
    project_id: str


class AskedConfig(Lenient):
    sdk_version: str = ""


M = TypeVar("M", bound=Lenient)


def parsed(model: type[M], body: bytes) -> M:
    """Raises SpecError with the first field that is wrong."""
    document = storable(load_json(body))
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or None
        raise SpecError(f"{where or 'body'}: {first['msg']}", field=where, code="invalid_value") from error
