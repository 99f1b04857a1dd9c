"""What nvidia-smi says of GPUs, driver and links; and nothing where it says nothing."""

import pytest

from somaspeed_patch.ab import machine

SMI = """\
#!/bin/sh
case "$1" in
--query-gpu=*) printf 'NVIDIA A40, 46068, 580.1\\nNVIDIA A40, 46068, 580.1\\n' ;;
topo) printf '\\t\\033[4mGPU0\\tGPU1\\tNIC0\\tCPU Affinity\\033[0m\\n'
      printf 'GPU0\\t X \\tNV4\\tSYS\\t0-15\\nGPU1\\tNV4\\t X \\tSYS\\t0-15\\nNIC0\\tSYS\\tSYS\\t X \\n' ;;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A program of that name, first on PATH."""

    def smi(text):
        (tmp_path / "nvidia-smi").write_text(text)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return smi


def test_gpus_driver_and_links(smi):
    smi(SMI)
    gpu = {"name": "NVIDIA A40", "memory_gib": pytest.approx(44.99, abs=0.01), "driver": "580.1"}
    assert machine.accelerators() == {"gpus": [gpu, gpu], "links": [["X", "NV4"], ["NV4", "X"]]}


@pytest.mark.parametrize(("visible", "places"), [("1", [1]), ("1,0", [1, 0]), ("GPU-4f2a", [0, 1]), ("", [])])
def test_gpus_that_this_process_may_not_use_are_left_out(smi, monkeypatch, visible, places):
    smi(SMI)
    every = machine.accelerators()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.accelerators()
    assert found["gpus"] == [every["gpus"][place] for place in places]
    assert found["links"] == [[every["links"][row][column] for column in places] for row in places]


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 9\n", "#!/bin/sh\necho No devices were found\n"])
def test_no_answer_is_no_gpu(smi, text):
    smi(text)
    assert machine.accelerators() == {"gpus": [], "links": []}


def test_no_program_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.accelerators() == {"gpus": [], "links": []}
