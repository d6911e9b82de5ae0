"""Meaning and remedy of every code of an API error, a data fault, a failed attempt or a notice.

`make docs` generates docs/troubleshooting.md from it. A test compares it with the source of core, api, worker and box:
every code used there has a row here, and every row is used.
"""

from __future__ import annotations

import re

Code = tuple[str, str]
"""Meaning and remedy."""

REQUESTS: dict[str, Code] = {
    "invalid_request": ("The request is not valid HTTP or JSON.", "The message names the position; send JSON or YAML."),
    "unsupported_media_type": (
        "The route does not accept the body's Content-Type.",
        "Use a type named in the message.",
    ),
    "unknown_parameter": ("The route has no such query parameter.", "Remove it; the message suggests similar names."),
    "unknown_cursor": ("The list cursor refers to a missing object.", "Start the list again without `after`."),
    "range_not_satisfiable": (
        "The requested range is beyond the end of the file.",
        "Get the file's size first (HEAD).",
    ),
    "idempotency_key_reused": ("An Idempotency-Key was reused with another body.", "Use a new key for a new job."),
    "shown_to_another_key": (
        "Another API key reused an Idempotency-Key for a secret.",
        "Revoke the first result, or use a new key.",
    ),
    "rate_limited": ("This key or address has exceeded its request rate.", "Wait for the seconds in `Retry-After`."),
    "too_large": ("A file or body exceeds its size limit.", "The message names the limit and its setting."),
    "timeout": ("The client sent the request body too slowly.", "Retry; submits are safe with an Idempotency-Key."),
    "unavailable": (
        "The database, broker or data root does not respond.",
        "See `GET /readyz`; clients retry automatically.",
    ),
    "not_found": (
        "The object does not exist, or is another project's.",
        "Check the id and your project (`eft whoami`).",
    ),
    "ambiguous_handle": (
        "Several objects have this name, or ids that begin so.",
        "The message lists them; give more of the id.",
    ),
    "retried_already": (
        "A retry of the job with another time limit is under way.",
        "Cancel that job first, or let it continue.",
    ),
    "conflict": ("The object's state does not allow this operation.", "The message names the allowed operations."),
    "gone": ("The object was deleted by a retention rule or a user.", "`eft audit` (admins) shows when and by whom."),
    "internal": ("eft has a bug.", "Report the request id, or the job's log, and what you did."),
    "error": ("An error without a code of its own.", "The message says what to do."),
}

RIGHTS: dict[str, Code] = {
    "missing_api_key": ("The request has no API key.", "`eft login`, or set `EFT_API_KEY` for the client."),
    "invalid_api_key": ("The API key is unknown, mistyped or revoked.", "`eft keys list`, `eft keys create`."),
    "expired_api_key": ("The API key has expired.", "Create one with another key, or ask an admin of the project."),
    "reused_api_key": (
        "A rotated key was used after its overlap; it may be stolen.",
        "All keys of its family are revoked. Create a new one, and check `eft audit --action key.`.",
    ),
    "user_disabled": ("The key's owner is disabled.", "An admin of the box can enable them again."),
    "forbidden": ("You do not have permission.", "The message names the permission and who can grant it."),
    "missing_scope": ("The key's scope does not allow this operation.", "Use a key with the scope in the message."),
    "missing_csrf_token": (
        "A signed-in browser sent a change without the token of its page.",
        "Load the page again; programs send an API key instead of the cookie.",
    ),
    "missing_right": ("The key does not have this right.", "Create one that has it: `eft keys create --right`."),
    "missing_role": ("Your role in the project does not allow this.", "An admin of the project can change your role."),
    "not_a_member": ("You are not a member of that project.", "An admin of the project can add you."),
    "box_admin_only": ("Only an admin of the box can do this.", "Ask an admin, or use the key that `eft up` showed."),
    "last_admin": ("The project or the box would have no admin left.", "Add another admin first."),
    "name_taken": ("A user or project has this name already.", "Choose another name."),
    "already_rotated": ("The key already has a successor.", "Use the successor; revoke keys that you no longer need."),
    "too_many_keys": (
        "A user has at most EFT_KEYS_PER_MEMBER valid keys in a project.",
        "Revoke unused keys: `eft keys list` shows the last use.",
    ),
    "key_is_over": ("The key was revoked or has expired.", "Create a new one."),
}

JOBS: dict[str, Code] = {
    "fits_nowhere": (
        "According to its memory plan, the job or session fits no slot, even with the smallest batches.",
        "The message lists changes that would fit; `eft plan FILE` shows the memory in detail.",
    ),
    "unsettled": ("A trainer started by hand got `method: auto`.", "Name the method; only the service can resolve it."),
    "invalid_spec": ("The job cannot run as specified.", "Each fault names its field; docs/spec.md lists all fields."),
    "invalid_yaml": ("The job file is not valid YAML.", "The message has the line and column."),
    "unknown_field": ("There is no such field.", "The message suggests the most similar name."),
    "missing_field": ("A required field is missing.", "The message names it; see docs/spec.md and docs/data.md."),
    "invalid_value": ("A value has the wrong type or is out of range.", "The message states the allowed values."),
    "unknown_value": ("The value is not one of the allowed values.", "The message lists them."),
    "file_not_found": ("The project has no such file.", "`eft files ls`; `eft files upload`."),
    "webhook_not_found": ("The project has no such webhook.", "`eft webhooks list`."),
    "path_not_allowed": ("Jobs may not read this path.", "An operator can add its folder to EFT_DATA_ROOTS."),
    "path_not_found": ("The server has no such file.", "Check the path; relative paths are relative to the job file."),
    "format_mismatch": ("The file's format differs from `format`.", "Leave `format` at `auto`, or correct it."),
    "same_rows": ("Training and held-out rows are the same.", "Use another file, or `data.split`."),
    "priority_too_high": ("The priority exceeds the project's limit.", "An admin can raise it: `eft quota set`."),
    "already_final": ("The job has already ended.", "`eft retry` runs it again."),
    "not_ended": ("Only a job that has ended can be retried or deleted.", "Wait, or cancel it first."),
    "job_in_use": (
        "A retry, a running pipeline, a job that waits for it, or one that was made from its model needs the job.",
        "Delete (or cancel) that one first; the message names it.",
    ),
    "model_in_use": (
        "A job that was made from the model, or a running pipeline, needs it.",
        "Delete (or cancel) that one first; the message names it.",
    ),
    "exported_already": (
        "The model has this format, or it is being made.",
        "Download it: `eft models download`; or wait for the export.",
    ),
    "too_many_tags": (
        "The model would have more tags than a model may have.",
        "Remove some: `eft models tag --remove`.",
    ),
    "sweep_too_large": (
        "The sweep has more runs than a sweep may have.",
        "Give fewer values, or draw some: `type: random` with a `count`.",
    ),
    "after_not_found": (
        "A job in `after` does not exist.",
        "Submit that job first: a job can only wait for earlier ones, never for itself.",
    ),
    "after_twice": ("A job is named twice in `after`.", "Name it once; the message has its id."),
    "after_failed": (
        "A job in `after` has ended without success, so the new job would never start.",
        "Name its retry, or set `on: end`.",
    ),
    "step_not_succeeded": (
        "A step before the one to retry from has no job that has succeeded.",
        "Retry from that step, or from one before it.",
    ),
    "unknown_step": ("The pipeline has no such earlier step.", "Name one of the steps that the message lists."),
    "gate_without_figure": (
        "The step's result will not have the gate's metric.",
        "Give the step `data.eval` or `data.split`, or use `train_loss`.",
    ),
    "owner_may_not_submit": (
        "The pipeline's owner has lost the right to submit jobs in the project.",
        "Somebody who has it can retry the pipeline.",
    ),
    "queue_full": (
        "Too many jobs or previews of the project wait.",
        "Submit later; the message names the setting or quota.",
    ),
    "specs_full": (
        "The specs of the project's jobs are at their limit.",
        "`eft delete` old jobs, or raise EFT_MAX_SPEC_BYTES.",
    ),
    "not_pausable": ("The job neither waits nor runs.", "`eft show JOB` shows its status."),
    "not_paused": ("Only a paused job can be resumed.", "`eft show JOB` shows its status."),
    "still_pausing": ("The job is still writing its checkpoint.", "Try again in a moment."),
    "file_in_use": ("A job that has not ended needs the file.", "Wait for the job, or cancel it."),
    "stale_spec": ("Another version of eft wrote the job; this one cannot read it.", "Submit it again."),
    "max_runtime": ("The job has reached its time limit.", "`eft retry` continues from its last checkpoint."),
}

DATA: dict[str, Code] = {
    "invalid_data": ("The file has faulty rows.", "Each fault names its line and the reason: `eft data check FILE`."),
    "empty_file": ("The file has no rows.", "A file needs at least one row."),
    "empty": ("A required text is empty.", "Fill it in, or remove the row."),
    "unknown_format": ("The columns match no format.", "See docs/data.md; map the columns with `columns`."),
    "mixed_formats": (
        "The file has rows of several formats.",
        "Use one format per file; combine files with `sources`.",
    ),
    "ambiguous_row": ("The row matches two formats.", "Set `format`, or remove the fields of one."),
    "invalid_row": ("A row is not an object.", "Every row must be an object with named fields."),
    "invalid_json": ("The text is not valid JSON.", "The message has the line and column."),
    "invalid_csv": ("The text is not valid CSV.", "Quote fields that contain commas, quotes or line ends."),
    "invalid_parquet": ("The Parquet file is inconsistent.", "Write the file again."),
    "unreadable_file": ("The file is damaged, encrypted or compressed.", "Write it again as the message says."),
    "invalid_utf8": ("The file is not valid UTF-8.", "Save the file as UTF-8."),
    "invalid_unicode": ("The text has half of a surrogate pair.", "Write the character itself."),
    "nul_character": ("The text has a NUL character.", "Remove it."),
    "invalid_type": ("A value has the wrong type.", "The message names the expected type."),
    "not_in_template": (
        "The chat template ignores a field of the row (tool calls, reasoning, a name …).",
        "The message names the field, and families for `data.rendering` that support it; docs/rendering.md.",
    ),
    "unsupported_field": ("Training cannot use the field in this form.", "The message says how to change it."),
    "unknown_role": ("The role of a turn is unknown.", "Use system, user, assistant or tool."),
    "role_order": ("The turns are in the wrong order.", "The message names the turn and its predecessor."),
    "unknown_call": ("A tool result refers to a call that does not exist.", "Check `tool_call_id`."),
    "no_answer": ("The chat has no final assistant turn to learn from.", "End the chat with one, or remove the row."),
    "no_question": ("The chat begins with an assistant turn.", "Put a user turn before it."),
    "nothing_to_learn": (
        "Every assistant turn has weight 0, or the two answers of a pair are equal.",
        "Give one turn weight 1, correct an answer, or remove the row.",
    ),
    "label_count": ("A row has more or fewer labels than steps.", "Give each step of `completions` one label."),
    "implicit_prompt": (
        "A pair of texts has no `prompt`; what both begin with is used.",
        "Nothing if intended; otherwise put the question into `prompt`.",
    ),
    "one_class": (
        "All labels are the same, and KTO compares good answers with bad ones.",
        "Add rows with the other label, or train on several files together.",
    ),
    "too_long": ("A row exceeds 16 MiB.", "Split it; no context is that long."),
    "formula": ("A spreadsheet would execute this text; it is kept.", "Be careful when you open the file in one."),
}

MODELS: dict[str, Code] = {
    "model_job_not_succeeded": (
        "The job that is to be the model has not succeeded.",
        "Wait for it, retry it, or submit both as a pipeline (docs/pipelines.md).",
    ),
    "model_job_gone": ("Weights of an earlier job are gone.", "Restore them from a backup, or train that job again."),
    "model_job_changed": (
        "Weights of an earlier job, or its base model, have changed since.",
        "Restore them from a backup, or train that job again.",
    ),
    "gguf_refused": (
        "llama.cpp cannot hold this model.",
        "Export it as `merged`, or remove `gguf` from `export`.",
    ),
    "packed_refused": (
        "The model has layers that quantised folders (fp8, GPTQ, AWQ, MXFP4, torchao) do not quantise.",
        "Export it as `merged` or `gguf`.",
    ),
    "lm_eval_refused": (
        "lm-eval has no such task, or not its data.",
        "Take another task; name a folder of tasks in `EFT_LM_EVAL_TASKS`; offline, put its data there.",
    ),
    "tools_missing": (
        "An export needs libraries that are not installed and cannot be.",
        "Prepare such a job once with network (docs/exports.md).",
    ),
    "adapter_of_another_base": (
        "The adapter was trained over another model than its base.",
        "Name the base model that the adapter was trained over.",
    ),
    "adapter_unsupported": (
        "The adapter has parts that no method trains further.",
        "Merge it into its base model and upload that.",
    ),
    "base_is_adapter": ("The base of an adapter is an adapter itself.", "Name its base model, or merge it first."),
    "export_without_rows": (
        "An uploaded model has no rows to hold a format against.",
        "Train it further with `export`.",
    ),
    "model_not_finite": ("A tensor holds NaN or infinite numbers.", "Upload a model that computes."),
    "model_needs_service": ("Only a service knows jobs.", "Give the folder of a model, e.g. a `merged` export."),
    "model_without_adapter": ("That job trained all parameters.", "Remove `model.adapter`."),
    "adapter_differs": (
        "The adapter to continue has another value of this field.",
        "Remove the field, or set `model.adapter: merge` to train a new adapter.",
    ),
    "model_unavailable": ("The model cannot be used.", "The message gives the reason."),
    "model_not_found": (
        "The hub or folder has no such model; in a request to `/v1`: the project has none.",
        "Check the name; private models need HF_TOKEN; `GET /v1/models` lists what can be asked.",
    ),
    "model_revision_not_found": ("The model has no such revision.", "Remove `revision`, or use an existing one."),
    "model_gated": ("The hub requires you to accept the model's terms.", "Accept them, and set HF_TOKEN on the box."),
    "model_not_cached": ("The box is offline and does not have the model.", "Connect it once, or use a local folder."),
    "model_path_not_allowed": ("Jobs may not read this folder.", "An operator can add it to EFT_MODEL_ROOTS."),
    "model_pickle": ("The weights are a pickle, which executes code when loaded.", "Use a safetensors version."),
    "model_needs_code": ("The model needs its own Python code.", "Use a model that transformers includes."),
    "model_quantized": ("The model's quantisation cannot be read.", "Use the original with `quantization: nf4`."),
    "model_unreadable": ("The model's files are damaged or incomplete.", "Download the file that the message names."),
    "model_unsupported": ("This model architecture cannot be trained.", "The message lists the supported ones."),
    "model_unmeasured": (
        "The model's memory does not follow from its config.json.",
        "Prepare it (any job does), or name a local folder.",
    ),
    "model_gone": ("The model's files disappeared while the job waited.", "`eft retry` prepares them again."),
    "hub_unreachable": (
        "The hub does not respond; the job is retried.",
        "Without a network: a mirror (HF_ENDPOINT), the cache (EFT_OFFLINE), or EFT_MODEL_ROOTS.",
    ),
    "dataset_not_found": ("There is no such dataset, subset, split or file.", "The message lists what exists."),
    "dataset_ambiguous": ("The dataset has several subsets, splits or files.", "Choose one, as the message says."),
    "dataset_unreadable": (
        "A file of the dataset is not what its name says.",
        "Name other files of it as `files`, or report it to its owner.",
    ),
    "dataset_not_cached": ("The box is offline and does not have the dataset.", "Connect the box once."),
}

FAILURES: dict[str, Code] = {
    "out_of_memory": (
        "The GPU (or the box) has too little memory, also with half the micro-batch where that helps.",
        "Lower the batch size or `training.max_length`, or see docs/memory.md (`method: qlora`, checkpointing).",
    ),
    "host_out_of_memory": ("The box ran out of memory.", "Run fewer jobs there; smaller batches do not help."),
    "memory_limit": (
        "A process exceeded its memory limit.",
        "Raise the setting in the message (EFT_PREPARE_BYTES, EFT_CPU_SLOT_BYTES), or use a smaller model.",
    ),
    "diverged": ("The loss became NaN or infinite.", "Use a lower learning rate, warm-up, or bf16 instead of fp16."),
    "no_space": (
        "A disk is full.",
        "`eft delete`, `eft files rm`; `eft doctor` shows the free space. Jobs then continue.",
    ),
    "hung": ("The trainer made no progress for too long.", "The job is retried; the log has the stacks."),
    "device_error": ("The GPU or its driver raised an error.", "`eft doctor`; the GPU may be quarantined."),
    "device_missing": ("The assigned GPU does not exist.", "`eft doctor` on that box."),
    "device_refused": ("The GPU failed its self-test.", "`eft doctor` shows the failed part; docs/hardware.md."),
    "gpus_unavailable": ("The box does not have the named GPU.", "The message lists its GPUs."),
    "killed": ("The trainer was killed from outside (SIGKILL).", "The job is retried from its checkpoint."),
    "terminated": ("The trainer got SIGTERM before it could handle it.", "The job is retried automatically."),
    "segfault": ("The trainer crashed in native code.", "The job is retried; report the log if it recurs."),
    "bus_error": (
        "A mapped file was cut off, or /dev/shm or a disk is full.",
        "Free space; raise `shm_size` of a container.",
    ),
    "aborted": ("A library aborted the process, as GPU drivers do.", "`eft doctor`; the log ends with the reason."),
    "illegal_instruction": ("A library is built for another processor.", "Install its build for this one."),
    "arithmetic": ("The trainer crashed in native arithmetic.", "The job is retried; report the log if it recurs."),
    "crashed": ("The trainer ended with an unknown exit status.", "The end of the log may have the reason."),
    "spawn_failed": ("The trainer could not be started.", "`eft doctor` on that box; check process limits."),
    "worker_lost": ("The worker stopped sending heartbeats.", "The job continues automatically on any suitable box."),
    "worker_error": ("The worker failed while it handled the job.", "Report the worker's log."),
    "bad_order": (
        "The trainer cannot read the worker's order.",
        "Reinstall: worker and trainer have different versions.",
    ),
    "bad_events": ("The worker cannot read the trainer's events.", "Reinstall: their versions differ."),
    "no_result": ("The trainer ended normally without a result.", "Report the log."),
    "drift_refused": (
        "The run was made from another base model, other data, or with another number of ranks.",
        "Restore what the message names (docs/drift.md), or submit the job again.",
    ),
    "checkpoint_gone": (
        "The checkpoint with which the job begins is damaged or was deleted.",
        "`eft checkpoints list` shows those that are there.",
    ),
    "checkpoint_too_far": (
        "The job would be over at the checkpoint with which it begins.",
        "Raise `training.max_steps`, or name an earlier checkpoint.",
    ),
    "checkpoint_mismatch": (
        "The checkpoint does not match the job.",
        "Submit the job again; the message says what differs.",
    ),
    "adapter_has_begun": (
        "The job continues an adapter and says where a new one begins.",
        "Remove `method.init_lora_weights`, or set `model.adapter: merge`.",
    ),
    "compile_dora": (
        "DoRA in compiled blocks would be slower than without.",
        "Remove `training.compile`, or `method.use_dora`.",
    ),
    "qat_adapter": (
        "`quantization: qat` rounds a weight with its adapter added, and the adapter is no such sum.",
        "Remove `lora_dropout`, `use_dora` or `init_lora_weights`.",
    ),
    "qat_refused": (
        "`quantization: qat` does not go with this stage, or with this way to save memory or time.",
        "The message names the field.",
    ),
    "qat_export": (
        "The format has other numbers than those that `quantization: qat` trained with.",
        "Take `torchao_int8` or `torchao_int4`, as `quantization.weights` says.",
    ),
    "fp8_of_what_is_trained": (
        "fp8 multiplies frozen weights, and the job trains modules whole.",
        "Use another precision, or remove `method.modules_to_save`.",
    ),
    "noise_of_another_stage": (
        "Noise on embeddings is for `sft` and `cpt`.",
        "Remove `training.neftune_noise_alpha`.",
    ),
    "no_whole_groups": (
        "A step's answers are not whole groups of `stage.num_generations`.",
        "Make `per_device_train_batch_size` · `gradient_accumulation_steps` a multiple of it.",
    ),
    "no_room_for_prompts": (
        "An answer may take all of `training.max_length`.",
        "Raise it, or lower `stage.max_completion_length`.",
    ),
    "rollouts_in_rows": ("Rollouts are batched in rows.", "Use `batching: rows` without `group_by_length`."),
    "rollouts_of_a_stream": ("Prompts are read at once.", "Remove `data.streaming`."),
    "no_reference_in_rollouts": (
        "There is no starting model beside the trained one for `stage.beta`.",
        "Set it to 0, or train a new adapter.",
    ),
    "no_sandbox": (
        "A reward is code of users, and the machine cannot run it safely.",
        "The message says what is missing (also `eft doctor`); docs/security.md lists what the sandbox needs.",
    ),
    "reward_failed": (
        "A reward raised an error, took too long, or returned no finite number for some answers.",
        "The message names the rows and the error; mend the reward, or set `stage.reward_error` to `zero` or `skip`.",
    ),
    "task_refused": (
        "A task or a game makes no problems with the level and options of the job.",
        "The message has the library's own words; docs/tasks.md and docs/games.md list levels and options.",
    ),
    "not_a_reward_model": (
        "The model of a reward `model` gives answers no score.",
        "Name a job of `stage: reward`, or a sequence classifier with one label over a causal model.",
    ),
    "fewer_scored_at_once": (
        "The device has no memory to score as many answers at once as the reward `model` says.",
        "None needed; to use that from the start, lower the reward's `batch_size`.",
    ),
    "reward_address_not_allowed": (
        "The address of a reward `http` is private or loopback.",
        "Use a public address, or let the administrator allow it with EFT_REWARD_ALLOW.",
    ),
    "reward_tokens_unreadable": (
        "The file of EFT_REWARD_TOKENS cannot be read, or is not a JSON object of tokens by origin.",
        "The administrator mends the file on that machine.",
    ),
    "reward_not_reached": (
        "The host of a reward `http` was not found when the training began.",
        "It is asked all the same, with retries; check the name in `url`.",
    ),
    "answers_not_scored": (
        "A reward is 0 for answers that it could not judge in its time and memory.",
        "The notice names the rows; where many are concerned, raise `seconds` of the reward. `rollouts.jsonl` has the "
        "reason of each as `unscored`.",
    ),
    "metric_failed": (
        "A Python metric of `evaluation.generation` raised an error, took too long, or returned no finite number.",
        "The message names the row and the error; mend the function, or remove the metric.",
    ),
    "rewards_do_not_teach": (
        "A trial of these rewards found next to no group whose answers have different rewards.",
        "Change prompts, rewards or sampling and try again (`eft rewards try`), or set `stage.force`.",
    ),
    "no_reward_column": (
        "A reward reads a column that some rows do not have, or that holds what it cannot use.",
        "The message names the rows; add the column, or name another one in `stage.reward`.",
    ),
    "pairs_are_not_split": ("Rows of two answers cannot be split.", "Set `training.truncation` to cut them."),
    "reference_is_trained": (
        "A full fine-tuning over a stream has no reference left for later rows.",
        "Train adapters, or remove `data.streaming`.",
    ),
    "solutions_are_not_split": ("A solution in steps cannot be split.", "Set `training.truncation` to cut it."),
    "no_text_to_sample": ("A reward model writes no text.", "Remove `evaluation.samples`."),
    "no_answers_to_score": (
        "The rows of this stage have no completions to score answers against.",
        "Remove `evaluation.generation`.",
    ),
    "no_prompt_to_answer": (
        "`evaluation.generation` meets a held-out row without a prompt.",
        "Give rows with a prompt and a completion, or remove `evaluation.generation`.",
    ),
    "vllm_refuses": ("vLLM does not load adapters of this method.", "Take `merged` instead of `vllm`."),
    "no_gguf_of_a_reward_model": ("A reward model is not exported as a GGUF file.", "Set `export: [merged]`."),
    "model_of_another_head": (
        "The model of the earlier job ends in another head than this stage trains.",
        "Start from a job of a stage that the message names.",
    ),
    "branch_differs": (
        "A job that begins with a checkpoint differs from that job in a field that it must have in common with it.",
        "Remove the change, or start at step 0 without `checkpoint.resume_from`.",
    ),
    "metric_of_another_stage": (
        "The stage does not measure the metric that chooses the best checkpoint.",
        "Use one of the metrics that the message names.",
    ),
    "reference_mismatch": (
        "The model differs from its reference before training.",
        "Submit the job again; the reference is computed again.",
    ),
    "rank_died": ("A rank ended without a message; the others were killed.", "The log has the output of all ranks."),
    "rank_lost": ("The ranks lost their connection.", "The job is retried; the log names the rank that ended first."),
    "artifacts_differ": ("The written weights differ from the trained ones.", "The job is retried; check the disk."),
    "storage_failed": (
        "The file system failed to read or write a file.",
        "The job is retried from its last checkpoint; check the disk or the share of the data root.",
    ),
    "ranks_drifted": ("The ranks no longer have the same weights.", "Run `eft doctor`, and report it."),
    "data_root_lost": (
        "The run folder disappeared with its data root.",
        "Mount the data root again; the job is retried.",
    ),
    "blocks_not_found": ("The model has no list of frozen blocks to stream.", "Remove `memory.stream`."),
    "blocks_shared": ("Blocks share weights or state with each other.", "Remove `memory.stream`: docs/memory.md."),
    "blocks_do_not_fit": ("The streamed blocks do not fit in host memory.", "Set `memory.stream` to `disk`."),
    "more_slots_than_blocks": ("There are more slots than blocks.", "Lower `memory.stream.slots`."),
    "slots_do_not_fit": ("The slots of layer streaming do not fit on the GPU.", "Lower `memory.stream.slots`."),
    "pinned_memory_refused": (
        "The system refuses to page-lock memory.",
        "Raise RLIMIT_MEMLOCK or set `pinned: false`.",
    ),
    "offload_does_not_fit": ("The offloaded data does not fit in host memory.", "Remove `memory.offload_optimizer`."),
    "blocks_lost": ("A file of streamed weights became unreadable.", "Check the data root. The job is retried."),
}

NOTICES: dict[str, Code] = {
    "snapshot": (
        "A snapshot of a session was not whole and was set aside.",
        "Nothing: the log is replayed from the one before.",
    ),
    "columns_ignored": (
        "The format does not use all columns.",
        "Nothing if intended; otherwise map them (`--column`).",
    ),
    "template_fields": (
        "Not every chat template supports fields of these rows.",
        "Preview the file with the model: `eft files preview`; docs/rendering.md.",
    ),
    "label_ignored": (
        "Raw text has a column that looks like its label.",
        "Map both: `columns: {prompt: text, completion: label}`.",
    ),
    "no_snapshots": (
        "The box's memory has no room for snapshots of the run.",
        "Nothing: checkpoints are written to the disk, and steps wait for them. Free memory, or raise `shm_size` of a "
        "container.",
    ),
    "checkpoint_withheld": (
        "An evaluation was worse than `checkpoint.metric_bound`, so no checkpoint is written.",
        "`eft checkpoints list` shows the last one before; continue from it with a lower learning rate.",
    ),
    "bad_checkpoint": ("A checkpoint was damaged; the previous one was used.", "Check the disk."),
    "bad_reference": (
        "The cached log-probabilities of the reference are damaged; they were computed again.",
        "Check the disk.",
    ),
    "drift": ("Versions, devices or threads changed: the run is not bitwise the same.", "Nothing if intended."),
    "precision_fallback": (
        "The GPU does not support the precision.",
        "The run record has the one used and the reason.",
    ),
    "beyond_context": ("Rows are longer than the model's context.", "Lower `training.max_length`."),
    "block_skipped": ("No row of a streamed block had label tokens.", "Raise `training.max_length`."),
    "rows_truncated": ("Rows were longer than `max_length`.", "`training.truncation` selects what happens to them."),
    "rows_over_budget": ("Rows longer than the token budget have batches of their own.", "Raise `tokens_per_batch`."),
    "pairs": (
        "How training renders rows of prompt and completion, and how to prompt the tuned model.",
        "Nothing, or choose another way with `data.rendering.pairs` (docs/rendering.md).",
    ),
    "few_steps": ("The run has fewer than 20 optimizer steps.", "Use smaller batches or more epochs."),
    "long_warmup": ("More than half of the optimizer steps are warm-up.", "Lower `schedule.warmup_ratio`."),
    "learning_rate_of_another_method": (
        "`method: auto` chose a method that needs another learning rate.",
        "Remove `optimizer.learning_rate`, or name the method.",
    ),
    "loss_rose": ("The final held-out loss is more than twice the initial one.", "Lower `optimizer.learning_rate`."),
    "prompt_boundary": (
        "Prompt and answer share a token.",
        "Remove `data.rendering.pairs`, or white space before answers.",
    ),
    "compile_fallback": (
        "Blocks, or batches of a shape, are computed without the compiled code that `training.compile` asks for.",
        "The message names the reason; without a C++ compiler on a CPU, install g++.",
    ),
    "compile_cache": (
        "Compiled blocks are not kept, so the next attempt compiles them again.",
        "See the message; nothing else changes.",
    ),
    "activations_stayed": (
        "Inputs of blocks were not moved to the host, as `memory.activation_offloading` asks for.",
        "Remove the field, and tell us the model and the version of torch in the run record.",
    ),
    "products_in_parts": (
        "Matrix products are split, because this GPU's libraries compute large ones wrongly.",
        "Nothing. Smaller micro-batches, or bf16 if float32 is affected, avoid the split.",
    ),
    "whole_logits": (
        "The chunked loss does not support the output head; the logits of a whole batch need more memory.",
        "Remove the head from `method.target_modules` if it has an adapter, or use smaller micro-batches.",
    ),
    "rewards_alike": (
        "In nearly all groups all answers have the same reward, so nothing is learned from them.",
        "Easier or harder prompts, more answers to each, or a reward that tells answers apart; docs/rollouts.md.",
    ),
    "answers_cut_off": (
        "Most answers were cut off at `stage.max_completion_length`.",
        "Raise it, set `stage.stop`, or fine-tune the format first; docs/rollouts.md.",
    ),
    "sampler_mismatch": (
        "Answers were drawn with other log-probabilities than training computes for them.",
        "Set `training.precision` to fp32, or lower the learning rate; docs/rollouts.md.",
    ),
    "sampler_not_exact": (
        "`stage.sampler: exact` was asked for, and tokens are drawn with other log-probabilities than in training.",
        "Remove `stage.sampler`; docs/rollouts.md.",
    ),
    "exact_sampler": (
        "The job asks for something that `stage.sampler: exact` has no form for.",
        "Follow the message, or remove `stage.sampler`; docs/rollouts.md.",
    ),
    "no_environment": (
        "A reward or an environment needs the other one, which the job does not have.",
        "Follow the message; docs/rollouts.md.",
    ),
    "environment_failed": (
        "The environment of an episode raised, took too long, or returned what is no reply and no reward.",
        "Mend it, or set `stage.reward_error` to `zero` or `skip`; docs/rollouts.md.",
    ),
    "environment_not_rendered": (
        "The model's chat template has no place for a reply behind an answer.",
        "Set `stage.environment.role` to `user`, use another template, or prompts of plain text.",
    ),
    "replies_cut": (
        "The environment replied with more than `max_reply_length` tokens, and the rest was left out.",
        "Say less, or raise `stage.environment.max_reply_length`.",
    ),
    "fewer_slots": (
        "There was no memory for the answers in the making; fewer are made at the same time.",
        "Nothing; or set `stage.slots` to the number in the message.",
    ),
    "generation_in_batches": (
        "The model's attention has no form for the slot generator; answers take longer, in batches.",
        "Nothing; where a window is the reason, shorter prompts or answers fit it.",
    ),
    "no_router_loss": (
        "The model's load-balancing loss is of a form that is not known, and is left out.",
        "Nothing, or set `training.router_aux_loss_coef: 0` to say so.",
    ),
    "activation_offloading": ("Offloading saves nothing on a CPU.", "Remove `memory.activation_offloading` there."),
    "training_loss_rose": (
        "The training loss is far above its beginning, though it is a finite number: the model unlearns.",
        "Cancel the job and use a lower learning rate or a longer warm-up.",
    ),
    "step_skipped": ("A step in fp16 overflowed; the loss scale was lowered.", "Normal at the start; else use bf16."),
    "early_stopping": ("The held-out loss stopped improving.", "Nothing. The best weights are exported."),
    "best_restored": ("The weights of the best step are exported.", "Nothing."),
    "best_missing": ("The best checkpoint is missing; the last weights are exported.", "Raise `keep_last`."),
    "already_quantized": ("The model's files are already quantised.", "Nothing: training uses them unchanged."),
    "quantization_cache": ("Packed weights could not be cached or read; they are rebuilt.", "Check the disk."),
    "merged_withheld": (
        "The merged model is not what was trained, or has kept too little of it.",
        "Read the job's result; take another `dtype`, or set `min_retention` (docs/exports.md).",
    ),
    "vllm_withheld": (
        "The adapter was not released for vLLM.",
        "The notice has the reason; `merged` is a model that vLLM serves as it is.",
    ),
    "packed_withheld": (
        "The quantised folder (fp8, GPTQ, AWQ, MXFP4, torchao) is not what was trained, or has kept too little of it.",
        "Read the job's result; take more bits per weight, or set `min_retention` (docs/exports.md).",
    ),
    "tracking_failed": (
        "A tracker is not shown the job's curves; the run continues.",
        "The notice has its reason, and `tracking-NAME.log` in the run's folder its words (docs/tracking.md).",
    ),
    "lm_eval_failed": (
        "lm-eval could not score the model.",
        "The notice has its reason, and the job's log its words.",
    ),
    "gguf_withheld": (
        "The GGUF file is not what was trained, or has kept too little of it.",
        "Read the job's result; take more bits per weight, or set `min_retention` (docs/exports.md).",
    ),
    "token_cache": ("Tokens could not be cached or read; they are rebuilt.", "Check the disk."),
    "method": ("The choice of `method: auto`, and why each earlier candidate was rejected.", "Nothing: docs/plans.md."),
    "stream": ("Where the streamed weights are kept, and why.", "Nothing: docs/memory.md."),
    "offload": ("On a CPU, host memory is device memory: offloading saves nothing.", "Remove it."),
}

SESSIONS: dict[str, Code] = {
    "invalid_operation": (
        "An operation of a session cannot be computed as it was asked. Nothing has changed.",
        "The message names the array or option.",
    ),
    "invalid_tensors": ("The body of an operation is not valid safetensors.", "Send flat arrays in safetensors' form."),
    "session_model_not_found": ("The session has no adapter of this name.", "The message lists those it has."),
    "session_name_taken": ("The session has an adapter or a checkpoint of this name.", "Choose another name."),
    "beyond_positions": ("An example is longer than the model's positions.", "Send shorter examples or ask for less."),
    "session_seq_reused": (
        "A number of an operation was used for another operation.",
        "Count operations of a model from 1; the same number is the same operation.",
    ),
    "too_many_examples": (
        "An operation of a session has too many examples.",
        "Send them in parts: gradients add up until `step`.",
    ),
    "session_quota": (
        "A quota of sessions is used up: open sessions, adapters, hours a week, or bytes.",
        "The message names the quota and what frees it; `eft quota list` shows yours.",
    ),
    "session_in_use": ("An operation of the session waits for its result.", "Park it later, or close it."),
    "session_operation_cancelled": (
        "The caller cancelled a sample of the session before it was computed.",
        "Ask again if you want it.",
    ),
    "session_result_expired": (
        "The arrays of this result have been removed, as those of all old results are.",
        "Fetch results within EFT_SESSION_RESULT_HOURS; to have it again, send the operation under a new number.",
    ),
    "session_ended": ("The session is closed or has failed.", "The message says why; open a new one."),
    "session_needs_folder": ("Sessions do not run over a data root in an object store.", "Use a folder as data root."),
    "no_gradients": ("`step` was called without gradients.", "Call `forward_backward` first."),
    "checkpoint_not_found": ("There is no saved adapter of this name.", "`save` writes one; check the name."),
}

SERVING: dict[str, Code] = {
    "model_not_served": ("A model of this kind is not served.", "The message says which are; export it instead."),
    "context_length_exceeded": ("Prompt and answer are too long together.", "Shorten the prompt or `max_tokens`."),
    "no_chat_template": ("The model has no chat template.", "Ask it by `/v1/completions`."),
    "chat_template_failed": (
        "The model's chat template refuses the conversation.",
        "The message has the template's own words; many want user and assistant in turn.",
    ),
    "serving_interrupted": ("The process that answered ended before the answer did.", "Ask again."),
    "serving_failed": ("The model could not be loaded to be served.", "The message says why."),
    "serving_timeout": (
        "No answer came within EFT_SERVING_WAIT_SECONDS.",
        "The message says what it waits for, often a slot; ask again when one is free.",
    ),
    "serving_needs_folder": ("Models are not served from an object store.", "Use a folder as data root."),
}

BOX: dict[str, Code] = {
    "newer_schema": ("A newer eft migrated the database.", "Upgrade this box."),
    "data_root_away": ("The data root does not respond.", "Mount it, or check the bucket; jobs wait meanwhile."),
    "other_data_root": ("It belongs to another installation.", "Correct EFT_DATA, or run `eft adopt` if it was moved."),
    "open_data_root": (
        "Other users can read the data root.",
        "`chmod 700` it as its owner, or use a folder below it (EFT_DATA).",
    ),
    "half_restored": ("A restore did not finish.", "Run `eft restore` again; it continues."),
    "backup": ("The backup cannot be created or read.", "The message names the file."),
    "already_held": ("The GPU is already held.", "`eft gpu list` shows by whom and until when."),
    "held_by_another": ("Another user holds the GPU.", "That user or an admin of the box can release it."),
    "not_held": ("The GPU is not held.", "`eft gpu list`."),
    "ambiguous_gpu": ("Several boxes have a GPU of that number.", "Write NODE/GPU."),
    "too_many_holds": ("You have reached the limit of held GPUs.", "Release one, or see EFT_HOLD_SLOTS."),
    "bad_time": ("The time is invalid or in the past.", "Write `18:00`, `2h`, or a date with its time zone."),
    "address_not_allowed": ("The webhook's address is private or loopback.", "See the setting EFT_WEBHOOK_ALLOW."),
    "webhook_disabled": ("The webhook failed for days.", "Repair the receiver, then run `eft webhooks enable`."),
    "no_secret": ("A chat webhook has no secret, because chat messages are not signed.", "Nothing to rotate."),
    "too_many": ("The project has reached its limit.", "Delete one."),
}

WAITING: dict[str, Code] = {
    "turn": ("Other jobs are ahead of it.", "`eft queue` shows the order and an estimate."),
    "model": ("Its model is being downloaded or packed.", "Nothing; `eft logs JOB` shows the progress."),
    "requirements": ("No available box meets its requirements.", "Lower them, or check `eft nodes`."),
    "closed": ("Matching GPUs are held, drained, or used by other processes.", "`eft gpu list` shows by whom."),
    "quota": ("A quota of the project or its owner is used up.", "Wait, or see `eft quota list`."),
    "maintenance": ("It would run into a maintenance window.", "Set a shorter `resources.max_runtime_seconds`."),
    "disk": ("The disk is full, or a disk budget is used up.", "`eft delete`, `eft files rm`, `eft gc`."),
    "later": ("It failed a moment ago and is retried soon.", "Nothing."),
    "after": (
        "It waits for other jobs to end.",
        "`eft show` names them; `after: [{job: …, on: end}]` waits for any end.",
    ),
    "no_worker": ("No worker is available.", "`eft worker list`; start one."),
}

PARTS: dict[str, tuple[str, dict[str, Code]]] = {
    "Why a job waits": ("The field `queue.code` of a job; `queue.reason` has the full sentence.", WAITING),
    "Requests": ("Errors of any route of the API.", REQUESTS),
    "Keys and rights": ("Authentication and permissions: [security](security.md).", RIGHTS),
    "Jobs": ("Errors of submitting or changing a job.", JOBS),
    "Data": ("Faults of a file, with line and field: [data](data.md).", DATA),
    "Models and datasets": ("Errors of downloading or reading them.", MODELS),
    "Failed attempts": (
        "The field `failure` of a job. Its class is `user` (change the job), `memory` (make it smaller), `machine` "
        "(retried automatically) or `internal` (report it).",
        FAILURES,
    ),
    "Sessions": ("Errors of operations of a session.", SESSIONS),
    "Serving": ("Errors of requests to served models (`/v1`).", SERVING),
    "Notices": ("Events of a run that continues: nothing has failed.", NOTICES),
    "The box": ("Errors of GPUs, data root, database and webhooks.", BOX),
}


def page() -> str:
    """docs/troubleshooting.md."""
    lines = [
        "# Troubleshooting by error code",
        "",
        "Generated from `core/error_codes.py` by `make docs`. An error of the API is",
        '`{"error": {"code", "message", "field", "faults", "request_id"}}`; a failed job has',
        "`failure: {class, code, message, field}`. `eft` prints the same text. The message describes the particular",
        "case and has more detail than this page.",
        "",
        "Start with `eft show JOB` (why a job waits or failed), `eft logs JOB`, and `eft doctor` on the box. It also",
        "names `EFT_…` variables that no setting has and folders of `EFT_DATA_ROOTS` that do not exist.",
    ]
    for title, (words, codes) in PARTS.items():
        lines += ["", f"## {title}", "", words, "", "| code | meaning | remedy |", "|---|---|---|"]
        lines += [f"| `{code}` | {_cell(means)} | {_cell(helps)} |" for code, (means, helps) in codes.items()]
    return "\n".join(lines) + "\n"


def _cell(words: str) -> str:
    """Turn names of pages into links."""
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](\1.md)", words)
