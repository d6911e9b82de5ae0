"""Loops by the SDK of Tinker: they run in its environment, against a service. Prints what came as JSON.

`supervised.py MODEL whole`: all of it.
`supervised.py MODEL steps`: a recipe alone, by any version of the SDK.
`supervised.py MODEL common`: the recipe and its resumption in another model.
`supervised.py MODEL recipe`: steps that a test disturbs: a line `sent N` is printed when step N is on its way, and the
recipe goes on when a line comes.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker
from tinker import types

ROWS = [[5, 6, 7, 8, 9, 10], [40, 41, 42, 43], list(range(60, 80))]
STEPS = 6


def datum(row: list[int], **inputs: list[float]) -> types.Datum:
    count = len(row) - 1
    given = {"target_tokens": np.array(row[1:], dtype=np.int64), "weights": np.ones(count, dtype=np.float32)}
    given |= {name: np.array(values, dtype=np.float32) for name, values in inputs.items()}
    if inputs:
        del given["weights"]
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=given)


def next_loss(client: tinker.TrainingClient, data: list[types.Datum]) -> float:
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return float(client.forward(data, "cross_entropy").result().metrics["loss:sum"])


def logprobs(client: tinker.TrainingClient, rows: list[list[int]]) -> list[list[float]]:
    """Of each row's targets, by a forward pass."""
    passed = client.forward([datum(row) for row in rows], "cross_entropy").result()
    return [list(map(float, one["logprobs"].data)) for one in passed.loss_fn_outputs]


def recipe(
    service: tinker.ServiceClient, training: tinker.TrainingClient, sent: Callable[[int], None]
) -> dict[str, Any]:
    """Six steps, saved weights, and samples of them, held against a forward pass."""
    data, losses, norms = [datum(row) for row in ROWS], [], []
    for step in range(STEPS):
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
        sent(step)
        losses.append(passed.result().metrics["loss:sum"])
        norms.append(stepped.result().metrics["grad_norm"])
    saved = training.save_state("first").result().path
    sampling = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(ROWS[0])
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop=[])
    answers = sampling.sample(prompt, num_samples=2, sampling_params=params).result().sequences
    again = sampling.sample(prompt, num_samples=2, sampling_params=params).result().sequences
    whole = [ROWS[0] + list(one.tokens) for one in answers]
    before, rescored, again_from_saved = logprobs(training, ROWS), logprobs(training, whole), []
    for _ in range(2):
        again_from_saved.append(next_loss(training, data))
        training.load_state_with_optimizer(saved).result()
    about = service.create_rest_client().get_weights_info_by_tinker_path(saved).result()
    return {
        "rank": about.lora_rank,
        "in_place": again_from_saved,
        "losses": losses,
        "norms": norms,
        "saved": saved,
        "logprobs": before,
        "sampled": [[list(one.tokens), list(one.logprobs), one.stop_reason] for one in answers],
        "again": [[list(one.tokens), list(one.logprobs), one.stop_reason] for one in again],
        "rescored": [found[len(ROWS[0]) - 1 :] for found in rescored],
        "of_prompt": sampling.compute_logprobs(prompt).result(),
    }


def rest(service: tinker.ServiceClient, training: tinker.TrainingClient) -> dict[str, Any]:
    """Losses of reinforcement learning, a refused request, and a sampler by its path."""
    data, before = [datum(row) for row in ROWS], logprobs(training, ROWS)
    next_losses = [next_loss(training, data)]
    numbers = {"logprobs": before[0], "advantages": [1.0, -1.0, 0.5, 2.0, 1.0]}
    rewarded = {}
    for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        mask = {"sequence_ratio_mask": [1.0] * 5} if name == "gspo" else {}
        drawn = datum(ROWS[0], **numbers, **mask)
        rewarded[name] = training.forward_backward([drawn], name).result().metrics["loss:sum"]
    refused = ""
    try:
        training.forward_backward([datum([1, 99_999])], "cross_entropy").result()
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    named = training.save_weights_for_sampler("sampler").result().path
    prompt = types.ModelInput.from_ints(ROWS[0])
    from_path = service.create_sampling_client(model_path=named).compute_logprobs(prompt).result()
    after_losses = logprobs(training, ROWS)[0]
    asked = {"num_samples": 1, "sampling_params": types.SamplingParams(max_tokens=1), "include_prompt_logprobs": True}
    sampler = service.create_sampling_client(model_path=named)
    looked = sampler.sample(prompt, topk_prompt_logprobs=3, prompt_logprobs_last_n=4, **asked).result()
    try:
        sampler.sample(prompt, topk_prompt_logprobs=101, **asked).result()
    except tinker.BadRequestError as error:
        too_many = str(error)
    return {
        "info": training.get_info().model_dump(),
        "next": next_losses,
        "from_path": from_path,
        "likeliest": [looked.prompt_logprobs, looked.topk_prompt_logprobs, too_many],
        "then": after_losses,
        "rewarded": rewarded,
        "refused": refused,
    }


def kept(service: tinker.ServiceClient, training: tinker.TrainingClient, saved: str) -> dict[str, Any]:
    """What was saved, in lists: a name that is taken, one that is written over, one that goes, and one that is gone."""
    listed = service.create_rest_client()
    run = saved.split("/")[2]
    taken = gone = ""
    try:
        training.save_state("first").result()
    except tinker.BadRequestError as error:
        taken = str(error)
    for _ in range(2):
        rolling = training.save_state("rolling", overwrite=True, user_metadata={"batch": "3"}).result().path
    listed.set_checkpoint_ttl_from_tinker_path(rolling, 3600).result()
    training.save_state("away").result()
    names = [one.checkpoint_id for one in listed.list_checkpoints(run).result().checkpoints]
    away = saved.replace("/first", "/away")
    listed.delete_checkpoint_from_tinker_path(away).result()
    try:
        service.create_training_client_from_state(away).result()
    except Exception as error:
        gone = type(error).__name__
    return {
        "run": listed.get_training_run_by_tinker_path(saved).result().model_dump(mode="json"),
        "runs": [one.training_run_id for one in listed.list_training_runs().result().training_runs],
        "names": names,
        "checkpoints": [one.model_dump(mode="json") for one in listed.list_user_checkpoints().result().checkpoints],
        "session": listed.get_session(run.split(":")[0]).result().training_run_ids,
        "taken": taken,
        "gone": gone,
    }


def custom(training: tinker.TrainingClient) -> dict[str, Any]:
    """A loss of the caller's in torch, and the norm of its gradient; the same by weights of cross-entropy."""

    def squares(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = sum((one**2).sum() for one in logprobs)
        return total, {"squares:sum": float(total.detach())}

    still = types.AdamParams(learning_rate=0.0)
    training.optim_step(still).result()  # of what was in the window
    found = logprobs(training, ROWS)
    plain = [
        types.Datum(model_input=one.model_input, loss_fn_inputs={"target_tokens": one.loss_fn_inputs["target_tokens"]})
        for one in map(datum, ROWS)
    ]
    told = training.forward_backward_custom(plain, squares).result()
    norms = [training.optim_step(still).result().metrics["grad_norm"]]
    weighted = [datum(row) for row in ROWS]
    for one, of_row in zip(weighted, found, strict=True):
        one.loss_fn_inputs["weights"] = types.TensorData(data=[-2 * value for value in of_row], dtype="float32")
    training.forward_backward(weighted, "cross_entropy").result()
    norms.append(training.optim_step(still).result().metrics["grad_norm"])
    return {"metrics": told.metrics, "expected": sum(value**2 for row in found for value in row), "norms": norms}


def several(training: tinker.TrainingClient) -> dict[str, Any]:
    """Three targets a token, dense and sparse, and the second of them alone."""
    import torch

    row, count = ROWS[2], len(ROWS[2]) - 1
    tokens = torch.zeros(count, 40, dtype=torch.int64)
    weights = torch.zeros(count, 40)
    for column in (3, 7, 21):
        tokens[:, column] = torch.tensor(row[1:]) + column
        weights[:, column] = 0.1 * column
    given = {"target_tokens": tokens, "weights": weights}
    sparse = types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=given)
    dense = {"target_tokens": tokens[:, [3, 7, 21]].numpy(), "weights": weights[:, [3, 7, 21]].numpy()}
    full = types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=dense)
    shifted = datum([row[0], *(token + 7 for token in row[1:])]).loss_fn_inputs
    one = types.Datum(model_input=full.model_input, loss_fn_inputs=shifted)
    of_sparse, of_dense, of_one = (training.forward([it], "cross_entropy").result() for it in (sparse, full, one))
    return {
        "losses": [of_sparse.metrics["loss:sum"], of_dense.metrics["loss:sum"]],
        "shape": list(of_dense.loss_fn_outputs[0]["logprobs"].shape),
        "second": of_dense.loss_fn_outputs[0]["logprobs"].to_numpy()[:, 1].tolist(),
        "alone": list(map(float, of_one.loss_fn_outputs[0]["logprobs"].data)),
        "was_sparse": sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None,
    }


def of_base(service: tinker.ServiceClient, model: str) -> dict[str, Any]:
    """A sampler over a base model that is named by its folder below EFT_MODEL_ROOTS."""
    sampler = service.create_sampling_client(base_model=model.rsplit("/", 1)[-1])
    found = sampler.compute_logprobs(types.ModelInput.from_ints(ROWS[0])).result()
    offered = [one.model_name for one in service.get_server_capabilities().supported_models]
    return {"of_base": found, "named": sampler.get_base_model(), "offered": offered}


def shared(service: tinker.ServiceClient, training: tinker.TrainingClient, saved: str) -> dict[str, Any]:
    """A sampler's second client, many samples at once, one that is cancelled, and what a single box has no use for."""
    listed, refused = service.create_rest_client(), {}
    listed.assign_session_project(saved.split("/")[2].split(":")[0], "default").result()
    for name, call in {
        "move": lambda: listed.assign_session_project(saved.split("/")[2].split(":")[0], "project-of-others"),
    }.items():
        try:
            call().result()
        except tinker.BadRequestError as error:
            refused[name] = str(error)
    listed.publish_checkpoint_from_tinker_path(saved).result()
    (public,) = [one.public for one in listed.list_user_checkpoints().result().checkpoints if one.tinker_path == saved]
    listed.unpublish_checkpoint_from_tinker_path(saved).result()
    copied = listed.copy_weights(saved, "default").result()
    rank = listed.get_weights_info_by_tinker_path(copied).result().lora_rank
    scored = service.create_sampling_client(model_path=copied).compute_logprobs(types.ModelInput.from_ints(ROWS[0]))
    sampler = training.save_weights_and_get_sampling_client()
    other = pickle.loads(pickle.dumps(sampler))
    prompt = types.ModelInput.from_ints(ROWS[0])
    params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=3, stop=[])
    asked = [one.sample(prompt, num_samples=1, sampling_params=params) for one in (sampler, other) for _ in range(8)]
    answers = [list(one.result().sequences[0].tokens) for one in asked]
    return {"refused": refused, "public": public, "answers": answers, "copied": [copied, rank, scored.result()]}


def fetched(service: tinker.ServiceClient, training: tinker.TrainingClient) -> dict[str, Any]:
    """Weights that are fetched file by file, and what is told of answers and of named tokens."""
    saved = training.save_weights_external("away", ttl_seconds=3600).result()
    given = service.create_rest_client().get_external_weights_urls(saved.path).result()
    sizes = {}
    for name, url in given.urls.items():
        with urllib.request.urlopen(url) as reply:
            sizes[name] = len(reply.read())
    sampler, prompt = training.save_weights_and_get_sampling_client(), types.ModelInput.from_ints(ROWS[0])
    params = types.SamplingParams(max_tokens=3, temperature=1.0, seed=3, stop=[])
    named = np.full((len(ROWS[0]) - 1, 2), -1)
    named[1:, 1] = ROWS[0][2:]
    asked = {"num_samples": 1, "sampling_params": params, "topk_sample_logprobs": 2}
    targets = types.TensorData(data=named.flatten().tolist(), dtype="int64", shape=list(named.shape))
    found = sampler.sample(prompt, target_prompt_logprobs=targets, **asked).result()
    return {
        "path": saved.path,
        "sizes": sizes,
        "top": found.sequences[0].topk_logprobs,
        "drawn": [list(found.sequences[0].tokens), list(found.sequences[0].logprobs)],
        "named": found.target_prompt_logprobs.to_numpy().tolist(),
        "own": sampler.compute_logprobs(prompt).result(),
    }


def wait(step: int) -> None:
    print(f"sent {step}", flush=True)
    sys.stdin.readline()


def main(model: str, what: str) -> dict[str, Any]:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(
        base_model=model, rank=4, seed=7, user_metadata={"renderer": "plain"}
    )
    told = recipe(service, training, wait if what == "recipe" else lambda step: None)
    if what == "whole":
        told |= rest(service, training)
        told["kept"] = kept(service, training, told["saved"])
        told["custom"] = custom(training)
        told["several"] = several(training)
        told["shared"] = shared(service, training, told["saved"])
        told["fetched"] = fetched(service, training)
        told |= of_base(service, model)
        resumed = service.create_training_client_from_state_with_optimizer(told["saved"])  # it waits for the slot
        told["resumed"] = logprobs(resumed, ROWS)
        told["next"].append(next_loss(resumed, [datum(row) for row in ROWS]))
    elif what == "common":
        told["next"] = [next_loss(training, [datum(row) for row in ROWS])]
        resumed = service.create_training_client_from_state_with_optimizer(told["saved"])
        told["next"].append(next_loss(resumed, [datum(row) for row in ROWS]))
    if hasattr(service, "close"):
        service.close("success").result()
    return told


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), default=str), flush=True)
    os._exit(0)  # threads of the SDK and of torch have aborted the interpreter while it was taken apart
