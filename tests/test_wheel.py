"""What an installed package has: built as pip builds it, from this tree."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode != 0:
        pytest.skip("needs a git checkout, to build from tracked files only")
    for name in filter(None, files.stdout.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    return set(zipfile.ZipFile(next(folder.glob("*.whl"))).namelist())


@pytest.mark.parametrize(
    "name",
    [
        "somaspeed_patch.pth",
        "somaspeed_patch/py.typed",
        "somaspeed_patch/adapters/pi05.py",
        "somaspeed_patch/kernels/split_attention.py",
        "somaspeed_patch/recipes/pi05_libero_tiny.yaml",
        "somaspeed_patch/recipes/README.md",
        "somaspeed_patch/recipes/assets/libero_spatial_tiny/meta/info.json",
        "somaspeed_patch/recipes/assets/libero_spatial_tiny/meta/episodes/chunk-000/file-000.parquet",
        "somaspeed_patch/recipes/assets/libero_spatial_tiny/data/chunk-000/file-000.parquet",
        "somaspeed_patch/recipes/assets/libero_spatial_tiny/videos/observation.images.image/chunk-000/file-000.mp4",
        "somaspeed_patch/tiny_pi05/tokenizer/tokenizer.json",
    ],
)
def test_the_wheel_has_it(names, name):
    assert name in names


def test_nothing_lies_beside_the_package(names):
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"somaspeed_patch", "somaspeed_patch.pth"}
