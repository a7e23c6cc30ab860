"""What all orders share. Their own properties are in `test_stream`, `test_mixture`, `test_eval_order` and others."""

import pickle

import numpy as np
import pytest

from vit_jax.data.order import (
    BalancedOrder,
    BalancedStreamOrder,
    ClassDraws,
    EvalOrder,
    MixedOrder,
    MixedStreamOrder,
    RepeatedOrder,
    ShuffledOrder,
    StreamOrder,
)
from vit_jax.data.sources import Mixture

MIXTURE, LENGTHS = Mixture((20, 7), (7, 3)), [8, 12, 3, 4]
DRAWS = ClassDraws(np.repeat([0, 1, 0, 2], [3, 9, 11, 4]), 0.5, 3)
ORDERS = {
    "shuffled": ShuffledOrder(27, 3),
    "mixed": MixedOrder(MIXTURE, 3),
    "repeated": RepeatedOrder(ShuffledOrder(27, 3), 8, 3),
    "streamed": StreamOrder(LENGTHS, 8, 2, 2, 3),
    "mixed and streamed": MixedStreamOrder(MIXTURE, LENGTHS, 8, 2, 2, 3),
    "balanced": BalancedOrder(DRAWS),
    "balanced and streamed": BalancedStreamOrder(DRAWS, LENGTHS, 8, 2, 2),
    "evaluation": EvalOrder(LENGTHS, 8, 2),
}
# The first indices, and the first random number of the first example, which a resumed run must find again.
FOUND = {
    "shuffled": ([4, 22, 16, 7, 26, 3, 18, 19, 24, 0, 2, 23], 1806020400010133442),
    "mixed": ([4, 20, 17, 16, 7, 22, 5, 3, 24, 18, 19, 26], 17351234777300664938),
    "repeated": ([4, 22, 16, 4, 22, 16, 4, 22, 7, 26, 3, 7], 17351234777300664938),
    "streamed": ([0, 4, 7, 1, 17, 19, 15, 16, 5, 6, 3, 9], 17351234777300664938),
    "mixed and streamed": ([0, 26, 4, 7, 21, 18, 17, 20, 1, 24, 5, 6], 17351234777300664938),
    "balanced": ([19, 26, 5, 13, 26, 16, 11, 3, 24, 20, 1, 25], 17351234777300664938),
    "balanced and streamed": ([0, 4, 7, 1, 18, 16, 17, 19, 5, 6, 3, 9], 17351234777300664938),
    "evaluation": ([0, 1, 2, 3, 13, 14, 15, 16, 4, 5, 6, 7], 16185167363213901265),
}


def draw(index, rng):
    return index, int(rng.bit_generator.random_raw())


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_that_of_its_seed_and_of_this_version(name):
    order = ORDERS[name]
    indices = [order[position] for position in range(12)]
    drawn = order.dataset().random_map(draw)
    assert (indices, drawn[0][1]) == FOUND[name]
    assert [drawn[position][0] for position in range(12)] == indices and len({drawn[at][1] for at in range(12)}) == 12
    again = pickle.loads(pickle.dumps(order))  # as it is sent to a worker process
    assert [again[position] for position in range(12)] == indices


@pytest.mark.parametrize("name", ORDERS)
def test_in_place_of_an_example_each_other_one_can_be_read(name):
    order = ORDERS[name]
    assert order.count == 27
    found = [order.neighbour(5, distance) for distance in range(20)]
    assert found[0] == 5 and sorted(found) == sorted(set(found)) and set(found) <= set(range(27))
