"""Sets of libraries of their own (core/tools), installed and run."""
