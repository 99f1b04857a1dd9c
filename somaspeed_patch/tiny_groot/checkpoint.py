"""Write a GR00T N1.7 checkpoint with random weights, for `--policy.base_model_path` of LeRobot's policy.

Model and configuration are the classes in lerobot.policies.groot, so config.json and model.safetensors are
those of a released checkpoint. It has no statistics and no choices of image sizes beside them: LeRobot takes
the data set's statistics and its own sizes then, as for a checkpoint that it finds on the hub.

The folder `backbone` holds what LeRobot's processor reads under the backbone's name on the hub.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from somaspeed_patch.tiny_groot import configs, tokenizer
from somaspeed_patch.tiny_groot.sizes import Size

BACKBONE = "backbone"
_TABLES = ("embed_tokens.weight", "pos_embed.weight", "position_embedding.weight")  # whose rows are inputs


def write(
    folder: Path, size: Size, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changed: Any
) -> Path:
    """Write a checkpoint to `folder`, which is made if need be.

    Args:
        folder: where to.
        size: widths and depths.
        dtype: of the stored weights, which LeRobot loads as they are and then, by default, makes fp32.
        seed: for every weight; the caller's RNG state is left as it was.
        changed: fields of LeRobot's GR00TN17Config, over the size's.
    Returns: the folder.
    """
    from lerobot.policies.groot.groot_n1_7 import GR00TN17

    with torch.random.fork_rng(), configs.backbone_of(size), _device_for(size):
        torch.manual_seed(seed)
        model = GR00TN17(configs.model(size, **changed), load_backbone_weights=False)
        _draw_weights(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder)
    write_processor(folder / BACKBONE, size)
    return folder


def write_processor(folder: Path, size: Size) -> None:
    """Write the files of the tokenizer, image processor and video processor to `folder`, which is made."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.write(folder)
    pixels = size.image_side**2
    half = [0.5, 0.5, 0.5]
    images = Qwen2VLImageProcessor(
        patch_size=16,
        size={"shortest_edge": pixels, "longest_edge": pixels},
        image_mean=half,
        image_std=half,
    )
    images.save_pretrained(folder)
    Qwen3VLVideoProcessor().save_pretrained(folder)


def _device_for(size: Size) -> torch.device:
    """Where the weights are drawn: a large model on a GPU, if there is one, for a CPU takes minutes."""
    large = size.llm_width * size.llm_depth > 10_000
    return torch.device("cuda" if large and torch.cuda.is_available() else "cpu")


def _draw_weights(model: nn.Module) -> None:
    """New weights under which activations stay near 1, and none that hides something.

    The host's standard deviation of 0.02 leaves a narrow model mute: at width 64 the image features would be
    1e-5 beside embeddings of 2e-2. Its zeros (biases, norms' shifts) and ones would not show that they were
    left out.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or name.endswith(".b"):  # .b: a bias for each embodiment
                parameter.add_(torch.randn_like(parameter) * 0.02)
            else:
                parameter.normal_(0.0, 1.0 if name.endswith(_TABLES) else _inputs(name, parameter) ** -0.5)


def _inputs(name: str, weight: torch.Tensor) -> int:
    """How many values an output is the sum of."""
    if name.endswith(".W"):  # [embodiments, inputs, outputs]
        return weight.shape[1]
    return math.prod(weight.shape[1:])
