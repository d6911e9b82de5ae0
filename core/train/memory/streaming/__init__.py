"""Layer streaming: frozen blocks pass through a few slots on the device."""
