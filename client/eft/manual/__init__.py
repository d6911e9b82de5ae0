"""The manual: help, man pages, docs/cli*.md and shell completion, from the commands themselves."""
