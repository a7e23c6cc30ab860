"""How the grid of the MLP's kernel divides a call, by the sizes of the call and the vector memory of a core."""

from typing import NamedTuple

from vit_jax.kernels.tpu_kinds import LANES

# Rows of one step of the grid and hidden channels of one product, at most. From 256 to 1,792 rows and from 256 to 1,024
# channels the cycles of v6e differ by 7 %.
MAX_ROWS, MAX_CHANNELS = 512, 1024
MIN_ROWS = 128  # fewer rows in a step were not tried
SUBLANES = 16  # rows of a tile in bfloat16
RESERVE = 6 * 2**20  # bytes by which the compiler may need more than the estimate
FLOAT32 = 4  # bytes


class MlpShape(NamedTuple):
    """The division of a call of the MLP's kernel by its grid, and what else is fixed when it is compiled."""

    rows: int  # of one step of the grid; 0: the kernel does not suit the sizes
    last_rows: int  # of the last step, if it has fewer; 0: it has as many
    channels: int  # hidden channels of one product
    memory: int  # bytes of vector memory that the kernel may use
    epsilon: float  # of the LayerNorm
    grad_dtype: str  # of the gradients of the kernels (matrices of weights)

    def columns(self, hidden: int) -> list[slice]:
        """Returns the hidden channels of each product."""
        return [slice(start, start + self.channels) for start in range(0, hidden, self.channels)]


def divide(count: int, most: int, tile: int) -> int:
    """Returns the largest divisor of `count` that is a multiple of `tile` and at most `most`; 0 if there is none."""
    return max((each for each in range(tile, most + 1, tile) if count % each == 0), default=0)


class MlpSizes(NamedTuple):
    """The sizes of a call on one device."""

    rows: int
    width: int
    hidden: int
    itemsize: int  # bytes of a channel
    grad_itemsize: int  # bytes of a number of the kernels' gradients
    memory: int  # bytes of a core's vector memory


def choose_mlp_step(sizes: MlpSizes) -> tuple[int, int] | None:
    """Returns the rows of a step of the grid and the hidden channels of a product.

    If no step divides the rows, the last one has fewer. Returns None if the kernel does not suit the sizes: there are
    fewer rows than a step has, the channels are no multiples of tiles, or the weights do not fit the vector memory.
    """
    channels = divide(sizes.hidden, MAX_CHANNELS, LANES)
    if sizes.width % LANES or not channels:
        return None
    steps = [
        rows
        for rows in range(MAX_ROWS, MIN_ROWS - 1, -SUBLANES)
        if rows <= sizes.rows and mlp_vmem_bytes(rows, channels, sizes) + RESERVE <= sizes.memory
    ]
    dividing = [rows for rows in steps if sizes.rows % rows == 0]
    rows = next(iter(dividing or steps), None)
    return (rows, channels) if rows else None


def mlp_vmem_bytes(rows: int, channels: int, sizes: MlpSizes) -> int:
    """Returns an estimate of the bytes that the backward pass needs, which needs more than the forward pass.

    Args:
        rows: the rows of a step of the grid.
        channels: the hidden channels of a product.
        sizes: the sizes of the call.
    """
    weights = 2 * sizes.width * sizes.hidden * (sizes.itemsize + sizes.grad_itemsize + FLOAT32)
    moved = 2 * rows * (3 * sizes.width + sizes.hidden) * sizes.itemsize
    computed = rows * (6 * sizes.width + 4 * channels) * FLOAT32
    return weights + moved + computed
