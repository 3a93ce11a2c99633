"""What parts of a transformer sum over the tensor axis: Shoeybi et al. 2019, "Megatron-LM", section 3."""

from __future__ import annotations

from lightning_3d.parallel.tensor.cost import Sums


def dense_block(state: int, *, recomputed: bool = False) -> Sums:
    """Returns the sums of a block of attention and MLP.

    Args:
        state: Bytes of the hidden state of a micro-batch: samples x length x width x bytes of an element.
        recomputed: Its forward runs again in backward, which ends before the last sum.
    """
    return Sums(forward=2, backward=3 if recomputed else 2, payload=state, gathers=1 if recomputed else 0)


def vocabulary(state: int, rows: int, *, element: int = 4) -> tuple[Sums, ...]:
    """Returns the sums of an embedding, a head and a cross-entropy whose vocabulary is cut.

    Args:
        state: Bytes of the hidden state of a micro-batch.
        rows: Its tokens.
        element: Bytes of an element of the loss: at least those of fp32.
    """
    embedding_and_head = Sums(forward=1, backward=1, payload=state)
    # The largest logit of each row; then its sum of exponentials and the logit of its class.
    largest = Sums(forward=1, backward=0, payload=rows * element, of_states=False)
    loss = Sums(forward=1, backward=0, payload=2 * rows * element, of_states=False)
    return embedding_and_head, largest, loss
