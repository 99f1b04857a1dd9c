"""LeRobot's LiberoEnv under the patch against itself without, in the real simulator at 64 pixels.

Task 4 of LIBERO-Spatial: its drawer starts open, for which LIBERO draws one more random number at each hard
reset than at the one before.
"""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import somaspeed_patch
from somaspeed_patch import sites
from somaspeed_patch.libero import bootstrap, film
from somaspeed_patch.libero.options import steps_between_images
from somaspeed_patch.testing_libero import counted_renders, differences, make_env, play

if find_spec("libero") is None:
    pytest.skip("needs the simulator: pip install hf-libero==0.1.4 mujoco==3.3.2", allow_module_level=True)

SUITE, TASK, STEPS = "libero_spatial", 4, 6
EPISODES = [{"seed": 5, "number": 0}, {"seed": 6, "number": 1}, {"seed": None, "number": 2}]
IMAGES = ("pixels/image", "pixels/image2")


@pytest.fixture(scope="module", autouse=True)
def renders(tmp_path_factory):
    """Counts rendered images; LIBERO's config is in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIBERO_CONFIG_PATH", str(tmp_path_factory.mktemp("libero")))
        bootstrap.setup("osmesa")
        with counted_renders() as count:
            yield count


@pytest.fixture
def clean_sites():
    sites.clear()
    yield
    sites.clear()


def make(**kwargs):
    return make_env(SUITE, TASK, image_size=64, **kwargs)


def episodes(env, renders, which=EPISODES):
    return [play(env, renders, steps=STEPS, **one) for one in which]


@pytest.fixture(scope="module")
def native(renders):
    env = make()
    np.random.seed(1)
    played = episodes(env, renders)
    env.close()
    return played


def calls(name):
    """Calls through our code, left to the host, and failed, at one site."""
    site = sites.site(f"lerobot_libero/{name}")
    return site.calls, site.native_calls, site.fallbacks


def test_the_native_env_renders_28_images_a_reset_and_2_a_step(native):
    assert native[1].renders == [28] + [2] * STEPS
    assert native[0].observations[0]["pixels/image"].std() > 10
    assert len({episode.randoms[0] for episode in native}) == 3


@pytest.mark.parametrize(
    ("settings", "renders_of_reset"),
    [({}, 2), ({"soft_reset": False, "reuse_stages": False}, 2), ({"lazy_images": False}, 24)],
    ids=["all", "lazy_images", "soft_reset"],
)
def test_every_bit_is_the_native_envs(native, renders, clean_sites, settings, renders_of_reset):
    """Images, states, video frames and random numbers, over seeded episodes and one that is not."""
    with somaspeed_patch.patched("lerobot_libero", **settings):
        env = make()
        np.random.seed(1)
        played = episodes(env, renders)
        env.close()
    for ours, theirs in zip(played, native, strict=True):
        assert differences(ours, theirs) == []
        assert ours.renders[1:] == [2] * STEPS
    assert [episode.renders[0] for episode in played[1:]] == [renders_of_reset] * 2
    assert calls("soft_reset") == ((0, 0, 0) if settings.get("soft_reset") is False else (4, 0, 0))
    assert calls("lazy_images") == ((0, 0, 0) if settings.get("lazy_images") is False else (3, 0, 0))
    steps = calls("reuse_stages")  # of the episodes, and of what each reset settles
    assert steps[1:] == (0, 0) and (steps[0] > 3 * STEPS) == settings.get("reuse_stages", True)


def test_render_every_repeats_images_and_shows_those_that_are_looked_at(native, renders, clean_sites):
    looked = [0, 4, STEPS]  # every 4th, and the last because the rollout is cut there
    with somaspeed_patch.patched("lerobot_libero", render_every="4"):
        env = make(episode_length=STEPS)
        np.random.seed(1)
        played = episodes(env, renders)
        env.close()
    for ours, theirs in zip(played, native, strict=True):
        assert ours.renders == [2 if step in looked else 0 for step in range(STEPS + 1)]
        for step, (mine, yours) in enumerate(zip(ours.observations, theirs.observations, strict=True)):
            shown = max(earlier for earlier in looked if earlier <= step)
            for key in mine:
                expected = theirs.observations[shown][key] if key in IMAGES else yours[key]
                np.testing.assert_array_equal(mine[key], expected, err_msg=f"step {step}: {key}")
            np.testing.assert_array_equal(ours.frames[step], theirs.frames[shown])
    assert calls("render_every") == (3 * STEPS, 0, 0)
    assert (native[0].observations[3]["pixels/image2"] != native[0].observations[4]["pixels/image2"]).any()


def test_render_every_shows_the_step_that_solves_the_task(native, renders, clean_sites):
    with somaspeed_patch.patched("lerobot_libero", render_every="100"):
        env = make()
        env.reset(seed=5)
        scene, taken = env._env.env, []
        scene._check_success = lambda: len(taken) == 3
        for action in np.random.default_rng(0).uniform(-1, 1, (3, 7)):
            taken.append(action)
            renders()
            observation, _, terminated, _, _ = env.step(action)
        assert terminated and renders() == 2
        frame = env.render()
        env.close()
    np.testing.assert_array_equal(observation["pixels"]["image"], native[0].observations[3]["pixels/image"])
    np.testing.assert_array_equal(frame, native[0].frames[3])


def test_an_env_built_before_the_patch_is_reset_hard_once_and_goes_on_after_it(native, renders, clean_sites):
    env = make()
    np.random.seed(1)
    played = episodes(env, renders, EPISODES[:1])
    with somaspeed_patch.patched("lerobot_libero"):
        played += episodes(env, renders, EPISODES[1:])
        assert calls("soft_reset") == (1, 1, 0)
        assert "before patch()" in sites.site("lerobot_libero/soft_reset").reason
    assert [differences(ours, theirs) for ours, theirs in zip(played, native, strict=True)] == [[], [], []]
    played = episodes(env, renders, EPISODES[:1])
    assert played[0].renders[0] == 28  # unpatched, the same environment is robosuite's again
    env.close()


def test_a_scene_is_right_after_another_was_drawn(native, renders, clean_sites):
    """Another task's renderer is the process's current one in between, which a soft reset does not renew."""
    with somaspeed_patch.patched("lerobot_libero"):
        env = make()
        np.random.seed(1)
        played = episodes(env, renders, EPISODES[:1])
        other = make_env("libero_object", 0, image_size=64)
        other.reset(seed=0)
        played += episodes(env, renders, EPISODES[1:])
        other.close()
        env.close()
    assert [differences(ours, theirs) for ours, theirs in zip(played, native, strict=True)] == [[], [], []]


def test_without_initial_states_a_soft_reset_places_what_a_hard_one_places(renders, clean_sites):
    played = []
    for settings in ({"soft_reset": False, "lazy_images": False}, {}):
        with somaspeed_patch.patched("lerobot_libero", **settings):
            env = make(init_states=False)
            np.random.seed(1)
            played.append(episodes(env, renders, EPISODES[2:]))
            env.close()
    assert differences(played[0][0], played[1][0]) == []
    assert calls("soft_reset") == (2, 0, 0)


def test_hard_reset_false_stays_robosuites_own_soft_reset(renders, clean_sites):
    with somaspeed_patch.patched("lerobot_libero"):
        env = make(hard_reset=False)
        env.reset(seed=5)
        assert not env._env.env.hard_reset
        env.close()
        assert calls("soft_reset") == (0, 2, 0)
        assert sites.site("lerobot_libero/soft_reset").reason.startswith("hard_reset=False")


def test_where_images_cannot_be_kept_the_host_renders_them(native, renders, clean_sites, monkeypatch):
    def broken(self, camera):
        raise RuntimeError("no scene")

    monkeypatch.setattr(film.Film, "expose", broken)
    with somaspeed_patch.patched("lerobot_libero", render_every="4"):
        env = make()
        np.random.seed(1)
        played = episodes(env, renders, EPISODES[:1])
        env.close()
    assert differences(played[0], native[0]) == []
    assert played[0].renders[1:] == [2] * STEPS
    assert calls("lazy_images") == (1, 0, 1)
    assert sites.site("lerobot_libero/lazy_images").last_fallback == "RuntimeError: no scene"


def test_an_image_before_the_first_reset_is_the_scenes(renders, clean_sites):
    frames = []
    for settings in ({"soft_reset": False, "lazy_images": False}, {}):
        with somaspeed_patch.patched("lerobot_libero", **settings):
            env = make()
            np.random.seed(1)
            renders()
            frames.append(env.render())
            env.close()
    np.testing.assert_array_equal(*frames)
    assert renders() == 2


@pytest.mark.parametrize("value", ["0", "-8", "eight", "2.5", ""])
def test_a_bad_number_of_steps_is_refused_at_once(value):
    with pytest.raises(ValueError, match=r"libero: render_every must be a whole number of steps"):
        somaspeed_patch.patch("lerobot_libero", render_every=value)
    assert "lerobot_libero" not in somaspeed_patch.patching.active()


def test_the_number_of_steps():
    assert [steps_between_images(text) for text in (None, "1", " 8 ")] == [None, 1, 8]


def test_a_mujoco_that_changes_libero_is_said_once_and_reported(monkeypatch, caplog, clean_sites):
    from somaspeed_patch.libero import hooks

    for module in (hooks, bootstrap):
        monkeypatch.setattr(module, "version", lambda _: "3.4.0")
    hooks._warn_about_mujoco.cache_clear()
    with somaspeed_patch.patched("lerobot_libero"):
        assert "lerobot_libero/mujoco" in str(somaspeed_patch.report())
        assert "mujoco 3.4.0 renders LIBERO's images darker" in sites.site("lerobot_libero/mujoco").reason
    for _ in range(2):
        hooks._warn_about_mujoco()
    hooks._warn_about_mujoco.cache_clear()
    assert ["darker" in line or "throws" in line for line in caplog.messages] == [True, True]


def test_the_pinned_mujoco_is_not_mentioned(clean_sites):
    with somaspeed_patch.patched("lerobot_libero"):
        assert "lerobot_libero/mujoco" not in str(somaspeed_patch.report())


ORDERS = ["IPU", "PIU", "PUI", "IUP", "PIUP", "IPUPU"]  # I import the host, P patch, U unpatch
RUNNER = """
import json, sys
import gymnasium, numba, scipy.spatial, torch, transformers, datasets, mujoco, cv2
from somaspeed_patch.libero import bootstrap
bootstrap.setup("osmesa")
from somaspeed_patch.testing_forks import in_forks

NAMES = ("robosuite.utils.binding_utils:MjSim", "robosuite.environments.base:MujocoEnv",
         "libero.libero.envs.bddl_base_domain:BDDLBaseDomain", "lerobot.envs.libero:LiberoEnv")

def touched():
    import importlib
    found = {}
    for name in NAMES:
        module, _, attribute = name.partition(":")
        module = importlib.import_module(module)
        found[name], found[module.__name__] = dict(vars(getattr(module, attribute))), dict(vars(module))
    return found

def wrapped(found):
    import wrapt
    return sorted(f"{owner}.{key}" for owner, names in found.items() for key, value in names.items()
                  if isinstance(value, wrapt.FunctionWrapper))

def child(order):
    import somaspeed_patch
    clean, on = None, False
    for step in order:
        if step == "I":
            import lerobot.envs.libero
            clean = touched() if not on else clean
        else:
            (somaspeed_patch.patch if step == "P" else somaspeed_patch.unpatch)("lerobot_libero")
            on = step == "P"
    patched = wrapped(touched())
    somaspeed_patch.unpatch()
    after = touched()
    return {"on": on, "patched": patched, "left": wrapped(after), "restored": clean is None or after == clean}

print(json.dumps(in_forks(json.loads(sys.argv[1]), child)))
"""


def test_orders_of_import_and_patch():
    """Each in a process of its own: what is patched follows the last call, and comes off without a trace."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(ORDERS)], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    base, scene = (
        "libero.libero.envs.bddl_base_domain:BDDLBaseDomain",
        "robosuite.environments.base:MujocoEnv",
    )
    host = [f"lerobot.envs.libero:LiberoEnv.{name}" for name in ("_ensure_env", "reset", "step")]
    scenes = [f"{scene}.{name}" for name in ("_initialize_sim", "reset", "step")]
    sims = [f"robosuite.utils.binding_utils:MjSim.{name}" for name in ("forward", "render", "step")]
    ours = [*host, f"{base}._load_model", *scenes, *sims]
    for order in ORDERS:
        on = order[-1] != "U" and "P" in order and order.rindex("P") > order.rfind("U")
        assert results[order] == {"on": on, "patched": ours if on else [], "left": [], "restored": True}, (
            order
        )


WORKER = """
import sys
import numpy as np

def env():
    from somaspeed_patch.libero import bootstrap
    bootstrap.setup("osmesa")
    from lerobot.envs.libero import LiberoEnv, _get_suite

    class Reporting(LiberoEnv):
        def sites(self):
            import somaspeed_patch
            return {site.site: [site.status, site.calls] for site in somaspeed_patch.report().sites}

    return Reporting(_get_suite("libero_spatial"), 4, "libero_spatial", observation_width=64,
                     observation_height=64, obs_type="pixels_agent_pos")

if __name__ == "__main__":
    import json
    import somaspeed_patch
    somaspeed_patch.patch("lerobot_libero", render_every="2")
    from lerobot.envs.utils import _LazyAsyncVectorEnv
    vector = _LazyAsyncVectorEnv([env])
    observation, _ = vector.reset(seed=[5])
    for action in np.random.default_rng(0).uniform(-1, 1, (2, 7)):
        after, *_ = vector.step(action[None])
    [found] = vector.call("sites")
    np.savez(sys.argv[1], first=observation["pixels"]["image"][0], last=after["pixels"]["image"][0])
    vector.close()
    print(json.dumps(found))
"""


def test_lerobots_worker_processes_are_patched_too(native, tmp_path):
    script, images = tmp_path / "workers.py", tmp_path / "images.npz"
    script.write_text(WORKER)
    done = subprocess.run(
        [sys.executable, str(script), str(images)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["lerobot_libero/soft_reset"] == ["patched", 2]
    assert found["lerobot_libero/lazy_images"] == ["patched", 1]
    assert found["lerobot_libero/render_every"] == ["patched", 2]
    with np.load(images) as seen:
        np.testing.assert_array_equal(seen["first"], native[0].observations[0]["pixels/image"])
        np.testing.assert_array_equal(seen["last"], native[0].observations[2]["pixels/image"])
