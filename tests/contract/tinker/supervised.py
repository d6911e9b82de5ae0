"""A supervised loop by the SDK of Tinker: runs in its environment, against a service. Prints what came as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import tinker
from tinker import types

ROWS = [[5, 6, 7, 8, 9, 10], [40, 41, 42, 43], list(range(60, 80))]


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


def supervised(model: str) -> dict[str, object]:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=model, rank=4, seed=7)
    data, losses, norms = [datum(row) for row in ROWS], [], []
    for _ in range(6):
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
        losses.append(passed.result().metrics["loss:sum"])
        norms.append(stepped.result().metrics["grad_norm"])
    saved = training.save_state("first").result().path
    before = training.forward(data, "cross_entropy").result()
    sampling = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(ROWS[0])
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop=[])
    sampled = sampling.sample(prompt, num_samples=2, sampling_params=params).result()
    again = sampling.sample(prompt, num_samples=2, sampling_params=params).result()
    of_prompt = sampling.compute_logprobs(prompt).result()
    next_losses = [next_loss(training, data)]
    old = before.loss_fn_outputs[0]["logprobs"].data
    drawn = datum(ROWS[0], logprobs=list(old), advantages=[1.0, -1.0, 0.5, 2.0, 1.0])
    rewarded = {}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        rewarded[name] = training.forward_backward([drawn], name).result().metrics["loss:sum"]
    refused = ""
    try:
        training.forward_backward([datum([1, 99_999])], "cross_entropy").result()
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    named = training.save_weights_for_sampler("sampler").result().path
    from_path = service.create_sampling_client(model_path=named).compute_logprobs(prompt).result()
    resumed = service.create_training_client_from_state_with_optimizer(saved)  # it waits for the slot of the first
    after = resumed.forward(data, "cross_entropy").result()
    next_losses.append(next_loss(resumed, data))
    return {
        "losses": losses,
        "norms": norms,
        "saved": saved,
        "info": training.get_info().model_dump(),
        "lengths": [len(one["logprobs"].data) for one in before.loss_fn_outputs],
        "logprobs": [list(map(float, one["logprobs"].data)) for one in before.loss_fn_outputs],
        "resumed": [list(map(float, one["logprobs"].data)) for one in after.loss_fn_outputs],
        "next": next_losses,
        "sampled": [[list(one.tokens), one.stop_reason] for one in sampled.sequences],
        "again": [[list(one.tokens), one.stop_reason] for one in again.sequences],
        "of_prompt": of_prompt,
        "from_path": from_path,
        "rewarded": rewarded,
        "refused": refused,
    }


if __name__ == "__main__":
    print(json.dumps(supervised(sys.argv[1]), default=str))
