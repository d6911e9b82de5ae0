"""Small tools that every room may use: the standard library only, nothing of eft."""
