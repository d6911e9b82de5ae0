"""Every setting of the service, from the environment (`EFT_…`)."""

from core.settings.checked import MAX_SOCKET_PATH, Settings, crosses_in_clear
from core.settings.read import SettingsError, make_root, read_settings, settings

__all__ = ["MAX_SOCKET_PATH", "Settings", "SettingsError", "crosses_in_clear", "make_root", "read_settings", "settings"]
