"""The API's reference page and the generated tables of its routes."""
