"""Weights in few bits: NF4 with double quantisation in bitsandbytes' layout, int8 by block, and the modules over
them."""
