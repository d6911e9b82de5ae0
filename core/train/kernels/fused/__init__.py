"""Parts of a block beside its products, each in one pass over its values in place of five to ten."""
