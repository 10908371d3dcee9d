"""The step bench by kind of kernel."""

import pytest

from specgen.experiments.bound import DeviceSpeed, Work
from specgen.experiments.explain import PARTS, KernelTime, StepTime, kind_of, kind_rows, step_table

DEVICE = DeviceSpeed(bytes_per_second=1e12, flops_per_second=1e14)
WORKS = {"verify": Work(num_bytes=5e9, flops=4e11, cache_bytes=1e9), "accept": Work(num_bytes=1e6, flops=0.0)}


def step(*, kernels: bool) -> StepTime:
    names = {"_skinny_kernel": 4e-3, "nvjet_tst_64x8": 1e-3, "kernel_mha": 2e-3, "_add_norm_kernel": 1e-3}
    found = tuple(KernelTime(part="verify", name=name, seconds=time, calls=1) for name, time in names.items())
    parts = {**dict.fromkeys(PARTS, 0.0), "verify": 8e-3, "accept": 1e-3}
    return StepTime(parts=parts, idle=0.0, kernels=found if kernels else ())


def test_each_kind_has_the_bound_of_what_it_reads() -> None:
    rows = {row["kind"]: row for row in kind_rows(8, step(kernels=True), WORKS, DEVICE)}
    found = {
        kind: (row["time"], row["bound"], row["over_bound"], row["bound_by"]) for kind, row in rows.items()
    }
    assert found["GEMM"] == pytest.approx((5000.0, 4000.0, 1.25, "memory"))
    assert found["attention"] == pytest.approx((2000.0, 1000.0, 2.0, "memory"))
    assert sum(row["time"] for row in rows.values()) == pytest.approx(8000.0), "the whole part"
    assert (rows["other"]["time"], rows["other"]["bound"]) == (pytest.approx(1000.0), None)
    assert kind_rows(8, step(kernels=False), WORKS, DEVICE) == []


def test_the_details_have_every_batch() -> None:
    table = step_table({}, 4, [(batch, step(kernels=True), WORKS) for batch in (8, 16)], DEVICE)
    assert {each.title: len(each.rows) for each in table.details} == {"By kernel": 8, "By kind of kernel": 6}
    unknown = step_table({}, 4, [(8, step(kernels=False), WORKS)], DEVICE)
    assert unknown.details == ()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_fp8_kernel", "GEMM"),
        ("_gate_up_kernel", "GEMM"),
        ("cublasLt::splitKreduce_kernel", "GEMM"),
        ("flashinfer::BatchPrefillWithPagedKVCacheKernel", "attention"),
        ("kernel_mha", "attention"),
        ("hopper_decode", "attention"),
        ("linear_kernel", "GEMM"),
        ("_silu_mul_kernel", "other"),
        ("_rope_store_kernel", "other"),
        ("_round_kernel", "other"),
        ("at::native::elementwise_kernel", "other"),
    ],
)
def test_kinds_are_recognised_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind
