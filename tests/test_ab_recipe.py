"""Recipes: the shipped ones load; a bad one is refused with file, line, key and the nearest valid key."""

import argparse
from pathlib import Path

import pytest

from somaspeed_patch.ab import flops, synthetic_recipe
from somaspeed_patch.ab.recipe import fill, load
from somaspeed_patch.ab.yaml_reader import RecipeError

RECIPES = Path(__file__).parents[1] / "recipes"

GOOD = """\
host: lerobot-train
steps: 30
arguments: [--batch_size=8, "{assets}/x", 3]
environment: {OMP_NUM_THREADS: 1}
tolerance: {loss: 1e-5}
arms:
  native: {targets: none}
  other:
    targets: [step_recorder]
    arguments: [--seed=2]
  patched: {targets: default}
"""


CACHED = (
    GOOD
    + """\
  native_cached: {targets: none, against: none}
  patched_cached: {targets: default, against: native_cached}
loader: {native: native_cached, patched: patched_cached}
"""
)


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        return str(file)

    return write


def test_reads_every_key(write):
    recipe = load(write(GOOD))
    assert (recipe.name, recipe.host, recipe.steps, recipe.discard, recipe.repeats) == (
        "mine",
        "lerobot-train",
        30,
        5,
        3,
    )
    assert (recipe.batches, recipe.find_batch, recipe.gradients, recipe.cool_seconds) == ((), False, 1, 0.0)
    assert recipe.arguments == ("--batch_size=8", "{assets}/x", "3")
    assert recipe.environment == {"OMP_NUM_THREADS": "1"}
    assert (recipe.tolerance.loss, recipe.tolerance.grad_norm) == (1e-5, 1e-4)
    assert [(arm.name, arm.targets) for arm in recipe.arms] == [
        ("native", ()),
        ("other", ("step_recorder",)),
        ("patched", None),
    ]
    assert recipe.arms[1].arguments == ("--seed=2",)


def test_chooses_arms_in_the_order_given(write):
    recipe = load(write(GOOD)).chosen("patched, native", 7)
    assert [arm.name for arm in recipe.arms] == ["patched", "native"] and recipe.repeats == 7
    assert recipe.baseline.name == "patched"
    with pytest.raises(RecipeError, match="no arm is called 'nativ'; did you mean native?"):
        load(write(GOOD)).chosen("nativ", None)


def test_an_arm_is_compared_with_the_one_it_names(write):
    recipe = load(write(CACHED))
    assert recipe.loader == {"native": "native_cached", "patched": "patched_cached"}
    assert {arm.name: recipe.reference(arm) for arm in recipe.arms} == {
        "native": None,
        "other": "native",
        "patched": "native",
        "native_cached": None,
        "patched_cached": "native_cached",
    }
    alone = recipe.chosen("native_cached,patched_cached", None)
    assert [alone.reference(arm) for arm in alone.arms] == [None, "native_cached"]
    without = recipe.chosen("native,patched_cached", None)
    assert [without.reference(arm) for arm in without.arms] == [None, None]


BATCHES = """\
host: lerobot-train
steps: 30
batches: [8, 32]
find_batch: true
gradients: none
cool_seconds: 2.5
necessary_tflop_per_sample: 2.75
arguments: ["--batch_size={batch}"]
arms:
  native: {targets: none, find_batch: false}
  patched: {targets: default, features: {compile: on}, environment: {A: 1}, arguments: [--x]}
  no_prefix: {like: patched, ablates: frozen_prefix, batches: [8], arguments: [--y]}
"""


def test_batches_and_what_is_looked_for(write):
    recipe = load(write(BATCHES))
    assert [(arm.name, batch) for arm, batch in recipe.cells] == [
        ("native", 8),
        ("native", 32),
        ("patched", 8),
        ("patched", 32),
        ("no_prefix", 8),
    ]
    assert [recipe.finds_batch(arm) for arm in recipe.arms] == [False, True, True]
    assert (recipe.gradients, recipe.cool_seconds, recipe.necessary_tflop_per_sample) == (None, 2.5, 2.75)


def test_an_ablation_is_another_arm_without_one_feature(write):
    native, patched, ablated = load(write(BATCHES)).arms
    assert ablated.features == {"compile": True, "frozen_prefix": False}
    assert ablated.arguments == ("--x", "--y") and ablated.environment == {"A": "1"}
    assert (ablated.targets, ablated.ablates, ablated.like) == (patched.targets, "frozen_prefix", "patched")
    assert (native.native, patched.native, ablated.native) == (True, False, False)


def test_what_makes_an_arm_native(write):
    cached = "  c: {targets: [lerobot_workers], features: {cached_batches: '4', worker_preprocess: off}}\n"
    workers = "  w: {targets: [lerobot_workers]}\n"
    arms = {arm.name: arm.native for arm in load(write(GOOD + cached + workers)).arms}
    assert arms == {"native": True, "other": True, "patched": False, "c": True, "w": False}


def test_the_baseline_against_itself(write):
    recipe = load(write(CACHED)).against_itself()
    first, again = recipe.arms
    assert (first.name, again.name, recipe.reference(again)) == ("native", "native_again", "native")
    assert (again.targets, again.arguments) == (first.targets, first.arguments) and recipe.loader == {}


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in RECIPES.glob("*.yaml") if not file.stem.startswith("rl_"))
)
def test_the_shipped_recipes_are_found_by_name(name):
    recipe = load(name)
    assert recipe.baseline.name == "native" and recipe.baseline.targets == ()


def test_fills_in_only_its_own_names():
    words = fill(("--a={out}/x", '--b={"k": {steps}}', "{assets}", "{other}"), out="/o", steps=3)
    assert words[0] == "--a=/o/x" and words[1] == '--b={"k": 3}' and words[3] == "{other}"
    assert words[2].endswith("recipes/assets")


BAD = {
    "unknown key": ("reapeats: 3\n" + GOOD, 1, "reapeats: unknown key; did you mean repeats?"),
    "unknown key of an arm": (
        GOOD.replace("    arguments: [--seed=2]", "    argument: [--seed=2]"),
        10,
        "arms.other.argument: unknown key; did you mean arguments?",
    ),
    "unknown tolerance": (
        GOOD.replace("{loss: 1e-5}", "{los: 1e-5}"),
        5,
        "tolerance.los: unknown key; did you mean loss?",
    ),
    "missing host": (
        GOOD.replace("host: lerobot-train\n", "hots: x\n"),
        1,
        "hots: unknown key; did you mean host?",
    ),
    "no host": (GOOD.replace("host: lerobot-train\n", ""), 1, "host: missing; expected a command"),
    "steps in words": (
        GOOD.replace("30", "many"),
        2,
        "steps: expected the number of updates of a run, but is 'many'",
    ),
    "steps below one": (
        GOOD.replace("30", "0"),
        2,
        "steps: expected the number of updates of a run, but is 0",
    ),
    "boolean argument": (
        GOOD.replace("3]", "yes]"),
        3,
        "arguments: expected words, but one is True; quote it",
    ),
    "arguments no list": (
        GOOD.replace("[--seed=2]", "--seed=2"),
        10,
        "arms.other.arguments: expected a list",
    ),
    "environment no mapping": (
        GOOD.replace("{OMP_NUM_THREADS: 1}", "[A]"),
        4,
        "environment: expected a mapping",
    ),
    "tolerance below zero": (
        GOOD.replace("1e-5", "-1.0e-5"),
        5,
        "tolerance.loss: expected a relative tolerance",
    ),
    "tolerance nan": (GOOD.replace("1e-5", ".nan"), 5, "tolerance.loss: expected a relative tolerance"),
    "all discarded": (
        GOOD + "discard: 30\n",
        12,
        "discard: must leave at least one of the 30 updates of native, but is 30",
    ),
    "no arms": (GOOD[: GOOD.index("arms:")], 1, "arms: missing; expected at least one arm"),
    "arm no mapping": (GOOD.replace("{targets: none}", "none"), 7, "arms.native: expected a mapping"),
    "arm without targets": (GOOD.replace("{targets: none}", "{}"), 7, "arms.native.targets: missing"),
    "bad arm name": (GOOD.replace("native:", "a/b:"), 7, "arms.a/b: an arm's name names a folder"),
    "unknown target": (
        GOOD.replace("[step_recorder]", "[step_recordr]"),
        9,
        "arms.other.targets: no adapter is called 'step_recordr'; did you mean step_recorder?",
    ),
    "unknown feature": (
        GOOD.replace("{targets: default}", "{targets: default, features: {record_step: x}}"),
        11,
        "arms.patched.features.record_step: unknown key; did you mean record_steps?",
    ),
    "feature of the wrong kind": (
        GOOD.replace("{targets: default}", "{targets: default, features: {record_steps: true}}"),
        11,
        "arms.patched.features.record_steps: expected a quoted value, but is True",
    ),
    "first arm against another": (
        GOOD.replace("{targets: none}", "{targets: none, against: other}"),
        7,
        "arms.native.against: the first arm is the baseline; leave it out",
    ),
    "against an unknown arm": (
        CACHED.replace("against: native_cached", "against: native_cashed"),
        13,
        "arms.patched_cached.against: no other arm is called 'native_cashed'; did you mean native_cached?",
    ),
    "against itself": (
        CACHED.replace("against: native_cached", "against: patched_cached"),
        13,
        "arms.patched_cached.against: no other arm is called 'patched_cached'",
    ),
    "loader of an unknown arm": (
        CACHED.replace("{native: n", "{nativ: n"),
        14,
        "loader.nativ: unknown key; did you mean native?",
    ),
    "loader without other data": (
        CACHED.replace("patched: patched_cached", "patched: other"),
        14,
        "loader.patched: cached batches are other data, so it must be an arm with `against`, but is 'other'",
    ),
    "given twice": (GOOD + "steps: 3\n", 12, "steps: given twice; keep one"),
    "batches without a place": (
        GOOD.replace("steps: 30", "steps: 30\nbatches: [8]"),
        3,
        "batches: the arguments of native have no {batch} to put them in",
    ),
    "a place without batches": (
        GOOD.replace("--batch_size=8", "'--batch_size={batch}'"),
        1,
        "batches: missing: the arguments of native have {batch}",
    ),
    "a batch twice": (BATCHES.replace("[8, 32]", "[8, 8]"), 3, "batches: expected a list of batch sizes"),
    "find_batch of nothing": (
        GOOD.replace("steps: 30", "steps: 30\nfind_batch: true"),
        3,
        "find_batch: the arguments of native have no {batch}",
    ),
    "like nobody": (
        BATCHES.replace("like: patched", "like: patch"),
        12,
        "arms.no_prefix.like: no arm above is called 'patch'; did you mean patched?",
    ),
    "like a later arm": (
        BATCHES.replace("targets: none, ", "like: patched, "),
        10,
        "arms.native.like: no arm above is called 'patched'",
    ),
    "ablates nothing known": (
        BATCHES.replace("ablates: frozen_prefix", "ablates: frozen_prefx"),
        12,
        "arms.no_prefix.ablates: no feature is called 'frozen_prefx'; did you mean frozen_prefix?",
    ),
    "ablates what is off": (
        BATCHES.replace("ablates: frozen_prefix", "ablates: gpu_images"),
        12,
        "arms.no_prefix.ablates: gpu_images is off in patched already",
    ),
    "ablates without like": (
        BATCHES.replace("like: patched, ", "targets: default, "),
        12,
        "arms.no_prefix.ablates: needs `like`, the arm that has the feature",
    ),
    "gradients of no update": (
        BATCHES.replace("gradients: none", "gradients: 0"),
        5,
        "gradients: expected the number of an update, or none",
    ),
    "a list": ("- a\n", 1, "expected a mapping of keys"),
    "not YAML": ("host: [a\nsteps: 3\n", 2, "not YAML"),
    "empty": ("", 1, "expected a mapping of keys"),
}


@pytest.mark.parametrize(("text", "line", "said"), BAD.values(), ids=BAD.keys())
def test_says_where_and_what(write, text, line, said):
    file = write(text)
    with pytest.raises(RecipeError) as refused:
        load(file)
    assert str(refused.value).startswith(f"{file}:{line}: {said}"), refused.value
    assert "\n" not in str(refused.value)


def test_an_unknown_recipe_names_the_shipped_ones():
    with pytest.raises(RecipeError, match="did you mean pi05_libero_tiny?"):
        load("pi05_libero_tyni")


def test_the_parser_takes_the_documented_flags():
    from somaspeed_patch.ab.cli import add_arguments, main

    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(
        ["ab", "x", "--repeats", "3", "--out", "o", "--arms", "a,b", "--budget", "60", "--json"]
    )
    assert (args.recipe, args.repeats, str(args.out), args.arms, args.budget, args.json) == (
        "x",
        3,
        "o",
        "a,b",
        60,
        True,
    )
    assert args.command is main
    with pytest.raises(SystemExit):
        parser.parse_args(["ab", "x", "--repeats", "0"])


FULL = ("pi05_libero", "molmoact2_libero", "groot_libero")


@pytest.mark.parametrize("name", FULL)
def test_the_full_recipes_have_native_tuned_patched_and_ablations(name):
    step, trainer = synthetic_recipe.load(name), load(name)
    assert trainer.necessary_tflop_per_sample == pytest.approx(flops.necessary(step) / 1e12, abs=5e-4)
    for recipe in (step, trainer):
        names = [arm.name for arm in recipe.arms]
        assert {"native", "tuned", "patched", "patched_compiled"} <= set(names)
        ablated = {arm.ablates: arm for arm in recipe.arms if arm.ablates}
        assert {"frozen_prefix", "optimizer"} <= set(ablated)
        assert all(arm.like == "patched" and not arm.features[name] for name, arm in ablated.items())
