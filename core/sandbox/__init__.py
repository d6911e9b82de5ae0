"""Runs code of users where it can harm nothing: without network, files, other processes or secrets (docs/security/)."""
