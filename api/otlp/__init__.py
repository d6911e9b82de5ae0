"""Traces of jobs that have ended, for an OpenTelemetry collector."""
