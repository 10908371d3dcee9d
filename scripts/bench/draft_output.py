"""Times the end of a draft, output layer and argmax, in the model's format and by a copy in FP8.

``python scripts/bench/draft_output.py [VOCABULARYxWIDTH ...]``, on a GPU if there is one. What a whole draft takes is
told by ``step.py --draft-lm-head``, of a pair.
"""

import sys
from collections.abc import Iterator

import torch
from layer_timing import num_layers, time_layers
from torch import Tensor

from specgen.engine.choices import DTYPES, choose_device, choose_dtype
from specgen.ops import Ops, bind_ops
from specgen.ops.fp8 import in_fp8
from specgen.ops.weight import Weight

SHAPES = ("128256x4096", "151936x2560", "262144x2560")  # Llama-3.1-8B, Qwen3-4B, Gemma 3 4B
ROWS = (1, 8, 32, 64, 128, 256)
_REPEATS = {"cuda": 20, "cpu": 2}
_TITLES = ("vocabulary x width", "rows", "plain us", "FP8 us", "ratio", "same token")


def seconds(ops: Ops, weights: list[Weight], x: Tensor) -> tuple[float, Tensor]:
    """Of one call on average, with weights in no cache, and the tokens by the first weight."""
    layers = [ops.linear(each) for each in weights]

    def call(index: int) -> Tensor:
        return ops.most_likely(layers[index](x))[0]

    taken = time_layers(call, len(layers), _REPEATS[x.device.type], x.device).mean
    return taken, call(0)


@torch.inference_mode()
def measured(shape: str, device: torch.device) -> Iterator[tuple[str, ...]]:
    """A line for each number of rows."""
    num_out, width = map(int, shape.split("x"))
    dtype = DTYPES[choose_dtype("auto", device)]
    ops, count = bind_ops(device, dtype), num_layers(num_out * width, device)
    plain = [
        Weight(data=torch.randn(num_out, width, device=device, dtype=dtype) * width**-0.5)
        for _ in range(count)
    ]
    copies = [in_fp8(each) for each in plain]
    for rows in ROWS:
        x = torch.randn(rows, width, device=device, dtype=dtype)
        (before, tokens), (after, others) = (seconds(ops, each, x) for each in (plain, copies))
        same = float((tokens == others).float().mean())
        yield (
            shape,
            f"{rows}",
            f"{1e6 * before:.1f}",
            f"{1e6 * after:.1f}",
            f"{before / after:.2f}",
            f"{same:.0%}",
        )


def main(shapes: list[str]) -> None:
    """Print the table."""
    device = choose_device("auto")
    print(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", torch.__version__)
    for line in (_TITLES, *(line for shape in shapes for line in measured(shape, device))):
        print("".join(f"{part:>20}" for part in line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(SHAPES))
