"""eft under systemd: units, and the command that installs them."""
