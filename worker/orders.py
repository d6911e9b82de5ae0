"""From a claim to the order its child gets: every path is made or checked here, on the box that will open it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from core.errors import EftError, SpecError
from core.hardware.selftest import Verdict
from core.jobs.admission import auto_method
from core.jobs.admission.ready import SHAPE, WHOLE
from core.jobs.kinds import Kind
from core.jobs.lifecycle.claims import Claim
from core.plan import compatibility
from core.plan.models.headers import read_json
from core.plan.models.shape import Shape
from core.settings import Settings
from core.spec.axes.data import FileSource, GameRows, Generated, HubDataset, PathSource, Single, TaskRows, singles
from core.spec.axes.method import Full
from core.spec.axes.rollout.environment import GameEnvironment
from core.spec.axes.rollout.models import model_rewards
from core.spec.axes.rollout.reward import HttpReward, MathReward, RewardArm, TaskReward
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.base import SpecModel
from core.spec.files import data_orders
from core.spec.job import JobSpec
from core.spec.run.chain import ModelChain, RewardModelPin
from core.spec.run.folder import CHECKPOINTS, SCORES
from core.spec.run.orders import (
    DatasetOrder,
    MemoryLimit,
    PrepareOrder,
    ResumePoint,
    RewardModelFolder,
    RewardModelOrder,
    RunOrder,
    ServingOrder,
    SessionOrder,
)
from core.spec.settled import method_of
from core.storage.checkpoints import Snapshots
from core.storage.layout import Layout
from core.tools import ToolSet

log = logging.getLogger("eft.worker")

FOLDERS = ("model_dir", "adapter_dir", "tokenizer_dir")
"""Folders in what a child has prepared."""
TRAINED = {False: "adapter_model.safetensors", True: "config.json"}
"""A file of the folder that was trained, by whether it has all parameters."""
TRIAL_PROMPTS = 32
"""Prompts that a trial of rewards answers, more where the last step has more of them."""
SLACK_BYTES = 1 << 30
"""Bytes of stacks and arenas that threads reserve and do not use."""


class ModelGone(EftError):
    """The prepared model is no longer on the data root."""

    code = "model_gone"


def order_of(
    claim: Claim,
    settings: Settings,
    layout: Layout,
    held_at: float,
    selftest: Verdict | None,
    snapshots: Snapshots | None,
) -> SpecModel:
    """The order of a child of the claim's kind. Raises as `run_order` does."""
    match claim.kind:
        case Kind.PREPARE:
            return prepare_order(claim, settings, layout, held_at)
        case Kind.SERVING:
            return serving_order(claim, settings, layout, held_at, selftest)
        case Kind.SESSION:
            return session_order(claim, settings, layout, held_at, selftest)
        case _:
            return run_order(claim, settings, layout, held_at, selftest, snapshots)


def prepare_order(claim: Claim, settings: Settings, layout: Layout, held_at: float) -> PrepareOrder:
    """`held_at`: see PrepareOrder."""
    spec = JobSpec.model_validate(claim.spec)
    data = spec.data
    named = singles(data.train, "data.train") + (singles(data.eval, "data.eval") if data.eval is not None else [])
    return PrepareOrder(
        job_id=claim.token.job_id,
        attempt=claim.token.attempt,
        model=spec.model,
        chain=None if claim.chain is None else ModelChain.model_validate(claim.chain),
        runs_dir=str(layout.runs),
        models_dir=str(layout.models),
        model_roots=[str(root) for root in settings.model_roots],
        offline=settings.offline,
        datasets=[
            DatasetOrder(field=field, source=one) for field, one in named if isinstance(one, HubDataset | Generated)
        ],
        reward_models=_reward_model_orders(claim, spec) if claim.slot.kind != "preview" else [],
        weights=claim.slot.kind != "preview",
        exports=spec.export if claim.slot.kind != "preview" else [],
        tools=tools_of(spec) if claim.slot.kind != "preview" else [],
        cache_dir=str(layout.cache),
        lm_eval_tasks=None if settings.lm_eval_tasks is None else str(settings.lm_eval_tasks.absolute()),
        memory_limit=_prepare_limit(settings),
        fence_seconds=settings.fence_seconds,
        held_at=held_at,
    )


def pins_of(claim: Claim) -> dict[str, RewardModelPin]:
    """What reward models that jobs have trained are made of, by the name of the reward."""
    return {pin.reward: pin for pin in map(RewardModelPin.model_validate, claim.reward_models or [])}


def _reward_model_orders(claim: Claim, spec: JobSpec) -> list[RewardModelOrder]:
    pins = pins_of(claim)
    return [
        RewardModelOrder(reward=name, field=field, model=reward.model, chain=pins[name].chain if name in pins else None)
        for field, name, reward in model_rewards(spec.stage)
    ]


def _reward_model_folders(claim: Claim, prepared: dict[str, Any], layout: Layout) -> list[RewardModelFolder]:
    """Raises ModelGone."""
    pins, found = pins_of(claim), []
    for one in prepared.get("reward_models", ()):
        folders = {name: str(layout.root / one[name]) for name in FOLDERS if name in one}
        files = {"model_dir": "config.json", "adapter_dir": TRAINED[False], "tokenizer_dir": "tokenizer_config.json"}
        if gone := [name for name, folder in folders.items() if not (Path(folder) / files[name]).is_file()]:
            raise ModelGone(f"the reward model `{one['reward']}` is no longer on the data root ({one[gone[0]]})")
        made = RewardModelFolder(reward=one["reward"], source=one["source"], model_dir=folders["model_dir"])
        made = made.model_copy(update=folders)
        if (pin := pins.get(one["reward"])) is not None and (handed := pin.chain.newest) is not None:
            spec = JobSpec.model_validate(pin.spec)
            made = made.model_copy(update={"spec": spec, "job": handed.job, "sha256": handed.sha256})
        found.append(made)
    return found


def tools_of(spec: JobSpec) -> list[ToolSet]:
    """Sets of libraries that the job's training needs."""
    found: list[ToolSet] = []
    if any(isinstance(one, MathReward) for one in _rewards(spec)):
        found.append("math")
    if any(isinstance(one, TaskReward) for one in _rewards(spec)):
        found.append("tasks")
    if isinstance(spec.stage, RolloutStage) and isinstance(spec.stage.environment, GameEnvironment):
        found.append("games")
    return [*found, *(one.type for one in spec.tracking)]


def asks_endpoints(spec: Mapping[str, Any]) -> bool:
    """Whether the job with this spec has endpoints score answers."""
    return any(isinstance(one, HttpReward) for one in _rewards(JobSpec.model_validate(spec)))


def _rewards(spec: JobSpec) -> Sequence[RewardArm]:
    return spec.stage.reward if isinstance(spec.stage, RolloutStage) else []


def run_order(
    claim: Claim,
    settings: Settings,
    layout: Layout,
    held_at: float,
    selftest: Verdict | None = None,
    snapshots: Snapshots | None = None,
) -> RunOrder:
    """`selftest`: what is known of the slot's device. Raises ModelGone, or another EftError for data that is not there
    or not allowed."""
    spec = auto_method.effective(claim.spec, claim.settled, claim.adjusted)
    refused = compatibility.check(spec, preview=claim.kind == Kind.PREVIEW)
    if refused:
        raise SpecError(refused[0].message, field=refused[0].field, faults=refused, code=refused[0].code)
    prepared = _prepared(claim, layout)
    train, held_out = data_orders(spec.data, partial(_located, prepared, settings, layout))
    model_dir = layout.root / prepared["model_dir"]
    files = [path for order in (train, held_out) if order is not None for one in order.sources for path in one.paths]
    return RunOrder(
        job_id=claim.token.job_id,
        attempt=claim.token.attempt,
        spec=spec,
        model_dir=str(model_dir),
        model_source=prepared.get("source", {}),
        adapter_dir=_folder(prepared, "adapter_dir", TRAINED[isinstance(method_of(spec), Full)], layout),
        tokenizer_dir=_folder(prepared, "tokenizer_dir", "tokenizer_config.json", layout),
        lineage=claim.lineage or [],
        train=train,
        eval=held_out,
        resume_from=[str(folder) for folder in _earlier(claim, layout, snapshots)],
        memory_dir=_memory_dir(claim, snapshots),
        resume_point=resume_point(claim, layout),
        cache_dir=str(layout.cache),
        lm_eval_tasks=None if settings.lm_eval_tasks is None else str(settings.lm_eval_tasks.absolute()),
        reward_allow=list(settings.reward_allow),
        reward_models=[] if claim.slot.kind == "preview" else _reward_model_folders(claim, prepared, layout),
        reward_tokens=None if settings.reward_tokens is None else str(settings.reward_tokens.absolute()),
        fence_seconds=settings.fence_seconds,
        held_at=held_at,
        trial_prompts=TRIAL_PROMPTS if claim.kind == Kind.TRIAL else None,
        world_size=len(claim.slots),
        selftest=None if selftest is None else selftest.model_dump(mode="json"),
        settled=None if claim.settled is None else claim.settled | {"words": auto_method.words(claim.settled)},
        memory_limit=_memory_limit(claim, settings, files, model_dir),
        helper_limit=_prepare_limit(settings),
        memory_bytes=settings.cpu_slot_bytes or None if claim.slot.kind == "cpu" else None,
    )


def _located(
    prepared: Mapping[str, Any], settings: Settings, layout: Layout, source: Single, field: str
) -> tuple[list[Path], dict[str, Any]]:
    """The files of a source of rows, and where they are from. ModelGone where prepared rows are no longer there."""
    match source:
        case HubDataset() | TaskRows() | GameRows():
            found = next((one for one in prepared.get("datasets", ()) if one["field"] == field), None)
            paths = [] if found is None else [layout.root / path for path in found["paths"]]
            if found is None or not all(path.is_file() for path in paths):
                named = source.id if isinstance(source, HubDataset) else source.name
                raise ModelGone(f"the prepared rows of {named} are no longer on the data root")
            return paths, found["source"]
        case FileSource() | PathSource():
            return [_file(source, field, settings.data_roots, layout)], {}
        case _ as never:
            assert_never(never)


def _memory_limit(claim: Claim, settings: Settings, files: Sequence[str], model_dir: Path) -> MemoryLimit | None:
    """What bounds the process; None: nothing but the machine."""
    match claim.slot.kind:
        case "preview":
            return _prepare_limit(settings, sum(Path(path).stat().st_size for path in files))
        case "cpu" if settings.cpu_slot_limit and claim.slot.share_bytes:
            # Files are mapped so that the kernel counts them, although it can let their pages go.
            mapped = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
            return MemoryLimit(bytes=claim.slot.share_bytes + mapped + SLACK_BYTES, setting="EFT_CPU_SLOT_BYTES")
        case _:
            return None


def session_order(
    claim: Claim, settings: Settings, layout: Layout, held_at: float, selftest: Verdict | None = None
) -> SessionOrder:
    """As `run_order`, for a session: it has no rows, and no checkpoints of earlier attempts, since its state lies
    beside all of them."""
    spec = auto_method.effective(claim.spec, claim.settled, claim.adjusted)
    prepared = _prepared(claim, layout)
    return SessionOrder(
        job_id=claim.token.job_id,
        attempt=claim.token.attempt,
        spec=spec,
        model_dir=str(layout.root / prepared["model_dir"]),
        model_source=prepared.get("source", {}),
        tokenizer_dir=_folder(prepared, "tokenizer_dir", "tokenizer_config.json", layout),
        cache_dir=str(layout.cache),
        fence_seconds=settings.fence_seconds,
        held_at=held_at,
        selftest=None if selftest is None else selftest.model_dump(mode="json"),
        memory_bytes=settings.cpu_slot_bytes or None if claim.slot.kind == "cpu" else None,
        session_dir=str(layout.session(claim.token.job_id)),
        world_size=len(claim.slots),
    )


def serving_order(
    claim: Claim, settings: Settings, layout: Layout, held_at: float, selftest: Verdict | None = None
) -> ServingOrder:
    """As `session_order`, for a model that is served."""
    given = session_order(claim, settings, layout, held_at, selftest)
    fields = {name: getattr(given, name) for name in RunOrder.model_fields}
    fields["world_size"] = 1
    return ServingOrder(**fields, slots=settings.serving_slots, adapters=settings.serving_adapters)


def _prepared(claim: Claim, layout: Layout) -> dict[str, Any]:
    """What was prepared for the claim's job. Raises ModelGone."""
    prepared = claim.prepared
    if prepared is None or not (layout.root / prepared["model_dir"] / "config.json").is_file():
        raise ModelGone("the prepared model is no longer on the data root")
    return prepared


def _folder(prepared: dict[str, Any], name: str, file: str, layout: Layout) -> str | None:
    if name not in prepared:
        return None
    folder = layout.root / prepared[name]
    if not (folder / file).is_file():
        raise SpecError(
            f"{prepared[name]}/{file} is no longer on the data root: restore it from a backup, or train that job again",
            field="model.id",
            code="model_job_gone",
        )
    return str(folder)


def _prepare_limit(settings: Settings, files: int = 0) -> MemoryLimit | None:
    """`files`: bytes of what the process works on."""
    if not settings.prepare_bytes:
        return None
    return MemoryLimit(bytes=settings.prepare_bytes + files, setting="EFT_PREPARE_BYTES")


def portable(prepared: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """What a child has prepared, as another box finds it: paths below the data root are relative to it, since boxes may
    have it at different places. A model below EFT_MODEL_ROOTS stays where it is."""

    def relative(path: str) -> str:
        return str(Path(path).relative_to(layout.root)) if Path(path).is_relative_to(layout.root) else path

    datasets = [{**one, "paths": [relative(path) for path in one["paths"]]} for one in prepared.get("datasets", ())]
    found = [one | _relative(one, relative) for one in prepared.get("reward_models", ())]
    told = {"reward_models": found} if found else {}
    return {**prepared, **_relative(prepared, relative), "datasets": datasets, **told}


def _relative(prepared: Mapping[str, Any], relative: Callable[[str], str]) -> dict[str, str]:
    return {name: relative(prepared[name]) for name in FOLDERS if name in prepared}


def with_shape(prepared: dict[str, Any], *, weights: bool) -> dict[str, Any]:
    """What a child has prepared (paths as on this box), with what plans need of the model. A model of which nobody can
    say that is planned by nobody, and runs all the same. `weights`: they are there too, not the configuration alone."""
    folder = Path(prepared["model_dir"])
    try:
        if weights:
            shape = Shape.of_folder(folder)
        else:
            shape = Shape.of_config(read_json(folder / "config.json", field="model"))
    except (EftError, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be planned: %s: %s", folder, type(error).__name__, error)
        return prepared
    found = [with_shape(one, weights=weights) for one in prepared.get("reward_models", ())]
    told = {"reward_models": found} if found else {}
    return prepared | told | {SHAPE: shape.as_dict(), WHOLE: weights}


def _file(source: FileSource | PathSource, field: str, roots: Sequence[Path], layout: Layout) -> Path:
    match source:
        case FileSource():
            path = layout.file(source.id)
            if not path.is_file():
                raise SpecError(f"file `{source.id}` is gone; upload it and submit the job again", field=f"{field}.id")
        case PathSource():
            # Resolved here: a link may have been turned elsewhere since the job was accepted.
            path = Path(source.path).expanduser().resolve()
            if not any(path.is_relative_to(root.resolve()) for root in roots):
                raise SpecError(
                    f"`{source.path}` is not below a folder of EFT_DATA_ROOTS on this node", field=f"{field}.path"
                )
            if not path.is_file():
                raise SpecError(f"there is no file `{source.path}` on this node", field=f"{field}.path")
        case _ as never:
            assert_never(never)
    return path


def resume_point(claim: Claim, layout: Layout) -> ResumePoint | None:
    """The checkpoint of another job that this one, or the one that it is a retry of, begins with."""
    named = next((one for one in claim.resume_from if "checkpoint" in one), None)
    if named is None:
        return None
    name, _, attempt = named["checkpoint"].partition("@")
    folder = layout.attempt(named["job"], int(attempt)) / CHECKPOINTS / name
    return ResumePoint(job=named["job"], folder=str(folder), sha256=named["sha256"], changed=named["changed"])


def _memory_dir(claim: Claim, snapshots: Snapshots | None) -> str | None:
    if snapshots is None or claim.kind != Kind.TRAIN:
        return None
    return str(snapshots.attempt(claim.token.job_id, claim.token.attempt))


def _earlier(claim: Claim, layout: Layout, snapshots: Snapshots | None) -> list[Path]:
    """Run folders of earlier attempts, and of the jobs this one is a retry of, that hold checkpoints or scores of
    endpoints; newest first. Before them: snapshots in memory, for which the disk had no room."""
    left = [] if snapshots is None else snapshots.left(claim.token.job_id)
    runs = [(claim.token.job_id, claim.token.attempt - 1)]
    runs += [(one["job"], one["attempts"]) for one in reversed(claim.resume_from) if "attempts" in one]
    folders = (layout.attempt(job_id, n) for job_id, attempts in runs for n in range(attempts, 0, -1))
    return left + [
        folder
        for folder in folders
        if any(path.is_dir() and any(path.iterdir()) for path in (folder / CHECKPOINTS, folder / SCORES))
    ]
