"""Block FP8 of many rows: which tile, by DeepGEMM's rule; what runs it is tested on a GPU."""

import pytest
import torch

from specgen.ops import block_fp8


@pytest.mark.parametrize(
    ("rows", "num_out", "chosen"),
    [
        (65, 6144, (48, 1)),  # 128 tiles, one turn of 132
        (128, 6144, (48, 1)),
        (160, 6144, (96, 1)),  # 128 tiles again
        (128, 4096, (32, 1)),
        (320, 4096, (96, 1)),  # 3 x 43
        (1023, 24576, (128, 1)),
        (1024, 24576, (128, 2)),
        (2048, 4096, (128, 2)),
        (2048, 128, (32, 1)),  # too few for pairs
    ],
)
def test_tiles_fill_the_gpu_in_the_fewest_turns(rows: int, num_out: int, chosen: tuple[int, int]) -> None:
    assert block_fp8.tile(rows, num_out, 132) == chosen


def test_an_odd_number_of_multiprocessors_has_no_pairs() -> None:
    assert block_fp8.tile(2048, 4096, 131)[1] == 1
    assert block_fp8.tile(2048, 128 * 33, 132)[1] == 1, "nor an odd number of tiles"


def test_other_shapes_and_devices_take_other_kernels() -> None:
    assert block_fp8.fits(256, 128)
    assert not block_fp8.fits(192, 128)
    assert not block_fp8.fits(128, 192)
    assert not block_fp8.can_run(torch.device("cpu"), 128, 128)
