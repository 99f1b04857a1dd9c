"""One update under torch.profiler: what is counted, and that a profiler which cannot run breaks nothing."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import somaspeed_patch
from somaspeed_patch import sites
from somaspeed_patch.ab import kernel_time, steps, synthetic_profile
from somaspeed_patch.ab.recorder_profile import UpdateProfile
from somaspeed_patch.testing_recorder import Loop, recorded

pytest.importorskip("accelerate")
pytest.importorskip("lerobot.utils.logging_utils")

ON_CPU = {"busy_seconds": None, "communication_seconds": 0.0, "exposed_communication_seconds": None}


def profiling():
    """Whether a profiler runs in this thread."""
    return torch._C._autograd._profiler_enabled()


def site():
    return sites.site("step_recorder/record_profile")


def event(name, start, end, *, device=DeviceType.CUDA, annotation=False, thread=7):
    """One of the profiler's; microseconds."""
    return FunctionEvent(
        id=1, name=name, thread=thread, start_us=start, end_us=end, device_type=device,
        is_user_annotation=annotation,
    )  # fmt: skip


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def test_only_the_chosen_update_has_a_profile(tmp_path):
    calls = site().calls
    _, lines = recorded(tmp_path, 3, features={"record_profile": "2"})
    assert [line.get("profile", "absent") for line in lines] == ["absent", ON_CPU, "absent"]
    assert [step.profile for step in steps.read(tmp_path / "steps.jsonl").every()] == [None, ON_CPU, None]
    assert site().calls == calls + 1 and not profiling()


def test_overlapping_streams_are_busy_once():
    found = kernel_time.measure(
        [
            event("gemm", 0, 40),
            event("norm", 30, 60, thread=20),
            event("Memcpy DtoD (Device -> Device)", 100, 110),
            event("Memcpy HtoD (Pinned -> Device)", 0, 1000),
            event("Memcpy DtoH (Device -> Pinned)", 0, 1000),
            event("Optimizer.step#AdamW.step", 0, 1000, annotation=True),
            event("aten::mm", 0, 1000, device=DeviceType.CPU),
            event("nccl:all_reduce", 0, 1000, device=DeviceType.CPU),
        ],
        cuda=True,
    )
    assert found.busy_seconds == pytest.approx(70e-6)
    assert (found.communication_seconds, found.exposed_communication_seconds) == (0, 0)


def test_communication_is_exposed_where_no_other_kernel_runs():
    compute = [event("gemm", 0, 100), event("gemm", 150, 180)]
    nccl = [event(ALL_REDUCE, 80, 160, thread=20), event("NCCL_broadcast", 300, 310, thread=20)]
    found = kernel_time.measure([*nccl, *compute], cuda=True)
    assert found.communication_seconds == pytest.approx(90e-6)
    assert found.exposed_communication_seconds == pytest.approx(60e-6)
    assert found.busy_seconds == pytest.approx(190e-6)


def test_a_gpu_whose_kernels_were_not_seen_has_no_profile():
    assert kernel_time.measure([event("aten::mm", 0, 9, device=DeviceType.CPU)], cuda=True) is None
    assert kernel_time.measure([], cuda=True) is None


def test_on_a_cpu_gloos_work_is_communication():
    cpu = {"device": DeviceType.CPU}
    events = [
        event("gloo:all_reduce", 0, 30, **cpu),
        event("gloo:broadcast", 50, 60, **cpu),
        event("c10d::allreduce_", 0, 500, **cpu),
    ]
    found = kernel_time.measure(events, cuda=False)
    assert found.communication_seconds == pytest.approx(40e-6)
    assert found.busy_seconds is None and found.exposed_communication_seconds is None


def test_a_host_that_profiles_itself_keeps_its_profile(tmp_path):
    declined = site().native_calls
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as hosts:
        _, lines = recorded(tmp_path, 2, features={"record_profile": "1"})
        assert profiling()
    assert lines[0]["profile"] is None and "profile" not in lines[1]
    assert "aten::addmm" in {one.key for one in hosts.key_averages()}
    assert site().native_calls == declined + 1


def test_a_profiler_that_cannot_start_leaves_no_profile(tmp_path, caplog):
    """The host's waits for its next step, so it is not on yet, and another one must not start."""
    schedule, events = torch.profiler.schedule(wait=0, warmup=1, active=1), []
    hosts = profile(
        activities=[ProfilerActivity.CPU], schedule=schedule, acc_events=True,
        on_trace_ready=lambda ready: events.extend(ready.events()),
    )  # fmt: skip
    fallbacks = site().fallbacks
    with hosts:
        _, lines = recorded(tmp_path, 1, features={"record_profile": "1"})
        hosts.step()
        torch.ones(3).add(1)
        hosts.step()
    assert lines[0]["profile"] is None and site().fallbacks == fallbacks + 1
    assert "aten::add" in {one.name for one in events}
    assert "the update has no profile" in caplog.text


def test_a_profiler_that_the_host_ended_leaves_no_profile(caplog):
    ours = UpdateProfile(cuda=False)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        torch.ones(3).add(1)
    assert ours.finish() is None
    assert "the update has no profile" in caplog.text and not profiling()


def test_unpatching_within_the_update_stops_the_profiler(tmp_path):
    loop = Loop()
    with somaspeed_patch.patched(
        "step_recorder", record_steps=str(tmp_path / "steps.jsonl"), record_profile="1"
    ):
        next(iter(loop.loader))
        assert profiling()
    assert not profiling()


def test_a_crash_within_the_update_is_the_hosts_own():
    """Without a stop at exit torch 2.11 ends in SIGSEGV."""
    code = (
        "from somaspeed_patch.ab.recorder_profile import UpdateProfile\n"
        "running = UpdateProfile(cuda=False)\nraise KeyError('of the host')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "KeyError: 'of the host'" in done.stderr


def largest(device):
    """The profile of an update of one multiplication, which takes a second unwatched."""
    weight = torch.ones(64, 64, device=device)
    subject = SimpleNamespace(device=weight.device, update=lambda batch: weight @ batch["x"])
    return synthetic_profile.largest(subject, {"x": weight}, step_seconds=1.0)


def test_the_synthetic_profile_of_a_cpu_is_never_busy():
    found = largest("cpu")
    assert found["busy_seconds"] is None and found["idle_share"] is None
    assert found["largest"][0]["name"] == "aten::mm" and found["total_ms"] > 0


@pytest.mark.gpu
def test_the_synthetic_profile_of_a_gpu_is_busy_for_the_union_of_its_kernels():
    found = largest("cuda")
    assert 0 < found["busy_seconds"] <= found["total_ms"] / 1e3 * (1 + 1e-6)
    assert found["idle_share"] == 1 - found["busy_seconds"]


@pytest.mark.gpu
def test_kernels_on_a_gpu_are_busy():
    x = torch.ones(2048, 2048, device="cuda")
    _ = x @ x
    torch.cuda.synchronize()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ours = UpdateProfile(cuda=True)
    begun.record()
    for _ in range(20):
        _ = x @ x
    ended.record()
    torch.cuda.synchronize()
    found = ours.finish()
    assert 0 < found["busy_seconds"] <= 1.05 * begun.elapsed_time(ended) / 1e3
    assert (found["communication_seconds"], found["exposed_communication_seconds"]) == (0, 0)
