"""What a row says: one file a family of formats. `settle` tells them apart, `read` makes rows of them."""
