"""The ground floor of the trainer: files, disk, events, logs. Imports no other room of core/train."""
