"""Training replayed under TRL's own trainers (https://github.com/huggingface/trl, extra `verify`): for `eft verify`,
for the oracle tests, and for benches. No other part of the trainer imports it."""
