"""Metrics on the device: no look, no transfer; one look, plain floats for ever."""

import copy
import json
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from somaspeed_patch.deferred import DeferredMetrics

EXPECTED = {"loss": 1.5, "flow": 2.25}


def metrics():
    return DeferredMetrics({"loss": torch.tensor(1.5), "flow": torch.tensor(2.25, dtype=torch.bfloat16)})


class NoRead(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} ran")


def test_length_truth_and_names_need_no_values():
    found = metrics()
    with NoRead():
        assert found and len(found) == 2 and "loss" in found and "other" not in found
        assert isinstance(found, dict)
        with pytest.raises(RuntimeError, match="ran"):
            found["loss"]


LOOKS = {
    "[]": lambda found: {key: found[key] for key in EXPECTED},
    "get": lambda found: {key: found.get(key) for key in EXPECTED},
    "items": lambda found: dict(found.items()),
    "dict()": dict,
    "**": lambda found: {**found},
    "values": lambda found: dict(zip(EXPECTED, found.values(), strict=True)),
    "|": lambda found: {} | found,
    "update": lambda found: (target := {}, target.update(found))[0],
    "json": lambda found: json.loads(json.dumps(found)),
    "repr": lambda found: eval(repr(found)),
    "copy": lambda found: found.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda found: pickle.loads(pickle.dumps(found)),
    "itself": lambda found: found,
}


@pytest.mark.parametrize("look", LOOKS)
def test_every_look_gives_floats(look):
    found = LOOKS[look](metrics())
    assert found == EXPECTED
    assert all(type(value) is float for value in found.values())


def test_values_are_those_of_the_moment():
    loss = torch.tensor(1.0)
    found = DeferredMetrics({"loss": loss})
    assert found["loss"] == 1.0
    loss.fill_(2.0)
    assert found["loss"] == 1.0


def test_changes_are_kept():
    found = metrics()
    found["loss"] = 7.0
    found["new"] = 1
    del found["flow"]
    assert found == {"loss": 7.0, "new": 1}
