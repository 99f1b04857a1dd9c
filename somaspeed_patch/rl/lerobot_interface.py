"""LIBERO's numbers as LeRobot's policies take them: through the policy's own pre- and postprocessor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from somaspeed_patch.rl.env_libero import CAMERAS
from somaspeed_patch.rl.env_process import ACTION, INSTRUCTION, Observation


class LeRobotInterface:
    """As `lerobot-eval` feeds a policy: images in [0, 1], state, instruction, then the preprocessor.

    The postprocessor gets the chunk of the observations that were processed last: it may need their states.
    """

    def __init__(
        self, preprocessor: Any, postprocessor: Any, rename: Mapping[str, str] | None = None
    ) -> None:
        """Take LeRobot's pipelines.

        Args:
            rename: names of observations that the policy has others for, as LeRobot's `--rename_map`.
        Raises: ValueError: the preprocessor augments at random, so that nothing can be encoded once for all.
        """
        for step in preprocessor.steps:
            if getattr(step, "training", False):
                raise ValueError(
                    f"rl: {type(step).__name__} of the preprocessor is in training mode, augments at random; "
                    "features of such observations cannot be trained on again: set its `training` to False"
                )
        self._preprocessor, self._postprocessor = preprocessor, postprocessor
        self._rename = dict(rename or {})

    def batch(self, observations: Sequence[Observation]) -> Mapping[str, Any]:
        """What the preprocessor makes of observations of `LiberoWorld` with cameras."""
        seen: dict[str, Any] = {
            f"observation.images.{camera}": _pixels([each[camera] for each in observations])
            for camera in CAMERAS
        }
        seen["observation.state"] = torch.from_numpy(np.stack([each["state"] for each in observations]))
        found = {self._rename.get(name, name): value for name, value in seen.items()}
        tasks = [str(each[INSTRUCTION]) for each in observations]
        with torch.no_grad():  # GR00T's steps augment only where gradients are on
            processed: Mapping[str, Any] = self._preprocessor({**found, "task": tasks})
        return processed

    def actions(self, chunks: Tensor) -> NDArray[np.float32]:
        """[B, C, 7], within the environment's [-1, 1], of the policy's normalised actions [B, C, D].

        Raises: ValueError: the policy's actions are not the environment's seven.
        """
        found: Tensor = self._postprocessor(chunks)
        if found.shape != (*chunks.shape[:2], ACTION):
            raise ValueError(
                f"rl: the postprocessor must give [{len(chunks)}, {chunks.shape[1]}, {ACTION}], "
                f"but gave {list(found.shape)}"
            )
        executed: NDArray[np.float32] = found.float().clamp(-1, 1).cpu().numpy()
        return executed


def _pixels(images: Sequence[NDArray[Any]]) -> Tensor:
    """[B, 3, H, W] fp32 in [0, 1] of uint8 [H, W, 3] each."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().float() / 255
