"""The model registry: its entries, and exports of them that are asked for later."""
