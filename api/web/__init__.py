"""The dashboard: pages at `/ui`, rendered here from what the API's own routes answer."""
