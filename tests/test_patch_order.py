"""Every order of importing LeRobot's pi0.5, patch() and unpatch(), each in a fresh process."""

import json
import subprocess
import sys
from itertools import permutations

import pytest

# I import the host, P patch, U unpatch. An order is sound when U undoes a P that came before it.
STEPS = ["".join(order) for order in {*permutations("IPU"), *permutations("IPPU"), *permutations("IPUP")}]
ORDERS = sorted({*STEPS, "IPUPU", "PIUPU", "PUPIU", "PIPUU", "IUP"})

# The parent imports the heavy libraries once and forks: LeRobot itself is imported by each child.
RUNNER = """
import json, os, sys
import accelerate, av, datasets, draccus, gymnasium, pandas, torch, transformers
import transformers.models.gemma.modeling_gemma, transformers.models.paligemma.modeling_paligemma
import cv2, diffusers.models.attention, diffusers.models.modeling_utils, einops, peft, scipy.stats, tree

HOST = "lerobot.policies.pi05.modeling_pi05"

def touched():
    import importlib
    model = importlib.import_module(HOST)
    tokenizer = importlib.import_module("lerobot.processor.tokenizer_processor")
    device = importlib.import_module("lerobot.processor.device_processor")
    train = importlib.import_module("lerobot.configs.train")
    objects = [model, tokenizer, device, train, model.PI05Pytorch, model.PI05Policy, accelerate.Accelerator,
               tokenizer.TokenizerProcessorStep, device.DeviceProcessorStep, train.TrainPipelineConfig]
    return {repr(o): dict(vars(o)) for o in objects}

def child(order):
    import somaspeed_patch, wrapt
    clean = touched() if order[0] == "I" else None
    on = False
    for step in order:
        if step == "I":
            __import__(HOST)
        elif step == "P":
            somaspeed_patch.patch(); on = True
        else:
            somaspeed_patch.unpatch(); on = False
    after = touched()
    forward = vars(sys.modules[HOST].PI05Pytorch)["forward"]
    patched = isinstance(forward, wrapt.FunctionWrapper)
    double = patched and isinstance(forward.__wrapped__, wrapt.FunctionWrapper)
    somaspeed_patch.unpatch()
    restored = clean is None or touched() == clean
    values = [value for attributes in touched().values() for value in attributes.values()]
    bare = not any(isinstance(value, wrapt.FunctionWrapper) for value in values)
    return {"wanted": on, "patched": patched, "double": double, "restored": restored and bare,
            "environment": os.environ.get("SOMASPEED")}

from somaspeed_patch.testing_forks import in_forks
print(json.dumps(in_forks(json.loads(sys.argv[1]), child)))
"""


@pytest.fixture(scope="module")
def results():
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(ORDERS)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_patched_follows_the_last_call_and_comes_off_clean(results, order):
    assert results[order] == {
        "wanted": results[order]["wanted"],
        "patched": results[order]["wanted"],
        "double": False,
        "restored": True,
        "environment": None,
    }


def test_the_orders_are_all_there():
    assert {"IPU", "IUP", "PIU", "PUI", "UIP", "UPI"} <= set(ORDERS)
