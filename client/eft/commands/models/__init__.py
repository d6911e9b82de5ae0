"""Commands of the heading "Models": the registry, serving, pipelines, sweeps."""
