"""What a GPU could do at most, for MFU: the datasheets' dense bf16 products with fp32 sums, in TFLOP/s.

Datasheets often quote twice that, with structured sparsity; and for GeForce cards twice that with fp16 sums.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# By the words that a device's name must have. Where two fit, the one of more words holds.
_PEAKS: Mapping[tuple[str, ...], float] = {
    ("gb200",): 2500.0,
    ("b200",): 2250.0,
    ("gh200",): 989.0,
    ("h200",): 989.0,
    ("h200", "nvl"): 835.0,
    ("h100",): 989.0,
    ("h100", "nvl"): 835.0,
    ("h100", "pcie"): 756.0,
    ("a100",): 312.0,
    ("a40",): 149.7,
    ("a30",): 165.0,
    ("a10",): 125.0,
    ("l40s",): 362.0,
    ("l40",): 181.0,
    ("l4",): 121.0,
    ("rtx", "6000", "ada"): 364.0,
    ("rtx", "a6000"): 154.8,
    ("rtx", "5090"): 209.5,
    ("rtx", "4090"): 165.0,
    ("rtx", "3090"): 71.0,
}
# Names that mean a part of that GPU, or a slower one: a MIG slice, a laptop's, the 4090 D and the 3090 Ti.
_OTHERS = frozenset({"mig", "laptop", "d", "ti"})


def peak_tflops(device_name: str) -> float | None:
    """The dense bf16 peak of a GPU, or None where it is not known.

    Args:
        device_name: as torch.cuda.get_device_name gives it. Whole words of it are compared: an RTX A4000 is
            no A40, an A10G no A10, a GH200 no H200.
    Returns: TFLOP/s.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    fitting = [needed for needed in _PEAKS if words.issuperset(needed)]
    if not fitting or words & _OTHERS:
        return None
    return _PEAKS[max(fitting, key=len)]
