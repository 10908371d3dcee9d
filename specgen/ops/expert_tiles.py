"""How the products of experts are tiled, by the mean number of rows per expert. Measured on an H100."""

from dataclasses import replace

from specgen.ops.expert_kernels import ExpertTiles, Tile


def _tile(block_out: int, block_in: int, stages: int, warps: int) -> Tile:
    return Tile(block_out=block_out, block_in=block_in, stages=stages, warps=warps)


def _rounds(block_out: int, block_in: int, stages: int, warps: int) -> Tile:
    return replace(_tile(block_out, block_in, stages, warps), rounds=True)


# of 2 bytes a weight; more rows in bfloat16 go to torch's grouped product, which waits for the host in others
PLAIN_TILES = (
    ExpertTiles(most=0.2, rows=16, gate_up=_tile(32, 128, 4, 4), down=_tile(64, 128, 4, 4)),
    ExpertTiles(most=11, rows=16, gate_up=_tile(64, 128, 3, 4), down=_tile(64, 128, 4, 4)),
    ExpertTiles(most=26, rows=32, gate_up=_tile(64, 128, 4, 8), down=_tile(64, 128, 4, 4)),
    ExpertTiles(most=50, rows=64, gate_up=_tile(64, 64, 4, 8), down=_tile(128, 64, 4, 8)),
    ExpertTiles(most=100, rows=128, gate_up=_tile(128, 64, 4, 8), down=_tile(128, 64, 4, 8)),
)
# the last is for any number of rows
MXFP4_TILES = (
    ExpertTiles(most=0.2, rows=16, gate_up=_tile(32, 128, 4, 4), down=_tile(64, 128, 4, 4)),
    ExpertTiles(most=2, rows=16, gate_up=_tile(32, 128, 4, 4), down=_tile(128, 128, 3, 4)),
    ExpertTiles(most=11, rows=16, gate_up=_tile(64, 128, 3, 4), down=_tile(128, 128, 3, 4)),
    ExpertTiles(most=26, rows=32, gate_up=_tile(128, 128, 3, 8), down=_tile(128, 128, 4, 4)),
    ExpertTiles(most=50, rows=64, gate_up=_tile(64, 128, 3, 8), down=_tile(128, 128, 3, 4)),
    ExpertTiles(most=100, rows=128, gate_up=_tile(128, 128, 3, 8), down=_tile(256, 128, 3, 8)),
    ExpertTiles(most=200, rows=256, gate_up=_tile(64, 128, 3, 8), down=_tile(128, 128, 3, 8)),
)
# of 1 byte a weight, not measured yet; the last is for any number of rows. All have blocks of 128 inputs, so that a
# row's sums do not depend on the tile
FP8_TILES = (
    ExpertTiles(most=0.2, rows=16, gate_up=_rounds(32, 128, 6, 4), down=_rounds(64, 128, 6, 4)),
    ExpertTiles(most=11, rows=16, gate_up=_rounds(64, 128, 5, 4), down=_rounds(64, 128, 6, 4)),
    ExpertTiles(most=26, rows=32, gate_up=_rounds(64, 128, 5, 4), down=_rounds(64, 128, 5, 4)),
    ExpertTiles(most=50, rows=64, gate_up=_rounds(64, 128, 4, 8), down=_rounds(128, 128, 4, 8)),
    ExpertTiles(most=100, rows=128, gate_up=_tile(32, 128, 4, 8), down=_tile(64, 128, 4, 8)),
)
# for any number of rows, without tensor cores
FLOAT32_TILES = (ExpertTiles(most=0, rows=16, gate_up=_tile(32, 64, 3, 4), down=_tile(32, 64, 3, 4)),)
