"""Requests to a model that is served, as the API writes them and the serving child reads them."""
