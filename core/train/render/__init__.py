"""From a row to tokens, and to the tokens that are learned."""
