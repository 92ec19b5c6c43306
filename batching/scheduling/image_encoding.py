"""When images are encoded: before the chunk of a prompt that needs their rows, one in a step."""

from collections import OrderedDict
from collections.abc import Iterable

from batching.inputs.images import ImageInput
from batching.request import BatchRequest, RequestStatus
from batching.steps.step_plan import EncodeOrder


class ImageEncoding:
    """Orders the encoding of images, and knows which of them the executor has.

    The rows of an image stay after its request has them in its KV blocks, for a request with an equal image, as
    long as there is room; the one that was not used for the longest time goes first.  Beside streams a step has
    either an image or chunks of prompts, in turns, so that neither adds to the other's stall.

    num_encoded: images that were encoded.
    """

    def __init__(self, max_rows: int, max_chunk: int) -> None:
        """`max_rows` may be kept, and the next image alone; a slice has at most `max_chunk` tokens."""
        self.num_encoded = 0
        self._max_rows = max_rows
        self._max_chunk = max_chunk
        self._encoded: OrderedDict[bytes, int] = OrderedDict()
        # Those that admitted requests need next, or in this step.
        self._needed: set[bytes] = set()
        self._ordered: list[EncodeOrder] = []
        self._dropped: list[bytes] = []
        self._had_turn = False

    def begin(self, running: Iterable[BatchRequest]) -> None:
        """Begin the plan of a step with these admitted requests."""
        prefilling = (r for r in running if r.status is RequestStatus.PREFILLING)
        images = (_next_image(r) for r in prefilling)
        self._needed = {image.digest for image in images if image is not None}
        self._had_turn = bool(self._ordered)
        self._ordered, self._dropped = [], []

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
            order = EncodeOrder(request.request_id, placed.image)
            if (has_streams and self._had_turn) or not self._add(order):
                return max(0, ahead)
        return pending

    def take(self) -> tuple[tuple[EncodeOrder, ...], tuple[bytes, ...]]:
        """Return the images to encode in this step, and the digests of those to forget before."""
        return tuple(self._ordered), tuple(self._dropped)

    def forget(self) -> None:
        """Record that the executor has lost all."""
        self._encoded.clear()
        self._ordered, self._dropped = [], []

    def _has(self, image: ImageInput) -> bool:
        if image.digest not in self._encoded:
            return False
        self._encoded.move_to_end(image.digest)
        return True

    def _add(self, order: EncodeOrder) -> bool:
        """Let the step encode an image if it encodes no other and there is room; return whether it does."""
        image = order.image
        if self._ordered or not self._make_room(image.num_rows):
            return False
        self._encoded[image.digest] = image.num_rows
        self._ordered.append(order)
        self.num_encoded += 1
        return True

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
        for digest in dropped:
            del self._encoded[digest]
        self._dropped += dropped
        return True


def _next_image(request: BatchRequest) -> ImageInput | None:
    """Return the image whose rows a request has to process next."""
    start = request.num_computed_tokens
    return next((placed.image for placed in request.spec.images if placed.stop > start), None)
