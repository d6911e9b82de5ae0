"""From a model folder to the module that trains: placement, loading, adapters, precision."""
