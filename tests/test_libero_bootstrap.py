"""LIBERO's set-up: the config that keeps it from asking, and what it says about mujoco."""

import logging
import os
import sys

import pytest
import yaml

from somaspeed_patch.libero import bootstrap


@pytest.fixture
def install(tmp_path):
    """Folders laid out as hf-libero installs them."""
    root = tmp_path / "site" / "libero" / "libero"
    for name in ("bddl_files", "init_files"):
        (root / name).mkdir(parents=True)
    return root


def test_config_names_the_installed_folders(install, tmp_path):
    file = tmp_path / "new" / "config.yaml"
    bootstrap.write_config(file, install, tmp_path / "meshes")
    assert yaml.safe_load(file.read_text()) == {
        "benchmark_root": str(install),
        "bddl_files": str(install / "bddl_files"),
        "init_states": str(install / "init_files"),
        "datasets": str(install.parent / "datasets"),
        "assets": str(tmp_path / "meshes"),
    }
    assert [f.name for f in file.parent.iterdir()] == ["config.yaml"]  # no scratch file stays


def test_config_whose_folders_exist_is_left_alone(install, tmp_path):
    file = tmp_path / "config.yaml"
    mine = {"benchmark_root": install, "bddl_files": tmp_path, "init_states": tmp_path}
    file.write_text("".join(f"{key}: {path}\n" for key, path in mine.items()))
    before = file.read_bytes()
    bootstrap.write_config(file, install, None)
    assert file.read_bytes() == before


def test_config_of_an_environment_that_is_gone_is_replaced_but_for_datasets(install, tmp_path):
    file = tmp_path / "config.yaml"
    old = "benchmark_root: /gone\nbddl_files: /gone\ninit_states: /gone\ndatasets: /data/mine\n"
    file.write_text(old)
    bootstrap.write_config(file, install, None)
    new = yaml.safe_load(file.read_text())
    assert (new["benchmark_root"], new["datasets"]) == (str(install), "/data/mine")


@pytest.mark.parametrize(
    ("release", "changes"),
    [("2.3.7", 0), ("3.3.2", 0), ("3.3.3", 1), ("3.3.7", 1), ("3.4.0", 2), ("3.10.0", 2)],
)
def test_mujoco_changes(release, changes):
    assert len(bootstrap.mujoco_changes(release)) == changes


def test_the_warning_names_the_release_to_install(monkeypatch, caplog):
    monkeypatch.setattr(bootstrap, "version", lambda name: "3.8.1")
    with caplog.at_level(logging.WARNING):
        bootstrap.warn_about_mujoco()
    assert [record.args[0] for record in caplog.records] == ["3.8.1", "3.8.1"]
    assert all("install mujoco==3.3.2" in record.getMessage() for record in caplog.records)


def test_renderer_is_the_same_for_mujoco_and_pyopengl(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    monkeypatch.delitem(sys.modules, "robosuite.utils.binding_utils", raising=False)
    bootstrap.set_renderer("osmesa")
    assert {os.environ[key] for key in ("MUJOCO_GL", "PYOPENGL_PLATFORM")} == {"osmesa"}


def test_renderer_cannot_change_once_robosuite_has_one(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setitem(sys.modules, "robosuite.utils.binding_utils", sys)
    with pytest.raises(ValueError, match="osmesa was asked for, .* already imported with egl; call"):
        bootstrap.set_renderer("osmesa")


def test_without_hf_libero_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(bootstrap, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="libero: libero is not installed; pip install hf-libero"):
        bootstrap._package_folder("libero")
