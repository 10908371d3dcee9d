"""Decode attention on Hopper: how passes are cut into clusters, without a GPU."""

from itertools import product
from pathlib import Path

import torch

from specgen.attention import hopper
from specgen.attention.hopper import cluster_heads, cluster_size, hopper_decode_module, serves

BF16, FP16 = torch.bfloat16, torch.float16


def test_a_cluster_has_the_most_heads_that_fit() -> None:
    for case in product(range(1, 20), (1, 3, 4, 7, 8, 16)):
        query_len, heads_per_kv = case
        heads = cluster_heads(query_len, heads_per_kv)
        if query_len > 16:
            assert heads is None, case
            continue
        assert heads is not None, case
        assert heads_per_kv % heads == 0, case
        assert heads * query_len <= 64, case
        more = [n for n in range(heads + 1, heads_per_kv + 1) if heads_per_kv % n == 0]
        assert all(n * query_len > 64 for n in more), case
        assert (
            f" {-(-heads * query_len // 16) * 16} rows"
            in hopper_decode_module(query_len, heads_per_kv, 128).what
        ), case


def test_clusters_are_large_while_they_are_few() -> None:
    for clusters in range(1, 2000, 7):
        size = cluster_size(clusters, 132)
        assert size in (1, 4, 8), clusters
        assert size * clusters <= max(2 * 132, clusters), clusters
        assert (size > 1) == (clusters <= 66), clusters


def test_it_is_for_bfloat16_and_heads_that_it_was_built_for() -> None:
    assert serves(5, 4, 128, BF16, BF16)
    assert serves(16, 8, 64, BF16, BF16)
    assert not serves(17, 4, 128, BF16, BF16)
    assert not serves(5, 4, 256, BF16, BF16)
    assert not serves(5, 4, 128, FP16, FP16)
    assert not serves(5, 4, 128, BF16, torch.float8_e4m3fn)


def test_python_and_the_kernel_agree_on_what_is_passed() -> None:
    """As many arguments, and as wide: ctypes would pass an int for a pointer and say nothing."""
    source = Path(hopper.__file__).with_name("hopper_decode.cu").read_text()
    declared = source[source.index('extern "C" int hopper_decode_run(') :]
    kinds = [each.split()[:-1] for each in declared[declared.index("(") + 1 : declared.index(")")].split(",")]
    wide = [" ".join(each) for each in kinds]
    pointers = [each for each in wide if each.endswith("*")]
    assert len(pointers) == 9, "eight tensors and a stream"
    assert wide[8:12] == ["int64_t"] * 4
    assert wide[12:22] == ["int"] * 10
    assert wide[22:24] == ["float"] * 2
    assert len(wide) == 25
