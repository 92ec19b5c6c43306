"""When images are encoded: before the chunk of a prompt that needs their rows, pieces of one in a step."""

from collections import OrderedDict
from collections.abc import Iterable
from math import inf

from batching.config import SchedulerConfig
from batching.inputs.images import ImageInput
from batching.request import BatchRequest, RequestStatus
from batching.steps.step_plan import EncodeOrder


class ImageEncoding:
    """Orders the encoding of images, and knows which of them the executor has, and how much of each.

    The rows of an image stay after its request has them in its KV blocks, for a request with an equal image, as
    long as there is room; the one that was not used for the longest time goes first.  An image of which pieces are
    left stays for the admitted requests that need it, and no longer.  Beside streams a step has either pieces of an
    image or chunks of prompts, in turns, so that neither adds to the other's stall.

    num_encoded: images that were encoded.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_encoded = 0
        self._max_rows = config.max_image_rows
        self._max_chunk = config.prefill_chunk
        self._num_pieces = config.num_image_pieces
        # The rows of the images that have some, or have the room for them.
        self._encoded: OrderedDict[bytes, int] = OrderedDict()
        # How many pieces are done of those that are not complete.
        self._begun: dict[bytes, int] = {}
        # Those that admitted requests need next, or in this step.
        self._needed: set[bytes] = set()
        self._ordered: list[EncodeOrder] = []
        self._dropped: list[bytes] = []
        self._had_turn = False
        self._max_bytes = inf

    def begin(self, running: Iterable[BatchRequest], max_bytes: float = inf) -> None:
        """Begin the plan of a step with these admitted requests; it encodes `max_bytes`, or one piece."""
        prefilling = (r for r in running if r.status is RequestStatus.PREFILLING)
        needed = [digests for r in prefilling if (digests := _images_left(r))]
        self._needed = {digests[0] for digests in needed}
        self._had_turn = bool(self._ordered)
        self._ordered, self._dropped = [], []
        self._max_bytes = max_bytes
        left = {digest for digests in needed for digest in digests}
        self._drop([digest for digest in self._begun if digest not in left])

    @property
    def has_order(self) -> bool:
        """True if the step encodes an image."""
        return bool(self._ordered)

    def reach(self, request: BatchRequest, *, has_streams: bool) -> int:
        """Return how many pending tokens of a prompt can be processed; order an image that it needs first.

        has_streams: others decode in this step.
        """
        start, pending = request.num_computed_tokens, request.num_pending_tokens
        for placed in request.spec.images:
            ahead = placed.start - start
            if placed.stop <= start:
                continue
            if ahead >= self._max_chunk:
                return ahead
            if self._has(placed.image):
                # This step reads it, whatever else needs room.
                self._needed.add(placed.image.digest)
                continue
            if (has_streams and self._had_turn) or not self._encode(request, placed.image):
                return max(0, ahead)
        return pending

    def take(self) -> tuple[tuple[EncodeOrder, ...], tuple[bytes, ...]]:
        """Return the images to encode in this step, and the digests of those to forget before."""
        return tuple(self._ordered), tuple(self._dropped)

    def forget(self) -> None:
        """Record that the executor has lost all."""
        self._encoded.clear()
        self._begun.clear()
        self._ordered, self._dropped = [], []

    def _has(self, image: ImageInput) -> bool:
        if image.digest not in self._encoded or image.digest in self._begun:
            return False
        self._encoded.move_to_end(image.digest)
        return True

    def _encode(self, request: BatchRequest, image: ImageInput) -> bool:
        """Let the step encode pieces of an image, if of no other and if there is room; return whether that completes it."""
        has_room = image.digest in self._encoded
        if self._ordered or not (has_room or self._make_room(image.num_rows)):
            return False
        first = self._begun.pop(image.digest, 0)
        stop = min(self._num_pieces, first + self._max_pieces(image))
        order = EncodeOrder(request.request_id, image, first, stop, self._num_pieces)
        self._encoded[image.digest] = image.num_rows
        self._ordered.append(order)
        if not order.is_last:
            self._begun[image.digest] = stop
        self.num_encoded += order.is_last
        return order.is_last

    def _max_pieces(self, image: ImageInput) -> int:
        num = self._max_bytes * self._num_pieces / max(1, image.num_bytes)
        return max(1, int(min(num, self._num_pieces)))

    def _make_room(self, num_rows: int) -> bool:
        """Drop images that no admitted request needs next; one that is larger than all room may be alone."""
        free = self._max_rows - sum(self._encoded.values())
        dropped: list[bytes] = []
        for digest, num in self._encoded.items():
            if free >= num_rows:
                break
            if digest not in self._needed:
                free += num
                dropped.append(digest)
        if free < num_rows and len(dropped) < len(self._encoded):
            return False
        self._drop(dropped)
        return True

    def _drop(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            del self._encoded[digest]
            self._begun.pop(digest, None)
            self._dropped.append(digest)


def _images_left(request: BatchRequest) -> list[bytes]:
    """Return the digests of the images whose rows a request has to process, the next one first."""
    start = request.num_computed_tokens
    return [placed.image.digest for placed in request.spec.images if placed.stop > start]
