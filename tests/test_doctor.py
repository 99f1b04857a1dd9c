"""somaspeed doctor: one line a check, and an exit code that is 1 only for what is broken."""

import json
import subprocess
import sys

import pytest

from somaspeed_patch import doctor
from somaspeed_patch.kernels import adamw, split_attention


def lines(found):
    return {finding.check: finding for finding in found}


def test_this_environment_has_its_host_and_its_switch():
    done = subprocess.run(
        [sys.executable, "-m", "somaspeed_patch", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert found["adapter pi05"]["verdict"] == "ok"
    assert found["SOMASPEED=1"]["verdict"] == "ok"
    assert {"torch", "C compiler", "split_attention", "FusedAdamW"} <= set(found)


def test_no_compiler_is_a_note_that_says_what_follows(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    (finding,) = doctor._compiler()
    assert finding.verdict == "note"
    assert finding.text.startswith("a C compiler missing: Triton cannot build")


def test_a_kernel_that_failed_is_a_failure(monkeypatch):
    monkeypatch.setattr(split_attention, "KERNEL_ERROR", "RuntimeError: no ptxas")
    finding = lines(doctor.examine())["split_attention"]
    assert (finding.verdict, finding.text) == ("fail", "the kernel failed: RuntimeError: no ptxas")
    assert doctor.exit_code([finding]) == 1


def test_a_wrong_kernel_is_a_failure(monkeypatch):
    monkeypatch.setattr(split_attention, "split_attention", lambda q, k, v: 2 * q)
    assert "from its reference" in lines(doctor.examine())["split_attention"].text


def test_an_optimizer_kernel_that_fails_or_is_wrong_is_a_failure(monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("no ptxas")

    assert lines(doctor.examine())["FusedAdamW"].text == "the Triton kernels serve"
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "update", broken)
        finding = lines(doctor.examine())["FusedAdamW"]
    assert (finding.verdict, "OSError: no ptxas" in finding.text) == ("fail", True)
    monkeypatch.setattr(adamw, "update", lambda *args, **kwargs: None)
    assert "from torch.optim.AdamW" in lines(doctor.examine())["FusedAdamW"].text


def test_a_check_that_raises_is_a_failure_with_its_text(monkeypatch):
    def broken():
        raise OSError("no disk")

    monkeypatch.setattr(doctor, "adapters", broken)
    finding = lines(doctor.examine())["hosts"]
    assert (finding.verdict, finding.text) == ("fail", "OSError: no disk")


@pytest.mark.parametrize(("verdicts", "code"), [(["ok", "note"], 0), (["ok", "fail"], 1), ([], 0)])
def test_only_a_failure_fails(verdicts, code):
    assert doctor.exit_code([doctor.Finding(check="x", verdict=v, text="") for v in verdicts]) == code


def test_libero_gets_a_frame_from_each_renderer_or_the_reason(monkeypatch):
    pytest.importorskip("libero", reason="needs the extra rl")
    found = [each for each in doctor.examine() if each.check in ("mujoco", "renderer")]
    assert [each.verdict for each in found] == ["ok", "ok"] and "gives a frame" in found[1].text
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    broken = lines(doctor.examine())["renderer"]
    assert broken.verdict == "fail" and "nonsense" in broken.text
    monkeypatch.setattr("somaspeed_patch.libero.check.version", lambda _: "3.4.0")
    old = [each for each in doctor.examine() if each.check == "mujoco"]
    assert [each.verdict for each in old] == ["note", "note"] and "3.3.2" in old[0].text
