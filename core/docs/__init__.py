"""The generated pages of docs/: `python -m core.docs` writes them."""
