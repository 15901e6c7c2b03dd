"""How a rollout trains the model. A loss is a class, in `edges` or `leaves`, and a line in `LOSSES`."""

from .base import Calls, EdgeBatch, EdgeLoss, LeafBatch, LeafLoss, Loss, Who, noised
from .edges import Dppo, Guard, Surrogate, clipped_surrogate
from .leaves import Awm, Nft

LOSSES: dict[str, type[EdgeLoss] | type[LeafLoss]] = {
    "surrogate": Surrogate,
    "dppo": Dppo,
    "guard": Guard,
    "nft": Nft,
    "awm": Awm,
}
"""A loss is a class and a line here."""

__all__ = [
    "LOSSES",
    "Awm",
    "Calls",
    "Dppo",
    "EdgeBatch",
    "EdgeLoss",
    "Guard",
    "LeafBatch",
    "LeafLoss",
    "Loss",
    "Nft",
    "Surrogate",
    "Who",
    "clipped_surrogate",
    "noised",
]
