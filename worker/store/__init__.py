"""A data root in an object store: local copies, staging, publishing."""
