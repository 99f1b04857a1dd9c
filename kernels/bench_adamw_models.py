"""The parameter lists of `bench_adamw`: what an optimizer updates, as (shape, dtype) in its own order.

    python -m somaspeed_patch.kernels.bench_adamw_models [pi05] [molmoact2] [groot]

writes those lists of bench_adamw_models.json anew, all by default, from LeRobot's own classes built on the
meta device. It needs LeRobot, for groot also diffusers and dm-tree; the benchmark itself reads only the JSON,
because the machine with the GPU has none of them. In the JSON an entry is [count, shape, dtype], or
[count, entries] where a block of entries repeats.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from somaspeed_patch.ab import machine

FILE = Path(__file__).with_name("bench_adamw_models.json")
Entry = tuple[tuple[int, ...], torch.dtype]


def names() -> list[str]:
    """Of every list, the models' first."""
    return [*_stored(), *_MADE]


def load(name: str) -> list[Entry]:
    """One list.

    Raises: KeyError: no list has this name.
    """
    return _MADE[name]() if name in _MADE else _unpack(_stored()[name]["list"])


def elements(entries: Iterable[Entry]) -> int:
    """Numbers in all tensors of a list."""
    return sum(math.prod(shape) for shape, _ in entries)


def shrunk(entries: list[Entry]) -> list[Entry]:
    """The first tensor of each dtype with no side above 40: a list for the CPU interpreter."""
    first = {dtype: shape for shape, dtype in reversed(entries)}
    return [(tuple(min(side, 40) for side in shape), dtype) for dtype, shape in first.items()]


def _stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(FILE.read_text())
    return stored


def _molmoact2_bf16() -> list[Entry]:
    return [(shape, torch.bfloat16) for shape, _ in load("molmoact2")]


def _fp32_1620m() -> list[Entry]:
    """1620 M numbers in 539 tensors, the list of the first measurements in the design notes."""
    sizes = [3_000_000] * 500 + [1024] * 37 + [60_000_000] * 2
    return [((size,), torch.float32) for size in sizes]


def _bf16_545m() -> list[Entry]:
    """545 M numbers in 330 tensors, likewise."""
    return [((size,), torch.bfloat16) for size in [4 << 20] * 130 + [1024] * 200]


def _small() -> list[Entry]:
    return [((64 << 10,), torch.float32)] * 1000


_MADE: dict[str, Callable[[], list[Entry]]] = {
    "molmoact2_bf16": _molmoact2_bf16,
    "fp32_1620m": _fp32_1620m,
    "bf16_545m": _bf16_545m,
    "small": _small,
}


def pi05() -> list[Entry]:
    """LeRobot's pi0.5 in bf16, expert only; without the expert's lm_head, which never has a gradient."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.pi05.modeling_pi05 import PI05Config, PI05Policy

    config = PI05Config(dtype="bfloat16", train_expert_only=True, device="cpu")
    config.device = "meta"  # not in the constructor, which replaces it by a device it knows
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, 224, 224))
    config.input_features = {"observation.images.image": image}
    config.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(7,))}
    with torch.device("meta"):
        policy = PI05Policy(config)
    return _trainable(policy, without="lm_head")


def molmoact2() -> list[Entry]:
    """MolmoAct2's action expert, in the sizes of the published checkpoint."""
    from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import (
        MolmoAct2ActionExpertConfig,
    )
    from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import ActionExpert

    config = MolmoAct2ActionExpertConfig(
        hidden_size=768, num_layers=36, num_heads=8, mlp_ratio=4.0, ffn_multiple_of=256
    )
    with torch.device("meta"):
        return _trainable(ActionExpert(config, llm_dim=2560, llm_kv_dim=1024, llm_num_layers=36))


def groot() -> list[Entry]:
    """LeRobot's port of GR00T N1.7 with its frozen backbone."""
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config

    with torch.device("meta"):
        model = GR00TN17(GR00TN17Config(), load_backbone_weights=False)
    model.backbone.set_trainable_parameters(False, False, 0)
    return _trainable(model)


CLASSES: dict[str, Callable[[], list[Entry]]] = {"pi05": pi05, "molmoact2": molmoact2, "groot": groot}


def _trainable(module: nn.Module, without: str | None = None) -> list[Entry]:
    return [
        (tuple(param.shape), param.dtype)
        for name, param in module.named_parameters()
        if param.requires_grad and (without is None or without not in name.split("."))
    ]


def _pack(items: list[Any]) -> list[Any]:
    """Entries with their counts; a block of entries that repeats becomes one."""
    packed: list[Any] = []
    place = 0
    while place < len(items):
        count, period = max(
            (_repeats(items, place, period) for period in range(1, len(items) // 2 + 1)),
            key=lambda found: (found[0] - 1) * found[1],
            default=(1, 1),
        )
        block = items[place : place + period]
        packed.append([count, *block[0]] if period == 1 else [count, _pack(block)])
        place += count * period
    return packed


def _repeats(items: list[Any], place: int, period: int) -> tuple[int, int]:
    """How often the `period` items from `place` on follow each other, and `period`; (1, 1) for once."""
    block, count = items[place : place + period], 1
    while items[place + count * period : place + (count + 1) * period] == block:
        count += 1
    return (count, period) if count > 1 else (1, 1)


def _unpack(packed: list[Any]) -> list[Entry]:
    entries: list[Entry] = []
    for count, first, *rest in packed:
        block = [(tuple(first), getattr(torch, rest[0]))] if rest else _unpack(first)
        entries += block * count
    return entries


def _describe(name: str) -> dict[str, Any]:
    entries = CLASSES[name]()
    plain = [(list(shape), str(dtype).removeprefix("torch.")) for shape, dtype in entries]
    return {
        "source": f"LeRobot {machine.versions().get('lerobot')}, {name}() of bench_adamw_models.py",
        "tensors": len(entries),
        "elements": elements(entries),
        "list": _pack(plain),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the parameter lists of bench_adamw from LeRobot.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLASSES)}; default: all")
    chosen = parser.parse_args(arguments).names or list(CLASSES)
    if unknown := set(chosen) - set(CLASSES):
        parser.error(f"no class is known for {', '.join(sorted(unknown))}; choose from {', '.join(CLASSES)}")
    stored = _stored() if FILE.is_file() else {}
    for name in chosen:
        try:
            stored[name] = _describe(name)
        except ImportError as error:
            parser.error(f"{name}: {error}; pip install 'somaspeed-patch[lerobot,groot]', or name others")
        print(f"{name}: {stored[name]['tensors']} tensors, {stored[name]['elements']:,} numbers")
    lines = [f' "{name}": {json.dumps(stored[name])}' for name in CLASSES if name in stored]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
