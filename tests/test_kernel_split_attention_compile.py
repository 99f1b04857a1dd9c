"""Compile the tile table offline, no GPU needed: no kernel may spill or exceed the shared memory there is.

A sample of the table by default; all of it (some 10 minutes) with SOMASPEED_COMPILE_ALL=1. Kernels compile in
child processes, as under TRITON_INTERPRET=1 this one has only interpreted kernels: `python <this file>` with
cases as JSON lines on stdin is such a child; it prints one JSON line a case.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED_KB = {90: 227, 80: 163, 86: 99, 89: 99}
VARIANTS = {  # config: kernel, and the switches it is compiled with: length, mask, stream B
    "fwd": ("fwd", [(True, False, False), (True, False, True), (False, False, True)]),
    "fwd_masked": ("fwd", [(False, True, False), (False, True, True)]),
    "fwd_few": ("fwd", [(True, False, False), (True, False, True), (False, True, True)]),
    "dq": ("dq", [(True, False, True), (False, False, True), (False, True, True)]),
    "dq_few": ("dq", [(True, False, True), (False, True, True)]),
    "dkv": ("dkv", [(False, False, True), (True, False, False), (False, True, False)]),
}
SAMPLE = [  # architecture, D, config, length, mask, stream B: what pi0.5 uses, and the tightest of the others
    (90, 256, "fwd", True, False, True),
    (90, 256, "fwd", True, False, False),
    (90, 256, "fwd_masked", False, True, True),
    (90, 256, "dq", True, False, True),
    (90, 256, "dkv", False, False, True),
    (90, 128, "dq", False, True, True),
    (90, 64, "fwd", True, False, True),
    (86, 256, "fwd", True, False, True),
    (86, 256, "dq", True, False, True),
    (86, 256, "dkv", False, False, True),
    (86, 128, "dkv", False, True, False),
    (80, 256, "fwd", True, False, True),
]


def cases():
    from somaspeed_patch.kernels.split_attention_table import TABLE

    if os.environ.get("SOMASPEED_COMPILE_ALL") != "1":
        chosen = SAMPLE
    else:
        chosen = [
            (architecture, D, name, *switches)
            for architecture in sorted(set(TABLE) - {89})  # sm_89 shares sm_86's entries
            for D in TABLE[architecture]
            for name, (_, variants) in VARIANTS.items()
            for switches in variants
        ]
    return [
        {
            "architecture": architecture,
            "D": D,
            "name": name,
            "kernel": VARIANTS[name][0],
            "length": length,
            "mask": mask,
            "stream_b": stream_b,
            "config": list(getattr(TABLE[architecture][D], name)),
        }
        for architecture, D, name, length, mask, stream_b in chosen
    ]


def compile_in_child(some_cases):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    child = subprocess.run(
        [sys.executable, __file__],
        input="\n".join(map(json.dumps, some_cases)),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_the_table_compiles_without_spills_and_fits():
    import pytest

    triton = pytest.importorskip("triton")
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
        pytest.skip("this triton ships no cuobjdump")
    todo = cases()
    with ThreadPoolExecutor(2) as pool:
        results = [r for half in pool.map(compile_in_child, (todo[::2], todo[1::2])) for r in half]
    assert len(results) == len(todo)
    bad = [r for r in results if r["stack"] or r["shared_kb"] > SHARED_KB[r["architecture"]]]
    assert not bad, "\n".join(map(json.dumps, bad))


def compile_case(case):
    """The case with the registers, stack bytes and shared memory that ptxas gave it."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from somaspeed_patch.kernels import split_attention_kernels

    kernel = getattr(split_attention_kernels, f"_split_attention_{case['kernel']}_kernel")
    block_r, block_n, num_warps, num_stages = case["config"]
    constants = {
        "D": case["D"],
        "BLOCK_R": block_r,
        "BLOCK_N": block_n,
        "BLOCK_D": triton.next_power_of_2(case["D"]),
        "DT": tl.bfloat16,
        "ACC": tl.float32,
        "HAS_LEN": case["length"],
        "HAS_MASK": case["mask"],
        "HAS_B": case["stream_b"],
    }
    if case["D"] == 256:  # pi0.5 has one key/value head, and Triton compiles an argument of 1 in
        constants["H"] = 1
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else _type(name) for name in names}
    aligned = [i for i, n in enumerate(names) if signature[n][0] == "*" or re.search(r"_s[bhrn]$", n)]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    target = GPUTarget("cuda", case["architecture"], 32)
    binary = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    shared_kb = binary.metadata.shared / 1024
    return {**case, "registers": int(registers), "stack": int(stack), "shared_kb": shared_kb}


def _type(name):
    if name in ("len_a", "length"):
        return "*i32"
    if name in ("mask_a", "mask"):
        return "*u8"
    if name in ("lse", "delta"):
        return "*fp32"
    if name.startswith("scale"):
        return "fp64"
    if name in ("H", "R", "NA", "NB", "N") or re.search(r"_s[bhrn]$", name):
        return "i32"
    return "*bf16"


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(compile_case(json.loads(line))), flush=True)
