"""Cards that are plugged in and that no source lists: no driver, another one, or a driver that will not compute.

The kernel lists the type and driver of every PCI device, readable by every user:
/sys/bus/pci/devices/*/uevent (drivers/pci/pci-driver.c, drivers/base/core.c). Of AMD's and NVIDIA's those count that
are display controllers (class 0x03) or processing accelerators (0x1200, as the MI300 calls itself).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from core.hardware.sources import access

DEVICES = "bus/pci/devices"
VENDORS = {"1002": "AMD", "10de": "NVIDIA"}
NAMES = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids")
"""Where distributions keep the list that lspci names devices by."""
ROCM_DRIVER = "https://rocm.docs.amd.com/projects/install-on-linux/en/latest/"


@dataclass(frozen=True, slots=True)
class Card:
    bdf: str
    """`0000:03:00.0`"""
    vendor: str
    """`1002` or `10de`"""
    device: str
    driver: str | None
    """The one that has it now."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A card that nothing can be computed on."""

    words: str
    broken: bool
    """Somebody has to do something: it is neither given to somebody else nor without any use for this."""


def cards(sysfs: Path) -> list[Card]:
    """In the order of the bus; none where /sys cannot be read."""
    found = []
    for path in sorted((sysfs / DEVICES).glob("*/uevent")):
        try:
            card = parse(path.read_text(errors="replace"))
        except OSError:
            continue
        if card is not None:
            found.append(card)
    return found


def parse(uevent: str) -> Card | None:
    """A device's `uevent`; None when it is no such card, or no such file."""
    said = dict(line.split("=", 1) for line in uevent.splitlines() if "=" in line)
    vendor, _, device = said.get("PCI_ID", "").lower().partition(":")
    try:
        kind = int(said.get("PCI_CLASS", "0"), 16) >> 8
    except ValueError:
        return None
    if vendor not in VENDORS or not (kind >> 8 == 0x03 or kind == 0x1200):
        return None
    return Card(said.get("PCI_SLOT_NAME", "?"), vendor, device, said.get("DRIVER"))


def idle(sysfs: Path, listed: Collection[str], environ: Mapping[str, str]) -> list[Idle]:
    """Cards that are not `listed` (PCI addresses of the GPUs that some source knows), with what to do about each.

    In a container only those without a driver count: it sees every card of its host in /sys, and which of them it was
    given is another matter."""
    root = sysfs.parent
    known = {bdf.rpartition(".")[0] for bdf in listed}
    inside = access.contained(root, environ)
    found = []
    for card in cards(sysfs):
        if card.bdf.rpartition(".")[0] in known:
            continue
        why = _why(card)
        if why is not None and not (inside and card.driver):
            words = f"{_name(card, root)} at PCI {card.bdf} {why}"
            found.append(Idle(words, broken=card.driver in (None, "nouveau")))
    return found


def _why(card: Card) -> str | None:
    match VENDORS[card.vendor], card.driver:
        case _, driver if driver is not None and driver.startswith("vfio"):
            return f"is held by {driver}, for a virtual machine"
        case "AMD", None:
            return (
                "has no driver: `sudo modprobe amdgpu`; where that is missing or does not know the card, install AMD's "
                f"(`amdgpu-dkms`, {ROCM_DRIVER}; docs/install-rocm.md)"
            )
        case "AMD", "amdgpu":
            return "has its driver, and the kernel does not list it as one that computes (`sudo dmesg | grep kfd`)"
        case "NVIDIA", None:
            return "has no driver: install NVIDIA's, of branch 580 or newer (docs/install-cuda.md)"
        case "NVIDIA", "nouveau":
            return (
                "is run by nouveau, which cannot compute: install NVIDIA's own driver, of branch 580 or newer "
                "(docs/install-cuda.md), and restart"
            )
        case "NVIDIA", "nvidia":
            return "has its driver, and nvidia-smi does not list it: is nvidia-smi installed, and what does it say?"
        case _, driver:
            return f"is run by {driver}, which is not a driver for computing"


def _name(card: Card, root: Path) -> str:
    product = _product(card, root)
    return f"{VENDORS[card.vendor]} {product or f'card {card.vendor}:{card.device}'}"


def _product(card: Card, root: Path) -> str | None:
    """As lspci has it, where its list is installed."""
    for path in NAMES:
        try:
            lines = (root / path).read_text(errors="replace").splitlines()
        except OSError:
            continue
        ours = False
        for line in lines:
            if line[:1] not in ("\t", "#", ""):
                ours = line.startswith(card.vendor)
            elif ours and line.startswith(f"\t{card.device}"):
                return line.split(None, 1)[1]
    return None


def names(sysfs: Path) -> str:
    """What that list has of this machine's cards, in its form."""
    found = []
    for card in cards(sysfs):
        if (product := _product(card, sysfs.parent)) is not None:
            found += [f"{card.vendor}  {VENDORS[card.vendor]}", f"\t{card.device}  {product}"]
    return "\n".join(found)
