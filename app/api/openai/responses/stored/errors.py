"""What a client is told when a conversation cannot be read or changed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from app.http.errors.invalid_requests import ConversationLocked, ConversationNotFound
from app.http.errors.rejections import Unavailable
from app.observability.logs import summarize_exception
from app.storage.responses.conversation_tables import ConversationMissing
from app.storage.responses.conversation_turns import ConversationBusy

logger = logging.getLogger(__name__)


@contextmanager
def conversation_errors(conversation_id: str, param: str = "conversation") -> Iterator[None]:
    """Translate the errors of the store for a client that named a conversation by a field.

    Raises:
        ConversationNotFound: the client has none with this id.
        ConversationLocked: a response has its turn.
        Unavailable: the database cannot be read or written.
    """
    try:
        yield
    except ConversationMissing:
        raise ConversationNotFound(conversation_id, param) from None
    except ConversationBusy:
        raise ConversationLocked(param) from None
    except OSError as error:
        logger.error("a conversation is not stored: %s", summarize_exception(error))
        raise Unavailable("conversations cannot be stored at present") from None
