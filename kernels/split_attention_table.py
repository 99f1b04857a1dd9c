"""Which tile sizes the split-attention kernels launch with: a static table, no autotuning at run time.

Found by compiling offline (no spills; shared memory within 227 KB on sm_90, 163 KB on sm_80, 99 KB on sm_86
and sm_89) and, for sm_90 at D = 256, by measuring on an H200. Two rules seen: at D = 256 the backward spills
with four warps, and on sm_90 a product of fewer than 64 rows falls from wgmma to the older mma.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """One kernel's launch: query rows and keys of a tile, warps of a program, depth of the load pipeline."""

    block_r: int
    block_n: int
    num_warps: int
    num_stages: int


class Entry(NamedTuple):
    """The configs of one architecture and head size."""

    fwd: Config
    fwd_masked: Config  # with mask_a, whose flags cost registers
    fwd_few: Config  # where tiles of `fwd` would leave processors idle
    dq: Config
    dq_few: Config
    dkv: Config


# {architecture: {D padded to a power of two: Entry}}, for two-byte dtypes
TABLE: dict[int, dict[int, Entry]] = {
    90: {
        256: Entry(
            fwd=Config(128, 64, 8, 2),
            fwd_masked=Config(128, 32, 8, 3),
            fwd_few=Config(64, 64, 8, 2),
            dq=Config(128, 32, 8, 2),
            dq_few=Config(64, 32, 8, 3),
            dkv=Config(32, 64, 8, 2),
        ),
        128: Entry(
            fwd=Config(128, 64, 8, 3),
            fwd_masked=Config(128, 64, 8, 3),
            fwd_few=Config(64, 64, 4, 2),
            dq=Config(128, 64, 8, 2),
            dq_few=Config(64, 64, 8, 2),
            dkv=Config(64, 64, 8, 2),
        ),
        64: Entry(
            fwd=Config(128, 64, 8, 3),
            fwd_masked=Config(128, 64, 8, 3),
            fwd_few=Config(64, 64, 4, 3),
            dq=Config(64, 64, 4, 2),
            dq_few=Config(64, 64, 4, 2),
            dkv=Config(64, 64, 4, 2),
        ),
    },
    80: {
        256: Entry(
            fwd=Config(64, 64, 8, 2),
            fwd_masked=Config(64, 32, 8, 2),
            fwd_few=Config(64, 32, 8, 2),
            dq=Config(64, 32, 8, 1),
            dq_few=Config(64, 32, 8, 1),
            dkv=Config(32, 32, 8, 1),
        ),
        128: Entry(
            fwd=Config(64, 64, 8, 2),
            fwd_masked=Config(64, 64, 8, 2),
            fwd_few=Config(64, 64, 8, 2),
            dq=Config(64, 64, 8, 1),
            dq_few=Config(64, 64, 8, 1),
            dkv=Config(64, 64, 8, 1),
        ),
        64: Entry(
            fwd=Config(64, 64, 4, 2),
            fwd_masked=Config(64, 64, 4, 2),
            fwd_few=Config(64, 64, 4, 2),
            dq=Config(64, 64, 4, 2),
            dq_few=Config(64, 64, 4, 2),
            dkv=Config(32, 64, 4, 2),
        ),
    },
}
TABLE[86] = {**TABLE[80], 256: TABLE[80][256]._replace(fwd=Config(64, 32, 8, 2))}
TABLE[89] = TABLE[86]

# unknown architectures, and four- and eight-byte dtypes: 66 KB at most, up to D = 256 in fp32 and 128 in fp64
SMALLEST = Entry(*[Config(16, 16, 4, 1)] * len(Entry._fields))

_overrides: list[dict[str, Config]] = []


@contextlib.contextmanager
def override(**configs: Config) -> Iterator[None]:
    """Within the block every launch of "fwd", "dq" or "dkv" uses the given config: for tuning and tests."""
    if unknown := set(configs) - {"fwd", "dq", "dkv"}:
        raise ValueError(f"split_attention: override takes fwd, dq and dkv, but got {sorted(unknown)}")
    _overrides.append(configs)
    try:
        yield
    finally:
        _overrides.pop()


def select(kernel: str, q: Tensor, masked: bool) -> Config:
    """The config of "fwd", "dq" or "dkv" for query rows q [B, H, R, D]."""
    for configs in reversed(_overrides):
        if kernel in configs:
            return configs[kernel]
    architecture, num_sms = _device(q.device)
    B, H, R, D = q.shape
    entry = lookup(architecture, D, q.element_size())
    if kernel == "fwd":
        few = _few(B * H * R, entry.fwd, num_sms)
        return entry.fwd_few if few else entry.fwd_masked if masked else entry.fwd
    if kernel == "dq":
        return entry.dq_few if _few(B * H * R, entry.dq, num_sms) else entry.dq
    return entry.dkv


def _few(rows: int, config: Config, num_sms: int) -> bool:
    """Less than three quarters of a wave; 32 samples of pi0.5, 128 tiles on 132 processors, are not few."""
    return 4 * rows < 3 * num_sms * config.block_r


@functools.cache
def lookup(architecture: int, D: int, element_size: int) -> Entry:
    """The table's entry, or the smallest tiles where it has none; D below 33 takes the entry of 64."""
    entries = TABLE.get(architecture, {}) if element_size == 2 else {}
    return next((entries[size] for size in sorted(entries) if size >= D), SMALLEST)


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Architecture (major * 10 + minor; 0 unless NVIDIA) and number of processors."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count
